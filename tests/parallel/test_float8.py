"""Products in eight bits: what rounding explains and no more, by one device's scale or by all devices'."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from llamajax.config.parallel import MeshConfig, TensorForm
from llamajax.parallel.float8 import E4M3, E5M2, Float8, rounded
from llamajax.parallel.matmul import gathered_matmul, scattered_matmul
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import token_axes
from tests.tiny import single_device_mesh

B, T, D, F = 8, 16, 32, 64
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3, jnp.dtype("float32"): 0.0}
"""Largest relative rounding of a number."""
MESHES = [MeshConfig(fsdp=8), MeshConfig(fsdp=2, tensor=4), MeshConfig(data=2, fsdp=1, sequence=2, tensor=2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", HALF_STEP)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 3e4, 1e30])
def test_numbers_of_any_size_are_rounded_to_the_format(form, dtype, size):
    x = (size * np.random.default_rng(0).standard_normal((64, 64))).astype(dtype).astype(np.float32)
    made = rounded(jnp.asarray(x, dtype), form)
    assert (made.values.dtype, made.dtype) == (form, jnp.dtype(dtype))
    mantissa, _ = np.frexp(np.asarray(made.scale))
    assert mantissa == 0.5  # a power of two
    back = np.asarray(made.values, np.float32) * np.asarray(made.scale)
    below = {E4M3: 2.0**-17, E5M2: 2.0**-31}.get(form, 0.0) * np.abs(x).max()
    np.testing.assert_array_less(np.abs(back - x), HALF_STEP[form] * np.abs(x) + below + 1e-45)
    if form in (E4M3, E5M2):
        top = float(jnp.finfo(form).max)
        assert top / 2 <= np.abs(np.asarray(made.values, np.float32)).max() <= top


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so():
    zeros = rounded(jnp.zeros((2, 3)), E4M3)
    assert not np.asarray(zeros.values, np.float32).any()
    assert np.isfinite(zeros.scale)
    for wrong in (jnp.nan, jnp.inf):
        made = rounded(jnp.asarray([1.0, wrong]), E5M2)
        assert not jnp.isfinite(made.values.astype(jnp.float32) * made.scale).all()


def test_stacked_layers_have_a_scale_each():
    layers = jnp.asarray([[1.0, 2.0], [100.0, 200.0]])
    made = rounded(layers, E4M3, num_stacked=1)
    for layer, values, scale in zip(layers, made.values, made.scale, strict=True):
        alone = rounded(layer, E4M3)
        assert scale == alone.scale
        np.testing.assert_array_equal(np.asarray(values, np.float32), np.asarray(alone.values, np.float32))
    assert made.scale[0] != made.scale[1]


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weight(values: np.ndarray, *dims: str | None) -> Float8:
    """As `llamajax.parallel.zero` gathers it."""
    placed = jax.device_put(values, spec(*dims))
    made = rounded(placed, E4M3)
    lies = P(*spec(*dims), reduced=token_axes())
    stand_in = jax.reshard(jnp.zeros_like(placed), lies)
    return Float8(jax.reshard(made.values, lies), made.scale, made.dtype, stand_in)


def both(form: TensorForm = "collective") -> list[tuple[np.ndarray, ...]]:
    """Result, gradient of the tokens and gradient of the weight, of a matmul of each kind, on the current mesh."""
    residual = jax.device_put(drawn(0, B, T, D), spec("batch", "residual_seq", None))
    wide = jax.device_put(drawn(1, B, T, F), spec("batch", "seq", "mlp"))
    lies, w = jax.typeof(residual).sharding.spec, weight(drawn(2, D, F), None, "mlp")
    of_outputs, of_residual = jax.device_put(drawn(3, B, T, F), spec("batch", "seq", "mlp")), jnp.flip(residual, 0)

    def up(x: jax.Array, stand_in: jax.Array) -> jax.Array:
        return gathered_matmul(x, Float8(w.values, w.scale, w.dtype, stand_in), form)

    def down(y: jax.Array, stand_in: jax.Array) -> jax.Array:
        return scattered_matmul(y, Float8(w.values, w.scale, w.dtype, stand_in), lies, form)

    @jax.jit
    def run(function_input: tuple[jax.Array, ...]) -> list[tuple[jax.Array, ...]]:
        residual, wide, stand_in, of_outputs, of_residual = function_input
        results = []
        for function, x, d_out in ((up, residual, of_outputs), (down, wide, of_residual)):
            out, pull_back = jax.vjp(function, x, stand_in)
            dx, dw = pull_back(d_out)
            results.append((out, dx, jax.reshard(dw, spec(None, "mlp"))))
        return results

    assert w.stand_in is not None
    made = run((residual, wide, w.stand_in, of_outputs, of_residual))
    return [tuple(np.asarray(array) for array in arrays) for arrays in made]


def bounded(ours: np.ndarray, x: np.ndarray, y: np.ndarray, relative: float) -> None:
    """Bounds the error of a matrix product with terms that are off by `relative` at most."""
    bound = relative * (np.abs(x) @ np.abs(y)) + 1e-3
    np.testing.assert_array_less(np.abs(ours - x @ y), bound)
    assert np.abs(ours - x @ y).max() > 1e-3  # and rounded it is


def test_products_and_gradients_are_off_by_rounding_alone():
    jax.set_mesh(single_device_mesh())
    tokens = [drawn(seed, B, T, size).reshape(B * T, size) for seed, size in ((0, D), (1, F), (3, F))]
    residual, wide, of_outputs = tokens
    w, of_residual = drawn(2, D, F), np.flip(drawn(0, B, T, D), 0).reshape(B * T, D)
    forward, backward = (1 + 2.0**-4) ** 2 - 1, (1 + 2.0**-4) * (1 + 2.0**-3) - 1
    up, down = ([array.reshape(-1, array.shape[-1]) for array in arrays] for arrays in both())
    bounded(up[0], residual, w, forward)
    bounded(up[1], of_outputs, w.T, backward)
    bounded(up[2], residual.T, of_outputs, backward)
    bounded(down[0], wide, w.T, forward)
    bounded(down[1], of_residual, w, backward)
    bounded(down[2], of_residual.T, wide, backward)


@pytest.mark.parametrize("form", ["collective", "ring"])
@pytest.mark.parametrize("sizes", MESHES)
def test_every_mesh_and_form_gives_one_device_s_products(sizes, form):
    jax.set_mesh(single_device_mesh())
    alone = both()
    jax.set_mesh(make_mesh(sizes))
    for ours, theirs in zip(both(form), alone, strict=True):
        for own, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(own, other, atol=1e-4)


def test_no_device_waits_for_the_largest_entry_of_tokens_that_it_does_not_multiply():
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tensor=4)))
    x, w = jax.device_put(drawn(0, B, T, D), spec("batch", "residual_seq", None)), weight(drawn(2, D, F), None, "mlp")
    program = str(jax.make_jaxpr(lambda x: gathered_matmul(x, w, "collective"))(x))
    assert re.findall(r"= (pmax|psum|all_\w+)\w*\[\s*axes=([^\n]*?\))", program) == [("pmax", "('tensor',)")]


@pytest.mark.parametrize("form", ["collective", "ring"])
def test_tokens_are_sent_in_eight_bits(form):
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tensor=4)))
    x, w = jax.device_put(drawn(0, B, T, D), spec("batch", "residual_seq", None)), weight(drawn(2, D, F), None, "mlp")
    program = str(jax.make_jaxpr(lambda x: gathered_matmul(x, w, form))(x))
    sent = re.findall(r"(\w+)\[[^\]]*\]\S* = (?:reshard|ppermute)\b", program)
    assert sent == ["f8_e4m3fn"] * (1 if form == "collective" else 3)
