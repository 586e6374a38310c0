"""The index of a source's shards: one small file with the totals of all of them, so a start opens just this file, however
many shards exist.
"""

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamajax import disk
from llamajax.data import cache
from llamajax.data.progress import gets_on
from llamajax.data.tokens.shards import read_shard, shard_path

READ_THREADS = 8
"""Number of shard heads read at a time. Reading waits for the disk as much as for the processor."""

_FOLDER = "index-1"
_TOTALS = ("tokens", "documents", "text_bytes", "space_signs", "empty", "bad")


class ShardIndex:
    """Totals and hashes of shards, in the order of their cache entries."""

    def __init__(self, path: Path) -> None:
        """Reads the file of `write_index`.

        Raises:
            DamagedError: it is missing or damaged.
        """
        file = cache.read_arrays(path)
        self.entries = cache.hashes_of_array(file.arrays["entries"][:])
        """Names of the cache entries."""
        self.sha256_of_shard = cache.hashes_of_array(file.arrays["sha256"][:])
        """Hashes that identify the contents of the shards."""
        totals = {name: file.arrays[name][:].copy() for name in _TOTALS}
        self.tokens_of_shard = totals["tokens"]
        """Number of tokens of each shard, int64 [shards]."""
        self.documents = int(totals["documents"].sum())
        self.text_bytes = int(totals["text_bytes"].sum())
        """Number of UTF-8 bytes of all texts."""
        self.space_signs = int(totals["space_signs"].sum())
        """Number of documents with U+2581."""
        self.empty = int(totals["empty"].sum())
        """Number of documents without text, which are left out."""
        self.bad = int(totals["bad"].sum())
        """Number of records that are left out because they are invalid."""
        self.more: int = file.info.get("more", 0)
        """Number of additional documents of conversations that become several."""
        self.split: int = file.info.get("split", 0)
        """Number of these conversations."""
        self.desirable: int = file.info.get("desirable", 0)
        """Number of documents with a desirable answer alone."""
        self.undesirable: int = file.info.get("undesirable", 0)
        """Number of documents with an undesirable answer alone."""
        self.record_bytes: int = file.info.get("record_bytes", 0)
        """Number of tokens that are bytes of the records of prompts."""
        self.first_bad: str = file.info["first_bad"]
        """Error of the first invalid record."""
        self._first_of_entry = np.cumsum([0, *file.arrays["num_shards"][:]])

    def __len__(self) -> int:
        return len(self.tokens_of_shard)

    def place(self, shard: int) -> tuple[str, int]:
        """Returns the name of a shard's entry and the shard's number in it."""
        entry = int(np.searchsorted(self._first_of_entry, shard, side="right")) - 1
        return self.entries[entry], shard - int(self._first_of_entry[entry])


def index_path(entries: Sequence[Path], cache_dir: Path) -> Path:
    """Returns the path of the index of these cache entries, which may not exist."""
    return cache_dir / _FOLDER / cache.key_of([entry.name for entry in entries]) / "shards"


def write_index(entries: Sequence[Path], path: Path) -> None:
    """Reads the heads of all shards of complete entries and writes their index, unless another process did.

    Raises:
        DamagedError: a shard is missing, or its head is damaged.
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
        more, split = sum(head.more for head in heads), sum(head.split for head in heads)
        desirable, undesirable = sum(head.desirable for head in heads), sum(head.undesirable for head in heads)
        record_bytes = sum(head.record_bytes for head in heads)
        cache.write_arrays(
            path,
            {
                "entries": cache.hashes_to_array(entry.name for entry in entries),
                "num_shards": np.array([len(of_entry) for of_entry in of_entries], np.int64),
                "sha256": cache.hashes_to_array(head.sha256 for head in heads),
                **{name: np.array(values, np.int64) for name, values in zip(_TOTALS, totals, strict=True)},
            },
            {
                "first_bad": next((head.first_bad for head in heads if head.first_bad), ""),
                **({"more": more, "split": split} if more else {}),
                **({"desirable": desirable, "undesirable": undesirable} if desirable + undesirable else {}),
                **({"record_bytes": record_bytes} if record_bytes else {}),
            },
            keep=is_new,
        )


class _Head(NamedTuple):
    """Head of a shard."""

    sha256: str
    totals: tuple[int, ...]
    """Values in the order of `_TOTALS`."""
    first_bad: str
    more: int
    split: int
    desirable: int
    undesirable: int
    record_bytes: int


def _heads(entry: Path) -> list[_Head]:
    """Returns the head of each shard of the entry."""
    heads, last = [], False
    for number in itertools.count():
        if last:
            break
        gets_on()
        shard = read_shard(shard_path(entry, number))
        last = shard.last
        totals = (
            len(shard.tokens), len(shard.hashes), shard.text_bytes, shard.num_space_signs, shard.num_empty, shard.num_bad,
        )  # fmt: skip
        others = shard.num_more, shard.num_split, shard.num_desirable, shard.num_undesirable, shard.num_record_bytes
        heads.append(_Head(shard.sha256, totals, shard.first_bad, *others))
    return heads
