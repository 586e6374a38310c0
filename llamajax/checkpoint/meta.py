"""What a checkpoint says about itself beside its arrays."""

from typing import Any

import jax

import llamajax
from llamajax.config.file import config_to_dict
from llamajax.config.run import Config
from llamajax.data.dataset import Dataset


def checkpoint_meta(config: Config, dataset: Dataset, hf: dict[str, Any] | None) -> dict[str, Any]:
    """What the checkpoints of a run say about themselves, whatever their step."""
    meta = {
        "llamajax": llamajax.__version__,
        "jax": jax.__version__,
        "config": config_to_dict(config),
        "data": {"fingerprint": dataset.fingerprint, "chat_template_sha256": dataset.template_sha256},
        "mesh": dict(jax.sharding.get_mesh().shape),
    }
    return meta if hf is None else meta | {"hf": hf}
