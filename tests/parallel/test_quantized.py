"""Weights in four and eight bits: rounded to the nearest code, equal to bitsandbytes, and the same on every mesh."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import AbstractMesh, AxisType

from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import AXES, MeshConfig
from llamajax.config.quantized import QuantizedForm
from llamajax.estimates.quantized import num_bytes
from llamajax.model.attention import Attention
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.quantized import Quantized, dequantize, quantize
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import Dims
from llamajax.planning.xla.compile import planned_mesh
from tests.tiny import single_device_mesh, tiny_config

FORMS: tuple[QuantizedForm, ...] = ("nf4", "int8", "float8")
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""As published (arXiv:2305.14314, appendix E)."""
TINY = 2.0**-106
"""Blocks of smaller weights are off by at most that: XLA computes with numbers below 2^-126 as with zeros on CPUs."""
quantized = jax.jit(quantize, static_argnums=(1, 2), static_argnames=("num_stacked", "double"))
numbers = jax.jit(dequantize, static_argnums=1)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def blocks(w: np.ndarray) -> np.ndarray:
    """Blocks of a matrix [D, F] with inputs first, [F, D / 64, 64], in the order of torch's [F, D]."""
    return w.T.reshape(w.shape[1], -1, 64)


def whole(weight: Quantized, dtype: str = "float32") -> np.ndarray:
    return np.asarray(numbers(weight, dtype), np.float32)


def of_sizes() -> np.ndarray:
    """A matrix [640, 64] with blocks of every size that weights can have, and blocks of zeros."""
    sizes = [1.0, 1e-30, 1e-36, 1e-3, 1e4, 1e30, 1e38, 0.0, 2.0**-126, 3e-5]
    w = drawn(640, 64).astype(np.float64) * np.repeat(sizes, 64)[:, None]
    return np.clip(w, -3.3e38, 3.3e38).astype(np.float32)


def test_nf4_is_the_nearest_published_number_two_to_a_byte():
    w = drawn(128, 8)
    made = quantized(w, "nf4", 0)
    upper, lower = np.asarray(made.codes) >> 4, np.asarray(made.codes) & 15
    codes = blocks(np.stack([upper, lower], axis=1).reshape(w.shape))
    largest = np.abs(blocks(w)).max(-1)
    np.testing.assert_array_equal(np.asarray(made.scales).T, largest)
    distances = np.abs((blocks(w) / largest[..., None])[..., None] - NF4)
    chosen = np.take_along_axis(distances, codes[..., None], -1)[..., 0]
    np.testing.assert_allclose(chosen, distances.min(-1), atol=1e-7)
    np.testing.assert_array_equal(blocks(whole(made)), NF4[codes] * largest[..., None])


def test_of_two_nearest_nf4_codes_the_lower_is_taken():
    middles = (NF4[1:] + NF4[:-1]) / 2
    w = np.zeros((64, 1), np.float32)
    w[:16, 0] = [1.0, *middles]
    np.testing.assert_array_equal(whole(quantized(w, "nf4", 0))[1:16, 0], NF4[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nf4_equals_bitsandbytes(dtype):
    torch, theirs = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes.functional")
    w = np.asarray(jnp.asarray(of_sizes(), dtype), np.float32)
    made = quantized(jnp.asarray(w, dtype), "nf4", 0)
    x = torch.tensor(w.T.copy()).to(getattr(torch, dtype))
    packed, state = theirs.quantize_4bit(x, quant_type="nf4", blocksize=64)
    codes, their_codes = (np.asarray(x).reshape(64, 10, 32) for x in (made.codes.T, packed))
    scales, their_scales = (np.asarray(x).reshape(64, 10) for x in (made.scales.T, state.absmax))
    normal = their_scales >= 2.0**-121
    assert normal.mean() == 0.8
    np.testing.assert_array_equal(codes[normal | (their_scales == 0)], their_codes[normal | (their_scales == 0)])
    np.testing.assert_array_equal(scales[normal], their_scales[normal])
    ours, other = blocks(whole(made, dtype)), blocks(theirs.dequantize_4bit(packed, state).float().numpy().T)
    np.testing.assert_array_equal(ours[normal], other[normal])
    np.testing.assert_allclose(ours, other, atol=TINY)


@given(arrays(np.float32, (128, 2), elements=st.floats(-1000, 1000, width=32)))
@settings(max_examples=20, deadline=None)
def test_eight_bits_are_off_by_half_a_step(w):
    for form in ("int8", "float8"):
        made = quantized(w, form, 0)
        off, scale = np.abs(whole(made) - w), np.repeat(np.asarray(made.scales), 64, axis=0)
        half = scale / 2 if form == "int8" else np.maximum(np.abs(w) * 2.0**-4, scale * 2.0**-10)
        assert (off <= half * (1 + 2.0**-15) + TINY).all()
        largest = np.abs(blocks(w)).max(-1)
        np.testing.assert_allclose(np.abs(blocks(whole(made))).max(-1), largest, rtol=1e-6, atol=TINY)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_all_sizes_keep_their_own(form, double):
    w = of_sizes()
    made = whole(quantized(w, form, 0, double=double))
    largest = np.abs(blocks(w)).max(-1, keepdims=True)
    within = {"nf4": 0.16, "int8": 0.008, "float8": 0.04}[form]
    assert (np.abs(blocks(made) - blocks(w)) <= within * largest + TINY).all()
    np.testing.assert_array_equal(blocks(made)[:, 7], 0.0)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_number_that_is_not_finite_stays_visible(form, double):
    for wrong in (np.nan, np.inf, -np.inf):
        w = drawn(640, 64)
        w[70, 3] = wrong
        finite = np.isfinite(whole(quantized(w, form, 0, double=double)))
        assert not finite[64:128, 3].any()
        assert np.delete(finite, slice(64, 128), axis=0).all()
        assert double or np.delete(finite, 3, axis=1).all()


@pytest.mark.parametrize("dim", [0, -1])
def test_double_quantization_rounds_scales_to_255_steps(dim):
    w = drawn(640, 64) * np.exp(0.5 * drawn(640, 1, seed=1))
    single, double = (quantized(w, "nf4", dim, double=double) for double in (False, True))
    np.testing.assert_array_equal(single.codes, double.codes)
    steps, least = (
        np.repeat(x, 64, axis=1 if dim == 0 else 0) for x in (np.asarray(double.steps), np.asarray(double.least))
    )
    above = np.asarray(double.scales) * steps
    np.testing.assert_array_equal(above, np.asarray(double.scales) * steps.astype(np.float64))  # exact in every program
    np.testing.assert_array_less(np.abs(least + above - single.scales), 0.501 * steps)
    errors = [np.sqrt(np.mean(np.square(whole(made) - w))) for made in (single, double)]
    assert errors[1] < 1.002 * errors[0]


class Matrix(NamedTuple):
    dim: int
    """Dim of the inputs."""
    shape: tuple[int, ...]
    stored: Dims
    compute: Dims


MESHES = [MeshConfig(fsdp=8), MeshConfig(fsdp=2, tensor=4), MeshConfig(data=2, fsdp=1, sequence=2, tensor=2)]
LAYERS, D, K, C, H, F = 2, 512, 4, 4, 16, 256
MATRICES = {
    "wqkv": Matrix(0, (D, K, C, H), ("embed", "kv_heads", None, "head_dim"), (None, "kv_heads", None, "head_dim")),
    "wo": Matrix(-1, (D, K, C, H), ("embed", "kv_heads", None, "head_dim"), (None, "kv_heads", None, "head_dim")),
    "w_gate_up": Matrix(0, (D, 2, F), ("embed", None, "mlp"), (None, None, "mlp")),
    "w_down": Matrix(-1, (D, F), ("embed", "mlp"), (None, "mlp")),
}
"""The matrices of a layer (`llamajax.model`)."""


@pytest.mark.parametrize(
    ("form", "sizes", "names"),
    [
        ("nf4", MESHES[1], ("wqkv", "w_down")),
        pytest.param("int8", MESHES[0], ("wo", "w_gate_up"), marks=pytest.mark.slow),
        pytest.param("float8", MESHES[2], ("wo", "w_gate_up"), marks=pytest.mark.slow),
        *(pytest.param(form, sizes, tuple(MATRICES), marks=pytest.mark.long) for form in FORMS for sizes in MESHES),
    ],
)
def test_devices_quantize_and_decode_their_own_parts_without_communication(form, sizes, names):
    stacks = {name: drawn(LAYERS, *MATRICES[name].shape) for name in names}

    def round_all(stacks: dict[str, jax.Array]) -> dict[str, Quantized]:
        return {name: quantize(x, form, MATRICES[name].dim, num_stacked=1, double=True) for name, x in stacks.items()}

    def decode_all(weights: dict[str, Quantized]) -> dict[str, jax.Array]:
        return {name: dequantize(weight) for name, weight in weights.items()}

    jax.set_mesh(single_device_mesh())
    alone, expected = jax.jit(lambda stacks: (rounded := round_all(stacks), decode_all(rounded)))(stacks)
    jax.set_mesh(make_mesh(sizes))
    placed = {name: jax.device_put(x, spec(None, *MATRICES[name].stored)) for name, x in stacks.items()}
    round_own = jax.jit(round_all).lower(placed).compile()
    own = round_own(placed)
    jax.tree.map(equal, own, alone)
    gathered = {name: jax.device_put(weight, spec(None, *MATRICES[name].compute)) for name, weight in own.items()}
    decoders = [jax.jit(decode_all).lower(weights).compile() for weights in (own, gathered)]
    for decode, weights in zip(decoders, (own, gathered), strict=True):
        made = decode(weights)
        jax.tree.map(equal, made, expected)
        for name, weight in weights.items():
            assert {array.sharding.spec for array in [made[name], *jax.tree.leaves(weight)]} == {weight.codes.sharding.spec}
            assert weight.shape == stacks[name].shape
    for program in (round_own, *decoders):
        assert not re.search(r"all-|collective|permute", text(program))


def text(program: jax.stages.Compiled) -> str:
    found = program.as_text()
    assert found is not None
    return found


def equal(ours: jax.Array, theirs: jax.Array) -> None:
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_layers_are_decoded_one_by_one_and_at_once():
    x = jax.device_put(drawn(LAYERS, D, F), spec(None, "embed", "mlp"))

    @jax.jit
    def three_ways(x: jax.Array) -> list[jax.Array]:
        weight = quantize(x, "nf4", 0, num_stacked=1, double=True)
        _, scanned = jax.lax.scan(lambda _, layer: (None, dequantize(layer)), None, weight)
        on_devices = jax.shard_map(dequantize, in_specs=jax.typeof(x).sharding.spec, out_specs=jax.typeof(x).sharding.spec)
        return [dequantize(weight), jax.vmap(dequantize)(weight), scanned, on_devices(weight)]

    first, *others = three_ways(x)
    for other in others:
        equal(other, first)
        assert other.sharding.spec == first.sharding.spec


def test_heads_are_copied_and_split_as_codes():
    """Where devices outnumber kv heads, exchanging the arrays of a quantized weight equals exchanging the weight."""
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tensor=4)))
    shape = ModelConfig(vocab_size=64, embed_dim=D, mlp_dim=F, num_layers=1, num_heads=8, num_kv_heads=2, head_dim=H)
    attention = jax.eval_shape(lambda: Attention(shape, jax.random.key(0)))

    @jax.jit
    def both(stored: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        results = []
        for param, x, dim in zip((attention.wqkv, attention.wo), stored, (0, -1), strict=True):
            weight = quantize(x, "nf4", dim, double=True)
            exchanged = jax.tree.map(lambda array, arrange=param.arrange: arrange(array, array.dtype), weight)
            results.append((dequantize(exchanged), param.arrange(dequantize(weight), jnp.float32)))
        return results

    lies = spec("embed_tensor", None, None, "head_dim")
    for ours, theirs in both([jax.device_put(drawn(D, 2, heads, H), lies) for heads in (6, 4)]):
        equal(ours, theirs)
        assert ours.shape[1] == 4


def test_weights_of_an_absent_machine_have_shapes_and_shardings():
    mesh = AbstractMesh((1, 1, 64, 1, 1, 8), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    with jax.set_mesh(None), jax.sharding.use_abstract_mesh(mesh):
        lies = jax.NamedSharding(mesh, spec(None, "embed", None, "mlp"))
        x = jax.ShapeDtypeStruct((80, 8192, 2, 28672), jnp.bfloat16, sharding=lies)
        weight = jax.eval_shape(partial(quantize, form="nf4", dim=0, num_stacked=1, double=True), x)
        assert (weight.shape, weight.ndim, weight.dtype) == (x.shape, x.ndim, x.dtype)
        assert {array.sharding.spec for array in jax.tree.leaves(weight)} == {lies.spec}
        held = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(weight))
        assert held == 80 * num_bytes(x.shape[1:], "nf4", 0, double=True)
        assert jax.eval_shape(dequantize, weight).sharding.spec == lies.spec


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_plan_counts_the_bytes(form, double):
    for dim, shape in ((0, (96, 2, 40)), (-1, (96, 2, 40)), (0, (64, 64)), (-1, (24, 1000))):
        weight = jax.eval_shape(partial(quantize, form=form, dim=dim, double=double), jax.ShapeDtypeStruct(shape, "float32"))
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weight)) == num_bytes(shape, form, dim, double=double)


def test_half_a_byte_is_refused():
    with pytest.raises(ValueError, match="nf4 stores two weights per byte, so the inputs must be even"):
        quantize(jnp.ones((3, 4)), "nf4", 0)
    assert whole(quantized(np.ones((3, 4), np.float32), "int8", 0)).shape == (3, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("dim", [0, -1])
def test_a_gpu_decodes_in_one_kernel_and_quantizes_in_place(dim):
    config = tiny_config(mesh=MeshConfig(fsdp=8), hardware=HardwareConfig(gpu="h200"))
    mesh = planned_mesh(config)
    with jax.set_mesh(mesh):
        lies = jax.NamedSharding(mesh, spec("embed", "mlp"))
        x = jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16, sharding=lies)
        round_own = jax.jit(partial(quantize, form="nf4", dim=dim, double=True))
        weight = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=lies), jax.eval_shape(round_own, x)
        )
        compiled = round_own.lower(x).compile()
        program = text(jax.jit(dequantize).lower(weight).compile())
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.05 * (x.size * x.dtype.itemsize / 8)
    kernels = program[program.index("ENTRY") :]
    assert re.findall(r"kind=k(\w+)", kernels) == ["Loop"]
    assert " gather(" not in kernels
