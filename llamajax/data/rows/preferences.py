"""Builds rows of preferences, and the other rows that losses need of them.

The segment ids of such a row say what its sequences are. Preference j of the row, counted from 0, has the id 2j + 1 for its
chosen or desirable sequence and 2j + 2 for its rejected or undesirable one; there may be only one of them. Every token has a
position. Targets are the tokens of the answers.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from llamajax.config.objective import ObjectiveKind
from llamajax.data.rows.packing import Row, fill_row
from llamajax.data.tokens.stores import Piece
from llamajax.step.batch import IGNORE, OTHER


def fill_preferences(pieces: Sequence[Piece], seq_len: int) -> Row:
    """Builds a row from preferences, in order."""
    row = fill_row([], seq_len)
    at = 0
    for number, (tokens, learnt, chosen) in enumerate(pieces):
        assert learnt is not None
        assert chosen is not None
        places = slice(at, at := at + len(tokens))
        num_chosen = int(chosen.sum())
        row["tokens"][places] = tokens
        row["segment_ids"][places] = 2 * number + np.where(chosen, 1, 2)
        row["positions"][places] = np.arange(len(tokens)) - np.where(chosen, 0, num_chosen)
        follows = np.diff(chosen, append=False) == 0  # a token of the same sequence
        follows[-1] = False
        is_target = follows[:-1] & learnt
        row["targets"][places][:-1] = np.where(is_target, tokens[1:].astype(np.int32), IGNORE)
    return row


def with_fields(row: Row, objective: ObjectiveKind) -> Row:
    """Returns a row with the fields that the objective reads beside `FIELDS`, see `llamajax.step.batch.fields`."""
    match objective:
        case "orpo":
            return row | {"whole_targets": whole_targets(row)}
        case "kto":
            return row | {OTHER + name: values for name, values in mismatched(row).items()}
        case _:
            return row


def mismatched(row: Row) -> Row:
    """Returns a row of as many sequences, each of them a prompt with the answer of the sequence before it.

    The first prompt gets the last answer. An answer is all from the first target's token to the end of its sequence. Every
    prompt keeps its segment id. A sequence that is alone in its row keeps its answer.

    Args:
        row: a row of preferences.
    """
    other = fill_row([], len(row["tokens"]))
    ends = np.flatnonzero(np.diff(row["segment_ids"], append=0)) + 1
    ends = ends[row["segment_ids"][ends - 1] > 0].tolist()
    sequences = list(itertools.pairwise([0, *ends]))
    answers = [_answer(row, start, end) for start, end in sequences]
    at = 0
    for number, (start, _) in enumerate(sequences):
        answer, (given, end) = answers[number], (answers[number - 1], sequences[number - 1][1])
        num_prompt = answer - start
        places = slice(at, at := at + num_prompt + end - given)
        other["tokens"][places] = np.concatenate([row["tokens"][start:answer], row["tokens"][given:end]])
        other["targets"][places][num_prompt - 1 :] = row["targets"][given - 1 : end]
        other["segment_ids"][places] = row["segment_ids"][start]
        other["positions"][places] = np.arange(num_prompt + end - given)
    return other


def whole_targets(row: Row) -> Int32[np.ndarray, "T"]:
    """Returns the targets of a row in which prompts are learnt too.

    Every token that is not the last one of its sequence has the next token as its target.
    """
    is_followed = (np.diff(row["segment_ids"], append=0) == 0) & (row["segment_ids"] > 0)
    following = np.where(is_followed, np.append(row["tokens"][1:], 0), IGNORE)
    return np.where(row["targets"] != IGNORE, row["targets"], following).astype(np.int32)


def _answer(row: Row, start: int, end: int) -> int:
    """Returns where the answer of the sequence from `start` to `end` begins."""
    learnt = np.flatnonzero(row["targets"][start:end] != IGNORE)
    return start + int(learnt[0]) + 1 if learnt.size else end
