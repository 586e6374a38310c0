"""Layers that take turns, with a window and without: what they compute in plain Python, one after the other."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.model import LayerType, ModelConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig, StackForm
from llamajax.kernels.attention import Mask
from llamajax.model import Llama
from llamajax.model.attention import Rows
from llamajax.model.llama import Activations
from llamajax.model.rope import positions_from_segment_ids, rope_tables
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import gathered
from tests.tiny import single_device_mesh

SLIDING, FULL = "sliding_attention", "full_attention"
ROUNDS: dict[str, tuple[LayerType, ...]] = {
    "every-other": (SLIDING, FULL),
    "two-of-three": (SLIDING, SLIDING, FULL),
    "upper": (FULL, FULL, SLIDING, SLIDING, SLIDING),
}
CONFIG = ModelConfig(
    vocab_size=32, embed_dim=16, mlp_dim=24, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=4,
    init_std=0.2, compute_dtype="float32", sliding_window=3, layer_types=ROUNDS["every-other"],
)  # fmt: skip
B, T = 4, 16
rng = np.random.default_rng(0)
TOKENS = rng.integers(0, 32, (B, T)).astype(np.int32)
SEGMENTS = np.sort(rng.integers(1, 3, (B, T)), axis=1).astype(np.int32)


def one_by_one(model: Llama, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The logits, without loops and what hides communication."""
    config, kinds = model.config, itertools.cycle(model.config.layer_types)
    tables = rope_tables(positions_from_segment_ids(segment_ids), config)
    x = model.embedding[...].at[tokens].get(out_sharding=spec("batch", "seq", None))
    for number, kind in zip(range(config.num_layers), kinds, strict=False):
        layer = gathered(jax.tree.map(lambda stacked, number=number: stacked[number], model.layers), "float32")
        window = config.sliding_window if kind == SLIDING else None
        (x, _), _ = layer(Activations(x, {}), Rows(*tables, Mask(window=window, segment_ids=segment_ids)))
    return jnp.einsum("BTD,VD->BTV", model.final_norm(x), model.output_weight()[...])


def value_and_gradients(logits, config: ModelConfig) -> tuple[jax.Array, list[np.ndarray]]:
    model = jax.jit(Llama, static_argnums=0)(config, jax.random.key(0))
    tokens, segment_ids = (jax.device_put(array, spec("batch", "seq")) for array in (TOKENS, SEGMENTS))

    def total(model: Llama) -> jax.Array:
        return jnp.mean(jnp.cos(logits(model, tokens, segment_ids)))

    value, gradients = jax.jit(jax.value_and_grad(total))(model)
    return value, list(map(np.asarray, jax.tree.leaves(gradients)))


@functools.cache
def expected(kinds: str) -> tuple[jax.Array, list[np.ndarray]]:
    jax.set_mesh(single_device_mesh())
    return value_and_gradients(one_by_one, dataclasses.replace(CONFIG, layer_types=ROUNDS[kinds]))


def in_form(stack: StackForm):
    def logits(model: Llama, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
        x, _ = model.hidden(tokens, segment_ids, parallel=ParallelConfig(stack=stack), remat=model.config.remat)
        return model._logits(jax.reshard(x, spec("batch", "seq", None)))

    return logits


def marks(stack: str, remat: str, on_a_mesh: bool):
    """Each form alone every day; `slow` has one that saves something, `long` all. Some meshes are in CI with training."""
    if remat == "full" and not on_a_mesh:
        return ()
    return pytest.mark.slow if (stack, remat, on_a_mesh) == ("unrolled", "save_attention", False) else pytest.mark.long


CASES = [
    pytest.param(stack, remat, kinds, on_a_mesh, marks=marks(stack, remat, on_a_mesh))
    for number, (stack, remat) in enumerate(
        itertools.product(("scan", "prefetch", "unrolled"), ("none", "full", "save_attention", "save_attention_qkv_mlp"))
    )
    for place, kinds in enumerate(ROUNDS)
    if number % 3 == place
    for on_a_mesh in (False, True)
]


@pytest.mark.parametrize(("stack", "remat", "kinds", "on_a_mesh"), CASES)
def test_logits_and_gradients_are_those_of_layers_run_one_by_one(stack, remat, kinds, on_a_mesh):
    value, truths = expected(kinds)
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)) if on_a_mesh else single_device_mesh())
    config = dataclasses.replace(CONFIG, remat=remat, layer_types=ROUNDS[kinds])
    found, gradients = value_and_gradients(in_form(stack), config)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    for ours, truth in zip(gradients, truths, strict=True):
        np.testing.assert_allclose(ours, truth, rtol=0, atol=1e-5 * np.abs(truth).max())


@pytest.mark.parametrize("changes", [{"layer_types": (FULL, SLIDING)}, {"layer_types": ()}, {"sliding_window": 4}])
def test_other_layers_compute_something_else(changes):
    jax.set_mesh(single_device_mesh())
    logits = [
        np.asarray(jax.jit(Llama.__call__)(jax.jit(Llama, static_argnums=0)(own, jax.random.key(0)), TOKENS, SEGMENTS))
        for own in (CONFIG, dataclasses.replace(CONFIG, **changes))
    ]
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


def test_layers_that_take_turns_are_the_windows_of_the_shortest_round():
    assert dataclasses.replace(CONFIG, layer_types=()).windows == (3,)
    assert dataclasses.replace(CONFIG, layer_types=(), sliding_window=None).windows == (None,)
    assert dataclasses.replace(CONFIG, layer_types=(SLIDING, FULL) * 2).windows == (3, None)
    assert dataclasses.replace(CONFIG, layer_types=(SLIDING, FULL, SLIDING)).windows == (3, None, 3)
    whole = (SLIDING, FULL, SLIDING, FULL, SLIDING)  # of all five layers
    assert dataclasses.replace(CONFIG, layer_types=whole).windows == (3, None)
