"""Token files of Megatron-LM are trained on where they lie: their documents, their split, and what they lack refused."""

import itertools
import pickle

import numpy as np
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents.sources import Source
from llamajax.data.rows import packing, packing_cache
from llamajax.data.rows.dataset import prepare
from llamajax.data.tokens import megatron, megatron_tokens
from llamajax.data.tokens.megatron import split_documents
from llamajax.data.tokens.megatron_tokens import MegatronTokens, parts_path
from llamajax.data.tokens.megatron_writer import write_indexed
from llamajax.errors import ConfigError, DataError
from llamajax.preprocessing.run import run
from llamajax.step.batch import IGNORE
from tests.data.rows.test_dataset import (
    config_for,
    epoch,
    jsonl_source,
    letters_tokenizer,
    num_rows,
    random_texts,
)

VOCABULARY = 286


def write(path, count, seed=0, dtype="<u2", longest=40):
    """Documents of one to three sequences, some of no or one token."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(3, VOCABULARY, rng.integers(0, longest)) for _ in range(count)]
    with write_indexed(path, np.dtype(dtype)) as writer:
        for document in documents:
            cuts = sorted(rng.integers(0, len(document) + 1, rng.integers(0, 3)))
            writer.add_document(document, np.diff([0, *cuts, len(document)]).tolist())
    return [document.tolist() for document in documents]


def source(*paths, **fields):
    return SourceConfig(kind="megatron", paths=tuple(map(str, paths)), **fields)


@pytest.fixture(autouse=True)
def _tokenizer(tmp_path):
    letters_tokenizer(tmp_path)


def pairs_of(documents):
    return sorted(pair for document in documents for pair in itertools.pairwise(document))


def pairs_in(rows):
    found = []
    for row in rows:
        real = row["targets"] != IGNORE
        found += zip(row["tokens"][real].tolist(), row["targets"][real].tolist(), strict=True)
    return sorted(found)


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8", "<i2"])
def test_every_pair_of_neighbours_in_a_document_is_learnt_once(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(megatron_tokens, "PART_DOCUMENTS", 7)
    monkeypatch.setattr(packing, "WINDOW", 16)
    monkeypatch.setattr(packing_cache, "CHUNK_WINDOWS", 2)
    documents = write(tmp_path / "a", 200, dtype=dtype) + write(tmp_path / "b", 60, seed=1, dtype=dtype)
    config = config_for(tmp_path, source(tmp_path / "a.bin", tmp_path / "b"), held_out_fraction=0.0)
    dataset = prepare(config, log=lambda line: None)
    assert pairs_in(epoch(dataset, num_rows(dataset))) == pairs_of(documents)
    tokens = sum(map(len, documents))
    assert dataset.summary[0].startswith(f"data       data.sources[0] megatron: 260 documents, {tokens:,} tokens, ")
    assert not list((tmp_path / "cache").rglob("*.shard"))


@pytest.mark.parametrize(("split", "fraction"), [("969,30,1", 0.0), ("8,1,1", 0.0), ("1", 0.0), (None, 0.1)])
def test_documents_are_divided_in_their_order_file_by_file(tmp_path, split, fraction):
    files = [write(tmp_path / name, count, seed) for seed, (name, count) in enumerate([("a", 300), ("b", 130)])]
    config = config_for(tmp_path, source(tmp_path / "*.idx", split=split), held_out_fraction=fraction)
    dataset = prepare(config, log=lambda line: None)
    train, held_out = [], []
    for documents in files:
        (_, end), (first, stop), _ = split_documents(len(documents), split or "0.9,0.1")
        train += documents[:end]
        held_out += documents[first:stop]
    assert pairs_in(epoch(dataset, num_rows(dataset))) == pairs_of(train)
    rows = [dataset.held_out_rows[index] for index in range(len(dataset.held_out_rows))]
    assert pairs_in(rows) == pairs_of(held_out)


def test_it_is_mixed_with_text_by_weight_and_told_apart(tmp_path):
    write(tmp_path / "a", 500)
    texts = jsonl_source(tmp_path, "b.jsonl", random_texts(500, longest=14), weight=3.0)
    config = config_for(tmp_path, source(tmp_path / "a"), texts)
    dataset = prepare(config, log=lambda line: None)
    bos = dataset.tokenizer.bos_id
    assert bos < 3, "the other source's documents are not begun by it"
    from_text = [bool((dataset.train_row(position)["tokens"] == bos).any()) for position in range(200)]
    assert sum(from_text) == 150
    assert list(dataset.epochs(100)) == ["data.sources[0]", "data.sources[1]"]


def test_the_fingerprint_follows_the_files_and_the_split(tmp_path):
    for name, seed, dtype in (("a", 0, "<u2"), ("copy", 0, "<u2"), ("b", 1, "<u2"), ("wide", 0, "<i4")):
        write(tmp_path / name, 200, seed, dtype)

    def fingerprint(name, **fields):
        config = config_for(tmp_path, source(tmp_path / name, **fields))
        return prepare(config, log=lambda line: None).fingerprint

    same = {fingerprint("a"), fingerprint("copy")}
    others = {fingerprint("b"), fingerprint("wide"), fingerprint("a", split="9,1")}
    assert len(same) == 1
    assert len(others | same) == 4
    tokens = np.memmap(tmp_path / "a.bin", np.uint16, "r+")
    tokens[7] += 1
    tokens.flush()
    assert fingerprint("a") not in same | others


def test_files_are_checked_once(tmp_path, monkeypatch):
    write(tmp_path / "a", 50)
    config = config_for(tmp_path, source(tmp_path / "a"))
    prepare(config, log=lambda line: None)
    monkeypatch.setattr(megatron_tokens, "IndexedDataset", None)
    dataset = prepare(config, log=lambda line: None)
    epoch(dataset, num_rows(dataset))


def test_a_store_can_be_sent_to_other_processes(tmp_path):
    write(tmp_path / "a", 50)
    of = Source(source(tmp_path / "a"), "data.sources[0]")
    tokens = MegatronTokens(of, parts_path(of, tmp_path / "cache"), 0.1, VOCABULARY, print)
    unread = pickle.dumps(tokens.store)
    sent = pickle.loads(unread)
    np.testing.assert_equal(sent.documents(0, 16), tokens.store.documents(0, 16))
    np.testing.assert_equal(sent.piece(0, 3, 5), tokens.store.piece(0, 3, 5))
    assert pickle.dumps(tokens.store) == unread, "what was read of the files must not travel"


@pytest.mark.parametrize(("dtype", "wrong"), [("<u2", 600), ("<i4", 600), ("<i8", 2**40), ("<i4", -3), ("<i2", -1)])
def test_an_id_beyond_the_vocabulary_is_found_before_the_first_step(tmp_path, dtype, wrong, monkeypatch):
    """Wherever it stands, in a part that is not trained on too; the ids are read once, and remembered."""
    monkeypatch.setattr(megatron, "_SPAN", 32)
    monkeypatch.setattr(megatron, "CHUNK", 8)
    with write_indexed(tmp_path / "a", np.dtype(dtype)) as writer:
        for number in range(60):
            writer.add_document(np.array([3, 4, wrong if number == 41 else 5]), [1, 0, 2])
            writer.add_document(np.array([], np.int64), [0])
    config = config_for(tmp_path, source(tmp_path / "a", split="1,9"), vocab_size=512)
    place = rf"a.bin: data.sources\[0\].paths: token id {wrong} in document 82 is not among the 512 of model.vocab_size"
    log = []
    for _ in range(2):
        with pytest.raises(DataError, match=place):
            prepare(config, log=log.append)
    with pytest.raises(DataError, match=place):
        run(config, {})
    assert sum(line.startswith("checked ") for line in log) == 1
    if wrong == 600:
        monkeypatch.setattr(megatron_tokens.IndexedDataset, "id_range", None)
        prepare(config.changed({"model.vocab_size": 601}), log=print)


def test_ids_that_change_after_the_start_are_refused_where_they_are_read(tmp_path):
    write(tmp_path / "a", 50)
    dataset = prepare(config_for(tmp_path, source(tmp_path / "a"), held_out_fraction=0.0), log=lambda line: None)
    np.memmap(tmp_path / "a.bin", np.uint16, "r+")[:] = 60_000
    with pytest.raises(DataError, match=r"a.bin: data.sources\[0\].paths: token id 60000 is not among"):
        epoch(dataset, num_rows(dataset))


def all_rows(config):
    dataset = prepare(config, log=lambda line: None)
    return epoch(dataset, num_rows(dataset))


def test_what_is_refused(tmp_path):
    write(tmp_path / "a", 50)

    def refused(error, message, *sources, **fields):
        with pytest.raises(error, match=message) as caught:
            all_rows(config_for(tmp_path, *sources, **fields))
        assert "\n" not in str(caught.value)

    refused(ConfigError, r"model.vocab_size: 100 is below", source(tmp_path / "a"), vocab_size=100)
    refused(DataError, r"'.*/none.idx' matches no file|none.idx", source(tmp_path / "none"))
    (tmp_path / "lone.idx").write_bytes((tmp_path / "a.idx").read_bytes())
    refused(DataError, r"lone.bin: data.sources\[0\].paths: cannot be read: No such file", source(tmp_path / "lone"))
    (tmp_path / "cut.idx").write_bytes((tmp_path / "a.idx").read_bytes())
    (tmp_path / "cut.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-2])
    refused(
        DataError, r"cut.bin: has [\d,]+ bytes, but the sequences .*\(data.sources\[0\].paths\)$", source(tmp_path / "cut")
    )
    with write_indexed(tmp_path / "empty", np.dtype("<u2")):
        pass
    refused(DataError, r"data.sources\[0\].paths: has no document to train on", source(tmp_path / "empty"))
