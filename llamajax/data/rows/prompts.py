"""Prompts of a run, each in a row of its own, with the record that it is from.

The row of a prompt is no row of a batch. It has `tokens`, the ids of the prompt, and `record`, the bytes of JSON beside them
(`llamajax.data.chat.prompt_tokens`).
"""

import json
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from llamajax.data import cache, progress
from llamajax.data.rows.packing import Row
from llamajax.data.rows.packing_cache import Totals
from llamajax.data.tokens.stores import SIDES, Piece, ShardStore


class Prompt(NamedTuple):
    """A prompt for the model to complete."""

    ids: tuple[int, ...]
    """Its token ids, at least one."""
    said: str | list[dict[str, Any]]
    """The prompt as a text, or as messages, for reward functions."""
    record: dict[str, Any]
    """The whole record that it is from, for reward functions."""


def prompt_row(piece: Piece) -> Row:
    """Returns the row of a prompt."""
    assert piece.chosen is not None
    ids = piece.tokens.astype(np.int32)
    return {"tokens": ids[piece.chosen], "record": ids[~piece.chosen]}


def prompt_of_row(row: Row) -> Prompt:
    """Returns the prompt in a row of `prompt_row`."""
    said, record = json.loads(row["record"].astype(np.uint8).tobytes())
    return Prompt(tuple(row["tokens"].tolist()), said, record)


class PromptIndex:
    """Places of the prompts that are short enough. It has the interface of `PackingIndex`, and is made anew by every process
    from the shards: sixteen bytes a prompt."""

    def __init__(self, store: ShardStore, max_tokens: int) -> None:
        """Reads the places of all prompts; those above `max_tokens` tokens are left out.

        Raises:
            DamagedError: a shard is damaged.
            OSError: the disk fails.
        """
        self.sha256 = cache.key_of("prompts", max_tokens)
        """Hash that identifies the content, with those of the shards."""
        self.longest = 0
        """Number of tokens of the longest prompt, left out or not."""
        starts, lengths = ([[np.zeros(0, np.int64)] for _ in SIDES] for _ in range(2))
        self._left_out, self._tokens = [0 for _ in SIDES], [0 for _ in SIDES]
        tokens_before = np.cumsum([0, *store.tokens_of_part])
        for part, before in enumerate(tokens_before[:-1]):
            progress.gets_on()
            places = store.prompts(part)
            fits = places.num_tokens <= max_tokens
            self.longest = max(self.longest, int(places.num_tokens.max(initial=0)))
            for side in range(len(SIDES)):
                is_here = places.sides == side
                starts[side].append(places.starts[is_here & fits] + before)
                lengths[side].append(places.lengths[is_here & fits])
                self._left_out[side] += int((is_here & ~fits).sum())
                self._tokens[side] += int(places.num_tokens[is_here & fits].sum())
        self._starts, self._lengths = ([np.concatenate(of_side) for of_side in both] for both in (starts, lengths))

    def num_rows(self, side: int) -> int:
        """Returns the number of prompts on this side of the split."""
        return len(self._starts[side])

    def num_targets(self, side: int) -> int:
        """Returns the number of tokens of these prompts."""
        return self._tokens[side]

    def totals(self, side: int) -> Totals:
        """Returns the other counts of this side."""
        return Totals(documents=self.num_rows(side), cut=0, left_out=self._left_out[side], moved=0)

    def pieces(self, side: int, row: int) -> tuple[Int64[np.ndarray, "1"], Int64[np.ndarray, "1"]]:
        """Returns where a prompt starts among all tokens of the source, and the number of ids of it and its record."""
        return self._starts[side][row : row + 1], self._lengths[side][row : row + 1]
