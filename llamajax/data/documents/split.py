"""Which documents are held out: decided by a hash of their text, so that copies are together, wherever they lie."""

import hashlib

import numpy as np
from jaxtyping import Bool, UInt64

HEAD_CHARS = 2**20
"""Characters of a text that decide; what is longer may be read in pieces, which stay together."""


def split_hash(text: str) -> int:
    """64 bits that decide on which side a text lies; copies that differ in white space at their ends, or in how their
    lines end, have the same.

    Args:
        text: all of it, or the first `2 * HEAD_CHARS` characters or more.
    """
    head = text[: 2 * HEAD_CHARS].replace("\r\n", "\n").strip()[:HEAD_CHARS]
    return plain_hash(f"{head}\n")


def plain_hash(text: str) -> int:
    """64 bits of the text as it is."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class PlainHash:
    """`plain_hash` of a text that comes in pieces."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def update(self, piece: str) -> None:
        """Takes the next piece."""
        self._hash.update(piece.encode())

    def value(self) -> int:
        """The hash of all pieces so far."""
        return int.from_bytes(self._hash.digest(), "little")


def is_held_out(hashes: UInt64[np.ndarray, "documents"] | int, fraction: float) -> Bool[np.ndarray, "documents"] | bool:
    """Whether documents with these hashes are held out, when `fraction` of all documents is."""
    return hashes < int(fraction * 2.0**64)
