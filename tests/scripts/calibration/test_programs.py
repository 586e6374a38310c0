"""Programs that measure the constants of attention, whose scores count as in plans, and of experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.file import load_config
from llamajax.kernels import plain
from llamajax.kernels.plain import Mask
from llamajax.planning.cost.attention import Grid, busy_share
from scripts.calibration import programs
from scripts.checkout import ROOT


def test_attention_is_measured_by_the_kernels_of_plans():
    """Which count the same scores: half of the square, and what of their tiles is beside it."""
    scores = programs.scores_behind("pallas_backward_efficiency")
    assert scores is not None
    assert programs.scores_behind("attention_efficiency") is programs.scores_behind("kernel_s") is None
    seq_len = programs.shipped().changed(programs.ATTENTION).data.seq_len
    assert seq_len / 2 < min(scores) <= max(scores) < seq_len / 2 + 128


@pytest.mark.parametrize(
    ("name", "file", "tensor"),
    [
        ("1B, row of 4,096", "llama3_2_1b_8xh100", 1),
        ("8B, row of 4,096", "llama3_1_8b_8xh200", 1),
        ("70B on tensor 8, row of 8,192", "llama3_1_70b_256xh100", 8),
    ],
)
def test_small_grids_are_those_of_shipped_models(name, file, tensor):
    """Their programs keep 132 cores busy to the end only with many rows."""
    shape, model = programs.SMALL_GRIDS[name], load_config(ROOT / "configs" / f"{file}.yaml").model
    assert shape.head_dim == model.head_dim
    assert shape.kv_heads * tensor == model.num_kv_heads
    assert shape.kv_heads * shape.queries_per_kv_head * tensor == model.num_heads
    q, k, v, d_out = (x.shape for x in programs.arguments_of(shape, 3))
    assert (q, k) == (d_out, v) == ((3, *shape), (3, shape.seq_len, shape.kv_heads, shape.head_dim))
    scores = programs.scores_of(shape)
    assert scores is not None
    one, many = (
        busy_share(Grid(num_heads, shape.seq_len // 128, rows), scores.by_queries, shape.seq_len, 132)
        for num_heads in (shape.kv_heads * shape.queries_per_kv_head,)
        for rows in (1, programs.MANY_ROWS)
    )
    assert 0.95 < one < many
    assert many > 0.999


def test_what_is_measured_of_the_own_kernels_is_causal_attention():
    """Forward and backward, as jax interprets them; on no mesh, as in a process that has not laid out its devices."""
    jax.set_mesh(None)
    q, k, v, d_out = programs.random([jax.ShapeDtypeStruct((2, 96, 2, *g, 16), jnp.float32) for g in ((2,), (), (), (2,))])
    by_pallas = partial(programs.by_pallas, interpret=True)

    def plainly(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return plain.attend_to_rows(q, k, v, Mask(), 16**-0.5, first=0, kv_segment_ids=None, with_lse=False)[0]

    found, true = (programs.and_gradients(attention, q, k, v, d_out) for attention in (by_pallas, plainly))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, true)


def test_what_is_measured_of_experts_is_their_products_and_gradients():
    """As jax interprets the kernels, for uneven experts and tokens in any order."""
    jax.set_mesh(None)
    x, w, d = programs.random([jax.ShapeDtypeStruct(n, jnp.float32) for n in ((256, 40), (3, 40, 24), (256, 24))])
    groups = programs.random_groups(3, 256)
    assert len(set(groups.sizes.tolist())) == 3
    y, d_x, d_w = jax.jit(partial(programs.by_grouped, interpret=True))(x, w, d)
    expert = np.repeat(np.arange(3), groups.sizes)
    rows, own = np.asarray(x)[groups.order], np.asarray(w)[expert]
    np.testing.assert_allclose(y, np.einsum("RK,RKN->RN", rows, own), atol=1e-4)
    np.testing.assert_allclose(d_x[groups.order], np.einsum("RN,RKN->RK", d, own), atol=1e-4)
    for number, found in enumerate(d_w):
        np.testing.assert_allclose(found, rows[expert == number].T @ np.asarray(d)[expert == number], atol=1e-3)
