"""cuDNN's attention lowers to one kernel forward and one backward; nothing runs on a GPU."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from llamajax.config.parallel import AXES, MeshConfig
from llamajax.config.training import TrainConfig
from llamajax.errors import EnvironmentMismatchError
from llamajax.kernels import cudnn, plain
from llamajax.kernels.cudnn import workspace_bytes
from llamajax.kernels.plain import Mask
from llamajax.model import Llama
from llamajax.parallel import mesh
from llamajax.parallel.sharding import spec
from llamajax.planning.xla.compile import compile_for
from llamajax.planning.xla.hlo import Computation, Module
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from tests.planning.plans import CONFIG
from tests.tiny import random_rows, tiny_config

SCALE = 0.4
H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda")


def mesh_of(device: AbstractDevice, **sizes: int) -> AbstractMesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES), abstract_device=device)


@pytest.mark.parametrize(("kv_heads", "full_heads"), [(8, 0), (2, 2 * 2), (1, 2 * 2)])
def test_the_workspace_by_hand(kv_heads, full_heads):
    """fp32 gradients of the queries and one sum per query and head; shared heads' gradients in 16 bits first."""
    assert workspace_bytes(2, 8, kv_heads, 1024, 128) == 2 * 8 * 1024 * (128 * (4 + full_heads) + 4)


def test_open_documents_are_one():
    config = tiny_config(train=TrainConfig(num_steps=1, global_batch_size=8))
    open_config = dataclasses.replace(config.model, attend_across_documents=True)
    rows = random_rows(config, step=0)
    model, open_model = (Llama(c, jax.random.key(0)) for c in (config.model, open_config))
    closed, whole = (jax.jit(m)(rows["tokens"], rows["segment_ids"], rows["positions"]) for m in (model, open_model))
    np.testing.assert_array_equal(whole, jax.jit(model)(rows["tokens"]))
    assert np.abs(whole - closed).max() > 0.1


@pytest.mark.parametrize("window", [None, 5])
def test_what_cudnn_is_asked_for_is_what_the_plain_form_computes(monkeypatch, window):
    """jax's own plain form stands in for the kernel, which cannot run here: heads, mask and window are told alike."""
    told = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **how: told(*x, **how))
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=4, tensor=2)))
    rng = np.random.default_rng(0)
    shapes = ((8, 16, 2, 3, 8), (8, 16, 2, 8), (8, 16, 2, 8))
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    q = jax.device_put(q, spec("batch", "seq", "kv_heads", None, "head_dim"))
    k, v = jax.device_put((k, v), spec("batch", "seq", "kv_heads", "head_dim"))

    def results(attention):
        def weighted(q, k, v):
            out = attention(q, k, v)
            return jnp.sum(out * jnp.cos(jnp.arange(8.0)).reshape(1, 1, 1, 1, 8)), out

        return jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(q, k, v)

    by_cudnn = results(lambda q, k, v: cudnn.attend(q, k, v, window, SCALE))
    by_plain = results(lambda q, k, v: plain.attend(q, k, v, Mask(window=window), SCALE)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), by_cudnn, by_plain)


def test_missing_cudnn_is_told_in_one_line(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("cuDNN not found.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    q = jax.device_put(jnp.zeros((8, 16, 8, 2, 8)), spec("batch", "seq", "kv_heads", None, "head_dim"))
    kv = jax.device_put(jnp.zeros((8, 16, 8, 8)), spec("batch", "seq", "kv_heads", "head_dim"))
    with pytest.raises(EnvironmentMismatchError, match=r"^cuDNN, .* was not found; .* model.attention_kernel: plain"):
        jax.jit(cudnn.attend, static_argnums=(3, 4))(q, kv, kv, None, SCALE)


def num_runs(module: Module, kernel: str, computation: Computation | None = None) -> int:
    """How often a kernel, named by its target or in its configuration, runs in one run of a computation, loops and all."""
    total = 0
    for instruction in (computation or module.entry).instructions.values():
        target = instruction.attributes.get("custom_call_target", "").strip('"')
        total += target == kernel or f'name = "{kernel}"' in instruction.attributes.get("backend_config", "")
        inner = instruction.called("body", "calls", "to_apply", "called_computations")
        if inner:
            times = instruction.trip_count or 1
            total += times * sum(num_runs(module, kernel, module.computations[name]) for name in inner)
    return total


@pytest.mark.long  # test_pallas.py has a step with the two kernels in CI
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(("window", "kv_heads", "stack"), [(None, 8, "scan"), (512, 2, "prefetch")])
def test_the_step_has_one_kernel_forward_and_one_backward(window, kv_heads, stack):
    shape = {"model.sliding_window": window, "model.num_kv_heads": kv_heads, "parallel.stack": stack}
    config = CONFIG.changed(shape | {"model.attend_across_documents": True, "model.remat": "save_attention"})
    fused = compile_for(resolve_planned(config.changed({"mesh": MeshConfig(tensor=2)})))
    assert set(re.findall(r"__cudnn\$\w+", fused.hlo)) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    module, layers = parse(fused.hlo), config.model.num_layers
    assert num_runs(module, "__cudnn$fmhaSoftmax") == layers
    assert num_runs(module, "__cudnn$fmhaSoftmaxBackward") == layers
    if window is not None:
        assert f'"sliding_window_length":{window}' in fused.hlo.replace(" ", "")
    plain = compile_for(resolve_planned(config.changed({"model.attention_kernel": "plain"})))
    assert "__cudnn$fmha" not in plain.hlo
    assert fused.peak_bytes < plain.peak_bytes
