"""Texts to token ids by gigatoken, ten times as fast as by the libraries that tokenizers are written for."""

import functools
import itertools
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Bool, Int32

if TYPE_CHECKING:
    import gigatoken

NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]

_MAX_BEGINNING = 32
"""Characters of a token by which it is looked for."""


class FastEncoder:
    """Encodes texts by gigatoken, but those in which libraries differ: that hold the text of an added or special token, and,
    since their tables of Unicode may be of any version, that a normalizer would change or that have characters so new that
    this Python does not know them."""

    def __init__(
        self, load: "Callable[[bool], gigatoken.Tokenizer]", tokens: Iterable[str], normal_form: NormalForm | None
    ) -> None:
        """Takes what loads the tokenizer, without what it puts before a text if that is asked for; those tokens; and the
        form that the tokenizer brings texts into."""
        self._load = functools.cache(functools.partial(_loaded, load))
        self._tokens = any_of(tokens)
        self._normal_form: NormalForm | None = normal_form

    def encode(
        self,
        texts: Sequence[str],
        follows: Sequence[bool],
        otherwise: Callable[[Sequence[str]], Sequence[Int32[np.ndarray, "_"]]],
    ) -> list[Int32[np.ndarray, "_"]]:
        """The ids of each text; nothing is put before those that follow on another; `otherwise` encodes what is left."""
        encoded = [self._encode(text, is_next) for text, is_next in zip(texts, follows, strict=True)]
        others = iter(otherwise([text for text, ids in zip(texts, encoded, strict=True) if ids is None]))
        return [next(others) if ids is None else ids for ids in encoded]

    def _encode(self, text: str, follows: bool) -> Int32[np.ndarray, "_"] | None:
        if self._tokens.search(text) or not self._is_read_alike(text):
            return None
        tokenizer = self._load(follows)
        try:
            return tokenizer.encode(text).view(np.int32)
        except BaseException as error:
            if isinstance(error, Exception) or _is_panic(error):
                return None
            raise

    def _is_read_alike(self, text: str) -> bool:
        """Whether the text is in the normal form, and of known kinds of characters, by tables of any version that have its
        characters, as these tables do."""
        if text.isascii():
            return True
        if _unassigned()[np.frombuffer(text.encode("utf-32-le"), "<u4")].any():
            return False
        return self._normal_form is None or unicodedata.is_normalized(self._normal_form, text)


@functools.cache
def _unassigned() -> Bool[np.ndarray, "codes"]:
    """Which codes are no characters, as far as this Python knows."""
    return np.array([unicodedata.category(chr(code)) == "Cn" for code in range(sys.maxunicode + 1)])


def _loaded(load: "Callable[[bool], gigatoken.Tokenizer]", follows: bool) -> "gigatoken.Tokenizer":
    try:
        return load(follows)
    except BaseException as error:
        if _is_panic(error):
            raise RuntimeError(str(error)) from error
        raise


def _is_panic(error: BaseException) -> bool:
    """Whether Rust panicked, of which Python makes no `Exception`."""
    return type(error).__name__ == "PanicException"


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Finds whatever begins as one of the words does. What they share is tried once: Mistral has 770 that begin with `[`."""
    beginnings = sorted({word[:_MAX_BEGINNING] for word in words} - {""})
    return re.compile(_tree(beginnings) if beginnings else "(?!)")


def _tree(words: Sequence[str]) -> str:
    """An expression for the sorted words."""
    if not words[0]:
        return ""
    branches = itertools.groupby(words, lambda word: word[0])
    found = [re.escape(first) + _tree([word[1:] for word in some]) for first, some in branches]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
