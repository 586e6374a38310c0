"""The contract between data, model and loss: what a batch holds."""

from collections.abc import Sequence

import jax
import numpy as np

from llamajax.errors import DataError
from llamajax.parallel.sharding import spec

Batch = dict[str, jax.Array]
"""`tokens`, `targets`, `segment_ids`, `positions`: int32 [micro-batches, B, T], sharded `spec(None, "batch", "seq")`."""

FIELDS = ("tokens", "targets", "segment_ids", "positions")

IGNORE = -1
"""Target of a token that is not counted: padding, or the last token of a document."""


def check_ids(ids: np.ndarray | Sequence[int], vocab_size: int, where: str, remedy: str) -> None:
    """Refuses ids of tokens that the model's table has no row for, which devices would take for zeros in silence.

    Raises:
        DataError: naming the first one; `IGNORE` is none.
    """
    ids = np.asarray(ids)
    if (wrong := ids[(ids >= vocab_size) | (ids < IGNORE)]).size:
        raise DataError(f"{where}: token id {wrong[0]} is not among the {vocab_size} rows of the model's table; {remedy}")


def batch_sharding() -> jax.NamedSharding:
    """How a batch lies on the current mesh."""
    return jax.NamedSharding(jax.sharding.get_mesh(), spec(None, "batch", "seq"))
