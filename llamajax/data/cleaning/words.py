"""Splits a text into words and hashes its runs of words to 64 bits, equally in every process and on every machine."""

import re
import zlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64, UInt64

# Scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese characters.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(f"[{_SPACELESS}]|[^\\W_{_SPACELESS}]+")

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in lower case and without punctuation; in scripts without spaces, each character."""
    return _WORD.findall(text.lower())


def word_hashes(words: Sequence[str]) -> UInt64[np.ndarray, "words"]:
    """Returns a 32-bit hash of each word; words contain no white space."""
    encoded = "\n".join(words).encode("utf-8", "surrogatepass").split(b"\n") if words else []
    return np.fromiter(map(zlib.crc32, encoded), np.uint64, len(words))


def run_hashes(hashes: UInt64[np.ndarray, "words"], length: int) -> UInt64[np.ndarray, "runs"]:
    """Returns a 64-bit hash of every run of `length` words, in order; none if there are fewer words."""
    num_runs = max(len(hashes) - length + 1, 0)
    mixed = np.zeros(num_runs, np.uint64)
    for offset in range(length):
        mixed = mixed * _MULTIPLIER + hashes[offset : offset + num_runs]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIXERS[0]  # splitmix64's final mix spreads nearby sums
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIXERS[1]
    return mixed ^ (mixed >> np.uint64(31))


def repeats(hashes: UInt64[np.ndarray, "runs"]) -> Int64[np.ndarray, "repeats"]:
    """Returns the indices, in order, of hashes that occurred before."""
    order = np.argsort(hashes, kind="stable")
    return np.sort(order[1:][hashes[order[1:]] == hashes[order[:-1]]])
