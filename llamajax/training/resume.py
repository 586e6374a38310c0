"""Whether a run may go on from its checkpoint."""

import dataclasses
import functools
from typing import Any

from llamajax.checkpoint.read import Saved
from llamajax.config.file import config_to_dict, dotted
from llamajax.config.run import Config
from llamajax.data.rows.position import next_row
from llamajax.errors import CheckpointError
from llamajax.training.rollback import parse_passed_over

MAY_CHANGE = (
    "run_dir", "mesh", "parallel", "distributed", "hardware", "xla", "data", "checkpoint", "recovery", "watchdog",
    "metrics", "profile", "sample",
    "train.grad_accum_steps", "train.grad_accum_dtype", "train.eval_every", "train.eval_batches",
    "train.max_nonfinite_steps", "model.remat", "model.attention_kernel",
)  # fmt: skip
"""Settings that a resumed run may change: beyond rounding, they do not change what is computed. The data is compared
by its fingerprint, so that it may move; of its stages those that have begun, so that others may still be planned."""


def check_settings(config: Config, saved: Saved) -> None:
    """Refuses to go on from a checkpoint that was computed with other settings; of the data see `check_data`.

    Args:
        config: the run.
        saved: its checkpoint.

    Raises:
        CheckpointError: naming every setting that differs.
    """
    position, batch_size = saved.meta["data"]["position"], config.train.global_batch_size
    passed_over = parse_passed_over(saved.meta["data"].get("passed_over", ()))
    if position != next_row(saved.step, batch_size, passed_over):
        batch_size_before = saved.meta["config"]["train"]["global_batch_size"]
        raise CheckpointError(
            f"train.global_batch_size: {batch_size} would skip or repeat data, because the run's {saved.step} steps took"
            f" {saved.step * batch_size_before} rows; keep {batch_size_before}, or choose another run_dir"
        )
    before, now = dotted(saved.meta["config"]), dotted(config_to_dict(config))
    # What a setting that is younger than the run has by default is what it did.
    before |= {key: _default(config, key) for key in now.keys() - before.keys()}
    _refuse(config, [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)
    ])  # fmt: skip


def check_data(config: Config, saved: Saved, meta: dict[str, Any]) -> None:
    """Refuses to go on from a checkpoint that was computed with other data.

    Args:
        config: the run.
        saved: its checkpoint.
        meta: `checkpoint_meta` of the run.

    Raises:
        CheckpointError: the data or the stages so far differ.
    """
    if saved.meta["data"]["fingerprint"] != meta["data"]["fingerprint"]:
        _refuse(config, ["data: other documents, tokenizer, weights or data.seq_len"])
    elif begun_stages(saved.meta, saved.step) != begun_stages(meta, saved.step):
        _refuse(config, ["data.stages: other ones before this step; those that are to come may change"])


def _refuse(config: Config, changes: list[str]) -> None:
    if changes and not config.checkpoint.allow_config_change:
        raise CheckpointError(
            f"run_dir: {config.run_dir} holds a run with other settings ({'; '.join(changes)}); choose another run_dir,"
            " or set checkpoint.allow_config_change to go on with the new ones"
        )


def begun_stages(meta: dict[str, Any], step: int) -> list[list[Any]]:
    """The stages that the first `step` steps were of, without the first: where each began, and the hash of its rows."""
    return [[from_step, fingerprint] for from_step, fingerprint in meta["data"].get("stages", ()) if from_step < step]


def _default(config: Config, key: str) -> Any:
    """Of a setting; None for one that has none, such as the place in a list."""
    *sections, name = key.split(".")
    section = functools.reduce(lambda owner, part: getattr(owner, part, None), sections, config)
    fields = dataclasses.fields(section) if dataclasses.is_dataclass(section) else ()
    return next((field.default for field in fields if field.name == name), None)
