"""gigatoken gives the ids of the tokenizer's own library, or does not encode."""

import json
import re
import shutil

import numpy as np
import pytest

from llamajax.data.tokenizers.fast_encoder import FastEncoder, any_of
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from tests import real_tokenizers as real
from tests.data.tokenizers.test_sentencepiece_tokenizer import LAYOUTS
from tests.data.tokenizers.test_tokenizer import byte_fallback, byte_level, trained
from tests.mixed_texts import TEXTS


def nfc(path):
    """Normalizes texts, as Qwen's."""
    byte_level(path)
    body = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(body | {"normalizer": {"type": "NFC"}}))
    return load_tokenizer(path)


def with_tokens(layout):
    """Mistral's first model, with files beside it that add tokens."""

    def make(path):
        shutil.copy(real.mistral("v1"), path / "tokenizer.model")
        for name, content in LAYOUTS[layout].items():
            (path / name).write_text(json.dumps(content))
        return load_tokenizer(path)

    return make


KINDS = {
    **{f"Mistral {name}": lambda path, name=name: load_tokenizer(real.mistral(name)) for name in real.MISTRAL_VERSIONS},
    **{f"added tokens: {layout}": with_tokens(layout) for layout in LAYOUTS},
    "Llama 3": lambda path: load_tokenizer(real.llama3(path)),
    "Qwen 2": lambda path: load_tokenizer(real.qwen2(path)),
    "trained": trained,
    "byte level": byte_level,
    "byte level, NFC": nfc,
    "byte fallback": byte_fallback,
}
SLOW = ("Qwen 2", "Mistral v2", "Mistral v3", "added tokens: added_tokens.json")
"""There are quicker ones of their kind."""
NEW_MARKS = tuple(f"a{mark}\u0301\u0327{mark}" for mark in "\u08d3\u0898\u1ac7\U00010eab\U0001e2ae\U0001612f")
"""Some versions of Unicode put these in another order: `tokenizers` has one of 2016."""
NEW_SIGNS = (" \U00011de0", "x \U00016ff4 y")
"""Libraries take these, of 2025, for signs of different kinds."""


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in KINDS])
def test_ids_are_those_of_the_tokenizers_own_library(tmp_path, kind):
    tokenizer = KINDS[kind](tmp_path)
    texts = [*TEXTS, *NEW_MARKS, *NEW_SIGNS, "one two " * 500]
    for follow, expected in ((False, tokenizer.encode_batch(texts)), (True, tokenizer.encode_following(texts))):
        for text, ids, others in zip(texts, expected, tokenizer.encode_fast(texts, follow=follow), strict=True):
            np.testing.assert_array_equal(others, ids, err_msg=repr(text))
            assert others.dtype == np.int32
    assert tokenizer.encode_fast([]) == []


def test_what_follows_on_a_text_has_nothing_put_before_it():
    tokenizer = load_tokenizer(real.mistral("v1"))
    (whole,) = tokenizer.encode_batch(["a text. Another"])
    parts = [*tokenizer.encode_batch(["a text."]), *tokenizer.encode_following([" Another"])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert len(tokenizer.encode_batch([" Another"])[0]) != len(parts[1])


class Library:
    """Encodes what has no `!`."""

    def encode(self, text):
        if "!" in text:
            raise ValueError("no")
        return np.array([len(text)], np.uint32)


def test_what_it_cannot_encode_goes_the_other_way():
    encoder = FastEncoder(lambda without_prefix: Library(), ["<s>", "[INST]"], "NFC")  # pyright: ignore[reportArgumentType]
    texts = ["plain", "a<s>b", "a!", "[INST", "[INST]", "é", "e\u0301", "\U000e0fff", "<S>"]
    left: list[str] = []

    def otherwise(some):
        left.extend(some)
        return [np.array([-len(text)], np.int32) for text in some]

    encoded = encoder.encode(texts, [False] * len(texts), otherwise)
    assert left == ["a<s>b", "a!", "[INST]", "e\u0301", "\U000e0fff"]
    assert [ids.tolist() for ids in encoded] == [[-len(text) if text in left else len(text)] for text in texts]


@pytest.mark.parametrize("form", ["NFC", None])
def test_characters_that_are_too_new_to_be_known_go_the_other_way(form):
    encoder = FastEncoder(lambda without_prefix: Library(), [], form)  # pyright: ignore[reportArgumentType]
    (own, fast) = encoder.encode(
        [" \U000e0fff", " \U0001f600"], [False] * 2, lambda some: [np.array([-1], np.int32)] * len(some)
    )
    assert (own.tolist(), fast.tolist()) == ([-1], [2])


def test_words_are_found_by_what_they_begin_with():
    words = ["<s>", "</s>", "[control_1]", "[control_12]", "[INST]", "a.b", "a" * 100]
    pattern = any_of([*words, ""])
    assert all(pattern.search(f"x{word}y") for word in words)
    assert not any(pattern.search(text) for text in ("", "<S>", "s>", "[control_", "axb", "a" * 31))
    assert pattern.search("a" * 32)
    assert not any_of([]).search("anything")
    assert re.compile("|".join(map(re.escape, words))).search("[control_1]")
