"""Products of tokens with their experts' matrices, by every kernel that runs here, against the definition; and the kernels
as XLA compiles them for GPUs."""

import contextlib
import dataclasses
import functools
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from llamajax.config.experts import ExpertKernel
from llamajax.config.parallel import AXES, MeshConfig
from llamajax.errors import ConfigError
from llamajax.estimates.gpus import planned_gpu
from llamajax.kernels import grouped, grouped_pallas
from llamajax.kernels.grouped import experts_on_rows
from llamajax.kernels.grouped_pallas import visits
from llamajax.parallel.dispatch import Groups
from llamajax.parallel.float8 import E4M3, E5M2, Float8, rounded
from llamajax.parallel.mesh import make_mesh
from llamajax.planning.cost.experts import KERNELS
from llamajax.planning.xla.compile import planned_mesh
from llamajax.planning.xla.hlo import arrays
from llamajax.planning.xla.parse import parse
from tests.kernels.test_pallas import needs
from tests.planning.plans import CONFIG

R, M, E, I_, F = 330, 300, 4, 40, 72
"""Rows, places for them, experts, widths: none of them is a multiple of a tile."""
SIZES = {
    "uneven": (5, 0, 170, 22),
    "all in one": (0, 300, 0, 0),
    "whole tiles": (128, 128, 0, 44),
    "one row": (0, 0, 0, 1),
    "no rows": (0, 0, 0, 0),
}


on_device: Any = functools.partial(jax.shard_map, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)


@pytest.fixture(autouse=True)
def _one_device():
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))


def groups_of(sizes: tuple[int, ...], seed: int = 0) -> Groups:
    """Groups of random rows; places beyond them name a row that has an expert."""
    order, num = np.random.default_rng(seed).permutation(R)[:M].astype(np.int32), sum(sizes)
    order[num:] = order[0]
    is_row, place = np.zeros(R, bool), np.zeros(R, np.int32)
    is_row[order[:num]], place[order[:num]] = True, np.arange(num)
    return Groups(*map(jnp.asarray, (order, np.asarray(sizes, np.int32), is_row, place)))


def experts_of(groups: Groups) -> np.ndarray:
    """The expert of each row as one-hot [R, E]; zeros for rows of none."""
    of_place = np.repeat(np.arange(E), np.asarray(groups.sizes))
    hot = np.zeros((R, E), np.float32)
    hot[np.asarray(groups.order)[: len(of_place)], of_place] = 1
    return hot


def drawn(dtype: str = "float32", gates: int = 2) -> Any:
    rng = np.random.default_rng(1)
    shapes = (R, I_), (R,), (E, I_, gates, F), (E, F, I_), (R, I_)
    x, weights, w_gate_up, w_down, d = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return jnp.asarray(x, dtype), jnp.asarray(weights), jnp.asarray(w_gate_up, dtype), jnp.asarray(w_down, dtype), d


@functools.cache
def results(kernel: ExpertKernel, dtype: str, gates: int = 2) -> Any:
    """Returns a compiled function from groups to the results of `experts_on_rows` and all gradients, by rows that NaN
    replaces where they have no expert."""

    @jax.jit
    @on_device
    def run(groups: Groups, x: jax.Array, weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array, d: jax.Array) -> Any:
        is_row = groups.is_row[:, None]

        def loss(x: jax.Array, weights: jax.Array, *matrices: jax.Array) -> Any:
            y = experts_on_rows(x, weights, groups, matrices[0], matrices[1], kernel)
            y = jnp.where(is_row, y, 0)
            return jnp.sum(y.astype(jnp.float32) * d), y

        known = jnp.where(is_row, x, jnp.nan), jnp.where(groups.is_row, weights, jnp.nan), w_gate_up, w_down
        (_, y), (d_x, *gradients) = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*known)
        return y, jnp.where(is_row, d_x, 0), *gradients

    compiled: Any = run
    return lambda groups: compiled(groups, *drawn(dtype, gates))


@functools.cache
def definition(gates: int = 2) -> Any:
    x, weights, *matrices, d = drawn(gates=gates)

    @jax.jit
    def run(hot: jax.Array) -> Any:
        def loss(x: jax.Array, weights: jax.Array, w_gate_up: jax.Array, w_down: jax.Array) -> Any:
            h = jnp.einsum("RI,EIAF,RE->ARF", x, w_gate_up, hot, precision="highest")
            hidden = jax.nn.silu(h[0]) * math.prod(h[1:]) * weights[:, None]
            y = jnp.einsum("RF,EFI,RE->RI", hidden, w_down, hot, precision="highest")
            return jnp.sum(y * d), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(x, weights, *matrices)
        return y, *gradients

    return run


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("kernel", "dtype", "bound"),
    [
        ("plain", "float32", 1e-5),
        ("pallas", "float32", 1e-5),
        pytest.param("pallas", "bfloat16", 3e-2, marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients_are_those_of_the_definition(kernel: ExpertKernel, dtype: str, bound: float, sizes: str):
    check(results(kernel, dtype), groups_of(SIZES[sizes]), bound)


@pytest.mark.parametrize("kernel", ["plain", "pallas"])
def test_experts_may_have_no_gates(kernel: ExpertKernel):
    check(results(kernel, "float32", 1), groups_of(SIZES["uneven"]), 1e-5, gates=1)


def check(results: Any, groups: Groups, bound: float, gates: int = 2) -> None:
    found, expected = results(groups), definition(gates)(experts_of(groups))
    for name, own, true in zip(("y", "x", "weights", "w_gate_up", "w_down"), found, expected, strict=True):
        true = np.asarray(true)
        np.testing.assert_allclose(
            np.asarray(own, np.float32), true, rtol=0, atol=bound * max(np.abs(true).max(), 1e-3), err_msg=name
        )


def test_tokamax_is_asked_for_the_same_products(monkeypatch):
    """With rows in their order, by a stand-in that leaves rows of no expert unwritten and sums zeros times them."""

    def stand_in(x: jax.Array, y: jax.Array, sizes: jax.Array, dims: Any, *, implementation: str, **how: Any) -> jax.Array:
        assert implementation == "mosaic"
        product = jax.lax.ragged_dot_general(x, y, sizes, dims, **how)
        if not dims.rhs_group_dimensions:
            return product + jnp.sum(0 * x) + jnp.sum(0 * y)
        return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), product, jnp.nan)

    settings = SimpleNamespace(ignore_autotuning_cache=lambda _: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(ragged_dot_general=stand_in, config=settings))
    monkeypatch.setattr(grouped, "grouped_form", lambda *_: "tokamax")
    check(results.__wrapped__("tokamax", "float32"), groups_of(SIZES["uneven"]), 1e-5)


def test_a_tile_is_visited_once_for_every_expert_in_it():
    of_sizes = jax.jit(visits, static_argnums=1)
    found = of_sizes(jnp.asarray([5, 0, 170, 22, 0]), 300)
    assert found.num_visits[0] == 4
    assert list(zip(found.expert[:4].tolist(), found.tile[:4].tolist(), strict=True)) == [(0, 0), (2, 0), (2, 1), (3, 1)]
    assert found.bounds.tolist() == [0, 5, 5, 175, 197, 197]
    for sizes in ([300, 0, 0, 0, 0], [99, 100, 0, 1, 100], [0, 0, 0, 0, 0]):
        own = of_sizes(jnp.asarray(sizes), 300)
        assert own.num_visits[0] <= len(own.tile)


def test_arrays_in_float8_that_pallas_cannot_index_are_refused():
    """Its offsets have 32 bits up to 4 GiB, with a sign."""
    like: Any = jax.ShapeDtypeStruct
    x, w = (Float8(like(n, E4M3), jnp.ones(()), jnp.dtype("bfloat16")) for n in ((2**20, 2048), (4, 2048, 8)))
    groups: Any = groups_of(SIZES["uneven"])
    with pytest.raises(ConfigError, match=r"^model.matmul_dtype: float8 has 2\^31 or more numbers in an array .*; set"):
        grouped_pallas.times(x, w, groups, "x")


def plain_values(x: Float8) -> np.ndarray:
    return np.asarray(x.values, np.float32) * np.asarray(x.scale)


@pytest.mark.parametrize("kernel", ["plain", "pallas"])
def test_products_in_float8_are_those_of_rounded_factors(kernel: ExpertKernel):
    """Rows of no expert, which may hold anything, change no scale."""
    groups = groups_of(SIZES["uneven"])
    hot, is_row = experts_of(groups), np.asarray(groups.is_row)
    x, weights, w_gate_up, w_down, d = map(np.asarray, drawn())
    matrices = tuple(rounded(jnp.asarray(w), E4M3) for w in (w_gate_up, w_down))

    def of_rows(values: np.ndarray) -> np.ndarray:
        return np.where(is_row.reshape(-1, *[1] * (values.ndim - 1)), values, np.nan)

    @jax.jit
    @on_device
    def run(x: jax.Array, weights: jax.Array, d: jax.Array, matrices: tuple[Float8, Float8], groups: Groups) -> Any:
        def of(x: jax.Array, weights: jax.Array, *stand_ins: jax.Array) -> jax.Array:
            own = [dataclasses.replace(w, stand_in=stand_in) for w, stand_in in zip(matrices, stand_ins, strict=True)]
            return experts_on_rows(x, weights, groups, own[0], own[1], kernel)

        y, pull_back = jax.vjp(of, x, weights, *(jnp.zeros(w.shape) for w in matrices))
        return y, *pull_back(d)

    y, d_x, d_weights, d_gate_up, d_down = run(of_rows(x), of_rows(weights), of_rows(d), matrices, groups)
    own_gate_up, own_down = map(plain_values, matrices)
    x8, d8 = in_format(hot.sum(1, keepdims=True) * x, E4M3), in_format(hot.sum(1, keepdims=True) * d, E5M2)
    h = jnp.einsum("RI,EIAF,RE->ARF", x8, own_gate_up, hot, precision="highest")
    hidden, pull_back = jax.vjp(lambda h, weights: jax.nn.silu(h[0]) * h[1] * weights[:, None], h, jnp.asarray(weights))
    hidden8 = in_format(hidden, E4M3)
    d_h, d_of_rows = pull_back(jnp.einsum("RI,EFI,RE->RF", d8, own_down, hot, precision="highest"))
    d_h8 = in_format(d_h, E5M2)
    expected = {
        "y": (y, np.einsum("RF,EFI,RE->RI", hidden8, own_down, hot)),
        "x": (d_x, np.einsum("ARF,EIAF,RE->RI", d_h8, own_gate_up, hot)),
        "weights": (d_weights, d_of_rows),
        "w_gate_up": (d_gate_up, np.einsum("RI,ARF,RE->EIAF", x8, d_h8, hot)),
        "w_down": (d_down, np.einsum("RF,RI,RE->EFI", hidden8, d8, hot)),
    }
    # Some numbers lie between two of the format, and another order of sums rounds them to the other.
    for name, (own, true) in expected.items():
        known = np.where(is_row[:, None], own, 0) if name in ("y", "x") else own
        assert np.linalg.norm(known - true) <= 5e-3 * np.linalg.norm(true), name


def in_format(x: Any, form: Any) -> np.ndarray:
    return plain_values(rounded(jnp.asarray(x), form))


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("gpu", "dtype", "products"),
    [
        ("h100", "bfloat16", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"),
        ("h100", "float8", "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"),
        ("a100-80gb", "bfloat16", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        pytest.param("rtx-4090", "bfloat16", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", marks=pytest.mark.long),
        pytest.param("h100", "float32", "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32", marks=pytest.mark.long),
    ],
)
def test_gpus_hold_the_kernels_and_no_sorted_copy(gpu: str, dtype: str, products: str, tmp_path: Path):
    """Four products of rows and two of matrices, forward and backward, on matrix units and without atomics. No other pass
    reads the hidden layer, and the backward pass multiplies nothing again for it: gates are saved by name. Of an expert's
    share of Qwen3-30B-A3B, with fewer rows."""
    rows, places, experts, width, hidden = 10_000, 8192, 16, 2048, 768
    config = CONFIG.changed({"hardware.gpu": gpu, "hardware.nodes": 1, "mesh": MeshConfig()})
    devices = planned_mesh(config).devices
    mesh = Mesh(devices.reshape(-1)[:1].reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    wide = "float32" if dtype == "float32" else "bfloat16"

    checked: Any = functools.partial(jax.shard_map, in_specs=jax.P(), out_specs=jax.P())

    @jax.jit
    @checked
    def both_passes(x: jax.Array, weights: jax.Array, matrices: Any, groups: Groups, d: jax.Array) -> Any:
        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("gate_up"))
        def run(x: jax.Array, weights: jax.Array, own: Any) -> jax.Array:
            return experts_on_rows(x, weights, groups, own[0], own[1], "auto")

        y, pull_back = jax.vjp(run, x, weights, matrices)
        d_x, d_weights, d_matrices = pull_back(d)
        return y, d_x, d_weights, [own.stand_in if isinstance(own, Float8) else own for own in d_matrices]

    def like(shape: tuple[int, ...], dtype: str = wide) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P()))

    def matrix(*shape: int) -> Any:
        if dtype != "float8":
            return like(shape)
        return Float8(like(shape, "float8_e4m3fn"), like((), "float32"), jnp.dtype(wide), like(shape))

    matrices = matrix(experts, width, 2, hidden), matrix(experts, hidden, width)
    groups = Groups(*map(like, ((places,), (experts,), (rows,), (rows,)), ("int32", "int32", "bool", "int32")))
    with jax.set_mesh(mesh), jax.default_device(devices.flat[0]):
        compiled: Any = both_passes
        lowered = compiled.lower(like((rows, width)), like((rows,), "float32"), matrices, groups, like((rows, width)))
        options: dict[str, Any] = {
            "xla_backend_optimization_level": 3, "xla_dump_to": str(tmp_path),
            "xla_dump_hlo_module_re": ".*both_passes.*", "xla_dump_emitter_re": "ptx",
        }  # fmt: skip
        text = lowered.compile(options).as_text()
    assert text is not None
    assert {name: text.count(f'name = "{name}"') for name in KERNELS} == dict(zip(KERNELS, (2, 1, 1, 2), strict=True))
    instructions = [i for c in parse(text).computations.values() for i in c.instructions.values()]
    made = {array.dims for i in instructions for array in arrays(i.shape)}
    assert (rows, width) in made
    assert (places, 2 * hidden) in made
    assert (places, width) not in made
    if dtype != "float8":
        makers = {
            i.opcode for i in instructions if {(places, hidden), (places, 2 * hidden)} & {a.dims for a in arrays(i.shape)}
        }
        assert makers <= {"custom-call", "get-tuple-element", "tuple", "bitcast"}
    card = planned_gpu(config.hardware)
    for name, of_block in needs(tmp_path, card, "grouped").items():
        assert of_block.threads * of_block.registers <= 65_536, (name, of_block)
        assert of_block.shared_bytes <= card.shared_memory_per_block, (name, of_block)
        assert of_block.spilled == 0, (name, of_block)
    kernels = [text for path in tmp_path.glob("*.ptx") if ".entry grouped_" in (text := path.read_text())]
    assert len(kernels) == 6
    for kernel in kernels:
        # A program of the hidden layer has several sums of fewer columns.
        of_hidden = re.search(r"\.entry grouped_rows_(gated|gradient)\b", kernel)
        columns = {"gated": 64, "gradient": 32 if dtype == "float32" else 64}[of_hidden[1]] if of_hidden else 128
        assert products.replace("m64n128", f"m64n{columns}") in kernel
        assert not re.search(r"\b(atom|red)\.", kernel)
