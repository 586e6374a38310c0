"""From a configuration to rows: tokenizer, shards, packing, held-out split and order, each made once and cached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grain
import numpy as np

from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.data.chat import TEMPLATE_FILE
from llamajax.data.order import Proportions, training_order
from llamajax.data.packing import Row
from llamajax.data.packings import Run
from llamajax.data.rows import PackedSource, cache_error
from llamajax.data.stores import HELD_OUT, SIDES, TRAIN
from llamajax.data.tokenized import tokenized
from llamajax.data.tokenizer_base import Tokenizer
from llamajax.errors import DataError

_ROWS_LOOKED_AT = 64


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
    content: str
    """Hash of the contents of the cached files that rows are read from."""
    epochs_per_row: dict[str, float]
    """By source: its share of the training rows, over the rows that it has."""
    order: grain.MapDataset
    """Training rows by position, without end."""
    files: dict[str, bytes]
    """Name and content of what is to be kept with a checkpoint: the tokenizer's files and, if there are conversations,
    chat_template.jinja."""
    template_sha256: str | None
    """Hash of the chat template; None without conversations."""

    def epochs(self, num_rows: int) -> dict[str, float]:
        """How often this many training rows go through each source, by its key."""
        return {key: num_rows * per_row for key, per_row in self.epochs_per_row.items()}

    def mean_keys(self, window: int | None) -> float:
        """Tokens before a token in its document, or those that a window leaves, on average over the first rows."""
        before = np.stack([self.train_row(position)["positions"] for position in range(_ROWS_LOOKED_AT)])
        return float(np.mean(before if window is None else np.minimum(before, window)))

    def train_row(self, position: int) -> Row:
        """The row at a position of the run: row r of step s is at `s * global_batch_size + r`."""
        row = self.order[position]
        assert row is not None
        return row


def prepare(
    config: Config,
    *,
    log: Callable[[str], None] = print,
    log_work: Callable[[str], None] | None = None,
    tokenizer: Tokenizer | None = None,
    run: Run = map,
) -> Dataset:
    """Makes the data of a run ready, reusing all that the cache holds; every process of a run may call it at once.

    Args:
        config: the run.
        log: takes a line for people to read.
        log_work: takes a line about what only this process of the run may be doing; default: `log`.
        tokenizer: of the model that training starts from; the one that `data.tokenizer.path` names must be the same.
        run: packs documents by calling a function for each million of them.

    Raises:
        ConfigError: the tokenizer does not fit the model, or there is no chat template for conversations.
        DataError: a source, tokenizer, template or cache cannot be read, or there is nothing to train on.
        DiskError: the disk fails, or is full.
    """
    cache_dir = Path(config.data.cache_dir).expanduser()
    try:
        return _prepare(config, cache_dir, log, log_work or log, tokenizer, run)
    except OSError as error:  # sources and tokenizers report their own
        raise cache_error(error, cache_dir) from error


def _prepare(
    config: Config,
    cache_dir: Path,
    log: Callable[[str], None],
    log_work: Callable[[str], None],
    models_tokenizer: Tokenizer | None,
    run: Run,
) -> Dataset:
    data = config.data
    found = tokenized(config, cache_dir, log, log_work, models_tokenizer)
    tokenizer, template = found.by.tokenizer, found.by.template
    packed, summary = [], []
    for tokens in found.sources:
        packed.append(PackedSource(tokens, cache_dir, data.seq_len, log_work, run))
        _check_bad(packed[-1], log)
        summary.append(_describe(packed[-1]))
        log(summary[-1])
        _check_rows(packed[-1])
    sides = [of_source.sides() for of_source in packed]
    held_out = grain.MapDataset.concatenate([grain.MapDataset.source(rows) for _, rows in sides])
    if data.held_out_fraction and config.train.eval_batches and not len(held_out):
        too_long = sum(of_source.num_left_out(HELD_OUT) for of_source in packed)
        why = f" within data.seq_len={data.seq_len} ({too_long:,} are longer)" if too_long else ""
        raise DataError(
            f"data.held_out_fraction: {data.held_out_fraction} of the documents is none{why}; raise it, add documents, or"
            " set train.eval_batches=0 to train without evaluation"
        )
    weights = [source.weight for source in data.sources]
    shares = Proportions(weights).shares
    epochs = [share / sum(shares) / len(rows) for share, (rows, _) in zip(shares, sides, strict=True)]
    return Dataset(
        tokenizer=tokenizer,
        held_out_rows=cast(Sequence[Row], held_out.shuffle(seed=0)),
        summary=tuple(summary),
        fingerprint=cache.key_of(tokenizer.sha256, [of_source.rows_key for of_source in packed], shares),
        content=cache.key_of([of_source.content for of_source in packed]),
        epochs_per_row=dict(zip((of_source.source.key for of_source in packed), epochs, strict=True)),
        order=training_order([rows for rows, _ in sides], weights, config.seed),
        files=tokenizer.files if template is None else tokenizer.files | {TEMPLATE_FILE: template.text.encode()},
        template_sha256=None if template is None else template.sha256,
    )


def _check_bad(packed: PackedSource, log: Callable[[str], None]) -> None:
    """Says what is left out of a source, and raises `DataError` if that is more than its configuration allows."""
    bad, source = packed.tokens.counts.bad, packed.source
    if bad > source.config.max_bad_records:
        raise source.too_many_bad(packed.tokens.counts.first_bad)
    if bad:
        log(f"left out   {source.key}: {bad:,} bad records, the first one {packed.tokens.counts.first_bad}")


def _check_rows(packed: PackedSource) -> None:
    """Raises `DataError`, with the cause, if a source has nothing to train on."""
    if packed.num_rows(TRAIN):
        return
    key, num_documents = f"{packed.source.key}.paths", packed.tokens.counts.documents
    if not num_documents:
        raise DataError(f"{key}: has no document to train on; add documents with text")
    if packed.num_left_out(TRAIN):
        raise DataError(
            f"{key}: no conversation has an answer within the {packed.seq_len:,} tokens of data.seq_len; raise it, or add"
            " shorter conversations"
        )
    raise DataError(
        f"{key}: has no document to train on: all {num_documents:,} are held out; add documents, or lower"
        " data.held_out_fraction"
    )


def _describe(packed: PackedSource) -> str:
    """What is in a source, in a line, and which conversations were too long for the rows."""
    source, counts, seq_len, num_rows = packed.source, packed.tokens.counts, packed.seq_len, packed.num_rows(TRAIN)
    skipped = f" ({counts.empty:,} empty ones skipped)" if counts.empty else ""
    full = f", {packed.num_targets(TRAIN) / (num_rows * seq_len):.2%} full" if num_rows else ""
    tokens = counts.tokens
    size = f" {counts.text_bytes / 1e6:,.1f} MB," if counts.text_bytes else ""
    cut, left_out = packed.num_cut, sum(packed.num_left_out(side) for side in SIDES)
    return (
        f"data       {source.key} {source.config.kind}: {counts.documents:,} documents{skipped},"
        f"{size} {tokens:,} tokens,"
        f" {tokens / max(counts.documents, 1):,.0f} per document; {num_rows:,} rows{full};"
        f" held out: {packed.num_rows(HELD_OUT):,} rows"
        + (f"; {cut:,} conversations cut to {seq_len:,} tokens" if cut else "")
        + (f"; {left_out:,} left out, since no answer is within {seq_len:,} tokens" if left_out else "")
    )
