"""Which library encodes is decided by what it gives, told in one line, and changes nothing in the cache."""

import json
import re
import unicodedata

import gigatoken
import pytest
import sentencepiece

from llamajax.config.data import SourceConfig
from llamajax.data.documents.file_groups import find_groups, group_files
from llamajax.data.documents.sources import Source
from llamajax.data.tokenizers import encoder_choice
from llamajax.data.tokenizers.encoder_choice import choose_encoder, differing_text
from llamajax.data.tokenizers.hard_texts import hard_texts, texts_of_all_characters
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.data.tokens.shards import shard_paths, shards_entry, tokenize
from tests.data.tokenizers.test_fast_encoder import KINDS
from tests.data.tokenizers.test_tokenizer import CORPUS, trained
from tests.mixed_texts import TEXTS

FAST, OWN = r"encoder    gigatoken [\d.]+, 2\.0 MB/s where ", r"encoder    sentencepiece [\d.]+"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """JSONL of all kinds of texts, of which a little is enough."""
    monkeypatch.setattr(encoder_choice, "MIN_BYTES", 1000)
    for part in range(3):
        texts = [*TEXTS[part::3], "</s> after", *CORPUS]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source(SourceConfig(kind="jsonl", paths=(f"{tmp_path}/*.jsonl",)), "data.sources[0]")


def chosen(tokenizer, source, tmp_path):
    log = []
    choose_encoder(tokenizer, find_groups(source), tmp_path / "cache", log.append)
    return log


def faster(monkeypatch):
    """Makes the outcome independent of how fast this machine is just now."""
    made = encoder_choice._try
    monkeypatch.setattr(encoder_choice, "_try", lambda *a, **k: made(*a, **k)._replace(own_rate=1.0, fast_rate=2.0))


def unigram(path):
    with (path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, model_type="unigram", vocab_size=400, byte_fallback=True,
            max_sentence_length=10**5, minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip
    return load_tokenizer(path / "tokenizer.model")


def normalizing(path):
    """As `spm_train` makes them by default: gigatoken reads U+0085 otherwise."""
    with (path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, model_type="bpe", vocab_size=500, byte_fallback=True,
            max_sentence_length=10**5, minloglevel=2,
        )  # fmt: skip
    return load_tokenizer(path / "tokenizer.model")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            trained,
            FAST
            + r"sentencepiece [\d.]+ reaches 1.0: the same ids for hard texts, all characters, all tokens"
            + r" and \d+ documents$",
        ),
        (unigram, OWN + r": gigatoken [\d.]+ does not support this tokenizer: only BPE sentencepiece models are sup"),
        (normalizing, OWN + r", 1.0 MB/s: gigatoken [\d.]+ returns other ids for '"),
    ],
)
def test_the_way_is_told_and_the_cache_is_the_same(tmp_path, source, monkeypatch, make, line):
    faster(monkeypatch)
    tokenizer = make(tmp_path)
    groups = group_files(source, tmp_path / "cache", print)
    log, made = [], {}
    for cache, may in (("cache", True), ("plain", False)):
        tokenizer.is_fast = False
        tokenize(groups, tokenizer, tmp_path / cache, log.append, gigatoken=may)
        entries = [shards_entry(group, tokenizer, tmp_path / cache) for group in groups]
        made[cache] = [path.read_bytes() for entry in entries for path in shard_paths(entry)]
        assert tokenizer.is_fast == (may and make is trained)
    assert made["cache"] == made["plain"]
    told = [entry for entry in log if entry.startswith("encoder")]
    assert len(told) == 1
    assert re.match(line, told[0]), told


def test_it_goes_the_other_way_where_that_is_faster(tmp_path, source, monkeypatch):
    made = encoder_choice._try
    monkeypatch.setattr(encoder_choice, "_try", lambda *a, **k: made(*a, **k)._replace(own_rate=9.0, fast_rate=8.0))
    tokenizer = trained(tmp_path)
    (line,) = chosen(tokenizer, source, tmp_path)
    assert not tokenizer.is_fast
    assert line.startswith("encoder    sentencepiece ")
    assert line.endswith(" reaches 8.0 here")


def test_a_difference_in_the_documents_is_found(tmp_path, source, monkeypatch):
    """A version of gigatoken gets one thing wrong."""
    faster(monkeypatch)
    right = gigatoken.Tokenizer.encode
    wrong = "Pchnąć w tę łódź jeża"
    monkeypatch.setattr(gigatoken.Tokenizer, "encode", lambda self, text: right(self, text)[: 3 if wrong in text else None])
    tokenizer = trained(tmp_path)
    (line,) = chosen(tokenizer, source, tmp_path)
    assert not tokenizer.is_fast
    assert "returns other ids for 'Pchn" in line


def test_another_version_is_told(tmp_path, source, monkeypatch):
    faster(monkeypatch)
    tokenizer = trained(tmp_path)
    (first,) = chosen(tokenizer, source, tmp_path)
    assert chosen(tokenizer, source, tmp_path) == [first]
    real_version = encoder_choice.version
    monkeypatch.setattr(encoder_choice, "version", lambda name: "9.9" if name == "gigatoken" else real_version(name))
    (line,) = chosen(tokenizer, source, tmp_path)
    assert line.startswith("encoder    gigatoken 9.9, ")
    assert line.endswith(f"; {real_version('gigatoken')} encoded for this cache before")


def test_little_text_and_conversations_are_not_tried(tmp_path, source, monkeypatch):
    tokenizer = trained(tmp_path)
    chat = Source(SourceConfig(kind="chat", paths=source.config.paths), "data.sources[0]")
    assert chosen(tokenizer, chat, tmp_path) == []
    monkeypatch.setattr(encoder_choice, "MIN_BYTES", 10**6)
    assert chosen(tokenizer, source, tmp_path) == []
    assert not tokenizer.is_fast


def test_a_sample_of_bad_files_is_what_can_be_read(tmp_path, source, monkeypatch):
    """Tokenizing reports the bad files."""
    faster(monkeypatch)
    (tmp_path / "0.jsonl").write_text('{"text": "a"}\noops\n')
    tokenizer = trained(tmp_path)
    (line,) = chosen(tokenizer, source, tmp_path)
    assert tokenizer.is_fast, line


def test_hard_texts_have_all_kinds():
    texts = hard_texts()
    assert len(set(texts)) == len(texts) > 900
    whole = "".join(texts)
    for kind in (
        "\r\n",
        "\u200d",
        "<s>",
        "e\u0301",
        "é",
        "\0",
        "\U0010ffff",
        "\ufeff",
        *(100 * sign for sign in "\u0301 9a"),
    ):
        assert kind in whole
    assert whole.encode()


def test_all_characters_are_all_that_are_known():
    texts = [*texts_of_all_characters()]
    signs = set().union(*texts)
    assert {"a", "é", "狐", "\U0001f600", "\u0301", "\0"} <= signs
    assert len({unicodedata.category(sign) for sign in signs}) == 28, "all of Unicode's but surrogates and the unassigned"
    assert all(f" {sign}" in texts[0] for sign in texts[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mistral v3", "Llama 3", pytest.param("Qwen 2", marks=pytest.mark.long)])
def test_published_tokenizers_are_taken(tmp_path, kind):
    assert differing_text(KINDS[kind](tmp_path)) is None
