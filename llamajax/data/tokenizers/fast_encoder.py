"""Encodes texts with gigatoken, ten times as fast as the libraries that tokenizers are written for."""

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
"""Number of a token's leading characters that the search uses."""


class FastEncoder:
    """Encodes texts with gigatoken, except those that libraries read differently.

    These contain the text of an added or special token. Since tables of Unicode differ between versions, they also include
    texts that a normalizer would change and texts with characters too new for this Python.
    """

    def __init__(
        self, load: "Callable[[bool], gigatoken.Tokenizer]", tokens: Iterable[str], normal_form: NormalForm | None
    ) -> None:
        """Stores the arguments.

        Args:
            load: loads the tokenizer; without its prefix if the argument is True.
            tokens: texts of added and special tokens.
            normal_form: normal form that the tokenizer applies to texts.
        """
        self._load = functools.cache(functools.partial(_loaded, load))
        self._tokens = any_of(tokens)
        self._normal_form: NormalForm | None = normal_form

    def encode(
        self,
        texts: Sequence[str],
        follows: Sequence[bool],
        otherwise: Callable[[Sequence[str]], Sequence[Int32[np.ndarray, "_"]]],
    ) -> list[Int32[np.ndarray, "_"]]:
        """Returns the ids of each text, without a prefix if it follows another; `otherwise` encodes the exceptions."""
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
        """Returns whether all Unicode tables that have its characters read the text as this Python does."""
        if text.isascii():
            return True
        if _unassigned()[np.frombuffer(text.encode("utf-32-le"), "<u4")].any():
            return False
        return self._normal_form is None or unicodedata.is_normalized(self._normal_form, text)


@functools.cache
def _unassigned() -> Bool[np.ndarray, "codes"]:
    """Returns for each code point whether it is unassigned in this Python's tables."""
    return np.array([unicodedata.category(chr(code)) == "Cn" for code in range(sys.maxunicode + 1)])


def _loaded(load: "Callable[[bool], gigatoken.Tokenizer]", follows: bool) -> "gigatoken.Tokenizer":
    try:
        return load(follows)
    except BaseException as error:
        if _is_panic(error):
            raise RuntimeError(str(error)) from error
        raise


def _is_panic(error: BaseException) -> bool:
    """Returns whether the error is a Rust panic, which is not an `Exception` in Python."""
    return type(error).__name__ == "PanicException"


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that finds anything beginning like one of the words.

    Common beginnings are tried once: Mistral has 770 tokens that begin with `[`.
    """
    beginnings = sorted({word[:_MAX_BEGINNING] for word in words} - {""})
    return re.compile(_tree(beginnings) if beginnings else "(?!)")


def _tree(words: Sequence[str]) -> str:
    """Returns an expression for the sorted words."""
    if not words[0]:
        return ""
    branches = itertools.groupby(words, lambda word: word[0])
    found = [re.escape(first) + _tree([word[1:] for word in some]) for first, some in branches]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
