"""The kernels in Triton's own language: what stands in their way; that they equal the plain form by Triton's interpreter;
and that they compile for GPUs that are not here. Nothing runs on a GPU."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from llamajax.kernels import attention, pallas, ring, ulysses
from llamajax.kernels.choice import Site, choose
from llamajax.kernels.plain import Mask
from llamajax.kernels.tiles import Documents
from llamajax.parallel.mesh import make_mesh
from llamajax.planning.cost.kernels import compiled_attention
from llamajax.planning.plan import plan_problems, replayed
from llamajax.planning.xla.compile import compile_for
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from tests.kernels.test_cudnn import H100, mesh_of, num_runs
from tests.kernels.test_pallas import check_needs
from tests.planning.plans import CONFIG

OPEN = Site(is_gpu=True, dtype="bfloat16", head_dim=128, closes_documents=False, form="gather", splits_rows=False)
KERNELS = ["attention_forward", "attention_backward_queries", "attention_backward_keys"]


@pytest.fixture
def _installed():
    pytest.importorskip("triton", reason="the extra `triton` is not installed")


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def _here(monkeypatch):
    """As if triton were installed; what it computes is not asked for."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.7.1")


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_gpu": False}, "it needs NVIDIA GPUs, or TRITON_INTERPRET=1 in the environment"),
        ({"dtype": "float32"}, "model.compute_dtype is float32"),
        ({"head_dim": 264}, "model.head_dim is 264, and the kernel supports up to 256"),
        ({"head_dim": 256, "capability": (8, 6)}, "model.head_dim is 256, and a core of compute capability 8.6 holds"),
    ],
)
def test_what_it_cannot_is_told_in_one_line(changes: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=rf"^model.attention_kernel: triton cannot be used: {reason}.*; or set auto$"):
        choose("triton", OPEN._replace(**changes))


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, "the package is not installed"),
        ("3.9.0", r"its version is 3\.9\.0, and only 3\.7 is supported"),
        ("3.71.0", r"its version is 3\.71\.0, and only 3\.7 is supported"),
    ],
)
def test_what_it_lacks_is_told_with_the_remedy(monkeypatch, installed, reason):
    def version_of(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    remedy = r"; pip install 'llamajax\[triton\]'; or set auto$"
    with pytest.raises(ConfigError, match=f"^model.attention_kernel: triton cannot be used: {reason}{remedy}"):
        choose("triton", OPEN)


@pytest.mark.usefixtures("_here")
def test_triton_compiles_or_interprets(monkeypatch):
    """It is told in the environment, before its first import."""
    assert choose("triton", OPEN) == ("triton", "model.attention_kernel says so")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = ("triton", "interpreted, which is slow: there is no GPU")
    assert choose("triton", OPEN._replace(is_gpu=False, dtype="float32")) == interpreted
    with pytest.raises(ConfigError, match="triton cannot be used: TRITON_INTERPRET=1 is in the environment"):
        choose("triton", OPEN)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("changes", [{"closes_documents": True}, {"splits_rows": True, "form": "ring"}, {"with_lse": True}])
def test_it_is_taken_only_by_name(changes: dict[str, Any]):
    site = OPEN._replace(**changes)
    assert choose("triton", site)[0] == "triton"
    assert choose("auto", site)[0] == "pallas"


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(("form", "split"), [("gather", False), ("gather", True), ("ring", True), ("ulysses", True)])
def test_the_door_leads_to_it(monkeypatch, form, split):
    q, kv, calls = jnp.zeros((2, 4, 2, 3, 8), "bfloat16"), jnp.zeros((2, 4, 2, 8), "bfloat16"), []

    def note(*_: Any, **how: Any) -> Any:
        calls.append(how)
        return q, None

    door = {"gather": pallas, "ring": ring, "ulysses": ulysses}[form]
    monkeypatch.setattr(door, "attend", note)
    with jax.sharding.use_abstract_mesh(mesh_of(H100, fsdp=1 if split else 8, sequence=8 if split else 1)):
        attention.attend(q, kv, kv, Mask(), 1.0, kernel="triton", sequence=form)
    (how,) = calls
    assert how["language" if form == "gather" else "kernel"] == "triton"
    assert how["interpret"] is False


# Slow, though it is quick: of CI's two runs of tests the second has the extra.
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    "chosen", [pytest.param("not long", marks=pytest.mark.slow), pytest.param("long", marks=pytest.mark.long)]
)
def test_equal_to_the_plain_form_by_the_interpreter(chosen):
    """In a process of its own: what is imported here compiles, and does not interpret."""
    tests = Path(__file__).with_name("triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "-m", chosen, str(tests)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.slow  # as above
@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("head_dim", "length", "rows", "is_packed", "window"),
    [(128, 512, 2, True, None), (80, 300, 1, False, 100), (128, 2**20, 2, True, None)],
)
def test_programs_for_gpus_call_it(head_dim, length, rows, is_packed, window):
    """Lowered, where no compiler for GPUs is: three kernels by name, of Triton's own making, and no path of this machine."""
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))
    K, G = 8, 4

    @jax.shard_map(in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> Any:
        def weighted(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            documents = None if ids is None else Documents(ids, ids)
            seen = pallas.sight(length, length, head_dim, window=window, documents=documents)
            how = {"window": window, "scale": 0.3, "interpret": False}
            out, lse = pallas.attend_to_rows(q, k, v, seen, **how, language="triton")
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

        return jax.grad(weighted, argnums=(0, 1, 2))(q, k, v)

    shapes = (rows, length, K, G, head_dim), (rows, length, K, head_dim), (rows, length, K, head_dim)
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32) if is_packed else None
    text = jax.jit(gradients).trace(*like, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == len(KERNELS)
    assert [text.count(f"tt.func public @{name}") for name in KERNELS] == [1, 1, 1]
    assert __file__.split("tests")[0] not in text


@pytest.mark.usefixtures("gpu_compiler", "_installed")
@pytest.mark.parametrize(
    ("gpu", "stack", "remat", "changes", "forward"),
    [
        pytest.param("a100-80gb", "scan", "full", {}, 2, marks=pytest.mark.slow),
        *(
            pytest.param("h100", stack, "save_attention", changes, 1, marks=pytest.mark.long)
            for stack, changes in (
                ("prefetch", {"model.sliding_window": 512}),
                ("scan", {"mesh": MeshConfig(sequence=2, tensor=2), "parallel.sequence": "ulysses"}),
            )
        ),
    ],
)
def test_the_step_has_one_kernel_forward_and_two_backward(gpu, stack, remat, changes, forward):
    """Compiled for GPUs that are not there; and their costs are understood."""
    asked = {"hardware.gpu": gpu, "model.remat": remat, "parallel.stack": stack, "model.attention_kernel": "triton"}
    config = CONFIG.changed(asked | changes)
    assert plan_problems(config) == []
    step = compile_for(resolve_planned(config))
    module, layers = parse(step.hlo), config.model.num_layers
    assert compiled_attention(module) == "triton"
    assert [num_runs(module, name) for name in KERNELS] == [forward * layers, layers, layers]
    timeline = replayed(step, config).timeline
    assert not any("triton" in name for name in timeline.not_understood)


@pytest.mark.usefixtures("gpu_compiler", "_installed")
@pytest.mark.parametrize(
    ("gpu", "head_dim"),
    [
        pytest.param(gpu, head_dim, marks=pytest.mark.slow if (gpu, head_dim) == ("h100", 256) else pytest.mark.long)
        for gpu in ("a100-80gb", "h100")
        for head_dim in (64, 80, 128, 256)
    ],
)
def test_gpus_hold_the_kernels(gpu, head_dim, tmp_path):
    check_needs(gpu, head_dim, tmp_path, "triton")
