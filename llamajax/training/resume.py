"""Whether a run may go on from its checkpoint."""

from typing import Any

from llamajax.checkpoint.read import Restored
from llamajax.config.file import dotted
from llamajax.config.run import Config
from llamajax.errors import CheckpointError

MAY_CHANGE = (
    "run_dir", "mesh", "parallel", "distributed", "hardware", "xla", "data", "checkpoint", "metrics", "profile", "sample",
    "train.grad_accum_steps", "train.grad_accum_dtype", "train.eval_every", "train.eval_batches",
    "train.max_nonfinite_steps", "model.remat", "model.attention_kernel",
)  # fmt: skip
"""Settings that a resumed run may change: beyond rounding, they do not change what is computed. The data is compared
by its fingerprint, so that it may move."""


def check_same_run(config: Config, restored: Restored[Any], meta: dict[str, Any]) -> None:
    """Refuses to go on from a checkpoint that was computed with other settings or other data.

    Args:
        config: the run.
        restored: its checkpoint.
        meta: `checkpoint_meta` of the run.

    Raises:
        CheckpointError: naming every setting that differs.
    """
    position, batch_size = restored.meta["data"]["position"], config.train.global_batch_size
    if position != restored.step * batch_size:
        raise CheckpointError(
            f"train.global_batch_size: {batch_size} would skip or repeat data, because the run's {restored.step} steps took"
            f" {position} rows; keep {position // restored.step}, or choose another run_dir"
        )
    if config.checkpoint.allow_config_change:
        return
    before, now = dotted(restored.meta["config"]), dotted(meta["config"])
    changes = [
        f"{key}: {before.get(key)} -> {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)
    ]
    if restored.meta["data"]["fingerprint"] != meta["data"]["fingerprint"]:
        changes.append("data: other documents, tokenizer, weights or data.seq_len")
    if changes:
        raise CheckpointError(
            f"run_dir: {config.run_dir} holds a run with other settings ({'; '.join(changes)}); choose another run_dir,"
            " or set checkpoint.allow_config_change to go on with the new ones"
        )
