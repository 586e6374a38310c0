"""From a configuration to rows: tokenizer, shards, packing, held-out split and order, each made once and cached."""

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import grain
import numpy as np

from llamajax.config import Config
from llamajax.data import cache
from llamajax.data.groups import ANNOUNCED_BYTES, FileGroup, group_files
from llamajax.data.order import Proportions, training_order
from llamajax.data.packing import Packing, Row, fill_row, pack
from llamajax.data.shards import document_hash, is_held_out, read_shard, shard_paths, shards_entry, tokenize
from llamajax.data.sources import Source
from llamajax.data.tokenizer import Tokenizer, load_tokenizer, sample_texts, train_sentencepiece
from llamajax.errors import ConfigError, DataError

MAX_MAPPED_SHARDS = 2**12
"""Shards that stay mapped after a row was read from them; Linux lets a process have 65,530 maps of any kind."""

_PACKING_FORMAT = "packing-1"
_TOKENIZER_FORMAT = "tokenizer-2"


class PackedRows:
    """The rows of one source and one side of the split; a row is put together when it is asked for."""

    def __init__(self, shards: Sequence[Path], num_tokens: np.ndarray, packing: Packing, seq_len: int) -> None:
        self._shards = shards
        self._shard_starts = np.cumsum([0, *num_tokens]).tolist()
        self._packing = packing
        self._seq_len = seq_len

    def __len__(self) -> int:
        return len(self._packing)

    def __getitem__(self, index: int) -> Row:
        first, end = self._packing.rows[index : index + 2]
        starts, lengths = self._packing.starts[first:end].tolist(), self._packing.lengths[first:end].tolist()
        return fill_row([self._piece(*piece) for piece in zip(starts, lengths, strict=True)], self._seq_len)

    def _piece(self, start: int, length: int) -> np.ndarray:
        """The piece's tokens and the one after them; a piece lies in one shard, as its document does."""
        shard = bisect.bisect_right(self._shard_starts, start) - 1
        at = start - self._shard_starts[shard]
        return _tokens(self._shards[shard])[at : at + length + 1]


@functools.lru_cache(MAX_MAPPED_SHARDS)
def _tokens(shard: Path) -> np.ndarray:
    return read_shard(shard).tokens


@dataclass(frozen=True)
class Dataset:
    """Everything a run reads."""

    tokenizer: Tokenizer
    """Text to ids and back."""
    held_out_rows: Sequence[Row]
    """Rows of documents that are never trained on, in an order that is always the same; may be empty."""
    summary: tuple[str, ...]
    """What the sources hold, a line each."""
    fingerprint: str
    """Hash of all that decides the rows, except the seed: tokenizer, documents, packing, split and weights."""
    order: grain.MapDataset
    """Training rows by position, without end."""

    def train_row(self, position: int) -> Row:
        """The row at a position of the run: row r of step s is at `s * global_batch_size + r`."""
        row = self.order[position]
        assert row is not None
        return row


def prepare(config: Config, *, log: Callable[[str], None] = print) -> Dataset:
    """Makes the data of a run ready, reusing all that the cache holds; every process of a run may call it at once.

    Args:
        config: the run.
        log: takes a line for people to read.

    Raises:
        ConfigError: the tokenizer does not fit the model.
        DataError: a source, tokenizer or cache cannot be read, or there is nothing to train on.
    """
    cache_dir = Path(config.data.cache_dir).expanduser()
    try:
        return _prepare(config, cache_dir, log)
    except OSError as error:  # sources and tokenizers report their own
        raise DataError(f"data.cache_dir: {error}; make {cache_dir} writable, free space there, or name another") from error


def _prepare(config: Config, cache_dir: Path, log: Callable[[str], None]) -> Dataset:
    data = config.data
    sources = [Source(source, f"data.sources[{index}]") for index, source in enumerate(data.sources)]
    for source in sources:
        log(f"source     {source}")
    groups = [group_files(source, cache_dir, log) for source in sources]
    all_groups = [group for of_source in groups for group in of_source]
    tokenizer = _tokenizer(config, all_groups, cache_dir, log)
    tokenize(all_groups, tokenizer, cache_dir, log)

    train_rows, held_out_rows, summary, entries = [], [], [], []
    for source, of_source in zip(sources, groups, strict=True):
        keys = [shards_entry(group, tokenizer, cache_dir) for group in of_source]
        shards = [path for key in keys for path in shard_paths(key)]
        totals = _Totals.of(shards)
        packing_key = cache.digest(_PACKING_FORMAT, [key.name for key in keys], data.seq_len, data.held_out_fraction)
        entry = cache_dir / "packing" / packing_key
        if not all(path.exists() for path in _packing_paths(entry)):
            if totals.text_bytes >= ANNOUNCED_BYTES:
                log(f"packing    {totals.documents:,} documents of {source.key}")
            _pack_source(entry, shards, data.seq_len, data.held_out_fraction)
        train, held_out = (Packing(**cache.read_arrays(path)[0]) for path in _packing_paths(entry))
        summary.append(_describe(source, totals, train, held_out, data.seq_len))
        log(summary[-1])
        if not len(train):
            raise DataError(
                f"{source.key}.paths: has no document to train on; add documents with text, or lower data.held_out_fraction"
            )
        train_rows.append(PackedRows(shards, totals.tokens_of_shard, train, data.seq_len))
        held_out_rows.append(PackedRows(shards, totals.tokens_of_shard, held_out, data.seq_len))
        entries.append(entry.name)

    held_out = grain.MapDataset.concatenate([grain.MapDataset.source(rows) for rows in held_out_rows])
    if data.held_out_fraction and config.train.eval_batches and not len(held_out):
        raise DataError(
            f"data.held_out_fraction: {data.held_out_fraction} of the documents is none; raise it, add documents, or set"
            " train.eval_batches=0 to train without evaluation"
        )
    weights = [source.config.weight for source in sources]
    return Dataset(
        tokenizer=tokenizer,
        held_out_rows=cast(Sequence[Row], held_out.shuffle(seed=0)),
        summary=tuple(summary),
        fingerprint=cache.digest(tokenizer.sha256, entries, Proportions(weights).shares),
        order=training_order(train_rows, weights, config.seed),
    )


def _tokenizer(config: Config, groups: Sequence[FileGroup], cache_dir: Path, log: Callable[[str], None]) -> Tokenizer:
    """The tokenizer that the configuration names, or one trained on its training documents."""
    data, vocab_size = config.data, config.model.vocab_size
    if data.tokenizer.path is not None:
        tokenizer = load_tokenizer(Path(data.tokenizer.path).expanduser())
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"model.vocab_size: {vocab_size} is below the {tokenizer.vocab_size} tokens of data.tokenizer.path="
                f"{data.tokenizer.path}; raise it to {tokenizer.vocab_size} or more"
            )
        return tokenizer

    contents = [group.content for group in groups]
    max_bytes = data.tokenizer.train_max_bytes
    key = cache.digest(_TOKENIZER_FORMAT, contents, data.held_out_fraction, vocab_size, max_bytes)
    entry = cache_dir / "tokenizers" / key
    path = entry / "tokenizer.model"
    if not path.exists():
        with cache.locked(entry):
            if not path.exists():
                num_bytes = sum(group.num_bytes for group in groups)
                if num_bytes >= ANNOUNCED_BYTES:
                    log(f"sampling   {max_bytes / 1e6:,.1f} MB of text for the tokenizer from {num_bytes / 1e9:,.1f} GB")
                sample = sample_texts(_training_texts(groups, data.held_out_fraction), max_bytes)
                size = sum(len(text.encode()) for text in sample)
                log(f"tokenizer  training {vocab_size:,} pieces on {size / 1e6:.1f} MB of text")
                model = train_sentencepiece(sample, vocab_size=vocab_size)
                cache.write_atomically(path, model)
    return load_tokenizer(path)


def _training_texts(groups: Iterable[FileGroup], held_out_fraction: float) -> Iterator[str]:
    for group in groups:
        for document in group.documents():
            if not is_held_out(document_hash(document.text.encode()), held_out_fraction):
                yield document.text


def _packing_paths(entry: Path) -> tuple[Path, Path]:
    """The packing of the training and of the held-out documents."""
    return entry / "train.packing", entry / "held_out.packing"


def _pack_source(entry: Path, shards: Sequence[Path], seq_len: int, held_out_fraction: float) -> None:
    """Packs the training and the held-out documents of a source, unless another process did."""
    with cache.locked(entry):
        if all(path.exists() for path in _packing_paths(entry)):
            return
        starts, lengths, hashes = [], [], []
        shard_start = 0
        for shard in map(read_shard, shards):  # all that is kept of one is copied, so that it need not stay mapped
            starts.append(shard.offsets[:-1] + shard_start)
            lengths.append(np.diff(shard.offsets))
            hashes.append(shard.hashes.copy())
            shard_start += len(shard.tokens)
        all_starts, all_lengths = np.concatenate(starts), np.concatenate(lengths)
        held_out = is_held_out(np.concatenate(hashes), held_out_fraction)
        for path, chosen in zip(_packing_paths(entry), (~held_out, held_out), strict=True):
            packing = pack(all_starts[chosen], all_lengths[chosen], seq_len)
            cache.write_arrays(path, vars(packing), {})


@dataclass(frozen=True)
class _Totals:
    """What a source's shards hold together."""

    tokens_of_shard: np.ndarray
    """int64 [num_shards]."""
    documents: int
    empty: int
    text_bytes: int

    @classmethod
    def of(cls, shards: Sequence[Path]) -> Self:
        counts = [
            (len(shard.tokens), len(shard.hashes), shard.num_empty, int(shard.num_bytes.sum()))
            for shard in map(read_shard, shards)
        ]
        tokens, documents, empty, text_bytes = np.array(counts).T
        return cls(tokens, documents.sum(), empty.sum(), text_bytes.sum())


def _describe(source: Source, totals: _Totals, train: Packing, held_out: Packing, seq_len: int) -> str:
    """What is in a source, in a line."""
    skipped = f" ({totals.empty:,} empty ones skipped)" if totals.empty else ""
    full = f", {int(train.lengths.sum()) / (len(train) * seq_len):.2%} full" if len(train) else ""
    return (
        f"data       {source.key} {source.config.kind}: {totals.documents:,} documents{skipped},"
        f" {totals.text_bytes / 1e6:,.1f} MB, {totals.tokens_of_shard.sum():,} tokens; {len(train):,} rows{full};"
        f" held out: {len(held_out):,} rows"
    )
