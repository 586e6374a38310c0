"""Both kinds of tokenizer give back every text, and know how many bytes every token stands for."""

import hashlib
import json
import sys

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llamajax.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from llamajax.data.tokenizers.tokenizer import (
    TRAINING_CHUNK_CHARS,
    load_tokenizer,
    sample_texts,
    train_sentencepiece,
)
from llamajax.errors import ConfigError, DataError

CORPUS = [
    "def main() -> None:\n    for word in text.split():\n        print(word, 1234, sep='\\t')\n\n" * 20,
    "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer über den Sylter Deich.\r\n" * 20,
    "Съешь же ещё этих мягких французских булок — 敏捷的棕色狐狸 😀 " * 20,
]
RNG = np.random.default_rng(0)
HARD_TEXTS = [
    "", " ", "   ", "\n", "\r\n\r\n", "\t\tx \n ", "  leading and trailing  ", "a\0b", "\x01\x7f\x80", "\u2581",
    "a\u2581 \u2581b", " \u2581 ", "\ufeffbom", "\u2028\u2029\u00a0\u3000\u200b", "e\u0301 \u00e9", "ﬁ ﷺ Å",
    "\ud7ff\ue000\U0010ffff", "👩‍👩‍👧‍👦🏳️‍🌈",
    "<s> </s> <unk> <0x41> <|begin_of_text|><|end_of_text|>", "⁇ \u2047", "१२३ 123456789 ½", "x" * 3000, "\u0000" * 50,
    "".join(map(chr, RNG.choice([c for c in range(sys.maxunicode) if not 0xD800 <= c < 0xE000], 2000))),
    *CORPUS,
]  # fmt: skip


def trained(tmp_path, vocab_size=500, texts=CORPUS):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(train_sentencepiece(texts, vocab_size=vocab_size))
    return load_tokenizer(path)


def byte_level(tmp_path, special_tokens=("<|begin_of_text|>", "<|end_of_text|>"), config=None, *, begins=True):
    """A byte-level BPE as Llama 3's, or, without what begins a text, as Qwen's."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if special_tokens and begins:
        begin = special_tokens[0]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(tmp_path / "tokenizer.json")


def byte_fallback(tmp_path, prepend=()):
    """A SentencePiece kind of tokenizer.json as Llama 2's, without or with its space in front."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "e", "n", "en", "▁en"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [("e", "n"), ("▁", "en")], byte_fallback=True, unk_token="<unk>"
        )
    )
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("make", [trained, byte_level])
def test_every_text_comes_back_and_its_bytes_add_up(tmp_path, make):
    tokenizer = make(tmp_path)
    texts = HARD_TEXTS if make is byte_level else [text.replace("\u2581", " ") for text in HARD_TEXTS]
    encoded = tokenizer.encode_batch(HARD_TEXTS)
    for text, ids in zip(texts, encoded, strict=True):
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids.tolist())
        np.testing.assert_array_equal(tokenizer.encode_batch([text])[0], ids)
    assert tokenizer.decode([tokenizer.bos_id, *encoded[-1], tokenizer.eos_id]) == texts[-1]
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]
    assert tokenizer.encode_batch([]) == []


def test_a_trained_tokenizer_is_as_asked(tmp_path):
    tokenizer = trained(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (500, 1, 2)
    (ids,) = tokenizer.encode_batch(["1234    for"])
    assert [tokenizer.decode([token]) for token in ids] == ["1", "2", "3", "4", "    ", "for"]
    assert tokenizer.files == {"tokenizer.model": (tmp_path / "tokenizer.model").read_bytes()}


def test_training_is_deterministic():
    assert train_sentencepiece(CORPUS, vocab_size=400) == train_sentencepiece(CORPUS, vocab_size=400)


def test_the_sample_is_spread_evenly_and_bounded():
    texts = [f"document {n} {'äöü ipsum ' * 500}" for n in range(100)]
    total_bytes = sum(len(text.encode()) for text in texts)
    largest_part = 2 * TRAINING_CHUNK_CHARS
    for max_bytes in (50_000, 100_000, 400_000):
        sample = sample_texts(iter(texts), max_bytes)
        assert sample == sample_texts(iter(texts), max_bytes)
        assert max_bytes - largest_part <= sum(len(part.encode()) for part in sample) <= max_bytes
        numbers = [int(part.split()[1]) for part in sample if part.startswith("document")]
        assert numbers == sorted(set(numbers))
        assert abs(np.mean(numbers) - 49.5) < 4 * 29 / len(numbers) ** 0.5
        assert abs(len(numbers) / 100 - max_bytes / total_bytes) < 0.15
    assert "".join(sample_texts(texts, total_bytes)) == "".join(texts)
    assert [len(part) for part in sample_texts(texts, 1)] == [TRAINING_CHUNK_CHARS]
    assert sample_texts(["", ""], 1000) == sample_texts([], 1000) == []


def test_a_vocabulary_too_small_or_a_text_too_short(tmp_path):
    with pytest.raises(ConfigError, match=r"model.vocab_size: 256 pieces cannot hold .* raise it to \d{3} or more"):
        trained(tmp_path, vocab_size=256)
    assert trained(tmp_path, vocab_size=1000, texts=["a short text"]).vocab_size < 1000
    with pytest.raises(DataError, match=r"data.sources: there is no text to train a tokenizer on"):
        trained(tmp_path, texts=[])
    with pytest.raises(DataError, match=r"data.sources: SentencePiece cannot be trained on this text: .*; add text or set"):
        trained(tmp_path, texts=["\0"])


def test_a_sentencepiece_model_from_elsewhere(tmp_path):
    """As Llama 2's: normalised, with a space in front."""
    with (tmp_path / "my.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, model_type="bpe", vocab_size=500, byte_fallback=True,
            max_sentence_length=10**5, minloglevel=2,
        )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "my.model")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "my.model"))
    for text in ("quick brown ▁ fox", "x\ty"):
        (ids,) = tokenizer.encode_batch([text])
        assert ids.tolist() == reference.encode(text)
    (ids,) = tokenizer.encode_batch(["quick fox 狸😀"])
    assert tokenizer.decode(ids) == "quick fox 狸😀"
    assert tokenizer.token_bytes[ids].sum() == len(" quick fox 狸😀".encode())


def test_a_tokenizer_json_with_byte_fallback(tmp_path):
    tokenizer = byte_fallback(tmp_path)
    for text in ("en en  \n😀n", " en", "<s>", "\0"):
        (ids,) = tokenizer.encode_batch([text])
        assert tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.token_bytes[:4].tolist()) == (1, 2, [0, 0, 0, 1])
    tokenizer = byte_fallback(tmp_path, prepend=[normalizers.Prepend("▁")])
    (ids,) = tokenizer.encode_batch([" en\n"])
    assert tokenizer.decode(ids) == " en\n"
    assert tokenizer.token_bytes[ids].sum() == len("  en\n")


def test_where_the_ends_of_a_document_come_from(tmp_path):
    named = byte_level(tmp_path)
    assert (named.bos_id, named.eos_id) == (0, 1)
    assert list(named.files) == ["tokenizer.json"]
    specials = ("<|a|>", "<|b|>", "<|endoftext|>")
    configured = byte_level(tmp_path, specials, {"bos_token": "<|b|>", "eos_token": {"content": "<|a|>"}})
    assert (configured.bos_id, configured.eos_id) == (1, 0)
    assert list(configured.files) == ["tokenizer.json", "tokenizer_config.json"]
    for config in ({}, {"bos_token": None, "eos_token": "<|endoftext|>"}):
        one_for_both = byte_level(tmp_path, specials, config, begins=False)
        assert (one_for_both.bos_id, one_for_both.eos_id) == (2, 2)
    with pytest.raises(
        DataError, match=r"tokenizer.json: eos_token: '<.nowhere.>', named by the files beside it, is not in it"
    ):
        byte_level(tmp_path, specials, {"eos_token": "<|nowhere|>"})
    with pytest.raises(DataError, match=r"has no token to begin or end a document; put a tokenizer_config.json"):
        byte_level(tmp_path, (), {})


def test_the_hash_follows_the_content(tmp_path):
    first = byte_level(tmp_path, config={"eos_token": "<|end_of_text|>"})
    (tmp_path / "copy").mkdir()
    for name, content in first.files.items():
        (tmp_path / "copy" / name).write_bytes(content)
    assert load_tokenizer(tmp_path / "copy").sha256 == first.sha256
    other = byte_level(tmp_path, config={"eos_token": "<|begin_of_text|>"})
    assert other.sha256 != first.sha256


def test_runs_with_a_lone_sentencepiece_model_go_on(tmp_path):
    """Its hash is part of a run's fingerprint, and must stay what it was in their checkpoints."""
    model = trained(tmp_path)
    (content,) = model.files.values()
    assert model.sha256 == hashlib.sha256(hashlib.sha256(content).digest()).hexdigest()


def test_a_directory_is_searched(tmp_path):
    with pytest.raises(DataError, match=r"has no tokenizer.json or tokenizer.model; name the file"):
        load_tokenizer(tmp_path)
    model = trained(tmp_path)
    (tmp_path / "tokenizer.model").rename(tmp_path / "my.model")
    assert load_tokenizer(tmp_path).sha256 == model.sha256
    (tmp_path / "config.json").write_text("{}")
    byte_level(tmp_path)
    assert list(load_tokenizer(tmp_path).files) == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.model", b"", "is not a SentencePiece model; if it came with Llama 3"),
        ("tokenizer.model", b"garbage", "is not a SentencePiece model"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "is not a SentencePiece model"),
        ("tokenizer.json", b"", "is not a tokenizer.json"),
        ("tokenizer.json", b"{}", "is not a tokenizer.json: Model missing"),
        ("tokenizer.json", b"\xff\xfe", "is not a tokenizer.json"),
        ("tokenizer.json", b'{"model": ' + b"[" * 10**5, "is not a tokenizer.json"),
        ("nowhere.json", None, "No such file or directory; correct the path"),
        ("nowhere.model", None, "No such file or directory; correct the path"),
    ],
)
def test_what_is_no_tokenizer(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_decoder_that_loses_text_is_refused(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="its decoder does not restore text exactly; use byte-level BPE"):
        load_tokenizer(tmp_path / "tokenizer.json")


def from_elsewhere(tmp_path, **options):
    """A SentencePiece model that puts a space before a text."""
    with (tmp_path / "my.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, model_type="bpe", vocab_size=500, byte_fallback=True,
            max_sentence_length=10**5, minloglevel=2, **options,
        )  # fmt: skip
    return load_tokenizer(tmp_path / "my.model")


def metaspace(tmp_path, prepend_scheme):
    """A SentencePiece kind of tokenizer.json as newer conversions make it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "e", "n", "en", "▁en"]
    model = models.BPE(
        {word: i for i, word in enumerate(words)}, [("e", "n"), ("▁", "en")], byte_fallback=True, unk_token="<unk>"
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json")


KINDS = {
    "trained here": trained,
    "with a space in front": lambda path: from_elsewhere(path, normalization_rule_name="identity"),
    "Llama 2's model": lambda path: from_elsewhere(path, normalization_rule_name="identity", remove_extra_whitespaces=False),
    "without outer spaces": from_elsewhere,
    "Llama 2's json": lambda path: byte_fallback(path, prepend=[normalizers.Prepend("▁")]),
    "space before the first text": lambda path: metaspace(path, "first"),
    "space before every text": lambda path: metaspace(path, "always"),
    "no space": lambda path: metaspace(path, "never"),
    "Llama 3's json": lambda path: byte_level(path, ("<s>", "</s>")),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_special_tokens_in_a_template_and_its_parts(tmp_path, make):
    """Parts that end where a token ends have the tokens of the whole: nothing comes before a part but the first."""
    tokenizer = make(tmp_path)
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    whole = tokenizer.encode_template("<s>en en</s><s>en en</s>")
    assert whole.dtype == np.int32
    assert [whole[0], whole[-1]] == [bos, eos]
    assert whole.tolist().count(bos) == whole.tolist().count(eos) == 2
    assert tokenizer.decode(whole).split() in (["en", "enen", "en"], ["en", "en", "en", "en"])
    assert not {bos, eos} & set(tokenizer.encode_batch(["<s>en</s>"])[0].tolist())
    for parts in (
        ["<s>", "en en</s>", "<s>en", " en</s>"],
        ["<s>en en</s><s>en", " en", "", "</s>"],
        ["<s>en", " en</s><s>en en", "</s>"],
        ["", "<s>en en</s>", "<s>", "en en", "</s>"],
    ):
        encoded = tokenizer.encode_template_parts(parts)
        assert len(encoded) == len(parts)
        assert np.concatenate(encoded).tolist() == whole.tolist(), parts
    assert tokenizer.decode(np.concatenate(tokenizer.encode_template_parts(["<s>12", "34"]))).strip() == "1234"
    assert tokenizer.encode_template("").tolist() == []
    assert tokenizer.encode_template_parts([]) == []


def test_user_defined_pieces_are_found(tmp_path):
    tokenizer = from_elsewhere(tmp_path, user_defined_symbols=["<|im_end|>"], control_symbols=["<|x|>", "<|x|>y"])
    assert isinstance(tokenizer, SentencePieceTokenizer)
    (end, x, xy) = (tokenizer._processor.piece_to_id(piece) for piece in ("<|im_end|>", "<|x|>", "<|x|>y"))
    ids = tokenizer.encode_template("en<|im_end|>en<|x|>y<|x|>").tolist()
    assert [ids.count(token) for token in (end, x, xy)] == [1, 1, 1]
    plain = tokenizer.encode_batch(["en<|im_end|>en<|x|>y<|x|>"])[0].tolist()
    assert [plain.count(token) for token in (end, x, xy)] == [1, 0, 0]


def test_a_token_that_is_not_there_is_not_written(tmp_path):
    """Qwen's configuration has null for bos_token: documents are begun with another token, conversations with none."""
    specials = ("<|endoftext|>", "<|im_end|>")
    tokenizer = byte_level(tmp_path, specials, {"bos_token": None, "eos_token": "<|im_end|>"}, begins=False)
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token) == (0, None, "<|im_end|>")
    tokenizer = byte_level(tmp_path, specials, {}, begins=False)
    assert (tokenizer.bos_token, tokenizer.eos_token) == (None, "<|endoftext|>")
    tokenizer = byte_level(tmp_path, ("</s>", "x"), {}, begins=False)
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token) == (0, None, "</s>")
