"""The contract between data, model and loss: what a batch holds."""

import jax

from llamajax.config import Config
from llamajax.sharding import spec

Batch = dict[str, jax.Array]
"""`tokens`, `targets`, `segment_ids`, `positions`: int32 [micro-batches, B, T], sharded `spec(None, "batch", "seq")`."""

FIELDS = ("tokens", "targets", "segment_ids", "positions")

IGNORE = -1
"""Target of a token that is not counted: padding, or the last token of a document."""


def micro_batch_size(config: Config) -> int:
    """Sequences per micro-batch, over all devices."""
    return config.train.global_batch_size // config.train.grad_accum_steps


def batch_sharding() -> jax.NamedSharding:
    """How a batch lies on the current mesh."""
    return jax.NamedSharding(jax.sharding.get_mesh(), spec(None, "batch", "seq"))
