"""Partitions by the names of dims, and that mistakes in them are errors."""

import pytest
from jax import P

from llamajax.parallel.sharding import spec


def test_logical_axes_become_mesh_axes():
    assert spec("batch", "seq", None) == P(("pipeline", "data", "fsdp", "expert"), "sequence", None)
    assert spec("layers", "embed", "mlp") == P("pipeline", ("fsdp", "expert", "sequence"), "tensor")


def test_a_typo_names_the_axis_that_was_meant():
    with pytest.raises(ValueError, match="unknown logical axis 'mpl'; did you mean 'mlp'"):
        spec("embed", "mpl")


def test_two_dims_cannot_claim_one_mesh_axis():
    with pytest.raises(ValueError, match="'embed' and 'batch' both claim mesh axis 'fsdp'"):
        spec("embed", "batch")
