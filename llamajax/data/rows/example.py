"""Picks a conversation, a preference or a prompt of a run to show people: what is read of it, and what is learned."""

import itertools
from typing import NamedTuple

import numpy as np

from llamajax.data.documents.record_formats import FORMATS
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.packing import Row
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.step.batch import IGNORE

_ROWS_LOOKED_AT = 64


class Stretch(NamedTuple):
    """Consecutive tokens of a document that are all learned, or all just read."""

    text: str
    """Their text, with the names of tokens that have none."""
    is_learned: bool


class Example(NamedTuple):
    """A document that is learned in part, or a prompt."""

    stretches: list[Stretch]
    num_tokens: int
    num_learned: int
    """Number of its tokens that are learned."""
    what: str = "document"
    """Word for it."""


def find_example(dataset: Dataset) -> Example | None:
    """Returns the first document in the first rows of the run that is learned only in part, or the run's first prompt; None
    if there is none."""
    if any(FORMATS[source.kind].has_prompts for source in dataset.sources):
        ids = dataset.prompt(dataset.rows.first_row).ids
        return Example([Stretch(dataset.tokenizer.decode_all(list(ids)), False)], len(ids), 0, "prompt")
    if not any(FORMATS[source.kind].has_targets for source in dataset.sources):
        return None
    for position in range(_ROWS_LOOKED_AT):
        place = dataset.rows.first_row + position
        row, shown = dataset.train_row(place), _preference if dataset.has_preferences(place) else _example
        for segment in np.unique(row["segment_ids"][row["segment_ids"] > 0]).tolist():
            if (row["targets"][row["segment_ids"] == segment] == IGNORE).any():
                return shown(row, segment, dataset.tokenizer)
    return None


def _preference(row: Row, first: int, tokenizer: Tokenizer) -> Example:
    """Returns a pair, the prompt of which is shown once, or an answer with a label; `first` is its first segment."""
    pair = (first, first + 1) if first % 2 and (row["segment_ids"] == first + 1).any() else (first,)
    sequences = [_example(row, segment, tokenizer) for segment in pair]
    names = ("chosen", "rejected") if len(pair) == 2 else ("desirable",) if first % 2 else ("undesirable",)
    stretches = sequences[0].stretches[:1]  # the prompt
    for name, sequence in zip(names, sequences, strict=True):
        stretches += [Stretch(f"\n[{name}] ", False), *sequence.stretches[1:]]
    return Example(
        stretches,
        sum(sequence.num_tokens for sequence in sequences),
        sum(sequence.num_learned for sequence in sequences),
        "pair" if len(pair) == 2 else "answer",
    )


def _example(row: Row, segment: int, tokenizer: Tokenizer) -> Example:
    tokens, targets = (row[name][row["segment_ids"] == segment] for name in ("tokens", "targets"))
    learned = np.append(False, targets != IGNORE)  # the first token is never a target
    ids = np.append(tokens, targets[-1])
    ids, learned = (ids, learned) if learned[-1] else (ids[:-1], learned[:-1])
    pairs = itertools.groupby(zip(ids.tolist(), learned.tolist(), strict=True), key=lambda pair: pair[1])
    stretches = [Stretch(tokenizer.decode_all([token for token, _ in run]), is_learned) for is_learned, run in pairs]
    return Example(stretches, len(ids), int(learned.sum()))
