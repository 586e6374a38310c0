"""What a checkpoint says about itself beside its arrays, and whether a run may go on from it."""

from pathlib import Path
from typing import Any

import jax

import llamajax
from llamajax.checkpoint.read import Restored
from llamajax.config.file import config_to_dict
from llamajax.config.keys import dotted
from llamajax.config.model import ModelConfig, RopeScalingConfig
from llamajax.config.run import Config
from llamajax.data.dataset import Dataset
from llamajax.errors import CheckpointError

MAY_CHANGE = (
    "run_dir", "mesh", "distributed", "hardware", "xla", "data", "checkpoint", "metrics", "profile", "sample",
    "train.grad_accum_steps", "train.eval_every", "train.eval_batches", "train.max_nonfinite_steps", "model.remat",
    "model.attention_kernel",
)  # fmt: skip
"""Settings that a resumed run may change: beyond rounding, they do not change what is computed. The data is compared
by its fingerprint, so that it may move."""


def checkpoint_meta(config: Config, step: int, dataset: Dataset, hf: dict[str, Any] | None) -> dict[str, Any]:
    """What a checkpoint says about itself, beside the arrays."""
    meta = {
        "llamajax": llamajax.__version__,
        "jax": jax.__version__,
        "config": config_to_dict(config),
        "data": {
            "position": step * config.train.global_batch_size,
            "fingerprint": dataset.fingerprint,
            "chat_template_sha256": dataset.template_sha256,
        },
        "mesh": dict(jax.sharding.get_mesh().shape),
    }
    return meta if hf is None else meta | {"hf": hf}


def model_config(meta: dict[str, Any], step_dir: Path) -> ModelConfig:
    """The model that the checkpoint in `step_dir` is of.

    Raises:
        CheckpointError: it is none of this version.
    """
    try:
        fields: dict[str, Any] = dict(meta["config"]["model"])
        fields["rope_scaling"] = RopeScalingConfig(**fields["rope_scaling"])
        fields["attention_kernel"] = "auto"  # belongs to the machine that trained, not to the model
        return ModelConfig(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{step_dir}: was not written by this version's model ({error}); read it with its own"
        ) from error


def check_same_run(config: Config, restored: Restored[Any], fingerprint: str) -> None:
    """Refuses to go on from a checkpoint that was computed with other settings or other data.

    Raises:
        CheckpointError: naming every setting that differs.
    """
    meta = restored.meta
    position, batch_size = meta["data"]["position"], config.train.global_batch_size
    if position != restored.step * batch_size:
        raise CheckpointError(
            f"train.global_batch_size: {batch_size} would skip or repeat data, because the run's {restored.step} steps took"
            f" {position} rows; keep {position // restored.step}, or choose another run_dir"
        )
    if config.checkpoint.allow_config_change:
        return
    before, now = dotted(meta["config"]), dotted(config_to_dict(config))
    changes = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)
    ]
    if meta["data"]["fingerprint"] != fingerprint:
        changes.append("data: other documents, tokenizer, weights or data.seq_len")
    if changes:
        raise CheckpointError(
            f"run_dir: {config.run_dir} holds a run with other settings ({'; '.join(changes)}); choose another run_dir,"
            " or set checkpoint.allow_config_change to go on with the new ones"
        )
