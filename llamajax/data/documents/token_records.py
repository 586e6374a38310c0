"""Reads records that are already tokens: ids, and labels that say which of them are trained on."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from llamajax.config.conversations import FieldNames
from llamajax.data.documents.messages import kind_of, optional, value_of

IGNORED = -100
"""Label of tokens that are not trained on, as in PyTorch."""
MAX_ID = 2**31 - 1


class Encoded(NamedTuple):
    """A document as tokens."""

    ids: Int32[np.ndarray, "T"]
    learnt: Bool[np.ndarray, "T"]
    """Whether each token is trained on."""


def tokens_of(record: Mapping[str, object], fields: FieldNames) -> Encoded:
    """Returns the tokens of a record of `input_ids` and, optionally, `labels` and `attention_mask`.

    Labels are aligned with the ids, as transformers' models take them: each is the id itself, or -100 where it is not
    trained on. Without labels, all tokens are trained on. Tokens with a 0 in the mask are padding and left out.

    Raises:
        ValueError: `field: rule; remedy`.
    """
    names = {"input_ids": "input_ids", "labels": "labels", "attention_mask": "attention_mask"} | fields.given
    ids = _whole_numbers(value_of(record, names["input_ids"]), names["input_ids"])
    if ids.size and (ids.min() < 0 or ids.max() > MAX_ID):
        raise ValueError(f"{names['input_ids']} has {ids[(ids < 0) | (ids > MAX_ID)][0]}, which is no id; correct the line")
    labels, mask = (_beside(record, names[field], ids, names["input_ids"]) for field in ("labels", "attention_mask"))
    if (position := _restart(record)) is not None:
        raise ValueError(f"position_ids starts again at {position}, so the record holds several documents; write them apart")
    learnt = np.full(len(ids), True) if labels is None else labels != IGNORED
    if labels is not None and (wrong := np.flatnonzero(learnt & (labels != ids))).size:
        at = wrong[0]
        raise ValueError(
            f"{names['labels']}[{at}] is {labels[at]}, but {names['input_ids']}[{at}] is {ids[at]}: labels are aligned with"
            f" the ids, and {IGNORED} where a token is not learned; correct the line"
        )
    kept = slice(None) if mask is None else mask != 0
    return Encoded(ids[kept].astype(np.int32), learnt[kept])


def _beside(record: Mapping[str, object], key: str, ids: np.ndarray, of: str) -> np.ndarray | None:
    """Returns the numbers under a key, one for each id; None if there are none."""
    if (value := optional(record, key)) is None:
        return None
    numbers = _whole_numbers(value, key)
    if len(numbers) != len(ids):
        raise ValueError(f"{key} has {len(numbers)} numbers for the {len(ids)} of {of}; correct the line")
    return numbers


def _restart(record: Mapping[str, object]) -> int | None:
    """Returns where `position_ids` begin again within the record, or None."""
    if (value := record.get("position_ids")) is None:
        return None
    again = np.flatnonzero(np.diff(_whole_numbers(value, "position_ids")) < 0)
    return int(again[0]) + 1 if again.size else None


def _whole_numbers(value: object, key: str) -> np.ndarray:
    """Returns a list of whole numbers as int64 [numbers]."""
    if not isinstance(value, list):
        raise ValueError(f"{key} must be a list of whole numbers, not {kind_of(value)}; correct the line")
    try:
        numbers = np.array(value) if value else np.zeros(0, np.int64)
    except ValueError:  # lists of several lengths
        numbers = np.zeros((0, 0))
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise ValueError(f"{key} must be one list of whole numbers; correct the line")
    return numbers.astype(np.int64)
