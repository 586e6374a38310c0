"""Whether a run may resume from its checkpoint with the settings that it has now."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from llamajax.checkpoint.read import Saved
from llamajax.config.file import config_to_dict
from llamajax.config.keys import join, without_removed
from llamajax.config.run import Config
from llamajax.data.rows.position import next_row, rows_read
from llamajax.errors import CheckpointError
from llamajax.training.rollback import parse_passed_over
from llamajax.watch import console

MAY_CHANGE = (
    "run_dir", "mesh", "parallel", "offload", "distributed", "hardware", "xla", "data", "checkpoint", "recovery", "watchdog",
    "metrics", "profile", "sample",
    "train.grad_accum_steps", "train.grad_accum_dtype", "train.eval_every", "train.eval_batches",
    "train.max_nonfinite_steps", "model.remat", "model.attention_kernel",
)  # fmt: skip
"""Settings that a resumed run may always change: beyond rounding, they do not change what is computed. The data are compared
by fingerprint, so the files may move; only stages that have begun are compared, so later ones may still be planned."""


def check_settings(config: Config, saved: Saved) -> None:
    """Refuses to resume a checkpoint of other settings, and logs the changes that `checkpoint.allow_changes` allows.

    `check_data` does the same for the data.

    Args:
        config: the run.
        saved: its checkpoint.

    Raises:
        CheckpointError: settings differ that may not; names each one.
    """
    position, train, is_grouped_alike = saved.meta["data"]["position"], config.train, True
    if config.objective.is_on_policy and (before := saved.meta["config"].get("objective", {}).get("rollout")):
        is_grouped_alike = before["group_size"] == config.objective.rollout.group_size
    passed_over = parse_passed_over(saved.meta["data"].get("passed_over", ()))
    if is_grouped_alike and position != (now_at := next_row(saved.step, rows_read(config), passed_over)):
        before, now = saved.meta["config"]["train"], config_to_dict(train)
        other = "global_batch_size" if before["global_batch_size"] != train.global_batch_size else "global_batch_ramp"
        raise CheckpointError(
            f"train.{other}: {_shown(now[other])} would skip or repeat data, because the run's {saved.step} steps end before"
            f" row {position}, not {now_at}; keep {_shown(before.get(other))}, or choose another run_dir"
        )
    before, now = _settings(without_removed(saved.meta["config"])), _settings(config_to_dict(config))
    # A setting that is newer than the run has its default, which changes nothing.
    before |= {key: _default(config, key) for key in now.keys() - before.keys()}
    _allow(config, {
        key: f"{_shown(before.get(key))} -> {_shown(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not _is_in(key, MAY_CHANGE)
    })  # fmt: skip


def check_data(config: Config, saved: Saved, meta: dict[str, Any]) -> None:
    """Refuses to resume a checkpoint of other data, unless `checkpoint.allow_changes` names `data`.

    Args:
        config: the run.
        saved: its checkpoint.
        meta: `checkpoint_meta` of the run.

    Raises:
        CheckpointError: the data, or the stages so far, differ.
    """
    if saved.meta["data"]["fingerprint"] != meta["data"]["fingerprint"]:
        _allow(config, {"data": "other documents, tokenizer, weights or data.seq_len"})
    elif begun_stages(saved.meta, saved.step) != begun_stages(meta, saved.step):
        _allow(config, {"data.stages": "other ones before this step; only later stages may change"})


def _allow(config: Config, changes: Mapping[str, str]) -> None:
    """Logs changes that `checkpoint.allow_changes` names, and refuses all others."""
    allowed = config.checkpoint.allow_changes
    shown = {key: f"{key}: {change}" for key, change in changes.items()}
    if refused := [key for key in changes if not _is_in(key, allowed)]:
        raise CheckpointError(
            f"run_dir: {config.run_dir} holds a run with other settings ({'; '.join(shown[key] for key in refused)}); choose"
            f" another run_dir, or allow the changes: --checkpoint.allow_changes '[{', '.join([*allowed, *refused])}]'"
        )
    if changes:
        console.log(f"changed    {'; '.join(shown.values())}{_new_schedule(config, changes)}")


def _new_schedule(config: Config, changes: Mapping[str, str]) -> str:
    """Returns a note on the learning rate where its schedule depends on a number of steps that changed."""
    optimizer, num_steps, num_epochs = config.optimizer, config.train.num_steps, config.train.num_epochs
    if not {"train.num_steps", "train.num_epochs"} & changes.keys() or optimizer.schedule == "constant":
        return ""
    if num_epochs is not None:
        return f"; the {optimizer.schedule} schedule of the learning rate is now the one of {num_epochs:g} epochs"
    decay = f", with its decay from step {num_steps - (optimizer.decay_steps or 0):,}" if optimizer.schedule == "wsd" else ""
    return f"; the {optimizer.schedule} schedule of the learning rate is now the one of {num_steps:,} steps{decay}"


def _is_in(key: str, several: tuple[str, ...]) -> bool:
    """Whether a key is one of several, or in one of the sections among them."""
    return any(f"{key}.".startswith(f"{other}.") for other in several)


def _settings(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns every setting of nested sections by its dotted key; a list is one setting."""
    inner = (
        _settings(value, join(above, name)) if isinstance(value, dict) else {join(above, name): value}
        for name, value in tree.items()
    )
    return {key: value for part in inner for key, value in part.items()}


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_shown(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value)


def begun_stages(meta: dict[str, Any], step: int) -> list[list[Any]]:
    """Returns the stages that began within the first `step` steps, without the first one: each one's start and row hash."""
    return [[from_step, fingerprint] for from_step, fingerprint in meta["data"].get("stages", ()) if from_step < step]


def _default(config: Config, key: str) -> Any:
    """Returns the default of a setting; None for a key that no setting has."""
    *sections, name = key.split(".")
    section = functools.reduce(lambda owner, part: getattr(owner, part, None), sections, config)
    fields = dataclasses.fields(section) if dataclasses.is_dataclass(section) else ()
    default = next((field.default for field in fields if field.name == name), None)
    return list(default) if isinstance(default, tuple) else default
