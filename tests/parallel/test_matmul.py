"""Shared matmuls give the same numbers, types and bytes whichever way tokens and sums come to the devices."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from llamajax.config.parallel import MeshConfig, TensorForm
from llamajax.parallel import mesh
from llamajax.parallel.matmul import Made, gathered_matmul, scattered_matmul
from llamajax.parallel.sharding import spec

B, T, D, C, F = 4, 16, 6, 2, 8
FORMS: tuple[TensorForm, ...] = ("collective", "ring", "auto")
MESHES = [MeshConfig(fsdp=2, tensor=4), MeshConfig(fsdp=1, sequence=2, tensor=4), MeshConfig(data=2, fsdp=2, tensor=2)]


def product(both: jax.Array) -> jax.Array:
    return both[:, :, 0] * both[:, :, 1]


def product_and_gradient(both: jax.Array, d_product: jax.Array) -> tuple[jax.Array, jax.Array]:
    return product(both), d_product[:, :, None] * both[:, :, ::-1]


def pair(operands: list[jax.Array], form: TensorForm, *, makes: bool = False) -> jax.Array:
    """A matmul of each kind, with a product between that tells tokens and outputs apart, or that the second `makes`."""
    x, up, down = operands
    token_axes = frozenset({"pipeline", "data", "fsdp", "expert", "sequence"})
    up, down = (jax.reshard(w, P(*jax.typeof(w).sharding.spec, reduced=token_axes)) for w in (up, down))
    both, residual = gathered_matmul(x, up, form), jax.typeof(x).sharding.spec
    if makes:
        return scattered_matmul(both, down, residual, form, made=Made(product, product_and_gradient))
    return scattered_matmul(product(both), down, residual, form)


def operands(dtype: str = "float32", residual: str = "residual_seq") -> list[jax.Array]:
    rng = np.random.default_rng(0)
    dims = (("batch", residual, None), (None, None, "mlp"), (None, "mlp"))
    shapes = ((B, T, D), (D, C, F), (D, F))
    drawn = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return [jax.device_put(array, spec(*own)) for array, own in zip(drawn, dims, strict=True)]


@pytest.mark.parametrize("residual", ["residual_seq", "seq"])
@pytest.mark.parametrize("sizes", MESHES)
def test_both_forms_give_the_dense_product_and_its_gradients(sizes, residual):
    jax.set_mesh(mesh.make_mesh(sizes))
    placed = operands(residual=residual)
    x, up, down = map(np.asarray, placed)
    cotangent = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)

    def dense(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        wide = jnp.einsum("BTD,DCF->BTCF", x, up)
        return jnp.einsum("BTF,DF->BTD", wide[:, :, 0] * wide[:, :, 1], down)

    expected, pull_back = jax.vjp(dense, x, up, down)
    for form, makes in itertools.product(FORMS, (False, True)):
        out, backward = jax.vjp(jax.jit(functools.partial(pair, form=form, makes=makes)), placed)
        np.testing.assert_allclose(out, expected, atol=1e-4)
        assert jax.typeof(out) == jax.typeof(placed[0])
        (gradients,) = backward(jax.device_put(cotangent, jax.typeof(out).sharding.spec))
        for ours, theirs, like in zip(gradients, pull_back(cotangent), placed, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-3)
            assert jax.typeof(ours) == jax.typeof(like)


def test_a_ring_passes_each_part_on_once_per_other_device():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, tensor=4)))

    def total(operands: list[jax.Array]) -> jax.Array:
        return jnp.sum(pair(operands, "ring"))

    program = str(jax.make_jaxpr(jax.grad(total))(operands("bfloat16")))
    passed = re.findall(r"(\w+)\[([\d,]+)\]\S* = ppermute\[", program)
    assert passed == [("bf16", f"{B // 2},{T // 4},{D}")] * (4 * 3)  # forward and backward, three hops each
    assert program.count("= optimization_barrier") == 4 * 3  # what keeps hops and matmuls side by side
    assert not re.findall(r"= (?:all_gather|reduce_scatter|psum\w*|all_to_all)\[", program)
