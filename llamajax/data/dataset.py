"""From a configuration to rows: tokenizer, shards, packing, held-out split and order, each made once and cached."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grain
import numpy as np

from llamajax import disk
from llamajax.config.data import SourceConfig
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.data.chat import TEMPLATE_FILE, ChatTemplate, load_chat_template
from llamajax.data.cleaning.pipeline import clean
from llamajax.data.groups import ANNOUNCED_BYTES, FileGroup, group_files
from llamajax.data.order import Proportions, training_order
from llamajax.data.packing import Row
from llamajax.data.rows import HELD_OUT, SIDES, TRAIN, PackedSource, cache_error
from llamajax.data.shards import tokenize
from llamajax.data.sources import Source
from llamajax.data.split import is_held_out
from llamajax.data.tokenizer import load_tokenizer, sample_texts, train_sentencepiece
from llamajax.data.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError, DataError

_TOKENIZER_FORMAT = "tokenizer-3"
_ROWS_LOOKED_AT = 64


@dataclass(frozen=True)
class Dataset:
    """Everything a run reads."""

    tokenizer: Tokenizer
    """Text to ids and back."""
    held_out_rows: Sequence[Row]
    """Rows of documents that are never trained on, in an order that is always the same; may be empty."""
    sources: tuple[SourceConfig, ...]
    """What rows are made of: the configuration's sources, or, with `data.cleaning`, what it leaves of them."""
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
) -> Dataset:
    """Makes the data of a run ready, reusing all that the cache holds; every process of a run may call it at once.

    Args:
        config: the run.
        log: takes a line for people to read.
        log_work: takes a line about what only this process of the run may be doing; default: `log`.
        tokenizer: of the model that training starts from; the one that `data.tokenizer.path` names must be the same.

    Raises:
        ConfigError: the tokenizer does not fit the model, or there is no chat template for conversations.
        DataError: a source, tokenizer, template or cache cannot be read, or there is nothing to train on.
        DiskError: the disk fails, or is full.
    """
    cache_dir = Path(config.data.cache_dir).expanduser()
    try:
        return _prepare(config, cache_dir, log, log_work or log, tokenizer)
    except OSError as error:  # sources and tokenizers report their own
        raise cache_error(error, cache_dir) from error


def _prepare(
    config: Config,
    cache_dir: Path,
    log: Callable[[str], None],
    log_work: Callable[[str], None],
    models_tokenizer: Tokenizer | None,
) -> Dataset:
    data = config.data
    sources = [Source(source, f"data.sources[{index}]") for index, source in enumerate(data.sources)]
    for source in sources:
        log(f"source     {source}")
    groups = [group_files(source, cache_dir, log_work) for source in sources]
    if data.cleaning.steps:
        sources = clean(sources, groups, data.cleaning, cache_dir, log, log_work=log_work)
        groups = [group_files(source, cache_dir, log_work) for source in sources]
    all_groups = [group for of_source in groups for group in of_source]
    tokenizer = _tokenizer(config, models_tokenizer, all_groups, cache_dir, log_work)
    template = _chat_template(config, tokenizer)
    tokenize(all_groups, tokenizer, cache_dir, log_work, template, log_waiting=log)

    packed, summary = [], []
    for source, of_source in zip(sources, groups, strict=True):
        packed.append(
            PackedSource(source, of_source, tokenizer, template, cache_dir, data.seq_len, data.held_out_fraction, log_work)
        )
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
    weights = [source.config.weight for source in sources]
    shares = Proportions(weights).shares
    epochs = [share / sum(shares) / len(rows) for share, (rows, _) in zip(shares, sides, strict=True)]
    return Dataset(
        tokenizer=tokenizer,
        held_out_rows=cast(Sequence[Row], held_out.shuffle(seed=0)),
        sources=tuple(source.config for source in sources),
        summary=tuple(summary),
        fingerprint=cache.key_of(tokenizer.sha256, [of_source.rows_key for of_source in packed], shares),
        content=cache.key_of([of_source.content for of_source in packed]),
        epochs_per_row=dict(zip((source.key for source in sources), epochs, strict=True)),
        order=training_order([rows for rows, _ in sides], weights, config.seed),
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
                f" raise it to {tokenizer.vocab_size} or more{_or_without(tokenizer, vocab_size)}"
            )
        return tokenizer

    contents = [group.content for group in groups]
    max_bytes = data.tokenizer.train_max_bytes
    key = cache.key_of(_TOKENIZER_FORMAT, contents, data.held_out_fraction, vocab_size, max_bytes)
    entry = cache_dir / "tokenizers" / key
    path = entry / "tokenizer.model"
    if not cache.is_whole(path):
        with disk.locked(entry):
            if not cache.is_whole(path):
                if path.exists():
                    log(f"damaged    {path}; making it again")
                num_bytes = sum(group.num_bytes for group in groups)
                if num_bytes >= ANNOUNCED_BYTES:
                    log(f"sampling   {max_bytes / 1e6:,.1f} MB of text for the tokenizer from {num_bytes / 1e9:,.1f} GB")
                sample = sample_texts(_training_texts(groups, data.held_out_fraction), max_bytes)
                size = sum(len(text.encode()) for text in sample)
                log(f"tokenizer  training {vocab_size:,} pieces on {size / 1e6:.1f} MB of text")
                model = train_sentencepiece(sample, vocab_size=vocab_size)
                cache.write_hashed(path, model)
    return load_tokenizer(path)


def _or_without(tokenizer: Tokenizer, vocab_size: int) -> str:
    """What else can be done where only added tokens have no row, as in some published fine-tunes."""
    if tokenizer.vocab_size - len(tokenizer.new_tokens) > vocab_size:
        return ""
    return f", or take {', '.join(tokenizer.new_tokens)} out of the files beside it if the model has no rows for them"


def _training_texts(groups: Iterable[FileGroup], held_out_fraction: float) -> Iterator[str]:
    for group in groups:
        for document in group.documents():
            if not is_held_out(document.split_hash, held_out_fraction):
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


def _check_bad(packed: PackedSource, log: Callable[[str], None]) -> None:
    """Says what is left out of a source, and raises `DataError` if that is more than its configuration allows."""
    bad, source = packed.counts.bad, packed.source
    if bad > source.config.max_bad_records:
        raise source.too_many_bad(packed.counts.first_bad)
    if bad:
        log(f"left out   {source.key}: {bad:,} bad records, the first one {packed.counts.first_bad}")


def _check_rows(packed: PackedSource) -> None:
    """Raises `DataError`, with the cause, if a source has nothing to train on."""
    if packed.num_rows(TRAIN):
        return
    key, num_documents = f"{packed.source.key}.paths", packed.counts.documents
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
    source, counts, seq_len, num_rows = packed.source, packed.counts, packed.seq_len, packed.num_rows(TRAIN)
    skipped = f" ({counts.empty:,} empty ones skipped)" if counts.empty else ""
    full = f", {packed.num_targets(TRAIN) / (num_rows * seq_len):.2%} full" if num_rows else ""
    tokens = sum(counts.tokens_of_shard)
    cut, left_out = packed.num_cut, sum(packed.num_left_out(side) for side in SIDES)
    return (
        f"data       {source.key} {source.config.kind}: {counts.documents:,} documents{skipped},"
        f" {counts.text_bytes / 1e6:,.1f} MB, {tokens:,} tokens,"
        f" {tokens / max(counts.documents, 1):,.0f} per document; {num_rows:,} rows{full};"
        f" held out: {packed.num_rows(HELD_OUT):,} rows"
        + (f"; {cut:,} conversations cut to {seq_len:,} tokens" if cut else "")
        + (f"; {left_out:,} left out, since no answer is within {seq_len:,} tokens" if left_out else "")
    )
