"""Gives packing and rows access to the tokens of a source, one part at a time."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int64, Integer, UInt8

from llamajax.data import cache
from llamajax.data.documents.split import is_held_out
from llamajax.data.tokens.shard_index import ShardIndex
from llamajax.data.tokens.shards import FOLDER, Shard, read_shard, shard_path

MAX_KNOWN_SHARDS = 2**12
"""Maximum number of shard heads, each up to 35 KB, that stay in memory after a row was read from them."""

TRAIN, HELD_OUT = SIDES = ("train", "held_out")
"""Sides of the split."""


class Documents(NamedTuple):
    """Properties of the documents of a part, in order, that packing needs."""

    starts: Int64[np.ndarray, "documents"]
    """Index of each document's first token in the part."""
    lengths: Int64[np.ndarray, "documents"]
    """Number of tokens that rows may use, from the first one on; below 2 if they use none. One more than the positions that
    the document takes."""
    sides: UInt8[np.ndarray, "documents"]
    """Index in `SIDES` of each document's side of the split; higher if it is on neither."""
    is_cut: Bool[np.ndarray, "documents"]
    """Whether each document is a conversation that exceeds a row, so that only its beginning is used."""
    is_left_out: Bool[np.ndarray, "documents"]
    """Whether each document is a conversation without an answer within a row, or a preference that exceeds a row."""
    is_moved: Bool[np.ndarray, "documents"]
    """Whether an earlier rule put each document on the other side."""


class Piece(NamedTuple):
    """Consecutive tokens of a document that a row takes."""

    tokens: Integer[np.ndarray, "_"]
    """The tokens, read-only: one more than the positions that they take, since the last one is only a target. Of a
    preference or a prompt, as many."""
    learnt: Bool[np.ndarray, "_"] | None = None
    """Whether each of them, except the first, is trained on; None: all are."""
    chosen: Bool[np.ndarray, "_"] | None = None
    """For a preference, whether each of them belongs to the chosen or desirable sequence; for a prompt, whether it is one
    of its tokens rather than a byte of its record."""


class PromptPlaces(NamedTuple):
    """Places of the prompts of a part, in order."""

    starts: Int64[np.ndarray, "prompts"]
    """Index of each prompt's first token in the part."""
    lengths: Int64[np.ndarray, "prompts"]
    """Number of ids of each prompt and its record."""
    num_tokens: Int64[np.ndarray, "prompts"]
    """Number of tokens of each prompt."""
    sides: UInt8[np.ndarray, "prompts"]
    """As in `Documents`."""


class TokenStore(Protocol):
    """Access to the tokens of one source. It can be sent to other processes."""

    @property
    def tokens_of_part(self) -> Int64[np.ndarray, "parts"]:
        """Number of tokens of each part."""
        ...

    def documents(self, part: int, seq_len: int) -> Documents:
        """Returns the documents of a part, for rows of `seq_len` tokens.

        Raises:
            DamagedError: a file of the cache is damaged.
            OSError: the disk fails.
        """
        ...

    def piece(self, part: int, start: int, length: int) -> Piece:
        """Returns the tokens that take `length` positions of a row, from token `start` of a part on.

        Raises:
            DamagedError: a file of the cache is damaged.
            OSError: the disk fails.
        """
        ...


@dataclass(frozen=True)
class ShardStore:
    """Tokens in shards of the cache; each shard is a part."""

    cache_dir: Path
    index_path: Path
    """File with the shards' totals."""
    held_out_fraction: float
    """Share of the documents that is held out."""

    @functools.cached_property
    def index(self) -> ShardIndex:
        """Totals of the shards, read on first access."""
        return ShardIndex(self.index_path)

    def __getstate__(self) -> dict[str, object]:
        """Omits the totals, which another process reads itself."""
        return {name: value for name, value in vars(self).items() if name != "index"}

    @property
    def tokens_of_part(self) -> Int64[np.ndarray, "parts"]:
        """Number of tokens of each shard."""
        return self.index.tokens_of_shard

    def documents(self, part: int, seq_len: int) -> Documents:
        """See `TokenStore`."""
        shard = self.shard(part)
        offsets = shard.offsets[:]
        lengths = np.diff(offsets)
        if shard.chosen is not None:  # each token of a preference has a position, the last ones of its sequences too
            is_left_out, kept = lengths > seq_len, lengths + 1
        else:
            kept = lengths if shard.learnt is None else np.minimum(lengths, seq_len + 1)
            is_left_out = shard.first_learnt() >= kept
        held_out = np.asarray(is_held_out(shard.hashes[:], self.held_out_fraction))
        return Documents(
            starts=offsets[:-1],
            lengths=np.where(is_left_out, 0, kept),
            sides=held_out.astype(np.uint8),
            is_cut=~is_left_out & (kept < lengths),
            is_left_out=is_left_out,
            is_moved=held_out != is_held_out(shard.plain_hashes[:], self.held_out_fraction),
        )

    def prompts(self, part: int) -> PromptPlaces:
        """Returns the places of the prompts of a part; raises the errors of `documents`."""
        shard = self.shard(part)
        offsets = shard.offsets[:]
        is_prompt = shard.is_chosen(0, int(offsets[-1]))
        return PromptPlaces(
            starts=offsets[:-1],
            lengths=np.diff(offsets),
            num_tokens=np.add.reduceat(is_prompt, offsets[:-1], dtype=np.int64),  # each has a record, so none is empty
            sides=np.asarray(is_held_out(shard.hashes[:], self.held_out_fraction)).astype(np.uint8),
        )

    def piece(self, part: int, start: int, length: int) -> Piece:
        """See `TokenStore`."""
        shard = _shard(self.path(part), self.index.sha256_of_shard[part])
        end = start + length
        if shard.chosen is not None:
            return Piece(shard.tokens[start:end], shard.is_learnt(start + 1, end), shard.is_chosen(start, end))
        learnt = None if shard.learnt is None else shard.is_learnt(start + 1, end + 1)
        return Piece(shard.tokens[start : end + 1], learnt)

    def shard(self, part: int) -> Shard:
        """Returns a shard; raises `DamagedError` if it is missing, damaged, or not the one in the index."""
        return _read(self.path(part), self.index.sha256_of_shard[part])

    def path(self, part: int) -> Path:
        """Returns the path of a shard."""
        entry, number = self.index.place(part)
        return shard_path(self.cache_dir / FOLDER / entry, number)

    def read_again(self) -> None:
        """Drops everything cached from the files, after one was rebuilt."""
        _shard.cache_clear()
        vars(self).pop("index", None)


def _read(path: Path, sha256: str) -> Shard:
    shard = read_shard(path)
    if shard.sha256 != sha256:
        raise cache.DamagedError(path, "is not the one in the index")
    return shard


_shard = functools.lru_cache(MAX_KNOWN_SHARDS)(_read)
