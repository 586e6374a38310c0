"""Attention by tokamax: what stands in its way, that it is asked for what the plain form computes, and that it compiles for
H100; nothing runs on a GPU."""

import importlib.metadata
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from llamajax.kernels import attention, choice, plain, tokamax_kernel, ulysses
from llamajax.kernels.choice import Site, choose
from llamajax.kernels.plain import Mask
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.planning.cost.kernels import compiled_attention
from llamajax.planning.plan import plan_problems, replayed
from llamajax.planning.xla.compile import compile_for
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from tests.kernels.test_cudnn import H100, mesh_of, num_runs
from tests.planning.plans import CONFIG

OPEN = Site(is_gpu=True, dtype="bfloat16", head_dim=128, closes_documents=False, form="gather", splits_rows=False)
SCALE = 0.4


@pytest.fixture
def _here(monkeypatch):
    """As if tokamax were installed; what it computes is not asked for."""
    monkeypatch.setattr(choice, "_missing", lambda: None)


@pytest.fixture
def stand_in(monkeypatch):
    """tokamax's own plain form in place of its kernel, which cannot run here; backward by what both are told to keep."""
    base = pytest.importorskip("tokamax._src.ops.attention.base", reason="the extra `tokamax` is not installed")
    op = base.DotProductAttention(vjp=by_residuals)
    monkeypatch.setattr(tokamax_kernel, "_kernel", lambda: op)
    with jax.numpy_rank_promotion("allow"):
        yield


def by_residuals(
    residuals: tuple[jax.Array, jax.Array], out: jax.Array, d_out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array,
    *, mask: Any, logits_scale: float, **_: Any,
) -> dict[str, jax.Array]:  # fmt: skip
    """FlashAttention's backward pass (arXiv:2205.14135) from each query's largest score and its sum of exponentials."""
    (B, T, N, H), K = q.shape, k.shape[2]
    shared_k, shared_v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = logits_scale * jnp.einsum("BTNH,BSNH->BNTS", q, shared_k)
    largest, total = (x[..., None] for x in residuals)
    weights = jnp.where(mask.as_array(T, T), jnp.exp(scores - largest) / total, 0)
    d_weights = jnp.einsum("BTNH,BSNH->BNTS", d_out, shared_v)
    d_scores = logits_scale * weights * (d_weights - jnp.einsum("BTNH,BTNH->BNT", out, d_out)[..., None])
    d_k, d_v = jnp.einsum("BNTS,BTNH->BSNH", d_scores, q), jnp.einsum("BNTS,BTNH->BSNH", weights, d_out)
    grouped = (x.reshape(B, T, K, N // K, H).sum(axis=3) for x in (d_k, d_v))
    return {"q": jnp.einsum("BNTS,BSNH->BTNH", d_scores, shared_k), **dict(zip("kv", grouped, strict=True))}


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_gpu": False}, "it needs NVIDIA GPUs"),
        ({"capability": (8, 0)}, r"it needs GPUs of compute capability 9\.0, such as H100, and these have 8\.0"),
        ({"with_lse": True}, "its backward pass supports no gradient of the log-sum-exp"),
        ({"dtype": "float32"}, "model.compute_dtype is float32"),
        ({"head_dim": 256}, "model.head_dim is 256, and the kernel supports up to 128"),
        ({"splits_rows": True}, "mesh.sequence splits the rows, .* ulysses would not"),
        ({"splits_rows": True, "form": "ring"}, "mesh.sequence splits the rows"),
    ],
)
def test_what_it_cannot_is_told_in_one_line(changes: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=rf"^model.attention_kernel: tokamax cannot be used: {reason}.*; or set auto$"):
        choose("tokamax", OPEN._replace(**changes))


@pytest.mark.parametrize(
    ("python", "version", "installed", "reason"),
    [
        ((3, 11), (0, 12, 0), choice.TOKAMAX, r"it needs Python 3\.12 or newer, and this is 3\.11"),
        ((3, 12), (0, 10, 2), choice.TOKAMAX, r"it needs jax 0\.11\.1 or newer, and this is 0\.10\.2"),
        ((3, 12), (0, 12, 0), None, r"the package is not installed; pip install 'llamajax\[tokamax\]'"),
        (
            (3, 12),
            (0, 12, 0),
            "0.1.0",
            r"its version is 0\.1\.0, and only 0\.0\.17 is supported; pip install 'llamajax\[tokamax\]'",
        ),
    ],
)
def test_what_it_lacks_is_told_with_the_remedy(monkeypatch, python, version, installed, reason):
    def version_of(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(choice, "sys", SimpleNamespace(version_info=(*python, 1)))
    own = SimpleNamespace(__version_info__=version, __version__=".".join(map(str, version)))
    monkeypatch.setattr(choice, "jax", own)
    monkeypatch.setattr(importlib.metadata, "version", version_of)
    with pytest.raises(ConfigError, match=rf"^model.attention_kernel: tokamax cannot be used: {reason}; or set auto$"):
        choose("tokamax", OPEN)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("changes", [{}, {"closes_documents": True}, {"splits_rows": True, "form": "ulysses"}])
def test_it_is_taken_only_by_name(changes: dict[str, Any]):
    site = OPEN._replace(**changes, capability=(9, 0))
    assert choose("tokamax", site) == ("tokamax", "model.attention_kernel says so")
    assert choose("auto", site)[0] != "tokamax"


@pytest.mark.usefixtures("_here")
def test_a_plan_for_gpus_without_it_is_refused_in_one_line():
    config = CONFIG.changed({"model.attention_kernel": "tokamax", "model.compute_dtype": "bfloat16"})
    assert plan_problems(config) == []
    (line,) = plan_problems(config.changed({"hardware.gpu": "a100-80gb"}))
    assert "tokamax cannot be used: it needs GPUs of compute capability 9.0, such as H100, and these have 8.0" in line


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("split", [False, True])
def test_the_door_leads_to_it(monkeypatch, split):
    """Over rows that are split, by way of Ulysses."""
    q, kv, calls = jnp.zeros((2, 4, 2, 3, 8), "bfloat16"), jnp.zeros((2, 4, 2, 8), "bfloat16"), []
    monkeypatch.setattr(tokamax_kernel, "attend", lambda *_: (calls.append("own"), q)[1])
    monkeypatch.setattr(ulysses, "attend", lambda *_, kernel, **__: (calls.append(kernel), (q, None))[1])
    with jax.sharding.use_abstract_mesh(mesh_of(H100, fsdp=1 if split else 8, sequence=8 if split else 1)):
        attention.attend(q, kv, kv, Mask(), 1.0, kernel="tokamax", sequence="ulysses")
    assert calls == ["tokamax" if split else "own"]


@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"sequence": 2, "fsdp": 2}])
def test_starts_say_what_segment_ids_say(axes):
    jax.set_mesh(make_mesh(MeshConfig(**axes), jax.devices()[:4]))
    rng, T = np.random.default_rng(0), 40
    ids = 1 + np.cumsum(rng.random((4, T)) < 0.15, axis=1).astype(np.int32)
    ids[1, 25:] = 0  # padding comes last
    assert tokamax_kernel.see(Mask(window=3)) == Mask(window=3)
    seen = jax.jit(lambda ids: tokamax_kernel.see(Mask(segment_ids=ids)).starts)(jax.device_put(ids, spec("batch", "seq")))
    causal = np.tril(np.ones((T, T), bool))
    by_starts = causal & (np.arange(T) >= np.asarray(seen)[:, :, None])
    np.testing.assert_array_equal(by_starts, causal & (ids[:, :, None] == ids[:, None, :]))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("axes", [{"fsdp": 4, "tensor": 2}, {"sequence": 2, "tensor": 2, "fsdp": 2}])
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_it_is_asked_for_what_the_plain_form_computes(axes, is_closed, window):
    """Mask, shared heads and scale, outputs and gradients."""
    jax.set_mesh(make_mesh(MeshConfig(**axes)))
    rng, T = np.random.default_rng(0), 16
    shapes = ((8, T, 4, 3, 8), (8, T, 4, 8), (8, T, 4, 8), (8, T, 4, 3, 8))
    q, k, v, d_out = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    q, d_out = jax.device_put((q, d_out), spec("batch", "seq", "kv_heads", None, "head_dim"))
    k, v = jax.device_put((k, v), spec("batch", "seq", "kv_heads", "head_dim"))
    ids = np.cumsum(rng.random((8, T)) < 0.2, axis=1).astype(np.int32)
    mask = Mask(window=window, segment_ids=jax.device_put(ids, spec("batch", "seq")) if is_closed else None)

    def by_plain(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        return plain.attend(q, k, v, mask, SCALE)[0]

    def by_tokamax(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> jax.Array:
        if "sequence" in axes:
            return ulysses.attend(q, k, v, mask, SCALE, kernel="tokamax")[0]
        return tokamax_kernel.attend(q, k, v, mask, SCALE)

    @partial(jax.jit, static_argnums=0)
    def results(attend: Any, q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> Any:
        out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, mask), q, k, v)
        return out, vjp(d_out)

    found, expected = (results(attend, q, k, v, mask) for attend in (by_tokamax, by_plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), found, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("remat", "stack", "window", "forward"),
    [("save_attention", "scan", None, 1), ("save_attention_qkv", "prefetch", 512, 1), ("none", "scan", None, 1),
     ("full", "scan", 512, 2)],
)  # fmt: skip
def test_the_step_has_one_kernel_forward_and_two_backward(remat, stack, window, forward):
    """Compiled for H100s that are not there; and their costs are understood."""
    pytest.importorskip("tokamax", reason="the extra `tokamax` is not installed")
    changes = {"model.remat": remat, "parallel.stack": stack, "model.sliding_window": window}
    config = CONFIG.changed(changes | {"model.attention_kernel": "tokamax", "mesh": MeshConfig(tensor=2)})
    assert plan_problems(config) == []
    step = compile_for(resolve_planned(config))
    module = parse(step.hlo)
    assert compiled_attention(module) == "tokamax"
    assert num_runs(module, "mosaic_gpu_v2") == (forward + 2) * config.model.num_layers
    timeline = replayed(step, config).timeline
    assert not any("mosaic" in name for name in timeline.not_understood)
