"""Documents of any length are one, with the ids of the whole, and little of them in memory."""

import itertools
import json
import re
from typing import Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents import formats
from llamajax.data.documents.file_groups import group_files
from llamajax.data.documents.sources import Source
from llamajax.data.documents.split import plain_hash, split_hash
from llamajax.data.tokenizers import long_documents
from llamajax.data.tokenizers.long_documents import Spool, cut_place
from llamajax.data.tokens import shards
from llamajax.data.tokens.shards import read_shard, remake, shard_paths, shards_entry, tokenize
from tests.data.tokenizers.test_fast_encoder import KINDS
from tests.data.tokenizers.test_tokenizer import trained
from tests.mixed_texts import CODE, SCRIPTS, SPACES

PIECE = 2500
LONG = "\n".join(" ".join((*SCRIPTS, *CODE)) + "".join(SPACES) + f" {number}," for number in range(4))
"""All kinds of words and spaces; some ends of words are no places for a cut."""
TEXTS = ["before", LONG, "\u2581 between", LONG + " another", "behind"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(formats, "MAX_DOCUMENT_CHARS", PIECE)
    monkeypatch.setattr(formats, "READ_BYTES", 700)


def groups_of(tmp_path, kind: Literal["jsonl", "parquet", "text"] = "jsonl", texts=TEXTS):
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    elif kind == "jsonl":
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.text").write_bytes(text.encode())
    source = Source(SourceConfig(kind=kind, paths=(f"{tmp_path}/*.{kind}",)), "data.sources[0]")
    return group_files(source, tmp_path / "cache", print)


def shards_of(groups, tokenizer, tmp_path):
    (group,) = groups
    return [read_shard(path) for path in shard_paths(shards_entry(group, tokenizer, tmp_path / "cache"))]


def framed(tokenizer, texts):
    return [[tokenizer.bos_id, *ids.tolist(), tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]


def documents(made):
    return [shard.tokens[a:b].tolist() for shard in made for a, b in itertools.pairwise(shard.offsets[:].tolist())]


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("kind", ["trained", "Mistral v1", "byte level", "byte level, NFC", "byte fallback",
                                  pytest.param("Llama 3", marks=pytest.mark.slow)])  # fmt: skip
def test_the_ids_are_those_of_the_whole(tmp_path, kind, is_fast):
    tokenizer, log = KINDS[kind](tmp_path), []
    groups = groups_of(tmp_path)
    tokenizer.is_fast = is_fast
    tokenize(groups, tokenizer, tmp_path / "cache", log.append, gigatoken=False)
    made = shards_of(groups, tokenizer, tmp_path)
    assert documents(made) == framed(tokenizer, TEXTS)
    assert not any(line.startswith("note") for line in log)
    (shard,) = made
    assert shard.hashes[:].tolist() == [split_hash(text) for text in TEXTS]
    assert shard.plain_hashes[:].tolist() == [plain_hash(text) for text in TEXTS]
    assert shard.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert shard.num_read == len(TEXTS)
    assert shard.num_space_signs == sum("\u2581" in text for text in TEXTS)
    assert log[-1].startswith(f"tokenized  {len(TEXTS)} documents")


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_of_every_kind_of_source(tmp_path, kind):
    tokenizer = trained(tmp_path)
    groups = groups_of(tmp_path, kind)
    tokenize(groups, tokenizer, tmp_path / "cache", print)
    assert documents(shards_of(groups, tokenizer, tmp_path)) == framed(tokenizer, TEXTS)


def test_no_more_than_a_piece_is_encoded_at_once(tmp_path, monkeypatch):
    tokenizer = trained(tmp_path)
    lengths, encode = [], tokenizer.encode_documents
    monkeypatch.setattr(tokenizer, "encode_documents", lambda t, **k: lengths.extend(map(len, t)) or encode(t, **k))
    tokenize(groups_of(tmp_path), tokenizer, tmp_path / "cache", print)
    assert max(lengths) <= 2 * PIECE < len(LONG)


def test_where_no_word_ends_it_is_told_and_still_one_document(tmp_path):
    tokenizer, log = trained(tmp_path), []
    texts = ["-" * 3 * PIECE, "short", "_" * PIECE + LONG]
    groups = groups_of(tmp_path, texts=texts)
    tokenize(groups, tokenizer, tmp_path / "cache", log.append)
    made = documents(shards_of(groups, tokenizer, tmp_path))
    assert [tokenizer.decode(ids) for ids in made] == texts
    notes = [line for line in log if line.startswith("note")]
    assert re.match(
        r"note       data.sources\[0\]: of the 3 pieces in which a document of 7,500 bytes is encoded, 2 do not end",
        notes[0],
    )
    assert " at a word, so some ids may differ from the whole document's; it remains one document" in notes[0]


def test_killed_and_damaged_shards_are_made_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 5000)
    tokenizer = trained(tmp_path)
    (group,) = groups = groups_of(tmp_path, texts=[*TEXTS, "one more", LONG])
    tokenize(groups, tokenizer, tmp_path / "cache", print)
    paths = shard_paths(shards_entry(group, tokenizer, tmp_path / "cache"))
    whole = [path.read_bytes() for path in paths]
    assert len(whole) >= 3
    for number, path in enumerate(paths):
        path.unlink()
        remake(path, group, tokenizer, tmp_path / "cache", print)
        assert path.read_bytes() == whole[number]


def test_what_has_no_long_documents_keeps_its_place(tmp_path, monkeypatch):
    tokenizer = trained(tmp_path)
    (group,) = groups_of(tmp_path, texts=["short"])
    before = shards_entry(group, tokenizer, tmp_path)
    monkeypatch.setattr("llamajax.data.documents.file_groups.MAX_DOCUMENT_CHARS", 5)
    assert shards_entry(group, tokenizer, tmp_path) != before


@pytest.mark.parametrize("kind", ["trained", "byte level"])
def test_a_cut_is_at_the_end_of_a_word(tmp_path, kind):
    tokenizer = KINDS[kind](tmp_path)
    text = "one two. three\nfour " * 100
    place = cut_place(text, tokenizer)
    assert len(text) - 400 < place < len(text)
    assert re.search(r"\w$", text[:place])
    assert re.match(r"\W", text[place:])
    assert cut_place("-" * 1000, tokenizer) == cut_place("", tokenizer) == cut_place("short text", tokenizer) == 0


def test_ids_wait_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(long_documents, "SPOOL_BYTES", 100)
    spool = Spool(np.dtype(np.uint16), tmp_path / "entry")
    assert spool.array().tolist() == []
    parts = [np.arange(number, dtype=np.int32) for number in (3, 0, 40, 70, 2)]
    for part in parts:
        spool.append(part)
    expected = np.concatenate(parts)
    assert len(spool) == len(expected)
    whole = spool.array()
    assert whole.dtype == np.uint16
    np.testing.assert_array_equal(whole, expected)
    assert not any((tmp_path / "entry").iterdir())
