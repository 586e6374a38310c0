"""What a source's shards hold, in one small file: a start opens this one, however many shards there are."""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamajax import disk
from llamajax.data import cache, progress
from llamajax.data.tokens.shards import read_shard, shard_path

READ_THREADS = 8
"""Heads of shards read at once, which waits for the disk as much as for the processor."""

_FOLDER = "index-1"
_TOTALS = ("tokens", "documents", "text_bytes", "space_signs", "empty", "bad")
_HASH_BYTES = 32


class ShardIndex:
    """The totals and hashes of shards, in the order of their cache entries."""

    def __init__(self, path: Path) -> None:
        """Reads the file of `write_index`.

        Raises:
            DamagedError: it is not there, or is damaged.
        """
        file = cache.read_arrays(path)
        self.entries = _hashes(file.arrays["entries"][:])
        """Names of the cache entries."""
        self.sha256_of_shard = _hashes(file.arrays["sha256"][:])
        """Tell the shards' contents apart."""
        totals = {name: file.arrays[name][:].copy() for name in _TOTALS}
        self.tokens_of_shard = totals["tokens"]
        """int64 [shards]."""
        self.documents = int(totals["documents"].sum())
        self.text_bytes = int(totals["text_bytes"].sum())
        """UTF-8 bytes of all texts."""
        self.space_signs = int(totals["space_signs"].sum())
        """Documents with U+2581."""
        self.empty = int(totals["empty"].sum())
        """Documents without text, which are left out."""
        self.bad = int(totals["bad"].sum())
        """Records that are left out because something is wrong with them."""
        self.more: int = file.info.get("more", 0)
        """Documents beyond the first of their conversation."""
        self.first_bad: str = file.info["first_bad"]
        """What is wrong with the first of them."""
        self._first_of_entry = np.cumsum([0, *file.arrays["num_shards"][:]])

    def __len__(self) -> int:
        return len(self.tokens_of_shard)

    def place(self, shard: int) -> tuple[str, int]:
        """The name of the entry that a shard is of, and its number there."""
        entry = int(np.searchsorted(self._first_of_entry, shard, side="right")) - 1
        return self.entries[entry], shard - int(self._first_of_entry[entry])


def index_path(entries: Sequence[Path], cache_dir: Path) -> Path:
    """Where the index of these cache entries of shards is, or would be."""
    return cache_dir / _FOLDER / cache.key_of([entry.name for entry in entries]) / "shards"


def write_index(entries: Sequence[Path], path: Path) -> None:
    """Reads the heads of all shards of complete entries, and writes their index, unless another process did.

    Raises:
        DamagedError: a shard is not there, or its head is damaged.
        OSError: the disk fails.
    """
    with disk.locked(path.parent):
        is_new = not path.exists()
        if cache.is_intact(path):
            return
        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="index") as threads:
            of_entries = list(threads.map(_heads, entries))
        heads = list(itertools.chain.from_iterable(of_entries))
        totals = zip(*(head.totals for head in heads), strict=True)
        more = sum(head.more for head in heads)
        cache.write_arrays(
            path,
            {
                "entries": _bytes([entry.name for entry in entries]),
                "num_shards": np.array([len(of_entry) for of_entry in of_entries], np.int64),
                "sha256": _bytes([head.sha256 for head in heads]),
                **{name: np.array(values, np.int64) for name, values in zip(_TOTALS, totals, strict=True)},
            },
            {
                "first_bad": next((head.first_bad for head in heads if head.first_bad), ""),
                **({"more": more} if more else {}),
            },
            keep=is_new,
        )


class _Head(NamedTuple):
    """What a shard says about itself."""

    sha256: str
    totals: tuple[int, ...]
    """In the order of `_TOTALS`."""
    first_bad: str
    more: int


def _heads(entry: Path) -> list[_Head]:
    """Of each shard of the entry."""
    heads, last = [], False
    for number in itertools.count():
        if last:
            break
        progress.gets_on()
        shard = read_shard(shard_path(entry, number))
        last = shard.last
        totals = (
            len(shard.tokens), len(shard.hashes), shard.text_bytes, shard.num_space_signs, shard.num_empty, shard.num_bad,
        )  # fmt: skip
        heads.append(_Head(shard.sha256, totals, shard.first_bad, shard.num_more))
    return heads


def _bytes(hashes: Sequence[str]) -> np.ndarray:
    return np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8)


def _hashes(array: np.ndarray) -> list[str]:
    whole = array.tobytes().hex()
    return [whole[at : at + 2 * _HASH_BYTES] for at in range(0, len(whole), 2 * _HASH_BYTES)]
