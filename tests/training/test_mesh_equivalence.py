"""The same numbers on every mesh: loss, gradients and weights equal those of a single device, step after step."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import apply_gradients, loss_and_grads
from tests.tiny import random_rows, resolved, single_device_mesh, tiny_config, to_device

MESHES = [sizes for sizes in itertools.product((1, 2, 4, 8), repeat=4) if np.prod(sizes) == 8]
"""Every way to lay eight devices over (data, fsdp, sequence, tensor)."""
ODD = tiny_config(
    model=ModelConfig(
        vocab_size=61, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=16, num_kv_heads=2, head_dim=4,
        compute_dtype="float32", remat="none", init_std=0.2, qkv_bias=True, output_bias=True,
        mlp_bias=True, qk_norm=True,
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=10),
    train=TrainConfig(num_steps=5, global_batch_size=32),
)  # fmt: skip
"""Less that divides: tokens of a row between matmuls, ids of the vocabulary, kv heads."""
BASES = {"tiny": tiny_config(), "tied": tiny_config().changed({"model.tie_embeddings": True}), "odd": ODD}
# One weight's gradient is 2e-8 among ones of 4e-3, whose rounding is 3e-9: with an eps of 1e-8 Adam would make a step of it.
ROUNDED = {"train.num_steps": 5, "optimizer.eps": 1e-5}
SHARED = [
    (1, 2, 1, 4),
    pytest.param((2, 1, 2, 2), marks=pytest.mark.slow),
    pytest.param((1, 1, 1, 8), marks=pytest.mark.long),
]
"""Some of these meshes, which share matmuls."""
EVERYDAY = [((1, 2, 2, 2), 2), ((2, 2, 1, 2), 4)]
SAMPLED = [((8, 1, 1, 1), 2), ((1, 1, 8, 1), 1), ((1, 1, 1, 8), 1)]


def run_steps(config: Config, mesh: jax.sharding.Mesh) -> list[dict[str, np.ndarray]]:
    """Loss, gradients and weights after each of ten steps, by name.

    One executable serves all of them: it refuses a state or batch of other shapes, types or shardings.
    """

    @jax.jit
    def step_with_grads(state, batch):
        losses, grads = loss_and_grads(resolved(config), state.model, batch)
        statistics = losses.pop("expert_statistics", None)
        state, metrics = apply_gradients(config, state, grads, losses["tokens"], statistics=statistics)
        return state, losses | metrics, grads

    first_state(config)
    jax.set_mesh(mesh)
    state, history = initial_state(config), []
    compiled = step_with_grads.lower(state, to_device(config, random_rows(config, 0))).compile()
    for step in range(config.train.num_steps):
        state, metrics, grads = compiled(state, to_device(config, random_rows(config, step)))
        values = {"metrics": metrics, "grads": grads, "weights": state.model}
        history.append({jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(values)})
    return history


@functools.cache
def first_state(config: Config):
    jax.set_mesh(single_device_mesh())
    return init_state(config)


def initial_state(config: Config):
    """The state of step 0, laid over the current mesh; that drawing it there gives the same is tested with the model."""
    abstract = abstract_state(config)
    return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), first_state(config), abstract)


@functools.cache
def reference(config: Config) -> list[dict[str, np.ndarray]]:
    return run_steps(config, single_device_mesh())


def cases():
    """A few every day; `slow` has some meshes of one axis, `long` all meshes with all numbers of micro-batches."""
    for case in itertools.product(MESHES, (1, 2, 4)):
        yield pytest.param(
            *case, marks=() if case in EVERYDAY else pytest.mark.slow if case in SAMPLED else pytest.mark.long
        )


@pytest.mark.parametrize(("sizes", "accumulation"), list(cases()))
def test_steps_equal_those_of_one_device(sizes, accumulation):
    check(tiny_config(), sizes, {"train.grad_accum_steps": accumulation})


@pytest.mark.parametrize("sizes", SHARED)
def test_odd_sizes_equal_those_of_one_device(sizes):
    check(ODD, sizes, {"model.remat": "full"})


@pytest.mark.parametrize(
    ("form", "sizes", "model"),
    [
        ("ring", (1, 2, 2, 2), {"model.remat": "save_attention"}),
        *(
            pytest.param(form, sizes, model, marks=pytest.mark.slow)
            for form, sizes, model in [
                ("ulysses", (1, 1, 4, 2), {"model.remat": "full"}),
                ("ring", (2, 1, 4, 1), {"model.sliding_window": 5}),
                ("ulysses", (1, 2, 2, 2), {"model.attend_across_documents": True}),
            ]
        ),
        *(
            pytest.param(form, sizes, model, marks=pytest.mark.long)
            for form, sizes, model in [
                ("ring", (1, 1, 8, 1), {"model.remat": "full"}),
                ("ring", (2, 1, 2, 2), {"model.attend_across_documents": True}),
                ("ring", (1, 1, 2, 4), {"model.num_kv_heads": 2}),
                ("ulysses", (1, 1, 2, 4), {"model.num_kv_heads": 2}),
                ("ulysses", (2, 2, 2, 1), {"model.sliding_window": 5}),
                ("ulysses", (1, 1, 8, 1), {"model.num_kv_heads": 2, "model.remat": "save_attention_qkv"}),
            ]
        ),
    ],
)
def test_every_form_of_split_rows_equals_one_device(form, sizes, model):
    check(tiny_config().changed(ROUNDED | model), sizes, {"parallel.sequence": form})


@pytest.mark.parametrize("sizes", SHARED)
def test_a_ring_over_the_tensor_axis_equals_one_device(sizes):
    check(tiny_config(), sizes, {"model.remat": "full", "parallel.tensor": "ring"})


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((1, 2, 2, 2), {"model.remat": "save_attention_qkv"}),
        *(
            pytest.param(sizes, changes, marks=pytest.mark.slow)
            for sizes, changes in [
                ((8, 1, 1, 1), {"parallel.stack": "unrolled", "parallel.zero_data": 1, "parallel.grad_reduce": "step"}),
                ((1, 2, 2, 2), {"model.remat": "full", "parallel.tensor": "ring", "parallel.sequence": "ring"}),
            ]
        ),
        *(
            pytest.param(sizes, changes, marks=pytest.mark.long)
            for sizes, changes in [
                ((2, 2, 1, 2), {"model.remat": "full", "train.grad_accum_steps": 2}),
                ((2, 4, 1, 1), {"model.remat": "save_attention_qkv_mlp", "train.grad_accum_steps": 4}),
                (
                    (2, 4, 1, 1),
                    {"parallel.stack": "unrolled", "model.remat": "save_attention_qkv", "train.grad_accum_steps": 2},
                ),
                ((1, 2, 2, 2), {"parallel.stack": "unrolled", "model.remat": "full", "parallel.tensor": "ring"}),
                ((2, 1, 2, 2), {"model.remat": "none", "train.grad_accum_steps": 2}),
                ((1, 8, 1, 1), {"model.remat": "none"}),
                ((8, 1, 1, 1), {"model.remat": "save_attention"}),
                ((1, 4, 2, 1), {"model.remat": "full", "parallel.sequence": "ring"}),
                ((1, 2, 4, 1), {"model.remat": "save_attention", "parallel.sequence": "ulysses"}),
                ((1, 2, 1, 4), {"model.remat": "full", "parallel.tensor": "ring"}),
            ]
        ),
    ],
)
def test_layers_that_hide_what_they_send_equal_one_device(sizes, changes):
    check(
        tiny_config().changed({"train.num_steps": 5, "model.num_layers": 4}), sizes, {"parallel.stack": "prefetch"} | changes
    )


@pytest.mark.parametrize(
    ("sizes", "num_sliding", "changes"),
    [
        pytest.param(
            *((1, 2, 2, 2), 1, {"parallel.stack": "prefetch", "model.remat": "save_attention"}), marks=pytest.mark.long
        ),
        *(
            pytest.param(sizes, num_sliding, changes, marks=pytest.mark.slow if num_sliding == sampled else pytest.mark.long)
            for num_sliding in (1, 2)
            for sizes, sampled, changes in [
                (
                    (1, 2, 2, 2),
                    1,
                    {"parallel.stack": "prefetch", "model.remat": "save_attention", "parallel.sequence": "ring"},
                ),
                ((2, 2, 2, 1), 0, {"parallel.stack": "scan", "model.remat": "save_attention_qkv"}),
                ((1, 8, 1, 1), 0, {"parallel.stack": "scan", "model.remat": "none"}),
                ((2, 4, 1, 1), 0, {"parallel.stack": "prefetch", "model.remat": "full", "train.grad_accum_steps": 2}),
                ((8, 1, 1, 1), 1, {"parallel.stack": "prefetch", "parallel.zero_data": 1, "parallel.grad_reduce": "step"}),
                ((1, 2, 4, 1), 0, {"parallel.stack": "prefetch", "parallel.sequence": "ulysses", "model.remat": "full"}),
                ((1, 2, 1, 4), 0, {"parallel.stack": "prefetch", "parallel.zero": 2, "parallel.tensor": "ring"}),
                ((1, 2, 2, 2), 0, {"parallel.stack": "unrolled", "model.remat": "full", "parallel.sequence": "ring"}),
            ]
        ),
    ],
)
def test_layers_that_take_turns_equal_one_device(sizes, num_sliding, changes):
    kinds = ("sliding_attention",) * num_sliding + ("full_attention",)
    windows = {"model.num_layers": 2 * len(kinds), "model.sliding_window": 3, "model.layer_types": kinds}
    check(tiny_config().changed(ROUNDED | windows), sizes, changes)


@pytest.mark.parametrize(
    ("base", "sizes", "changes"),
    [
        ("tiny", (2, 4, 1, 1), {"zero": 2, "zero_data": 1, "grad_reduce": "step", "stack": "prefetch", "accumulation": 2}),
        *(
            pytest.param(base, sizes, changes, marks=pytest.mark.slow)
            for base, sizes, changes in [
                ("tiny", (2, 2, 1, 2), {"zero": 2, "stack": "prefetch", "remat": "save_attention", "accumulation": 4}),
                ("tiny", (1, 2, 4, 1), {"zero": 2, "stack": "prefetch", "sequence": "ulysses", "grad_reduce": "step"}),
                ("tied", (2, 2, 1, 2), {"zero_data": 1, "grad_reduce": "step", "stack": "prefetch", "accumulation": 2}),
            ]
        ),
        *(
            pytest.param(base, sizes, changes, marks=pytest.mark.long)
            for base, sizes, changes in [
                ("odd", (2, 1, 1, 4), {"zero_data": 1, "stack": "prefetch", "grad_reduce": "step", "accumulation": 2}),
                ("odd", (1, 2, 1, 4), {"zero": 2, "stack": "prefetch", "grad_reduce": "step", "accumulation": 2}),
                ("tiny", (1, 8, 1, 1), {"grad_reduce": "step", "stack": "prefetch", "accumulation": 4, "remat": "none"}),
                (
                    "tiny",
                    (1, 2, 2, 2),
                    {"zero": 1, "stack": "prefetch", "sequence": "ring", "tensor": "ring", "accumulation": 2},
                ),
                ("tiny", (4, 2, 1, 1), {"grad_reduce": "micro", "accumulation": 4, "stack": "prefetch"}),
                ("tiny", (2, 2, 2, 1), {"zero": 1, "accumulation": 2}),
                ("tiny", (1, 4, 2, 1), {"zero": 2}),
                ("tiny", (2, 2, 1, 2), {"grad_reduce": "step", "accumulation": 2}),
                ("tiny", (8, 1, 1, 1), {"zero_data": 1, "grad_reduce": "step", "stack": "prefetch", "accumulation": 4}),
                ("tiny", (4, 2, 1, 1), {"zero_data": 1, "accumulation": 2}),
                ("tiny", (2, 2, 2, 1), {"zero_data": 1, "zero": 1, "accumulation": 2, "remat": "full"}),
                ("tiny", (1, 2, 1, 4), {"zero": 1, "stack": "prefetch", "remat": "full"}),
                ("odd", (2, 2, 1, 2), {"zero": 1, "stack": "prefetch", "accumulation": 2}),
            ]
        ),
    ],
)
def test_stages_of_zero_and_times_of_reduction_equal_one_device(base, sizes, changes):
    check(BASES[base].changed(ROUNDED), sizes, in_full(changes))


@pytest.mark.parametrize(
    ("base", "frozen", "sizes", "changes"),
    [
        ("tiny", ("layers.attention", "head"), (1, 2, 2, 2), {"zero": 1, "accumulation": 2}),
        pytest.param(
            *("tied", ("layers",), (2, 2, 2, 1), {"stack": "prefetch", "grad_reduce": "step", "accumulation": 2}),
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(base, frozen, sizes, changes, marks=pytest.mark.long)
            for base, frozen, sizes, changes in [
                (
                    "tiny",
                    ("embedding",),
                    (2, 2, 1, 2),
                    {"stack": "prefetch", "zero_data": 1, "grad_reduce": "step", "accumulation": 2},
                ),
                ("tied", ("embedding",), (2, 2, 1, 2), {"stack": "unrolled", "grad_reduce": "step", "accumulation": 2}),
                ("odd", ("mlp", "bias"), (2, 1, 2, 2), {"zero": 2, "zero_data": 1, "accumulation": 2}),
                ("odd", ("head", "final_norm"), (1, 2, 1, 4), {"remat": "full", "tensor": "ring"}),
                ("tiny", ("embedding",), (1, 8, 1, 1), {"zero": 2, "stack": "prefetch"}),
                ("tiny", ("embedding",), (2, 2, 1, 2), {"zero": 1, "stack": "unrolled", "accumulation": 2}),
                ("tiny", ("w_down", "wqkv"), (2, 4, 1, 1), {"zero": 1, "stack": "prefetch", "accumulation": 2}),
            ]
        ),
    ],
)
def test_what_is_left_when_weights_are_frozen_equals_one_device(base, frozen, sizes, changes):
    check(BASES[base].changed(ROUNDED | {"train.frozen": frozen}), sizes, in_full(changes))


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ((2, 2, 1, 2), {"parallel.stack": "prefetch", "train.grad_accum_steps": 2, "model.float8_exempt": ("wo", "w_down")}),
        *(
            pytest.param(sizes, changes, marks=pytest.mark.slow)
            for sizes, changes in [
                ((2, 2, 1, 2), {"parallel.stack": "prefetch", "parallel.grad_reduce": "step", "train.grad_accum_steps": 2}),
                ((1, 4, 2, 1), {"parallel.zero": 1, "parallel.sequence": "ulysses"}),
            ]
        ),
        *(
            pytest.param(sizes, changes, marks=pytest.mark.long)
            for sizes, changes in [
                ((2, 4, 1, 1), {"parallel.stack": "prefetch", "parallel.zero": 2, "parallel.zero_data": 1}),
                ((1, 4, 1, 2), {}),
                ((1, 2, 1, 4), {"parallel.tensor": "ring", "model.num_kv_heads": 4}),
                (
                    (1, 2, 2, 2),
                    {"parallel.stack": "prefetch", "parallel.tensor": "ring", "model.remat": "save_attention_qkv"},
                ),
            ]
        ),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float8_unrounded", 1e-5), pytest.param("float8", 2e-3, marks=pytest.mark.long)]
)
def test_matmuls_in_float8_equal_those_of_one_device(dtype, tolerance, sizes, changes):
    """Where nothing is rounded, as all else does; else to where a sum in another order is rounded to another number."""
    base = {name: value for name, value in changes.items() if name.startswith("model.") and name != "model.remat"}
    alone = tiny_config().changed(ROUNDED | {"train.num_steps": 3, "model.matmul_dtype": dtype} | base)
    check(alone, sizes, {"model.remat": "full"} | changes, tolerance)


@pytest.mark.long
def test_copied_heads_in_float8_are_as_near_to_what_is_not_rounded():
    """Each copy of a head rounds the gradient of its own queries, where one device rounds their sum: other numbers, which
    are no farther from those that nothing rounds, but for chance."""
    mesh, on_mesh = make_mesh(MeshConfig(fsdp=2, tensor=4)), {"parallel.tensor": "ring", "model.remat": "full"}
    float8, exact = (
        tiny_config().changed(ROUNDED | {"train.num_steps": 3, "model.num_kv_heads": 2, "model.matmul_dtype": dtype})
        for dtype in ("float8", "float8_unrounded")
    )
    check(exact, (1, 2, 1, 4), on_mesh)
    (copied, *_), (alone, *_), (true, *_) = run_steps(float8.changed(on_mesh), mesh), reference(float8), reference(exact)
    names = [name for name in true if name.startswith("['grads']")]
    assert any(not np.array_equal(copied[name], alone[name]) for name in names)
    for name in names:
        distances = [np.linalg.norm(found[name] - true[name]) for found in (copied, alone)]
        assert distances[0] <= 1.1 * distances[1], name


def in_full(changes: dict[str, Any]) -> dict[str, Any]:
    """Changes by their dotted keys."""
    own_names = {"accumulation": "train.grad_accum_steps", "remat": "model.remat"}
    return {own_names.get(name, f"parallel.{name}"): value for name, value in changes.items()}


def check(config: Config, sizes: tuple[int, ...], changes: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Runs a changed configuration on a mesh, and as it is on one device."""
    mesh = make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "sequence", "tensor"), sizes, strict=True))))
    for step, (ours, theirs) in enumerate(zip(run_steps(config.changed(changes), mesh), reference(config), strict=True)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=tolerance, err_msg=f"step {step}: {name}")
