"""Turns a configuration into rows: tokenizer, shards, packing, held-out split and order, each made once and cached."""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import grain
import numpy as np

from llamajax.config.data import SourceConfig
from llamajax.config.objective import ObjectiveKind
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.data.chat.chat_template import TEMPLATE_FILE
from llamajax.data.rows.order import Proportions
from llamajax.data.rows.packing import Row
from llamajax.data.rows.position import PassedOver, rows_read
from llamajax.data.rows.preferences import with_fields
from llamajax.data.rows.prompts import Prompt, prompt_of_row
from llamajax.data.rows.rows import PackedSource, RowPlace, RowPlaces, cache_error
from llamajax.data.rows.stages import Passes, StageRows, stage_orders, takes_part
from llamajax.data.tasks import MapTasks
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.data.tokens.source_tokens import Counts, SourceTokens
from llamajax.data.tokens.stores import HELD_OUT, SIDES, TRAIN
from llamajax.data.tokens.tokenize_run import tokenized
from llamajax.errors import DataError

_ROWS_LOOKED_AT = 64
_TOKENS_LOOKED_AT = 2**16


@dataclass(frozen=True)
class Dataset:
    """Everything that a run reads, as seen in one stage: the first one, or the one chosen by `of_stage`."""

    tokenizer: Tokenizer
    """Tokenizer of the documents."""
    rows: StageRows
    """Rows of this stage."""
    stages: tuple[StageRows, ...]
    """Rows of each stage."""
    sources: tuple[SourceConfig, ...]
    """Sources that rows are made of: the configuration's, or what `data.cleaning` leaves of them."""
    summary: tuple[str, ...]
    """Contents of the sources, one line each."""
    fingerprint: str
    """Hash of everything that decides the rows of the first stage, except the seed: tokenizer, documents, packing, split and
    weights."""
    stage_fingerprints: tuple[tuple[int, str], ...]
    """For each later stage, the finished steps at its begin, and the hash of everything that decides the rows to its end."""
    content: str
    """Hash of the contents of the cached files that rows are read from."""
    passes: Passes
    """Number of passes of the run through its sources."""
    keys: tuple[str, ...]
    """Configuration keys of the sources."""
    held_out_of_sources: tuple[Sequence[Row], ...]
    """Held-out rows of each source, in order, of the first stage's length."""
    files: dict[str, bytes]
    """Content by name of the files to be stored with a checkpoint: the tokenizer's files and, if there are conversations,
    chat_template.jinja."""
    template_sha256: str | None
    """Hash of the chat template; None without conversations."""
    train_places: tuple[RowPlaces, ...]
    """Training rows of each source, of the first stage's length, in order."""
    objective: ObjectiveKind
    """Objective of the run, which decides the fields of a row."""
    reference: Callable[[int], Row] | None
    """Returns the reference's fields of a row by its number; None: there are none."""
    preferences: tuple[Literal["pairs", "labels"] | None, ...]
    """For each source, whether its preferences are pairs or have labels; None if it has no preferences."""
    completion_tokens: int
    """Number of tokens of the longest completion, which follows a prompt; 0 if rows are no prompts."""

    @property
    def held_out_rows(self) -> Sequence[Row]:
        """Rows of documents that are never trained on, in a fixed order; may be empty. Of prompts: see `held_out_prompt`."""
        return self.rows.held_out_rows

    def held_out_row(self, number: int) -> Row:
        """Returns one of `held_out_rows` with all fields that the objective reads."""
        return self._completed(self.held_out_rows[number], self.num_train_rows + number)

    def of_stage(self, number: int) -> "Dataset":
        """Returns the dataset as seen in a stage, counted from 0: training and held-out rows of its length."""
        return replace(self, rows=self.stages[number])

    def of_source(self, index: int) -> "Dataset":
        """Returns the dataset with the held-out rows of one source alone."""
        return replace(self, rows=replace(self.rows, held_out_rows=self.held_out_of_sources[index]))

    def epochs(self, step: int, passed_over: Sequence[PassedOver] = ()) -> dict[str, float]:
        """Returns how often the first `step` steps go through each source, by its key; see `Passes.after`."""
        return dict(zip(self.keys, self.passes.after(step, passed_over), strict=True))

    def mean_keys(self, window: int | None) -> float:
        """Returns the mean number of tokens before a token in its document, limited by the window, over the first rows.

        After a prompt, the longest completion is assumed.
        """
        places = [self._place(self.rows.first_row + number) for number in range(_ROWS_LOOKED_AT)]
        pairs = np.concatenate([place.pairs_of_documents() for place in places]).astype(np.int64)
        pairs += self.completion_tokens
        whole = pairs if window is None else np.minimum(pairs, window + 1)  # each token has one more key than the one before
        keys = whole * (whole - 1) // 2 + (pairs - whole) * (window or 0)
        return float(keys.sum() / sum(place.packed.seq_len + self.completion_tokens for place in places))

    def train_row(self, position: int) -> Row:
        """Returns the row at a position of the run: row r of step s is at `rows_after(s) + r`."""
        return self._completed(self._place(position).row(), self.number_of(position))

    def prompt(self, position: int) -> Prompt:
        """Returns the prompt at a position of the run; has the positions and errors of `train_row`."""
        return prompt_of_row(self._place(position).row())

    def held_out_prompt(self, number: int) -> Prompt:
        """Returns one of the prompts that are never trained on, as many as `held_out_rows`."""
        return prompt_of_row(self.held_out_rows[number])

    @property
    def num_train_rows(self) -> int:
        """Number of training rows of all sources."""
        return sum(map(len, self.train_places))

    def number_of(self, position: int) -> int:
        """Returns the number of the row at a position of the run, see `numbered_row`."""
        place = self._place(position)
        return sum(map(len, self.train_places[: self.keys.index(place.packed.source.key)])) + place.number

    def numbered_row(self, number: int) -> Row:
        """Returns a row by its number: training rows come first, source after source, then the held-out rows."""
        ends = list(itertools.accumulate(map(len, self.train_places)))
        if number >= ends[-1]:
            return self.held_out_row(number - ends[-1])
        source = bisect.bisect_right(ends, number)
        return self._completed(self.train_places[source][number - [0, *ends][source]].row(), number)

    def _completed(self, row: Row, number: int) -> Row:
        row = with_fields(row, self.objective)
        return row if self.reference is None else row | self.reference(number)

    def has_preferences(self, position: int) -> bool:
        """Returns whether the row at a position of the run has preferences; see `packing.Row`."""
        return self._place(position).packed.source.format.has_preferences

    def _place(self, position: int) -> RowPlace:
        place = self.rows.order[position]
        assert place is not None
        return place


def prepare(
    config: Config,
    *,
    log: Callable[[str], None] = print,
    log_work: Callable[[str], None] | None = None,
    tokenizer: Tokenizer | None = None,
    run: MapTasks = map,
) -> Dataset:
    """Prepares the data of a run, reusing everything in the cache; all processes of a run may call this at once.

    Args:
        config: configuration of the run.
        log: receives a line.
        log_work: receives lines about work that only this process of the run may do; default: `log`.
        tokenizer: tokenizer of the model that training starts from; `data.tokenizer.path` must name the same one.
        run: cleans and packs documents by calling functions for parts of them, as `map` does, possibly in other processes.

    Raises:
        ConfigError: the tokenizer does not fit the model, or conversations lack a chat template.
        DataError: a source, tokenizer, template or cache cannot be read, or there is nothing to train on.
        DiskError: the disk fails or is full.
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
    run: MapTasks,
) -> Dataset:
    data = config.data
    found = tokenized(config, cache_dir, log, log_work, models_tokenizer, run)
    tokenizer, template = found.by.tokenizer, found.by.template

    stages, packed, summary = data.all_stages, dict[int, list[PackedSource]](), []
    for seq_len in dict.fromkeys(stage.seq_len for stage in stages):
        packed[seq_len] = []
        for index, tokens in enumerate(found.sources):
            own = PackedSource(tokens, cache_dir, config.objective.tokens_of_data(seq_len), log_work, run)
            packed[seq_len].append(own)
            if seq_len == data.seq_len:
                _check_bad(own, log)
                _check_preferences(tokens, config.objective.kind)
                _check_end(own, tokenizer, log)
            summary.append(_describe(own) if seq_len == data.seq_len else _describe_rows(own))
            log(summary[-1])
            if takes_part(stages, index, seq_len):
                _check_rows(own, _row_setting(config, seq_len))
    held_out = {seq_len: _held_out(config, of_length) for seq_len, of_length in packed.items()}
    rows = {seq_len: [own.train_places for own in of_length] for seq_len, of_length in packed.items()}
    orders = stage_orders(stages, rows, config.seed, rows_read(config))
    of_stages = tuple(
        StageRows(rows_read(config)(stage.from_step), order, held_out[stage.seq_len])
        for stage, order in zip(stages, orders, strict=True)
    )
    keys = {seq_len: [own.rows_key for own in of_length] for seq_len, of_length in packed.items()}
    num_rows = {seq_len: list(map(len, own)) for seq_len, own in rows.items()}
    fingerprints = [cache.key_of(tokenizer.sha256, keys[data.seq_len], Proportions(stages[0].weights).shares)]
    for stage in stages[1:]:
        shares = Proportions(stage.weights).shares
        fingerprints.append(cache.key_of(fingerprints[-1], stage.from_step, stage.seq_len, keys[stage.seq_len], shares))
    return Dataset(
        tokenizer=tokenizer,
        rows=of_stages[0],
        stages=of_stages,
        sources=tuple(tokens.source.config for tokens in found.sources),
        summary=tuple(summary),
        fingerprint=fingerprints[0],
        stage_fingerprints=tuple((stage.from_step, own) for stage, own in zip(stages[1:], fingerprints[1:], strict=True)),
        content=cache.key_of([own.content for of_length in packed.values() for own in of_length]),
        passes=Passes(stages, num_rows, rows_read(config)),
        keys=tuple(tokens.source.key for tokens in found.sources),
        held_out_of_sources=tuple(own.held_out_rows for own in packed[data.seq_len]),
        files=tokenizer.files if template is None else tokenizer.files | {TEMPLATE_FILE: template.text.encode()},
        template_sha256=None if template is None else template.sha256,
        train_places=tuple(own.train_places for own in packed[data.seq_len]),
        objective=config.objective.kind,
        reference=None,
        preferences=tuple([_preferences(tokens) for tokens in found.sources]),
        completion_tokens=config.objective.rollout.max_tokens if config.objective.is_on_policy else 0,
    )


def _row_setting(config: Config, seq_len: int) -> str:
    """Returns what sets how many tokens of the data a row has."""
    if config.objective.is_on_policy:
        return "data.seq_len less objective.rollout.max_tokens"
    return "data.seq_len" if seq_len == config.data.seq_len else "a row in data.stages"


def _preferences(tokens: SourceTokens) -> Literal["pairs", "labels"] | None:
    """Returns the kind of the source's preferences; raises `DataError` if it has both kinds."""
    if not tokens.source.format.has_preferences:
        return None
    counts = tokens.counts
    labelled = counts.desirable + counts.undesirable
    if labelled not in (0, counts.documents):
        raise DataError(
            f"{tokens.source.key}.paths: has {counts.documents - labelled:,} pairs and {labelled:,} single answers with a"
            " label; a source has one or the other: write them into two"
        )
    return "labels" if labelled else "pairs"


def _check_preferences(tokens: SourceTokens, objective: ObjectiveKind) -> None:
    """Raises `DataError` if the source's answers are not those that the objective compares."""
    if _preferences(tokens) == "labels" and objective != "kto":
        raise DataError(
            f"{tokens.source.key}.paths: has single answers with a label, but objective.kind={objective} compares pairs; use"
            " kto, or records with chosen and rejected"
        )


def _held_out(config: Config, packed: Sequence[PackedSource]) -> Sequence[Row]:
    """Returns the held-out rows of all sources, of one length, mixed.

    Raises:
        DataError: there are none to evaluate on.
    """
    rows = grain.MapDataset.concatenate([grain.MapDataset.source(of_source.held_out_rows) for of_source in packed])
    share = config.data.held_out_fraction
    if share and config.train.eval_batches and not len(rows):
        too_long = sum(of_source.num_left_out(HELD_OUT) for of_source in packed)
        seq_len = packed[0].seq_len
        within = f"data.seq_len={seq_len}" if seq_len == config.data.seq_len else f"data.stages' {seq_len} tokens"
        within = f"{seq_len} tokens" if config.objective.is_on_policy else within
        why = f" within {within} ({too_long:,} are longer)" if too_long else ""
        raise DataError(
            f"data.held_out_fraction: {share} holds out no document{why}; raise it, add documents,"
            " or set train.eval_batches=0 to train without evaluation"
        )
    return cast(Sequence[Row], rows.shuffle(seed=0))


def _check_bad(packed: PackedSource, log: Callable[[str], None]) -> None:
    """Logs how many bad records of a source are left out; raises `DataError` if there are more than allowed."""
    bad, source = packed.tokens.counts.bad, packed.source
    if bad > source.config.max_bad_records:
        raise source.too_many_bad(packed.tokens.counts.first_bad)
    if bad:
        log(f"left out   {source.key}: {bad:,} bad records, the first one {packed.tokens.counts.first_bad}")


def _check_end(packed: PackedSource, tokenizer: Tokenizer, log: Callable[[str], None]) -> None:
    """Logs a warning if no token that ends an answer is learned in a source of tokens; templates are checked elsewhere."""
    store = packed.tokens.store
    if packed.source.config.kind != "tokenized" or not store.tokens_of_part.any():
        return
    tokens, learnt, _ = store.piece(0, 0, min(_TOKENS_LOOKED_AT, int(store.tokens_of_part[0])) - 1)
    if learnt is not None and tokenizer.token_bytes[tokens[1:][learnt]].all():
        log(
            f"warning    {packed.source.key}: its labels never include {tokenizer.name(tokenizer.eos_id)} or another token"
            " without text, so the model never learns to stop; give the token that ends each answer its label"
        )


def _check_rows(packed: PackedSource, of_row: str) -> None:
    """Raises `DataError`, with the cause, if a source has nothing to train on; `of_row` names what sets the row length."""
    if packed.num_rows(TRAIN):
        return
    key, num_documents = f"{packed.source.key}.paths", packed.tokens.counts.documents
    if not num_documents:
        raise DataError(f"{key}: has no document to train on; add documents with text")
    if packed.num_left_out(TRAIN) and _what(packed) != "documents":
        which = _what(packed)
        raise DataError(
            f"{key}: none of the {which} fits in the {packed.seq_len:,} tokens of {of_row}; raise it, or add shorter {which}"
        )
    if packed.num_left_out(TRAIN):
        raise DataError(
            f"{key}: no conversation has an answer within the {packed.seq_len:,} tokens of {of_row}; raise it, or add"
            " shorter conversations"
        )
    raise DataError(
        f"{key}: has no document to train on: all {num_documents:,} are held out; add documents, or lower"
        " data.held_out_fraction"
    )


def _describe(packed: PackedSource) -> str:
    """Returns a line about a source's content and its conversations that are too long for the rows."""
    source, counts, seq_len, num_rows = packed.source, packed.tokens.counts, packed.seq_len, packed.num_rows(TRAIN)
    which = "with an empty answer" if source.format.has_preferences else "empty ones"
    skipped = f" ({counts.empty:,} {which} skipped)" if counts.empty else ""
    full = f", {packed.num_targets(TRAIN) / (num_rows * seq_len):.2%} full" if num_rows else ""
    rows = f"; {num_rows:,} rows{full}; held out: {packed.num_rows(HELD_OUT):,} rows"
    if source.format.has_prompts:
        rows = f", at most {packed.longest_prompt:,}; {num_rows:,} to train on; held out: {packed.num_rows(HELD_OUT):,}"
    tokens = counts.tokens
    size = f" {counts.text_bytes / 1e6:,.1f} MB," if counts.text_bytes else ""
    what = _what(packed)
    labels = f" ({counts.desirable:,} desirable, {counts.undesirable:,} undesirable)" if what == "answers" else ""
    return (
        (
            f"data       {source.key} {source.config.kind}: {counts.documents:,} {what}{labels}{skipped},"
            f"{size} {tokens:,} tokens,"
            f" {tokens / max(counts.documents, 1):,.0f} per {what[:-1]}{rows}"
        )
        + _describe_split(counts)
        + _describe_too_long(packed)
    )


def _what(packed: PackedSource) -> str:
    """Returns the word for what a source's documents are."""
    counts = packed.tokens.counts
    if packed.source.format.has_prompts:
        return "prompts"
    if not packed.source.format.has_preferences:
        return "documents"
    return "answers" if counts.desirable + counts.undesirable else "pairs"


def _describe_too_long(packed: PackedSource) -> str:
    """Returns how many documents are cut or left out because of the length of a row."""
    cut, left_out, seq_len = packed.num_cut, sum(packed.num_left_out(side) for side in SIDES), packed.seq_len
    if _what(packed) != "documents":
        return f"; {left_out:,} {_what(packed)} left out, since they exceed {seq_len:,} tokens" if left_out else ""
    return (f"; {cut:,} conversations cut to {seq_len:,} tokens" if cut else "") + (
        f"; {left_out:,} left out, since no answer is within {seq_len:,} tokens" if left_out else ""
    )


def _describe_split(counts: Counts) -> str:
    """Returns how many conversations became several documents."""
    if not counts.more:
        return ""
    of = f"{counts.split:,} conversations are {counts.split + counts.more:,}" if counts.split else f"{counts.more:,} more"
    return f"; {of} documents, because the template changes earlier answers"


def _describe_rows(packed: PackedSource) -> str:
    """Returns a line about a source's rows in a later stage."""
    return (
        f"data       {packed.source.key} in rows of {packed.seq_len:,} tokens: {packed.num_rows(TRAIN):,}"
        f"; held out: {packed.num_rows(HELD_OUT):,} rows" + _describe_too_long(packed)
    )
