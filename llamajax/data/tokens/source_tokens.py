"""The tokens of a source: where they are, what is counted of them, and how what is damaged of them is made again."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llamajax import disk
from llamajax.data import cache
from llamajax.data.documents.file_groups import HashedGroup
from llamajax.data.documents.sources import Source
from llamajax.data.tokens.encoding import Tokenizing
from llamajax.data.tokens.shards import ShardIndex, index_path, read_shard, remake, shards_entry, write_index
from llamajax.data.tokens.stores import ShardStore, TokenStore
from llamajax.errors import DataError


class Counts(NamedTuple):
    """What a source holds."""

    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of all texts."""
    space_signs: int = 0
    """Documents with U+2581."""
    empty: int = 0
    """Documents without text, which are left out."""
    bad: int = 0
    """Records that are left out because something is wrong with them."""
    first_bad: str = ""
    """What is wrong with the first of them."""
    more: int = 0
    """Documents beyond the first of their conversation, whose template does not let all answers be learnt in one."""


class SourceTokens(Protocol):
    """What rows are made of."""

    source: Source

    @property
    def store(self) -> TokenStore:
        """Where they are."""
        ...

    @property
    def counts(self) -> Counts:
        """What the source holds."""
        ...

    @property
    def key(self) -> Any:
        """What decides the documents and their tokens, as a JSON value."""
        ...

    @property
    def split(self) -> Any:
        """What decides their sides, as a JSON value."""
        ...

    @property
    def content(self) -> list[str]:
        """What tells the contents of the files apart that tokens are read from."""
        ...

    def remake(self, damaged: Path) -> None:
        """Makes a damaged file again.

        Raises:
            DataError: it cannot be made again.
            DiskError: the disk fails.
        """
        ...


class ShardedTokens:
    """The tokens of documents, in shards of the cache."""

    def __init__(self, source: Source, index: Path, groups: Callable[[], Sequence[HashedGroup]], by: Tokenizing) -> None:
        """Takes the index of the source's shards, which is made if it is not there, and what gives the source's groups.

        Raises:
            DataError: what is missing or damaged cannot be made.
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
            documents=index.documents, tokens=int(index.tokens_of_shard.sum()), text_bytes=index.text_bytes,
            space_signs=index.space_signs, empty=index.empty, bad=index.bad, first_bad=index.first_bad, more=index.more,
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
            raise DataError(f"{self.source.key}.paths: was changed since the start; run again when it is at rest")
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
                f"{damaged}: has other tokens than when it was made first, as by another version of the tokenizer's library;"
                f" remove {self.store.index_path.parent} to take them"
            )

    def _read_index(self) -> ShardIndex:
        if not self.store.index_path.exists():
            write_index(self._entries(), self.store.index_path)
        return self.store.index

    def _entries(self) -> list[Path]:
        return entries_of(self._groups(), self._by)

    def _is_another(self, shard: Path) -> bool:
        """Whether a shard is whole, but not the one that the index knows."""
        with contextlib.suppress(cache.DamagedError):
            return any(
                self.store.path(part) == shard and sha256 != read_shard(shard).sha256
                for part, sha256 in enumerate(self.store.index.sha256_of_shard)
            )
        return False


def entries_of(groups: Sequence[HashedGroup], by: Tokenizing) -> list[Path]:
    """The cache entries of the groups' shards."""
    return [shards_entry(group, by.tokenizer, by.cache_dir, by.template) for group in groups]
