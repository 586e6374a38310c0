"""From a configuration to rows: tokenizer, shards, packing, held-out split and order, each made once and cached."""

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import grain
import numpy as np

from llamajax.config import Config
from llamajax.data import cache
from llamajax.data.chat import TEMPLATE_FILE, ChatTemplate, load_chat_template
from llamajax.data.groups import ANNOUNCED_BYTES, FileGroup, group_files
from llamajax.data.order import Proportions, training_order
from llamajax.data.packing import Packing, Row, fill_row, pack
from llamajax.data.shards import Shard, document_hash, is_held_out, read_shard, shard_paths, shards_entry, tokenize
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
        pieces, learnt = [], []
        for start, length in zip(self._packing.starts[first:end], self._packing.lengths[first:end], strict=True):
            number = bisect.bisect_right(self._shard_starts, start) - 1  # a piece lies in one shard, as its document does
            at = start - self._shard_starts[number]
            shard = _shard(self._shards[number])
            pieces.append(shard.tokens[at : at + length + 1])
            if shard.learnt is not None:
                learnt.append(shard.is_learnt(at + 1, at + length + 1))
        return fill_row(pieces, self._seq_len, learnt)


@functools.lru_cache(MAX_MAPPED_SHARDS)
def _shard(path: Path) -> Shard:
    return read_shard(path)


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
    files: dict[str, bytes]
    """Name and content of what is to be kept with a checkpoint: the tokenizer's files and, if there are conversations,
    chat_template.jinja."""
    template_sha256: str | None
    """Hash of the chat template; None without conversations."""

    def train_row(self, position: int) -> Row:
        """The row at a position of the run: row r of step s is at `s * global_batch_size + r`."""
        row = self.order[position]
        assert row is not None
        return row


def prepare(config: Config, *, log: Callable[[str], None] = print, tokenizer: Tokenizer | None = None) -> Dataset:
    """Makes the data of a run ready, reusing all that the cache holds; every process of a run may call it at once.

    Args:
        config: the run.
        log: takes a line for people to read.
        tokenizer: of the model that training starts from; the one that `data.tokenizer.path` names must be the same.

    Raises:
        ConfigError: the tokenizer does not fit the model, or there is no chat template for conversations.
        DataError: a source, tokenizer, template or cache cannot be read, or there is nothing to train on.
    """
    cache_dir = Path(config.data.cache_dir).expanduser()
    try:
        return _prepare(config, cache_dir, log, tokenizer)
    except OSError as error:  # sources and tokenizers report their own
        raise DataError(f"data.cache_dir: {error}; make {cache_dir} writable, free space there, or name another") from error


def _prepare(config: Config, cache_dir: Path, log: Callable[[str], None], models_tokenizer: Tokenizer | None) -> Dataset:
    data = config.data
    sources = [Source(source, f"data.sources[{index}]") for index, source in enumerate(data.sources)]
    for source in sources:
        log(f"source     {source}")
    groups = [group_files(source, cache_dir, log) for source in sources]
    all_groups = [group for of_source in groups for group in of_source]
    tokenizer = _tokenizer(config, models_tokenizer, all_groups, cache_dir, log)
    template = _chat_template(config, tokenizer)
    tokenize(all_groups, tokenizer, cache_dir, log, template)

    train_rows, held_out_rows, summary, entries = [], [], [], []
    for source, of_source in zip(sources, groups, strict=True):
        keys = [shards_entry(group, tokenizer, cache_dir, template) for group in of_source]
        shards = [path for key in keys for path in shard_paths(key)]
        totals = _Totals.of(shards)
        packing_key = cache.digest(_PACKING_FORMAT, [key.name for key in keys], data.seq_len, data.held_out_fraction)
        entry = cache_dir / "packing" / packing_key
        if not all(path.exists() for path in _packing_paths(entry)):
            if totals.text_bytes >= ANNOUNCED_BYTES:
                log(f"packing    {totals.documents:,} documents of {source.key}")
            _pack_source(entry, shards, data.seq_len, data.held_out_fraction)
        (train, held_out), counts = _read_packings(entry)
        summary.append(_describe(source, totals, train, held_out, data.seq_len) + _describe_lost(counts, data.seq_len))
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
        files=tokenizer.files if template is None else tokenizer.files | {TEMPLATE_FILE: template.text.encode()},
        template_sha256=None if template is None else template.sha256,
    )


def _tokenizer(
    config: Config,
    models_tokenizer: Tokenizer | None,
    groups: Sequence[FileGroup],
    cache_dir: Path,
    log: Callable[[str], None],
) -> Tokenizer:
    """The model's own tokenizer, or the one that the configuration names, or one trained on its training documents."""
    data, vocab_size = config.data, config.model.vocab_size
    tokenizer = models_tokenizer
    if data.tokenizer.path is not None:
        tokenizer = load_tokenizer(Path(data.tokenizer.path).expanduser())
        if models_tokenizer is not None and tokenizer.sha256 != models_tokenizer.sha256:
            raise ConfigError(
                f"data.tokenizer.path: {data.tokenizer.path} is not the tokenizer that the model was trained with,"
                f" {models_tokenizer.source}; remove data.tokenizer.path to use that one"
            )
    if tokenizer is not None:
        if tokenizer.vocab_size > vocab_size:
            named = f"data.tokenizer.path={data.tokenizer.path}" if data.tokenizer.path else str(tokenizer.source)
            raise ConfigError(
                f"model.vocab_size: {vocab_size} is below the {tokenizer.vocab_size} tokens of {named};"
                f" raise it to {tokenizer.vocab_size} or more"
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


def _chat_template(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of the run's conversations; None if there are none."""
    if not any(source.kind == "chat" for source in config.data.sources):
        return None
    named = config.data.chat_template
    template = load_chat_template(Path(named).expanduser() if named else tokenizer.source.parent, tokenizer)
    if template is None:
        raise ConfigError(
            "data.chat_template: is needed for sources of kind=chat, since the tokenizer has none; name a Jinja file, for"
            " example one of configs/chat_templates/"
        )
    return template


def _packing_paths(entry: Path) -> tuple[Path, Path]:
    """The packing of the training and of the held-out documents."""
    return entry / "train.packing", entry / "held_out.packing"


def _read_packings(entry: Path) -> tuple[list[Packing], Counter[str]]:
    """The packings, and how many conversations were too long for them."""
    files = [cache.read_arrays(path) for path in _packing_paths(entry)]
    return [Packing(**arrays) for arrays, _ in files], sum((Counter(info) for _, info in files), Counter())


def _pack_source(entry: Path, shards: Sequence[Path], seq_len: int, held_out_fraction: float) -> None:
    """Packs the training and the held-out documents of a source, unless another process did.

    A text may lie across rows. A conversation does not: what is beyond a row is cut off, and if nothing that is learnt is
    left, all of it.
    """
    with cache.locked(entry):
        if all(path.exists() for path in _packing_paths(entry)):
            return
        starts, lengths, kept_lengths, is_dropped, hashes = [], [], [], [], []
        shard_start = 0
        for shard in map(read_shard, shards):  # all that is kept of one is copied, so that it need not stay mapped
            starts.append(shard.offsets[:-1] + shard_start)
            lengths.append(np.diff(shard.offsets))
            kept_lengths.append(lengths[-1] if shard.learnt is None else np.minimum(lengths[-1], seq_len + 1))
            is_dropped.append(shard.first_learnt() >= kept_lengths[-1])
            hashes.append(shard.hashes.copy())
            shard_start += len(shard.tokens)
        all_starts, all_lengths, dropped = np.concatenate(starts), np.concatenate(kept_lengths), np.concatenate(is_dropped)
        cut = ~dropped & (all_lengths < np.concatenate(lengths))
        held_out = is_held_out(np.concatenate(hashes), held_out_fraction)
        for path, chosen in zip(_packing_paths(entry), (~held_out, held_out), strict=True):
            packing = pack(all_starts[chosen & ~dropped], all_lengths[chosen & ~dropped], seq_len)
            counts = {"num_cut": int((chosen & cut).sum()), "num_dropped": int((chosen & dropped).sum())}
            cache.write_arrays(path, vars(packing), counts)


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


def _describe_lost(counts: Mapping[str, int], seq_len: int) -> str:
    """Which conversations were too long for the rows, if any."""
    cut, dropped = counts["num_cut"], counts["num_dropped"]
    return (f"; {cut:,} conversations cut to {seq_len:,} tokens" if cut else "") + (
        f"; {dropped:,} left out, since no answer is within {seq_len:,} tokens" if dropped else ""
    )
