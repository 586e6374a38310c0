"""Shards are made once: killed at any moment, resumed where it stopped; by one process while the others wait."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data import cache
from llamajax.data.documents import file_groups as groups_module
from llamajax.data.documents.file_groups import group_files
from llamajax.data.documents.sources import Source
from llamajax.data.documents.split import plain_hash, split_hash
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from llamajax.data.tokens import shards
from llamajax.data.tokens.shard_index import ShardIndex, index_path, write_index
from llamajax.data.tokens.shards import read_shard, shard_paths, shards_entry, tokenize
from llamajax.errors import DataError

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def write_documents(path, count, seed=0):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, rng.integers(0, 40))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


@pytest.fixture
def tokenizer(tmp_path):
    texts = [" ".join(WORDS)] * 50
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(texts, vocab_size=320))
    return load_tokenizer(tmp_path / "tokenizer.model")


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(groups_module, "GROUP_BYTES", 2000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    monkeypatch.setattr(shards, "BATCH_BYTES", 300)


def groups_of(tmp_path, pattern="*.jsonl"):
    source = Source(SourceConfig(kind="jsonl", paths=(str(tmp_path / pattern),)), "data.sources[0]")
    return group_files(source, tmp_path / "cache", print)


def all_shards(groups, tokenizer, tmp_path):
    entries = [shards_entry(group, tokenizer, tmp_path / "cache") for group in groups]
    return [read_shard(path) for entry in entries for path in shard_paths(entry)]


def test_documents_are_framed_and_counted(tmp_path, tokenizer, small_shards):
    texts = write_documents(tmp_path / "a.jsonl", 100)
    groups, log = groups_of(tmp_path), []
    tokenize(groups, tokenizer, tmp_path / "cache", log.append)
    made = all_shards(groups, tokenizer, tmp_path)
    assert len(made) > 3
    assert [shard.last for shard in made] == [False] * (len(made) - 1) + [True]
    documents = [shard.tokens[a:b] for shard in made for a, b in itertools.pairwise(shard.offsets[:])]
    kept = [text for text in texts if text]
    assert [tokenizer.decode(document) for document in documents] == kept
    assert all(document[0] == tokenizer.bos_id and document[-1] == tokenizer.eos_id for document in documents)
    assert all(document.dtype == np.uint16 for document in documents)
    assert sum(shard.num_empty for shard in made) == len(texts) - len(kept) > 0
    assert sum(shard.text_bytes for shard in made) == sum(map(len, kept))
    assert np.concatenate([shard.hashes[:] for shard in made]).tolist() == [split_hash(text) for text in kept]
    assert np.concatenate([shard.plain_hashes[:] for shard in made]).tolist() == [plain_hash(text) for text in kept]
    assert all(shard.text_bytes < 2000 + 400 for shard in made)
    assert [shard.first for shard in made] == np.cumsum([0, *(shard.num_read for shard in made)])[:-1].tolist()
    assert len(log) == 1
    assert log[0].startswith(f"tokenized  {len(kept)} documents in ")


def test_a_second_time_nothing_is_tokenized(tmp_path, tokenizer, small_shards, monkeypatch):
    write_documents(tmp_path / "a.jsonl", 100)
    tokenize(groups_of(tmp_path), tokenizer, tmp_path / "cache", print)
    monkeypatch.setattr(tokenizer, "encode_batch", None)
    log = []
    tokenize(groups_of(tmp_path), tokenizer, tmp_path / "cache", log.append)
    assert log == []


def test_whether_a_group_is_complete_is_asked_of_its_last_shard_only(tmp_path, tokenizer, small_shards, monkeypatch):
    write_documents(tmp_path / "a.jsonl", 100)
    (group,) = groups_of(tmp_path)
    tokenize([group], tokenizer, tmp_path / "cache", print)
    read, read_arrays = [], cache.read_arrays
    monkeypatch.setattr(cache, "read_arrays", lambda path: read.append(path) or read_arrays(path))
    tokenize([group], tokenizer, tmp_path / "cache", print)
    assert read == shard_paths(shards_entry(group, tokenizer, tmp_path / "cache"))[-1:]


def test_small_files_are_grouped_and_a_new_file_leaves_the_old_groups(tmp_path, tokenizer, small_shards):
    for n in range(8):
        write_documents(tmp_path / f"{n}.jsonl", 8, seed=n)
    write_documents(tmp_path / "5-large.jsonl", 100)
    before = groups_of(tmp_path)
    assert [path for group in before for path in group.files] == sorted(tmp_path.glob("*.jsonl"))
    assert 1 < len(before) < 9
    assert all(group.num_bytes <= 2000 or len(group.files) == 1 for group in before)
    write_documents(tmp_path / "9.jsonl", 30, seed=9)
    after = groups_of(tmp_path)
    entries = [[shards_entry(group, tokenizer, tmp_path).name for group in groups] for groups in (before, after)]
    assert entries[1][: len(entries[0]) - 1] == entries[0][:-1]


def test_what_decides_the_documents_decides_the_entry(tmp_path, tokenizer):
    write_documents(tmp_path / "a.jsonl", 3)
    entries = set()
    paths = (str(tmp_path / "a.jsonl"),)
    for config in (
        SourceConfig(kind="jsonl", paths=paths),
        SourceConfig(kind="jsonl", paths=paths, text_key="body"),
        SourceConfig(kind="text", paths=paths),
    ):
        source = Source(config, "data.sources[0]")
        entries |= {shards_entry(group, tokenizer, tmp_path) for group in group_files(source, tmp_path / "cache", print)}
    assert len(entries) == 3


def test_a_file_that_changes_while_it_is_read(tmp_path, tokenizer, small_shards):
    write_documents(tmp_path / "a.jsonl", 100)
    groups = groups_of(tmp_path)
    write_documents(tmp_path / "a.jsonl", 100, seed=1)
    with pytest.raises(DataError, match=r"a.jsonl: data.sources\[0\].paths: changed while it was read; run again"):
        tokenize(groups, tokenizer, tmp_path / "cache", print)
    assert all_shards(groups, tokenizer, tmp_path) == []


def test_a_bad_line_keeps_the_shards_before_it(tmp_path, tokenizer, small_shards):
    write_documents(tmp_path / "a.jsonl", 100)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("oops\n")
    groups = groups_of(tmp_path)
    with pytest.raises(DataError, match=r"a.jsonl:101: .*is not JSON"):
        tokenize(groups, tokenizer, tmp_path / "cache", print)
    assert len(all_shards(groups, tokenizer, tmp_path)) > 3


def test_a_damaged_shard_is_made_again_and_no_other(tmp_path, tokenizer, small_shards):
    write_documents(tmp_path / "a.jsonl", 100)
    (group,) = groups_of(tmp_path)
    tokenize([group], tokenizer, tmp_path / "cache", print)
    paths = shard_paths(shards_entry(group, tokenizer, tmp_path / "cache"))
    whole = {path: path.read_bytes() for path in paths}
    times = {path: path.stat().st_mtime_ns for path in paths}
    for damaged in (paths[0], paths[4], paths[-1]):
        for at in (50, len(whole[damaged]) // 2):  # in the head and among the tokens
            content = bytearray(whole[damaged])
            content[at] ^= 1
            damaged.write_bytes(content)
            log = []
            shards.remake(damaged, group, tokenizer, tmp_path / "cache", log.append)
            assert log[0] == f"damaged    {damaged}: is damaged; rebuilding it"
            assert {path: path.read_bytes() for path in paths} == whole
            assert {path: path.stat().st_mtime_ns for path in paths if path != damaged} == {
                path: time for path, time in times.items() if path != damaged
            }
            times[damaged] = damaged.stat().st_mtime_ns
    log = []
    shards.remake(paths[0], group, tokenizer, tmp_path / "cache", log.append)
    assert log == [], "another process was first"


def test_a_shard_that_does_not_follow_the_one_before_is_made_again(tmp_path, tokenizer, small_shards, monkeypatch):
    """As when a shard is made again with another bound."""
    write_documents(tmp_path / "a.jsonl", 100)
    (group,) = groups_of(tmp_path)
    tokenize([group], tokenizer, tmp_path / "cache", print)
    paths = shard_paths(shards_entry(group, tokenizer, tmp_path / "cache"))
    expected = np.concatenate([read_shard(path).tokens[:] for path in paths])
    monkeypatch.setattr(shards, "SHARD_TOKENS", 100)
    paths[2].unlink()
    shards.remake(paths[2], group, tokenizer, tmp_path / "cache", print)
    made = [read_shard(path) for path in shard_paths(paths[0].parent)]
    assert len(made) > len(paths)
    np.testing.assert_array_equal(np.concatenate([shard.tokens[:] for shard in made]), expected)


def test_short_documents_fill_shards_as_well(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n' * 3000)
    (group,) = groups_of(tmp_path)
    most, encode_batch = [], tokenizer.encode_batch
    monkeypatch.setattr(shards, "SHARD_BYTES", 67 * 1000)
    monkeypatch.setattr(shards, "BATCH_BYTES", 67 * 100)
    monkeypatch.setattr(tokenizer, "encode_batch", lambda texts: most.append(len(texts)) or encode_batch(texts))
    tokenize([group], tokenizer, tmp_path / "cache", print)
    assert [len(shard.hashes) for shard in all_shards([group], tokenizer, tmp_path)] == [1000, 1000, 1000, 0]
    assert max(most) == 100


def test_many_tokens_fill_a_shard_whatever_the_text(tmp_path, tokenizer, monkeypatch):
    write_documents(tmp_path / "a.jsonl", 100)
    (group,) = groups_of(tmp_path)
    monkeypatch.setattr(shards, "BATCH_BYTES", 300)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 500)
    tokenize([group], tokenizer, tmp_path / "cache", print)
    made = all_shards([group], tokenizer, tmp_path)
    assert len(made) > 3
    assert all(500 <= len(shard.tokens) < 1000 for shard in made[:-1])


def test_large_vocabularies_take_four_bytes(tmp_path, tokenizer):
    write_documents(tmp_path / "a.jsonl", 3)
    tokenizer.vocab_size = 2**16 + 1
    tokenize(groups_of(tmp_path), tokenizer, tmp_path / "cache", print)
    (shard,) = all_shards(groups_of(tmp_path), tokenizer, tmp_path)
    assert shard.tokens.dtype == np.uint32


def shard_of(path, documents, learnt=None):
    arrays = {
        "tokens": np.zeros(sum(map(len, documents)), np.uint16),
        "offsets": np.cumsum([0, *map(len, documents)]),
        "hashes": np.zeros(len(documents), np.uint64),
        "plain_hashes": np.zeros(len(documents), np.uint64),
    } | ({} if learnt is None else {"learnt": np.packbits(learnt)})
    info = {"text_bytes": 0, "first": 0, "num_space_signs": 0, "num_empty": 0, "num_bad": 0, "first_bad": "", "last": True}
    cache.write_arrays(path, arrays, info)
    return read_shard(path)


def test_where_a_conversation_begins_to_be_learnt(tmp_path):
    documents = [[0, 0, 1, 1], [1, 0, 0], [1, 1], [0], [1], [0] * 9 + [1, 0], [0, 0, 0]]
    learnt = np.array([bit for document in documents for bit in document], bool)
    shard = shard_of(tmp_path / "chat", documents, learnt)
    first = [2, None, 1, None, None, 9, None]  # the token that begins a conversation follows nothing
    for found, expected, document in zip(shard.first_learnt().tolist(), first, documents, strict=True):
        assert found == expected if expected is not None else found >= len(document)
    for start, end in [(0, 4), (3, 5), (5, 5), (7, 25), (0, 25), (8, 16)]:
        assert shard.is_learnt(start, end).tolist() == learnt[start:end].tolist()
    assert shard_of(tmp_path / "text", documents).first_learnt().tolist() == [1] * 7


# Runs in a process of its own, which forks one child per request: a list of events, each the number of the event at
# which the child kills itself, or 0 to run to its end. A child's shards are those it wrote itself.
CHILDREN = """
import json, os, pathlib, signal, sys
from llamajax.config.data import SourceConfig
from llamajax.data import cache
from llamajax.data.documents import file_groups, sources
from llamajax.data.tokenizers import tokenizer
from llamajax.data.tokens import shards

folder = pathlib.Path(sys.argv[1])
file_groups.GROUP_BYTES = shards.SHARD_BYTES = 2000
shards.BATCH_BYTES, file_groups.UNSETTLED_S = 300, -60


def build(kill_at, cache_dir):
    events = 0

    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal events
            events += 1
            if events == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return wrapper

    os.fsync = counted(os.fsync)
    pathlib.Path.replace = counted(pathlib.Path.replace)
    tokenizer.SentencePieceTokenizer.encode_batch = counted(tokenizer.SentencePieceTokenizer.encode_batch)
    write_arrays, written = cache.write_arrays, []
    cache.write_arrays = lambda path, *rest, **how: (written.append(path), write_arrays(path, *rest, **how))
    source = sources.Source(SourceConfig(kind="jsonl", paths=(str(folder / "*.jsonl"),)), "data.sources[0]")
    files = file_groups.group_files(source, cache_dir, lambda line: None)
    shards.tokenize(files, tokenizer.load_tokenizer(folder / "tokenizer.model"), cache_dir, lambda line: None)
    return {"written": sum(path.suffix == ".shard" for path in written), "events": events}


def start(kill_at, cache_dir):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, json.dumps(build(kill_at, cache_dir)).encode())
        os._exit(0)
    os.close(writer)
    return pid, reader


def finish(pid, reader):
    with open(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else {"signal": os.WTERMSIG(status)}


for line in sys.stdin:
    request = json.loads(line)
    started = [start(kill_at, folder / request["cache"]) for kill_at in request["kill_at"]]
    print(json.dumps([finish(*child) for child in started]), flush=True)
"""


@pytest.fixture
def children(tmp_path, tokenizer):
    """Asks for children, as `children(cache, [kill_at, ...])`; those of one call run at the same time."""
    write_documents(tmp_path / "a.jsonl", 60)
    for n in range(3):
        write_documents(tmp_path / f"b{n}.jsonl", 30, seed=n)
    command = [sys.executable, "-c", CHILDREN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as process:

        def ask(cache, kill_at):
            assert process.stdin
            assert process.stdout
            process.stdin.write(json.dumps({"cache": cache, "kill_at": kill_at}) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        assert process.stdin
        process.stdin.close()
        assert process.wait() == 0


def contents(folder: Path):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_killed_at_any_moment_and_resumed(tmp_path, children):
    (unbroken,) = children("unbroken", [0])
    assert unbroken["written"] >= 8
    shard_files = {name: blob for name, blob in contents(tmp_path / "unbroken").items() if name.endswith(".shard")}
    assert len(shard_files) == unbroken["written"]
    rng = np.random.default_rng(0)
    for trial, kill_at in enumerate([1, 2, 3, 4, *rng.integers(5, unbroken["events"], 12).tolist()]):
        folder = f"killed{trial}"
        assert children(folder, [kill_at]) == [{"signal": 9}]
        finished = {name for name in contents(tmp_path / folder) if name.endswith(".shard")}
        (resumed,) = children(folder, [0])
        assert resumed["written"] == unbroken["written"] - len(finished), "a finished shard was made again"
        after = contents(tmp_path / folder)
        assert {name: blob for name, blob in after.items() if name.endswith(".shard")} == shard_files
        assert not [name for name in after if name.endswith(".tmp")]


def test_killed_again_and_again_it_still_arrives(tmp_path, children):
    (unbroken,) = children("unbroken", [0])
    lives = (children("stubborn", [15])[0] for _ in range(unbroken["events"]))  # events: enough for a shard, not for all
    outcome = next(outcome for outcome in lives if "written" in outcome)
    assert outcome["written"] < unbroken["written"] / 2
    for name, blob in contents(tmp_path / "unbroken").items():
        if name.endswith(".shard"):
            assert (tmp_path / "stubborn" / name).read_bytes() == blob


def test_processes_share_the_work_and_one_may_die(tmp_path, children):
    (alone,) = children("alone", [0])
    together = children("together", [0, 0, 0])
    assert sum(child["written"] for child in together) == alone["written"]
    children("with deaths", [1, 12, 0])  # who dies, and where, depends on who comes first; the result must not
    shard_files = {name: blob for name, blob in contents(tmp_path / "alone").items() if name.endswith(".shard")}
    for folder in ("together", "with deaths"):
        found = {name: blob for name, blob in contents(tmp_path / folder).items() if name.endswith(".shard")}
        assert found == shard_files


@pytest.fixture
def entries(tmp_path, tokenizer, small_shards):
    for n in range(3):
        write_documents(tmp_path / f"{n}.jsonl", 60, seed=n)
    groups = groups_of(tmp_path)
    tokenize(groups, tokenizer, tmp_path / "cache", print)
    return [shards_entry(group, tokenizer, tmp_path / "cache") for group in groups]


def test_the_index_has_what_the_heads_say(tmp_path, entries):
    path = index_path(entries, tmp_path / "cache")
    write_index(entries, path)
    index = ShardIndex(path)
    paths = [path for entry in entries for path in shard_paths(entry)]
    made = [read_shard(path) for path in paths]
    assert len(index) == len(made) > len(entries) == 3
    assert index.entries == [entry.name for entry in entries]
    assert index.sha256_of_shard == [shard.sha256 for shard in made]
    assert index.tokens_of_shard.tolist() == [len(shard.tokens) for shard in made]
    assert index.documents == sum(len(shard.hashes) for shard in made)
    assert index.empty == sum(shard.num_empty for shard in made) > 0
    assert index.text_bytes == sum(shard.text_bytes for shard in made)
    assert (index.bad, index.first_bad, index.space_signs) == (0, "", 0)
    places = [index.place(number) for number in range(len(index))]
    assert [entries[0].parent / name / f"{number:06d}.shard" for name, number in places] == paths


@pytest.mark.parametrize("which", [0, 2, -1])
def test_the_index_is_made_of_complete_entries_only(tmp_path, entries, which):
    path = index_path(entries, tmp_path / "cache")
    lost = shard_paths(entries[1])[which]
    lost.unlink()
    with pytest.raises(cache.DamagedError) as caught:
        write_index(entries, path)
    assert caught.value.path == lost
    assert not path.exists()


def test_a_shard_without_documents_is_in_the_index(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    (group,) = groups_of(tmp_path)
    tokenize([group], tokenizer, tmp_path / "cache", print)
    entry = shards_entry(group, tokenizer, tmp_path / "cache")
    write_index([entry], path := index_path([entry], tmp_path / "cache"))
    assert (ShardIndex(path).tokens_of_shard > 0).tolist() == [True, False]
