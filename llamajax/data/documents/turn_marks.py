"""Reads the fields in chat data that say which messages to train on.

Tools use different fields for this: `weight` (OpenAI, Mistral), `train` and `training` (axolotl), `train_on_turn` (data
made for it), `loss` and `loss_scale` (ms-swift, XTuner), `loss_weight` (LLaMA-Factory), `loss_mask` and `step_loss_mask`
(verl, slime), `masked` (torchtune). Fields with one clear meaning are honoured; any other field about learning is refused.
"""

import functools
import re
from collections.abc import Mapping

_LEARNT_IF_TRUE = (
    "weight", "train", "training", "trainable", "train_on_turn", "loss", "loss_scale", "loss_weight", "loss_mask",
    "step_loss_mask",
)  # fmt: skip
_HIDDEN_IF_TRUE = ("masked",)
MARKS = frozenset((*_LEARNT_IF_TRUE, *_HIDDEN_IF_TRUE))
"""Fields that say whether a message is trained on."""
MARKS_OF_RECORD = ("weight", "train", "trainable", "loss_mask", "loss_weight", "masked", "mask")
"""Fields that say so for a whole record. Other `MARKS` may be measurements there, such as a loss."""
OF_PREFERENCES = ("label", "kto_tag")
"""Fields that are false for an undesirable answer."""

_ABOUT_LEARNING = frozenset((
    "train", "trains", "training", "trainable", "trained", "learn", "learns", "learning", "learnable", "learned", "learnt",
    "loss", "losses", "mask", "masks", "masked", "masking", "weight", "weights", "weighted", "supervise", "supervised",
    "supervision", "gradient", "grad", "label", "labels",
))  # fmt: skip
_REMEDY = 'write "train": true or "train": false instead'


@functools.lru_cache
def says_about_learning(key: str) -> bool:
    """Returns whether a field's name contains a word about learning, as `train_detail` and `lossWeight` do."""
    return bool(_ABOUT_LEARNING & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", key)})


def learnt_mark(message: Mapping[str, object], where: str, own: str | None = None) -> bool | None:
    """Returns whether the message is marked to be trained on, or None if it has no mark.

    Args:
        message: a message of a conversation, or a part of its content.
        where: place of the message in error messages, with a trailing dot.
        own: name of a field that the source's configuration makes a mark, true where a message is trained on.

    Raises:
        ValueError: `field: rule; remedy`, if a mark is not supported, or two marks contradict each other.
    """
    found: dict[str, bool] = {}
    for key, value in message.items():
        if value is None:
            continue
        if key in MARKS or key == own:
            found[key] = _is_true(value, f"{where}{key}") != (key in _HIDDEN_IF_TRUE)
        elif says_about_learning(key) and value not in ("", [], {}):
            raise ValueError(
                f"{where}{key}: this field about learning has no meaning here; {_REMEDY}, or name it in fields.train"
            )
    if len(set(found.values())) > 1:
        raise ValueError(f"{where}{' and '.join(found)} contradict each other; keep one of them")
    return next(iter(found.values()), None)


def check_record(record: Mapping[str, object], *, is_preference: bool = False) -> None:
    """Refuses a record that is marked, as a whole, not to be trained on, or with a weight of its own.

    Args:
        record: the record.
        is_preference: whether the answer may be undesirable.

    Raises:
        ValueError: `field: rule; remedy`.
    """
    for key in MARKS_OF_RECORD:
        if (value := record.get(key)) is None:
            continue
        if key == "mask":
            raise ValueError(f"mask: means different things to different programs; remove it, and {_REMEDY} in messages")
        if _is_true(value, key) == (key in _HIDDEN_IF_TRUE):
            raise ValueError(f"{key}: excludes the whole line from training; remove the line")
    for key in OF_PREFERENCES:
        if record.get(key) is False and not is_preference:
            raise ValueError(f"{key}: false marks a rejected answer; remove the line, or set kind: preference")


def _is_true(value: object, where: str) -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    shown = f"{value!r}"[:40]
    raise ValueError(f"{where} must be 0 or 1, or false or true, not {shown}: a message is trained on or not; {_REMEDY}")
