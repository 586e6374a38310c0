"""The contents of a batch: the contract between data, model and loss."""

from collections.abc import Sequence

import jax
import numpy as np

from llamajax.errors import DataError
from llamajax.parallel.sharding import spec

Batch = dict[str, jax.Array]
"""`tokens`, `targets`, `segment_ids`, `positions`: int32 [micro-batches, B, T], sharded (None, "micro_batch", "seq")."""

FIELDS = ("tokens", "targets", "segment_ids", "positions")

IGNORE = -1
"""Target of a token that is not counted: padding, or the last token of a document."""


def check_ids(ids: np.ndarray | Sequence[int], vocab_size: int, where: str, remedy: str) -> None:
    """Refuses token ids outside the model's table, which devices would silently look up as zeros.

    Raises:
        DataError: names the first such id; `IGNORE` is allowed.
    """
    ids = np.asarray(ids)
    if (wrong := ids[(ids >= vocab_size) | (ids < IGNORE)]).size:
        raise DataError(f"{where}: token id {wrong[0]} is not among the {vocab_size} rows of the model's table; {remedy}")


def batch_sharding() -> jax.NamedSharding:
    """Returns the sharding of a batch on the current mesh."""
    return jax.NamedSharding(jax.sharding.get_mesh(), spec(None, "micro_batch", "seq"))
