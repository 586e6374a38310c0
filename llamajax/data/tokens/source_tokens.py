"""Tokens of a source: where they are stored, their counts, and how damaged files are rebuilt."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llamajax import disk
from llamajax.data import cache
from llamajax.data.documents.file_groups import HashedGroup
from llamajax.data.documents.sources import Source
from llamajax.data.tokens.encoding import Tokenizing
from llamajax.data.tokens.shard_index import ShardIndex, index_path, write_index
from llamajax.data.tokens.shards import read_shard, remake, shards_entry
from llamajax.data.tokens.stores import ShardStore, TokenStore
from llamajax.errors import DataError


class Counts(NamedTuple):
    """Counts of a source."""

    documents: int
    tokens: int
    """Number of tokens; without the records of prompts, which are beside them."""
    text_bytes: int
    """Number of UTF-8 bytes of all texts."""
    space_signs: int = 0
    """Number of documents with U+2581."""
    empty: int = 0
    """Number of documents without text, which are left out."""
    bad: int = 0
    """Number of records that are left out because they are invalid."""
    first_bad: str = ""
    """Error of the first invalid record."""
    more: int = 0
    """Number of additional documents of conversations that become several, because one cannot train on all answers."""
    split: int = 0
    """Number of these conversations."""
    desirable: int = 0
    """Number of preferences with a desirable answer alone."""
    undesirable: int = 0
    """Number of preferences with an undesirable answer alone."""


class SourceTokens(Protocol):
    """Tokens that rows are made from."""

    source: Source

    @property
    def store(self) -> TokenStore:
        """Store that reads the tokens."""
        ...

    @property
    def counts(self) -> Counts:
        """Counts of the source."""
        ...

    @property
    def key(self) -> Any:
        """JSON value that identifies the documents and their tokens."""
        ...

    @property
    def split(self) -> Any:
        """JSON value that decides on which side of the split each document is."""
        ...

    @property
    def content(self) -> list[str]:
        """Hashes that identify the contents of the files with the tokens."""
        ...

    def remake(self, damaged: Path) -> None:
        """Rebuilds a damaged file.

        Raises:
            DataError: it cannot be rebuilt.
            DiskError: the disk fails.
        """
        ...


class ShardedTokens:
    """Tokens of documents, in shards of the cache."""

    def __init__(self, source: Source, index: Path, groups: Callable[[], Sequence[HashedGroup]], by: Tokenizing) -> None:
        """Stores the arguments and writes the index if it is missing.

        Args:
            source: the source.
            index: path of the index of its shards.
            groups: returns the source's groups.
            by: what the documents are tokenized with.

        Raises:
            DataError: a missing or damaged file cannot be made.
            DiskError: the disk fails.
        """
        self.source, self.split = source, by.held_out_fraction
        self.store = ShardStore(by.cache_dir, index, by.held_out_fraction)
        self._groups, self._by = groups, by
        cache.repaired(self._read_index, self.remake)

    @property
    def counts(self) -> Counts:
        """See `SourceTokens`."""
        index = self.store.index
        return Counts(
            documents=index.documents, tokens=int(index.tokens_of_shard.sum()) - index.record_bytes,
            text_bytes=index.text_bytes, space_signs=index.space_signs, empty=index.empty, bad=index.bad,
            first_bad=index.first_bad, more=index.more, split=index.split,
            desirable=index.desirable, undesirable=index.undesirable,
        )  # fmt: skip

    @property
    def key(self) -> list[str]:
        """See `SourceTokens`."""
        return self.store.index.entries

    @property
    def content(self) -> list[str]:
        """See `SourceTokens`."""
        return self.store.index.sha256_of_shard

    def remake(self, damaged: Path) -> None:
        """See `SourceTokens`."""
        by = self._by
        entries = self._entries()
        if index_path(entries, by.cache_dir) != self.store.index_path:
            raise DataError(f"{self.source.key}.paths: changed since the start; run again once it no longer changes")
        if damaged == self.store.index_path:
            by.log(f"damaged    {damaged}; rebuilding it")
            write_index(entries, damaged)
        else:
            with disk.locked(damaged.parent):
                if self._is_another(damaged):
                    damaged.unlink(missing_ok=True)
            group = self._groups()[entries.index(damaged.parent)]
            remake(damaged, group, by.tokenizer, by.cache_dir, by.log, by.template)
        self.store.read_again()
        if damaged != self.store.index_path and self._is_another(damaged):
            raise DataError(
                f"{damaged}: has other tokens than at first, perhaps because of another version of the tokenizer's library;"
                f" remove {self.store.index_path.parent} to accept them"
            )

    def _read_index(self) -> ShardIndex:
        if not self.store.index_path.exists():
            write_index(self._entries(), self.store.index_path)
        return self.store.index

    def _entries(self) -> list[Path]:
        return entries_of(self._groups(), self._by)

    def _is_another(self, shard: Path) -> bool:
        """Returns whether a shard is intact but differs from the one in the index."""
        with contextlib.suppress(cache.DamagedError):
            return any(
                self.store.path(part) == shard and sha256 != read_shard(shard).sha256
                for part, sha256 in enumerate(self.store.index.sha256_of_shard)
            )
        return False


def entries_of(groups: Sequence[HashedGroup], by: Tokenizing) -> list[Path]:
    """Returns the cache entries of the groups' shards."""
    return [shards_entry(group, by.tokenizer, by.cache_dir, by.template) for group in groups]
