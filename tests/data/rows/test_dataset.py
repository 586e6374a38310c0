"""From a configuration to rows: golden rows, the split, mixtures, the cache and what is refused."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from llamajax.config.data import DataConfig, SourceConfig, TokenizerConfig
from llamajax.data import cache
from llamajax.data.documents import file_groups
from llamajax.data.documents.sources import Source
from llamajax.data.documents.split import is_held_out, split_hash
from llamajax.data.rows import rows as rows_module
from llamajax.data.rows.dataset import prepare
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from llamajax.data.tokens import encoding
from llamajax.errors import ConfigError, DataError, DiskError
from llamajax.step.batch import IGNORE
from tests.tiny import tiny_config

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letters_tokenizer(tmp_path):
    """One token per letter: 26 characters, a space and 259 fixed ones."""
    path = tmp_path / "letters.model"
    path.write_bytes(train_sentencepiece([LETTERS + " "], vocab_size=286))
    return load_tokenizer(path)


@pytest.fixture
def tokenizer(tmp_path):
    return letters_tokenizer(tmp_path)


def config_for(tmp_path, *sources, seed=0, vocab_size=512, eval_batches=0, objective="next_token", **fields):
    fields = {
        "seq_len": 16, "held_out_fraction": 0.0, "cache_dir": str(tmp_path / "cache"),
        "tokenizer": TokenizerConfig(path=str(tmp_path / "letters.model")),
    } | fields  # fmt: skip
    data = DataConfig(sources=sources, **fields)
    changes = {"seed": seed, "model.vocab_size": vocab_size, "train.eval_batches": eval_batches}
    changes |= {"objective.kind": objective, "init_from": "model" if objective == "kto" else None}
    return tiny_config(data=data).changed(changes)


def jsonl_source(tmp_path, name, texts, **fields):
    (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return SourceConfig(kind="jsonl", paths=(str(tmp_path / name),), **fields)


def random_texts(count, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list(LETTERS), rng.integers(1, longest))) for _ in range(count)]


def documents_of(rows, tokenizer):
    """Every piece of text in the rows, with its place: (position of the first token, text without ends)."""
    for row in rows:
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["segment_ids"] == segment
            yield row["positions"][inside], tokenizer.decode(row["tokens"][inside]), row["targets"][inside]


def epoch(dataset, num_rows):
    return [dataset.train_row(position) for position in range(num_rows)]


def num_rows(dataset, source=0):
    return int(dataset.summary[source].split("; ")[1].split(" rows")[0].replace(",", ""))


def test_golden_rows(tmp_path, tokenizer):
    texts = ["abc", "de", "", "fghijk", "l"]
    dataset = prepare(config_for(tmp_path, jsonl_source(tmp_path, "a.jsonl", texts), seq_len=6), log=lambda line: None)
    ids = {letter: int(tokenizer.encode_batch([letter])[0][0]) for letter in LETTERS}
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    a, b, c, d, e, f, g, h, i, j, k, m = (ids[letter] for letter in "abcdefghijkl")
    golden = [
        ([bos, f, g, h, i, j], [f, g, h, i, j, k], [1] * 6, [0, 1, 2, 3, 4, 5]),
        ([bos, a, b, c, bos, m], [a, b, c, eos, m, eos], [1, 1, 1, 1, 2, 2], [0, 1, 2, 3, 0, 1]),
        ([bos, d, e, k, 0, 0], [d, e, eos, eos, -1, -1], [1, 1, 1, 2, 0, 0], [0, 1, 2, 0, 0, 0]),
    ]
    rows = [
        tuple(row[name].tolist() for name in ("tokens", "targets", "segment_ids", "positions")) for row in epoch(dataset, 3)
    ]
    assert sorted(rows) == sorted(golden)
    assert dataset.summary == (
        "data       data.sources[0] jsonl: 4 documents (1 empty ones skipped), 0.0 MB, 20 tokens, 5 per document;"
        " 3 rows, 88.89% full;"
        " held out: 0 rows",
    )
    assert len(dataset.held_out_rows) == 0


def test_every_target_once_in_an_epoch(tmp_path, tokenizer):
    texts = random_texts(200)
    dataset = prepare(config_for(tmp_path, jsonl_source(tmp_path, "a.jsonl", texts)), log=lambda line: None)
    for start in (0, num_rows(dataset)):
        rows = [dataset.train_row(start + position) for position in range(num_rows(dataset))]
        targets = np.concatenate([row["targets"] for row in rows])
        targets = targets[targets != IGNORE]
        expected = np.concatenate([[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)])
        np.testing.assert_array_equal(np.sort(targets), np.sort(expected))
        # Bits per byte rest on this: what the targets stand for is the text, byte for byte.
        assert dataset.tokenizer.token_bytes[targets].sum() == sum(map(len, texts))


def test_the_split_is_by_document_and_holds_for_duplicates(tmp_path, tokenizer):
    texts = random_texts(400, longest=14)
    sources = [jsonl_source(tmp_path, "a.jsonl", texts), jsonl_source(tmp_path, "b.jsonl", texts[::-1] + texts[:50])]
    config = config_for(tmp_path, *sources, held_out_fraction=0.2, eval_batches=1)
    dataset = prepare(config, log=lambda line: None)
    total = 4 * (num_rows(dataset, 0) + num_rows(dataset, 1))
    trained = {text for _, text, _ in documents_of(epoch(dataset, total), tokenizer)}
    held_out = {
        text for _, text, _ in documents_of([dataset.held_out_rows[i] for i in range(len(dataset.held_out_rows))], tokenizer)
    }
    assert trained | held_out == set(texts)
    assert not trained & held_out
    assert 0.1 < len(held_out) / len(set(texts)) < 0.3


def test_held_out_rows_are_the_same_for_every_seed_and_mixed(tmp_path, tokenizer):
    sources = [jsonl_source(tmp_path, f"{n}.jsonl", random_texts(200, n)) for n in range(2)]
    both = [
        prepare(config_for(tmp_path, *sources, held_out_fraction=0.5, seed=seed), log=lambda line: None) for seed in (0, 1)
    ]
    first, second = (
        [dataset.held_out_rows[i]["tokens"].tolist() for i in range(len(dataset.held_out_rows))] for dataset in both
    )
    assert first == second
    in_file_order = [
        prepare(config_for(tmp_path, source, held_out_fraction=0.5), log=lambda line: None).held_out_rows
        for source in sources
    ]
    assert len(first) == sum(map(len, in_file_order))
    of_first_source = {tuple(in_file_order[0][i]["tokens"].tolist()) for i in range(len(in_file_order[0]))}
    front = [tuple(row) in of_first_source for row in first[: len(first) // 2]]
    assert 0.3 < np.mean(front) < 0.7


def test_a_tokenizer_is_trained_on_training_documents_only(tmp_path):
    fraction = 0.3
    texts = [text for text in random_texts(60) if not is_held_out(split_hash(text), fraction)]
    secret = next(text for n in range(100) if is_held_out(split_hash(text := f"{n} " + "xyzzy plugh " * 50), fraction))
    vocabularies = []
    for name, documents in (("a", texts), ("b", [*texts, secret])):
        config = config_for(
            tmp_path, jsonl_source(tmp_path, f"{name}.jsonl", documents), held_out_fraction=fraction,
            tokenizer=TokenizerConfig(train_max_bytes=10_000), vocab_size=320,
        )  # fmt: skip
        dataset = prepare(config, log=lambda line: None)
        vocabularies.append([dataset.tokenizer.decode([token]) for token in range(dataset.tokenizer.vocab_size)])
    assert vocabularies[0] == vocabularies[1]


def test_sources_are_mixed_by_weight(tmp_path, tokenizer):
    sources = [
        jsonl_source(tmp_path, "a.jsonl", ["a" * (1 + n % 40) for n in range(1500)], weight=0.7),
        jsonl_source(tmp_path, "b.jsonl", ["b" * (1 + n % 40) for n in range(700)], weight=0.3),
    ]
    dataset = prepare(config_for(tmp_path, *sources), log=lambda line: None)
    letter_a = tokenizer.encode_batch(["a"])[0][0]
    from_a = [bool((dataset.train_row(position)["targets"] == letter_a).any()) for position in range(1000)]
    assert sum(from_a) == 700
    assert all(6 <= sum(from_a[start : start + 10]) <= 8 for start in range(990))


def test_the_order_depends_on_the_seed_and_on_nothing_else(tmp_path, tokenizer):
    source = jsonl_source(tmp_path, "a.jsonl", random_texts(100))
    same = config_for(tmp_path, source)
    first = [row["tokens"].tolist() for row in epoch(prepare(same, log=lambda line: None), 30)]
    elsewhere = same.changed({"data.cache_dir": str(tmp_path / "elsewhere")})
    assert [row["tokens"].tolist() for row in epoch(prepare(elsewhere, log=lambda line: None), 30)] == first
    other = prepare(config_for(tmp_path, source, seed=1), log=lambda line: None)
    assert [row["tokens"].tolist() for row in epoch(other, 30)] != first


def test_the_fingerprint_follows_all_that_decides_the_rows(tmp_path, tokenizer):
    a, b = (jsonl_source(tmp_path, f"{name}.jsonl", random_texts(50, seed)) for seed, name in enumerate("ab"))
    (tmp_path / "copy").mkdir()
    copy = jsonl_source(tmp_path / "copy", "other-name.jsonl", random_texts(50, 0))
    same = [
        config_for(tmp_path, a),
        config_for(tmp_path, a, seed=7),
        config_for(tmp_path, copy, cache_dir=str(tmp_path / "cache2")),
        config_for(tmp_path, dataclasses.replace(a, weight=3.0)),
    ]
    others = [
        config_for(tmp_path, b),
        config_for(tmp_path, a, seq_len=8),
        config_for(tmp_path, a, held_out_fraction=0.1),
        config_for(tmp_path, a, b),
        config_for(tmp_path, b, a),
        config_for(tmp_path, a, dataclasses.replace(b, weight=2.0)),
        config_for(tmp_path, a, tokenizer=TokenizerConfig(), vocab_size=300),
    ]
    fingerprints = [[prepare(config, log=lambda line: None).fingerprint for config in group] for group in (same, others)]
    assert len(set(fingerprints[0])) == 1
    assert len({*fingerprints[0], *fingerprints[1]}) == 1 + len(others)


def test_prepared_once(tmp_path, tokenizer, monkeypatch):
    texts = random_texts(50)
    config = config_for(tmp_path, jsonl_source(tmp_path, "a.jsonl", texts), tokenizer=TokenizerConfig(), vocab_size=300)
    first_log, second_log = [], []
    work: list[str] = []
    first = prepare(config, log=first_log.append, log_work=work.append)
    assert [line.split()[0] for line in first_log] == ["source", "data"]
    assert [line.split()[0] for line in work] == ["tokenizer", "tokenized"]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    monkeypatch.setattr("llamajax.data.tokens.encoding.train_sentencepiece", None)
    monkeypatch.setattr("llamajax.data.rows.packing.pack", None)
    second = prepare(config, log=second_log.append)
    assert second_log == first_log == [first_log[0], *first.summary]
    assert (second.fingerprint, second.summary) == (first.fingerprint, first.summary)
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_what_is_refused(tmp_path, tokenizer):
    a = jsonl_source(tmp_path, "a.jsonl", random_texts(5))
    empty = jsonl_source(tmp_path, "empty.jsonl", ["", ""])

    def refused(error, message, config):
        with pytest.raises(error, match=message) as caught:
            prepare(config, log=lambda line: None)
        assert "\n" not in str(caught.value)

    refused(
        ConfigError,
        r"model.vocab_size: 100 is below the 286 tokens of data.tokenizer.path=.*letters.model; raise it to 286 or more",
        config_for(tmp_path, a, vocab_size=100),
    )
    (tmp_path / "added_tokens.json").write_text('{"[PAD]": 286}')
    refused(
        ConfigError,
        r"raise it to 287 or more, or remove \[PAD\] from the files beside it if the model has no rows for them",
        config_for(tmp_path, a, vocab_size=286),
    )
    (tmp_path / "added_tokens.json").unlink()
    no_documents = r"data.sources\[1\].paths: has no document to train on; add documents with text"
    refused(DataError, no_documents, config_for(tmp_path, a, empty))
    refused(DataError, r"there is no text to train a tokenizer on", config_for(tmp_path, empty, tokenizer=TokenizerConfig()))
    refused(
        DataError,
        r"data.held_out_fraction: 0.0001 holds out no document; raise it, add documents, or set train.eval_batches=0",
        config_for(tmp_path, a, held_out_fraction=0.0001, eval_batches=1),
    )
    assert len(prepare(config_for(tmp_path, a, held_out_fraction=0.0001), log=lambda line: None).held_out_rows) == 0
    (tmp_path / "file").write_text("")
    refused(
        DataError,
        r"data.cache_dir: .*Not a directory.*; make .*/file/x writable",
        config_for(tmp_path, a, cache_dir=str(tmp_path / "file/x")),
    )


def test_copies_that_differ_by_a_newline_are_on_one_side(tmp_path, tokenizer):
    texts = random_texts(100, longest=14)
    twins = jsonl_source(tmp_path, "a.jsonl", [twin for text in texts for twin in (text, f"{text} ", f" {text} ")])
    dataset = prepare(config_for(tmp_path, twins, held_out_fraction=0.5, eval_batches=1), log=lambda line: None)
    sides = [
        {text.strip() for _, text, _ in documents_of(rows, tokenizer)}
        for rows in (epoch(dataset, num_rows(dataset)), dataset.held_out_rows)
    ]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == set(texts)


@pytest.mark.parametrize(("end", "same"), [("\n", True), ("", False), ("\u2581\n", False)])
def test_the_fingerprint_is_that_of_the_first_version_where_the_rows_are(tmp_path, tokenizer, end, same):
    """Which split by the text with its white space, and spelt U+2581; its runs go on if that makes no difference."""
    source = jsonl_source(tmp_path, "a.jsonl", [text + end for text in random_texts(60)])
    log = []
    dataset = prepare(config_for(tmp_path, source, held_out_fraction=0.5), log=log.append)
    (group,) = file_groups.group_files(Source(source, "data.sources[0]"), tmp_path / "cache", log.append)
    of_shards = cache.key_of("shard-1", 2**26, tokenizer.sha256, group.content)
    of_rows = cache.key_of("packing-1", [of_shards], 16, 0.5)
    assert (dataset.fingerprint == cache.key_of(tokenizer.sha256, [of_rows], [1])) == same


def test_bad_records_are_counted_and_bounded(tmp_path, tokenizer):
    source = jsonl_source(tmp_path, "a.jsonl", [*random_texts(5), None, None, "last"])
    some = dataclasses.replace(source, max_bad_records=2)
    log = []
    dataset = prepare(config_for(tmp_path, some), log=log.append)
    first = f"{tmp_path}/a.jsonl:6: data.sources[0].text_key: 'text' must be a string, not null; correct or remove it"
    assert f"left out   data.sources[0]: 2 bad records, the first one {first}" in log
    assert "6 documents," in dataset.summary[0]
    for bound, suffix in ((0, ""), (1, "; data.sources[0].max_bad_records: 1 allows no more")):
        with pytest.raises(DataError) as caught:  # also where the cache has them
            prepare(config_for(tmp_path, dataclasses.replace(source, max_bad_records=bound)), log=lambda line: None)
        assert str(caught.value) == first + suffix


def test_how_often_each_source_is_gone_through(tmp_path, tokenizer):
    sources = [
        jsonl_source(tmp_path, "a.jsonl", random_texts(40), weight=3.0),
        jsonl_source(tmp_path, "b.jsonl", random_texts(90, seed=1)),
    ]
    dataset = prepare(config_for(tmp_path, *sources), log=lambda line: None)
    rows = [num_rows(dataset, 0), num_rows(dataset, 1)]
    of_a, of_b = 24 * rows[1] / rows[0], 8.0  # of 32 rows per step, three quarters and one
    assert dataset.epochs(rows[1]) == pytest.approx({"data.sources[0]": of_a, "data.sources[1]": of_b})


def test_why_there_is_nothing_to_train_on(tmp_path, tokenizer):
    source = jsonl_source(tmp_path, "a.jsonl", ["abc"])
    fraction = (split_hash("abc") + 2**40) / 2**64
    with pytest.raises(DataError, match=r"paths: has no document to train on: all 1 are held out; add documents, or lower"):
        prepare(config_for(tmp_path, source, held_out_fraction=fraction), log=lambda line: None)


def test_a_signal_while_a_tokenizer_is_made_is_not_hidden(tmp_path, monkeypatch):
    """Its handler may raise SystemExit at any document; here at the first, then at the second, and so on."""
    source = jsonl_source(tmp_path, "a.jsonl", random_texts(3))
    kill_at = 0
    for kill_at in range(1, 10):
        config = config_for(tmp_path, source, tokenizer=TokenizerConfig(), cache_dir=str(tmp_path / str(kill_at)))
        calls = itertools.count(1)

        def terminated(*args, kill_at=kill_at, calls=calls):
            if next(calls) == kill_at:
                raise SystemExit(143)
            return is_held_out(*args)

        monkeypatch.setattr(encoding, "is_held_out", terminated)
        try:
            prepare(config, log=lambda line: None)
        except SystemExit:
            continue
        break
    assert kill_at == 4  # after three documents


def test_the_files_are_read_once_for_the_tokenizer(tmp_path, monkeypatch):
    config = config_for(tmp_path, jsonl_source(tmp_path, "a.jsonl", random_texts(50)), tokenizer=TokenizerConfig())
    read, documents = [], Source.documents
    monkeypatch.setattr(Source, "documents", lambda self, files, *rest: read.append(files) or documents(self, files, *rest))
    prepare(config, log=lambda line: None)
    assert len(read) == 2  # for the tokenizer and by it


def test_a_source_that_cannot_be_read_is_not_the_cache(tmp_path, tokenizer):
    def refused(path, kind):
        with pytest.raises(kind) as caught:
            prepare(config_for(tmp_path, SourceConfig(kind="text", paths=(path,))), log=lambda line: None)
        return str(caught.value)

    remedy = "check the disk and run the same command again"
    message = f"/proc/self/mem: data.sources[0].paths: cannot be read: Input/output error; {remedy}"
    assert refused("/proc/self/mem", DiskError) == message  # its start is not mapped
    long = str(tmp_path / ("x" * 300))
    assert refused(long, DataError) == f"{long}: data.sources[0].paths: File name too long; correct or remove the path"


def test_long_work_is_announced(tmp_path, monkeypatch):
    texts = random_texts(50)
    for name in ("a", "b"):
        jsonl_source(tmp_path, f"{name}.jsonl", texts)
    size = 2 * (tmp_path / "a.jsonl").stat().st_size
    source = SourceConfig(kind="jsonl", paths=(str(tmp_path / "*.jsonl"),))
    config = config_for(tmp_path, source, tokenizer=TokenizerConfig(train_max_bytes=1_000_000), vocab_size=300)
    for module in (encoding, file_groups, rows_module):
        monkeypatch.setattr(module, "ANNOUNCED_BYTES", 2 * sum(map(len, texts)))
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    log = []
    prepare(config, log=log.append)
    assert [line.split()[0] for line in log] == [
        "source", "hashing", "sampling", "tokenizer", "tokenized", "packing", "data",
    ]  # fmt: skip
    assert log[1] == f"hashing    2 files, {size / 1e9:.1f} GB, of data.sources[0]"
    assert log[2] == "sampling   1.0 MB of text for the tokenizer from 0.0 GB"
    assert log[5] == "packing    100 documents of data.sources[0]"
    log.clear()
    prepare(config, log=log.append)
    assert [line.split()[0] for line in log] == ["source", "data"]


@pytest.mark.slow
def test_the_standard_library(tmp_path):
    config = config_for(
        tmp_path, SourceConfig(kind="stdlib"), seq_len=256, tokenizer=TokenizerConfig(), vocab_size=4096,
        held_out_fraction=0.05, eval_batches=1,
    )  # fmt: skip
    dataset = prepare(config, log=lambda line: None)
    assert dataset.tokenizer.vocab_size == 4096
    assert num_rows(dataset) > 10_000
    assert len(dataset.held_out_rows) > 100
    full = float(dataset.summary[0].split("rows, ")[1].split("%")[0])
    assert full > 99
    targets = np.concatenate([dataset.train_row(position)["targets"] for position in range(2000)])
    assert 3.0 < dataset.tokenizer.token_bytes[targets[targets != IGNORE]].mean() < 4.0
