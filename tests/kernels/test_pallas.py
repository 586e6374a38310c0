"""The kernels in Pallas, interpreted, against attention by its definition; and as XLA compiles them for GPUs."""

import functools
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding

from llamajax.config.parallel import AXES, MeshConfig
from llamajax.estimates.gpus import Gpu, planned_gpu
from llamajax.kernels import pallas
from llamajax.kernels.plain import Mask
from llamajax.kernels.task import Language
from llamajax.kernels.tiles import Documents
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.planning.xla.compile import compile_for, planned_mesh
from llamajax.planning.xla.hlo import arrays
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from tests.kernels.split_rows import check, check_bf16
from tests.kernels.test_cudnn import num_runs
from tests.planning.plans import CONFIG

SCALE = 0.3


@pytest.fixture(autouse=True)
def _one_device():
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))


def by_definition(
    q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents | None, offset: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """In fp32, of all scores at once; a query that sees nothing has zeros, and -inf."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    distance = offset + jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    visible = ((distance >= 0) & (distance < (window or 10**6)))[None]
    if documents is not None:
        visible = visible & (documents.of_queries[:, :, None] == documents.of_keys[:, None, :])
    visible = visible[:, None, None]
    scores = SCALE * jnp.einsum("BTKGH,BSKH->BKGTS", q, k, precision="highest")
    lse = jax.nn.logsumexp(scores, axis=-1, where=visible)
    weights = jnp.where(visible, jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None]), 0.0)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v, precision="highest"), jnp.moveaxis(lse, -1, 1)


def by_kernel(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    documents: Documents | None,
    offset: int,
    window: int | None,
    language: Language = "pallas",
) -> tuple[jax.Array, jax.Array]:
    @functools.partial(jax.shard_map, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, documents: Documents | None) -> tuple[jax.Array, jax.Array]:
        sight = pallas.sight(q.shape[1], k.shape[1], q.shape[-1], offset=offset, window=window, documents=documents)
        return pallas.attend_to_rows(q, k, v, sight, window=window, scale=SCALE, interpret=True, language=language)

    return on_device(q, k, v, documents)


@st.composite
def cases(draw) -> dict[str, Any]:
    """Shapes, masks, ragged documents, windows, ratios of heads, offsets; some queries may see nothing."""
    t, s = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    return {
        "shape": (draw(st.integers(1, 2)), t, s, draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3, 7)))),
        "head_dim": draw(st.sampled_from((8, 64, 80, 96, 128))),
        "offset": draw(st.sampled_from((0, s - t, 17, -9, 300))),
        "window": draw(st.none() | st.integers(1, 150)),
        "num_documents": draw(st.sampled_from((0, 1, 3, 30))),
        "seed": draw(st.integers(0, 99)),
        "enough_programs": draw(st.sampled_from((1, 9, 512))),
    }


def check_case(case: dict[str, Any], dtype: str, tolerance: float, language: Language = "pallas") -> None:
    """Outputs, log-sum-exps and gradients for random gradients of both, in units of the largest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas, "_ENOUGH_PROGRAMS", case.get("enough_programs", 1))
        _check_case(case, dtype, tolerance, functools.partial(by_kernel, language=language))


def _check_case(case: dict[str, Any], dtype: str, tolerance: float, by_kernel: Any) -> None:
    (B, T, S, K, G), H, rng = case["shape"], case["head_dim"], np.random.default_rng(case["seed"])
    q, k, v = (jnp.asarray(rng.standard_normal(n), dtype) for n in ((B, T, K, G, H), (B, S, K, H), (B, S, K, H)))
    d_out, d_lse = rng.standard_normal((B, T, K, G, H)), rng.standard_normal((B, T, K, G))
    documents = None
    if case["num_documents"]:
        lengths = rng.integers(0, case["num_documents"], (2, B, max(T, S)))
        of_queries, of_keys = np.sort(lengths, axis=2)[:, :, : max(T, S)].astype(np.int32)
        documents = Documents(jnp.asarray(of_queries[:, :T]), jnp.asarray(of_keys[:, :S]))
    where = documents, case["offset"], case["window"]

    def results(attend: Any) -> list[np.ndarray]:
        def weighted(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            out, lse = attend(q, k, v, *where)
            return jnp.sum(out * d_out) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0) * d_lse), (out, lse)

        gradients, outs = jax.jit(jax.grad(weighted, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return [np.asarray(x, np.float32) for x in (*outs, *gradients)]

    for name, own, true in zip(("out", "lse", "d_q", "d_k", "d_v"), results(by_kernel), results(by_definition), strict=True):
        np.testing.assert_array_equal(np.isneginf(own), np.isneginf(true), err_msg=name)
        own, true = (np.where(np.isneginf(x), 0, x) for x in (own, true))
        assert np.abs(own - true).max() <= tolerance * max(np.abs(true).max(), 1e-3), (name, case)


@settings(max_examples=8, derandomize=True, deadline=None)
@given(cases())
def test_fp32_is_attention_by_its_definition(case):
    check_case(case, "float32", 1e-5)


@pytest.mark.slow
def test_bf16_is_near_it():
    case = {"shape": (1, 150, 130, 1, 2), "head_dim": 64, "offset": 0, "window": 40, "num_documents": 3, "seed": 0}
    check_case(case, "bfloat16", 2e-2)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "tolerance", "examples"), [("float32", 1e-5, 60), ("bfloat16", 2e-2, 6)])
def test_more_cases(dtype, tolerance, examples):
    @settings(max_examples=examples, derandomize=True, deadline=None)
    @given(cases())
    def check(case):
        check_case(case, dtype, tolerance)

    check()


@pytest.mark.parametrize(("head_dim", "length"), [(256, 150), (128, 260)])
def test_wide_heads_and_rows_of_several_tiles(head_dim, length):
    shape = (1, length, length, 1, 2)
    case = {"shape": shape, "head_dim": head_dim, "offset": 0, "window": None, "num_documents": 3, "seed": 0}
    check_case(case, "float32", 1e-5)


@pytest.mark.long
def test_the_order_of_programs_changes_no_number(monkeypatch):
    """Every program sums up as it did, whichever are before it."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(n), "float32") for n in ((2, 260, 1, 2, 64), (2, 260, 1, 64), (2, 260, 1, 64))
    )
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (2, 260)), axis=1), jnp.int32)

    def results() -> list[np.ndarray]:
        @jax.jit
        def there_and_back(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            found, pull_back = jax.vjp(lambda q, k, v: by_kernel(q, k, v, Documents(ids, ids), 0, 150), q, k, v)
            return *found, *pull_back(jax.tree.map(jnp.ones_like, found))

        return [np.asarray(x) for x in there_and_back(q, k, v)]

    longest_first, sight = results(), pallas.sight

    def shortest_first(*arguments: Any, **how: Any) -> Any:
        seen = sight(*arguments, **how)
        return seen._replace(tiles=jax.tree.map(lambda table: table[:, ::-1], seen.tiles))

    monkeypatch.setattr(pallas, "sight", shortest_first)
    for own, other in zip(longest_first, results(), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize(
    ("group", "programs", "parts"), [(8, 128, 4), (8, 64, 8), (8, 600, 1), (8, 256, 2), (7, 300, 7), (1, 5, 1), (6, 200, 3)]
)
def test_a_group_is_split_where_programs_are_few(group, programs, parts):
    assert pallas._parts_of_group(group, programs) == parts


def test_queries_that_see_nothing_have_zeros_and_no_gradient():
    q, kv = jnp.ones((1, 20, 1, 1, 8)), jnp.ones((1, 20, 1, 8))
    documents = Documents(jnp.ones((1, 20), jnp.int32), jnp.full((1, 20), 2, jnp.int32))

    @jax.jit
    def there_and_back(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        found, backward = jax.vjp(lambda q, k, v: by_kernel(q, k, v, documents, 0, None), q, k, v)
        return found, backward(jax.tree.map(jnp.ones_like, found))

    (out, lse), gradients = there_and_back(q, kv, kv)
    assert not np.any(out)
    assert np.all(np.isneginf(lse))
    for gradient in gradients:
        assert not np.any(gradient)


@pytest.mark.parametrize(
    ("form", "axes", "case"),
    [
        pytest.param("gather", {"fsdp": 2, "tensor": 2}, {"window": 5}, marks=pytest.mark.slow),
        ("gather", {"fsdp": 2, "sequence": 2, "tensor": 2}, {"packed": False}),
        ("gather", {"sequence": 4}, {"window": 7}),
        ("ulysses", {"sequence": 4}, {"window": 9, "K": 1, "G": 4}),
        pytest.param("ulysses", {"fsdp": 2, "sequence": 2}, {"packed": False}, marks=pytest.mark.slow),
        ("ring", {"sequence": 2}, {}),
        pytest.param("ring", {"sequence": 4}, {"window": 7, "packed": False}, marks=pytest.mark.long),
        pytest.param("ring", {"fsdp": 2, "sequence": 3}, {"T": 18, "window": 2}, marks=pytest.mark.long),
        pytest.param("ring", {"sequence": 2, "tensor": 2}, {"T": 64, "window": 20}, marks=pytest.mark.slow),
    ],
)
def test_split_rows_are_one_devices(form, axes, case):
    check(form, axes, kernel="pallas", **case)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ulysses", *(pytest.param(form, marks=pytest.mark.long) for form in ("gather", "ring"))])
def test_split_rows_in_bf16_are_as_near_as_the_plain_form(form):
    check_bf16(form, kernel="pallas")


@pytest.mark.slow
def test_what_is_seen_is_found_out_once_for_all_layers():
    """Given to the door with the mask, it is not made again."""
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2), jax.devices()[:2]))
    q, kv = jnp.zeros((2, 32, 1, 2, 8)), jnp.zeros((2, 32, 1, 8))
    q, kv = jax.device_put((q, kv), (spec("batch", "seq", "kv_heads", None, None), spec("batch", "seq", "kv_heads", None)))
    bare = Mask(segment_ids=jax.device_put(jnp.ones((2, 32), jnp.int32), spec("batch", "seq")))
    mask = pallas.see(bare, 32, 8, "gather")
    of_mask, of_bare = (
        str(jax.make_jaxpr(lambda q, kv, m=m: pallas.attend(q, kv, kv, m, 1.0, interpret=True))(q, kv)) for m in (mask, bare)
    )
    assert "argmax" in of_bare
    assert "argmax" not in of_mask


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("gpu", "stack", "remat", "kernel"),
    [
        pytest.param("h100", "prefetch", "save_attention", "pallas", marks=pytest.mark.long),
        *(
            pytest.param(*how, remat, kernel, marks=pytest.mark.slow if remat in sampled else pytest.mark.long)
            for *how, kernel, sampled in (
                ("h100", "scan", "pallas", ("full",)),
                ("a100-80gb", "prefetch", "pallas", ()),
                ("h100", "prefetch", "cudnn", ("none",)),
            )
            for remat in ("none", "save_attention_qkv_mlp", "save_attention_qkv", "save_attention", "full")
        ),
    ],
)
def test_the_step_runs_the_kernel_once_forward_and_once_backward(gpu, stack, remat, kernel):
    """In a layer; again only where attention is computed again, which is what `full` asks for. And neither the scores of
    rows nor the logits of tokens are arrays in fp32."""
    open_documents = {"model.attend_across_documents": kernel == "cudnn"}
    config = CONFIG.changed({"hardware.gpu": gpu, "model.remat": remat, "parallel.stack": stack} | open_documents)
    # Rows longer than the 1,024 tokens whose embeddings' gradients are summed at once, by an array of that square.
    config = config.changed({"model.vocab_size": 4096, "data.seq_len": 2048, "mesh": MeshConfig(fsdp=-1)})
    module, layers = parse(compile_for(resolve_planned(config)).hlo), config.model.num_layers
    names = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
    if kernel == "pallas":
        names = ("attention_forward", "attention_backward_queries", "attention_backward_keys")
    again = layers if remat == "full" else 0
    assert [num_runs(module, name) for name in names] == [layers + again, *(layers for _ in names[1:])]
    inside = {name for c in module.computations.values() for i in c.instructions.values() for name in i.called("calls")}
    T, V = config.data.seq_len, config.model.vocab_size
    for computation in module.computations.values():
        if computation.name not in inside:  # what is inside a fusion is never an array in memory
            made = [array for i in computation.instructions.values() for array in arrays(i.shape)]
            assert not [array for array in made if array.dims[-2:] == (T, T)]
            wide = [array for array in made if array.dtype == "f32" and array.dims[-1:] == (V,)]
            # The head's gradient may lie like this; a device has eight times as many tokens.
            assert not [array for array in wide if array.num_elements > config.model.embed_dim * V]


class Needs(NamedTuple):
    """Resources of a core that a block of a kernel takes."""

    threads: int
    registers: int
    """Registers of each thread."""
    spilled: int
    """Bytes of each thread that are written to memory for want of registers."""
    shared_bytes: int


def needs(folder: Path, gpu: Gpu, kernels: str = "attention") -> dict[str, Needs]:
    """Returns the needs of every kernel with such a name that XLA wrote into the folder, from NVIDIA's assembler and XLA's
    own launches."""
    import nvidia  # pyright: ignore[reportMissingImports]  # of the extra `plan`

    (ptxas,) = (found for root in nvidia.__path__ for found in Path(root).rglob("bin/ptxas"))
    architecture = "sm_90a" if gpu.compute_capability == (9, 0) else "sm_{}{}".format(*gpu.compute_capability)
    (thunks,) = folder.glob("*thunk_sequence.txt")
    launches = re.findall(rf"({kernels}_\w+) grid: .* threads: \[(\d+), 1, 1\] +shared_memory: (\d+)", thunks.read_text())
    found: dict[str, Needs] = {}
    for ptx in folder.glob("*.ptx"):
        if f".entry {kernels}_" in ptx.read_text():
            command = [str(ptxas), "-v", f"-arch={architecture}", str(ptx), "-o", str(folder / "cubin")]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            for name, threads, shared in launches:
                if of_kernel := re.search(rf"'{name}'.*?(\d+) bytes spill stores.*?Used (\d+) registers", told, re.DOTALL):
                    found[name] = Needs(int(threads), int(of_kernel[2]), int(of_kernel[1]), int(shared))
    return found


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("gpu", "head_dim"),
    [
        ("h100", 256),
        pytest.param("h100", 80, marks=pytest.mark.slow),
        *(pytest.param("h100", head_dim, marks=pytest.mark.long) for head_dim in (64, 128)),
        *(pytest.param("a100-80gb", head_dim, marks=pytest.mark.long) for head_dim in (64, 128, 256)),
    ],
)
def test_gpus_hold_the_kernels(gpu, head_dim, tmp_path):
    check_needs(gpu, head_dim, tmp_path)


def check_needs(gpu: str, head_dim: int, folder: Path, language: Language = "pallas") -> None:
    """Three kernels, compiled by Triton for a GPU that is not here: no array is as large as the scores of one head, and a
    core holds a block, or two with heads of 64, whose registers suffice."""
    B, T, K, G = 1, 4096, 2, 2
    config = CONFIG.changed({"hardware.gpu": gpu, "hardware.nodes": 1, "mesh": MeshConfig()})
    devices = planned_mesh(config).devices
    mesh = Mesh(devices.reshape(-1)[:1].reshape((1,) * len(AXES)), AXES, axis_types=(AxisType.Explicit,) * len(AXES))

    def weighted(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        out, lse = pallas.attend(q, k, v, Mask(segment_ids=ids), SCALE, interpret=False, language=language)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    with jax.set_mesh(mesh), jax.default_device(devices.flat[0]):
        heads = [(B, T, K, G, head_dim), (B, T, K, head_dim), (B, T, K, head_dim)]
        lies = [spec("batch", "seq", *("kv_heads", None, None)[: len(n) - 2]) for n in heads]
        like = [
            jax.ShapeDtypeStruct(n, jnp.bfloat16, sharding=NamedSharding(mesh, where))
            for n, where in zip(heads, lies, strict=True)
        ]
        ids = jax.ShapeDtypeStruct((B, T), jnp.int32, sharding=NamedSharding(mesh, spec("batch", "seq")))
        lowered = jax.jit(jax.grad(weighted, argnums=(0, 1, 2))).lower(*like, ids)
        # As it ships, where other tests compile without optimisation; jax 0.12 writes PTX only if it is named.
        options: dict[str, Any] = {
            "xla_backend_optimization_level": 3, "xla_dump_to": str(folder),
            "xla_dump_hlo_module_re": ".*weighted.*", "xla_dump_emitter_re": "ptx",
        }  # fmt: skip
        compiled = lowered.compile(options)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    kernels = ["attention_backward_keys", "attention_backward_queries", "attention_forward"]
    assert [text.count(f'name = "{kernel}"') for kernel in kernels] == [1, 1, 1]
    assert memory.temp_size_in_bytes < T * T * K * G
    card = planned_gpu(config.hardware)
    found = needs(folder, card)
    assert sorted(found) == kernels
    at_once = 2 if head_dim == 64 else 1
    for kernel, of_block in found.items():
        assert at_once * of_block.threads * of_block.registers <= 65_536, (kernel, of_block)
        assert of_block.shared_bytes <= card.shared_memory_per_block, (kernel, of_block)
        assert at_once * of_block.shared_bytes <= card.shared_memory_per_core, (kernel, of_block)
        # Four warps share the tiles of heads of 64, and an A100 has their sums in registers.
        assert of_block.spilled <= (160 if (gpu, head_dim) == ("a100-80gb", 64) else 40), (kernel, of_block)
