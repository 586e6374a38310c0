"""SwiGLU's product and gradient in one kernel, interpreted, against jax's own; and as XLA compiles it for GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from llamajax.config.parallel import AXES, MeshConfig
from llamajax.kernels.swiglu import gated, gated_and_gradient, own_gated_and_gradient
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.planning.xla.compile import compile_for, planned_mesh
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from tests.kernels.test_cudnn import num_runs
from tests.planning.plans import CONFIG


@functools.partial(jax.shard_map, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
def interpreted(gate_up: jax.Array, d_gated: jax.Array) -> tuple[jax.Array, jax.Array]:
    return own_gated_and_gradient(gate_up, d_gated, interpret=True)


@pytest.fixture(autouse=True)
def _one_device():
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))


@pytest.mark.parametrize("shape", [(2, 8, 256), (1, 9, 256), (3, 5, 300), (1, 1, 1)])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_the_kernel_is_the_product_and_its_gradient(shape, dtype, bound):
    """In tiles that fill the arrays and in others; gates from where silu is 0 to where it is the gate itself."""
    rng = np.random.default_rng(0)
    gate_up = jnp.asarray(rng.normal(0, 20, (*shape[:2], 2, shape[2])), dtype)
    d_gated = jnp.asarray(rng.standard_normal(shape), dtype)
    found = interpreted(gate_up, d_gated)
    wide = gate_up.astype(jnp.float32)
    expected, pull = jax.vjp(gated, wide)
    for ours, theirs in zip(found, (expected, *pull(d_gated.astype(jnp.float32))), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, rtol=bound, atol=bound)


def test_extreme_gates_have_finite_gradients():
    gate_up = jnp.stack([jnp.asarray([-1e4, -200.0, 0.0, 200.0, 1e4]), jnp.ones(5)])[None, None]
    product, gradient = interpreted(gate_up, jnp.ones((1, 1, 5)))
    np.testing.assert_allclose(product[0, 0], [0, 0, 0, 200, 1e4], atol=1e-6)
    np.testing.assert_allclose(gradient[0, 0], [[0, 0, 0.5, 1, 1], [0, 0, 0, 200, 1e4]], atol=1e-6)


def test_without_a_gpu_it_is_jaxs_own():
    gate_up, d_gated = jax.random.normal(jax.random.key(0), (2, 4, 2, 8)), jax.random.normal(jax.random.key(1), (2, 4, 8))
    expected, pull = jax.vjp(gated, gate_up)
    for ours, theirs in zip(gated_and_gradient(gate_up, d_gated), (expected, *pull(d_gated)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("gpu", ["a100-80gb", "h100"])
def test_gpus_compile_it_for_any_width(gpu):
    """One kernel, compiled by Triton for a GPU that is not here, which makes nothing but its results."""
    B, T, F = 1, 100, 1376
    devices = planned_mesh(CONFIG.changed({"hardware.gpu": gpu, "hardware.nodes": 1, "mesh": MeshConfig()})).devices
    mesh = Mesh(devices.reshape(-1)[:1].reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    with jax.set_mesh(mesh):
        like = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, lies))
            for shape, lies in (((B, T, 2, F), spec("batch", "seq", None, "mlp")), ((B, T, F), spec("batch", "seq", "mlp")))
        ]
        compiled = jax.jit(gated_and_gradient).lower(*like).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    assert text.count('name = "swiglu_gradient"') == 1
    assert memory.temp_size_in_bytes < 1024


SHARED = {"mesh": MeshConfig(fsdp=-1, tensor=4)}


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("remat", "changes", "runs"),
    [
        ("none", {"model.num_layers": 2}, 1),
        *(
            pytest.param(*how, marks=pytest.mark.long)
            for how in (
                ("none", {}, 1),
                ("full", {}, 1),
                ("save_attention_qkv_mlp", {}, 1),
                ("save_attention", {"parallel.stack": "scan"}, 1),
                ("save_attention_qkv_mlp", {"parallel.stack": "scan"}, 0),
                ("full", SHARED | {"parallel.tensor": "collective"}, 1),
                ("full", SHARED | {"parallel.tensor": "ring"}, 0),
                ("full", {"model.matmul_dtype": "float8"}, 0),
            )
        ),
    ],
)
def test_a_layer_runs_it_once_where_it_reads_whole_gates(remat, changes, runs):
    """And not where these come in parts, out of a stack of all layers or from a ring, or the product is rounded."""
    config = CONFIG.changed({"hardware.gpu": "h100", "model.remat": remat, "mesh": MeshConfig(fsdp=-1)} | changes)
    assert num_runs(parse(compile_for(resolve_planned(config)).hlo), "swiglu_gradient") == runs * config.model.num_layers
