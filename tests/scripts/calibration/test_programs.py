"""What attention's constants are measured by: causal attention, whose scores count as in plans."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from llamajax.kernels import plain
from llamajax.kernels.plain import Mask
from scripts.calibration import programs


def test_attention_is_measured_by_the_kernels_of_plans():
    """Which count the same scores: half of the square, and what of their tiles is beside it."""
    scores = programs.scores_behind("pallas_backward_efficiency")
    assert scores is not None
    assert programs.scores_behind("attention_efficiency") is programs.scores_behind("kernel_s") is None
    seq_len = programs.shipped().changed(programs.ATTENTION).data.seq_len
    assert seq_len / 2 < min(scores) <= max(scores) < seq_len / 2 + 128


def test_what_is_measured_of_the_own_kernels_is_causal_attention():
    """Forward and backward, as jax interprets them; on no mesh, as in a process that has not laid out its devices."""
    jax.set_mesh(None)
    q, k, v, d_out = programs.random([jax.ShapeDtypeStruct((2, 96, 2, *g, 16), jnp.float32) for g in ((2,), (), (), (2,))])
    by_pallas = partial(programs.by_pallas, interpret=True)

    def plainly(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return plain.attend_to_rows(q, k, v, Mask(), 16**-0.5, first=0, kv_segment_ids=None, with_lse=False)[0]

    found, true = (programs.and_gradients(attention, q, k, v, d_out) for attention in (by_pallas, plainly))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, true)
