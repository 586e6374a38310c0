"""Assigns documents to the held-out split by a hash of their text, so that all copies of a text fall on the same side."""

import hashlib

import numpy as np
from jaxtyping import Bool, UInt64

HEAD_CHARS = 2**20
"""Number of leading characters that decide the split. Longer texts may be read in pieces, which then stay together."""


def split_hash(text: str) -> int:
    """Returns the 64-bit hash that decides the split of a text.

    Copies that differ only in leading or trailing white space, or in their line endings, have the same hash.

    Args:
        text: the whole text, or at least its first `2 * HEAD_CHARS` characters.
    """
    head = text[: 2 * HEAD_CHARS].replace("\r\n", "\n").strip()[:HEAD_CHARS]
    return plain_hash(f"{head}\n")


def plain_hash(text: str) -> int:
    """Returns a 64-bit hash of the text exactly as it is."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class PlainHash:
    """Computes `plain_hash` of a text that arrives in pieces."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def update(self, piece: str) -> None:
        """Adds the next piece."""
        self._hash.update(piece.encode())

    def value(self) -> int:
        """Returns the hash of all pieces so far."""
        return int.from_bytes(self._hash.digest(), "little")


def is_held_out(hashes: UInt64[np.ndarray, "documents"] | int, fraction: float) -> Bool[np.ndarray, "documents"] | bool:
    """Returns whether documents with these hashes are held out when `fraction` of all documents is held out."""
    return hashes < int(fraction * 2.0**64)
