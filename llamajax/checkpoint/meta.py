"""The metadata that a checkpoint holds beside its arrays."""

from pathlib import Path
from typing import Any

import jax

import llamajax
from llamajax.checkpoint import manifest
from llamajax.checkpoint.read import read_object
from llamajax.checkpoint.steps import steps_in
from llamajax.config.file import config_to_dict
from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset
from llamajax.errors import CheckpointError


def checkpoint_meta(config: Config, dataset: Dataset, hf: dict[str, Any] | None, began: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata of a run's checkpoints that does not depend on the step.

    Args:
        config: configuration of the run, as the user wrote it.
        dataset: the training data.
        hf: metadata of the Hugging Face files that the run started from.
        began: initial `mesh` and `grad_accum_steps`.
    """
    of_data = {"fingerprint": dataset.fingerprint, "chat_template_sha256": dataset.template_sha256}
    of_data |= {"stages": [list(stage) for stage in dataset.stage_fingerprints]} if dataset.stage_fingerprints else {}
    meta = {
        "llamajax": llamajax.__version__,
        "jax": jax.__version__,
        "config": config_to_dict(config),
        "data": of_data,
        "mesh": dict(jax.sharding.get_mesh().shape),
        "began": began,
    }
    return meta if hf is None else meta | {"hf": hf}


def read_meta(step_dir: Path) -> dict[str, Any] | None:
    """Returns the metadata of a step; None if its manifest does not confirm it. The arrays are not checked.

    Raises:
        OSError: the disk fails, which says nothing about the step.
    """
    try:
        records = {"meta.json": manifest.read(step_dir)["meta.json"]}
        return None if manifest.problems(step_dir, records) else read_object(step_dir, "meta.json")
    except (CheckpointError, KeyError):
        return None


def newest_meta(run_dir: Path) -> dict[str, Any] | None:
    """Returns the metadata of the newest step that has it, or None. For facts that are the same in all steps of a run.

    Raises:
        OSError: the disk fails.
    """
    steps = reversed(steps_in(run_dir / "checkpoints"))
    metas = (read_meta(run_dir / "checkpoints" / str(step)) for step in steps)
    return next((meta for meta in metas if meta is not None), None)
