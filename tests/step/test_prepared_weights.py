"""Weights that are whole for a step, gradients that wait for its end, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.model import Llama
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.step.prepared_weights import copies, in_slots, prepare
from llamajax.step.state import init_state
from tests.tiny import tiny_config

TOKENS = {"pipeline", "data", "fsdp", "expert", "sequence"}
TABLES, FIRST = frozenset({"embedding", "head"}), frozenset({"whole_first.attention.wqkv"})
MATRIX, LATE = frozenset({"layers.attention.wqkv"}), frozenset({"layers.mlp_norm.scale"})


@pytest.mark.parametrize(
    ("changes", "whole", "waiting"),
    [
        ({"grad_reduce": "micro"}, set(), {}),
        ({"grad_reduce": "step"}, TABLES, {MATRIX: {"data"}}),
        ({"grad_reduce": "step", "stack": "prefetch"}, TABLES | FIRST, {MATRIX: {"data"}}),
        ({"grad_reduce": "micro", "zero_data": 1}, set(), {MATRIX | TABLES: {"data"}}),
        ({"zero": 1}, TABLES | MATRIX, {}),
        ({"zero": 2, "grad_reduce": "step"}, TABLES, {MATRIX: {"data"}}),
    ],
    ids=["micro", "step, scan", "step", "zero_data", "zero 1", "zero 2"],
)
def test_what_is_whole_and_over_which_axes_gradients_wait(changes, whole, waiting):
    jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, sequence=2)))
    config = tiny_config().changed({f"parallel.{name}": value for name, value in changes.items()})
    trained = jax.eval_shape(lambda: prepare(config, init_state(config).model))
    found = {name: leaf.sharding.spec for name, leaf in named_arrays(trained).items()}
    assert (trained.whole_first is not None) == (whole >= FIRST)
    open_over = {name: axes for names, axes in waiting.items() for name in names}
    for name in TABLES | MATRIX | LATE | (FIRST & found.keys()):
        split = {axis for entry in found[name].partitions for axis in (entry if isinstance(entry, tuple) else [entry])}
        assert ("fsdp" not in split) == (name in whole | LATE), name
        assert "data" not in split
        assert found[name].reduced == (TOKENS if name in whole | LATE else open_over.get(name, set())), name


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_copies_are_made_of_all_weights_whose_gradients_are_split(zero):
    jax.set_mesh(make_mesh(MeshConfig(fsdp=8)))
    config = tiny_config().changed({"parallel.zero": zero})
    made = jax.eval_shape(lambda: copies(config, prepare(config, init_state(config).model)))
    if zero != 2:
        assert made is None
        return
    for name, leaf in named_arrays(made).items():
        assert "fsdp" not in str(leaf.sharding.spec.partitions), name


@pytest.mark.parametrize("chunks", [1, 2])
def test_each_layer_of_a_stage_has_a_scale_of_its_own(chunks):
    jax.set_mesh(make_mesh(MeshConfig(pipeline=2, fsdp=4)))
    order = {"parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 2} if chunks == 2 else {}
    mesh = {"mesh.pipeline": 2, "mesh.fsdp": 4, "parallel.zero": 1, "train.grad_accum_steps": 2}
    config = tiny_config().changed(mesh | order | {"model.num_layers": 4, "model.matmul_dtype": "float8"})
    made = jax.eval_shape(lambda: copies(config, prepare(config, init_state(config).model)))
    assert made.layers[0].mlp.w_down[...].scale.shape == ((2, 2) if chunks == 2 else (2,))


def test_stages_get_layers_of_both_kinds_and_return_their_gradients():
    """Five layers of two stages: a dense one and two with experts, and two with experts."""
    jax.set_mesh(make_mesh(MeshConfig(pipeline=2, fsdp=2, expert=2)))
    changes = {"model.num_layers": 5, "model.experts.num_experts": 4, "model.experts.first_dense_layers": 1}
    mesh = {"mesh.pipeline": 2, "mesh.fsdp": 2, "mesh.expert": 2, "parallel.zero": 1, "train.grad_accum_steps": 2}
    config = tiny_config().changed(mesh | changes)
    model = jax.jit(init_state, static_argnums=0)(config).model

    def total(model: Llama) -> tuple[jax.Array, Llama]:
        made = in_slots(model, 1, "float32")
        return sum(map(jnp.sum, jax.tree.leaves(made)), jnp.zeros(())), made

    gradients, made = jax.jit(jax.grad(total, has_aux=True))(model)
    assert made.dense_layers is None
    dense, first, second = made.layers
    held = {
        "dense": (dense, model.dense_layers, [0, None]),
        "1, 3": (first, model.layers, [0, 2]),
        "2, 4": (second, model.layers, [1, 3]),
    }
    for slot, (own, stack, indices) in held.items():
        found, stored = named_arrays(own), named_arrays(stack)
        assert found.keys() == stored.keys(), slot
        for name, array in found.items():
            for stage, index in enumerate(indices):
                if index is not None:
                    own_layer = np.asarray(stored[name])[index]
                    np.testing.assert_array_equal(np.asarray(array)[stage], own_layer, err_msg=f"{slot} {name}")
    for name, gradient in named_arrays(gradients).items():
        # The empty slot of the second stage has the dense layer's weights too; a pipeline gives these no gradient.
        times = 2 if name.startswith("dense_layers") else 1
        np.testing.assert_array_equal(gradient, np.full(gradient.shape, times), err_msg=name)


@pytest.mark.parametrize("zero_data", [0, 1])
def test_state_lies_split_over_data_where_asked(zero_data):
    jax.set_mesh(make_mesh(MeshConfig(data=4, fsdp=2)))
    config = tiny_config().changed({"parallel.zero_data": zero_data})
    state = jax.eval_shape(lambda: init_state(config))
    for name, leaf in named_arrays((state.model, state.opt_state)).items():
        if "wqkv" in name or "embedding" in name:
            (columns,) = (entry for entry in leaf.sharding.spec if entry not in (None, "tensor"))
            assert columns == (("fsdp", "expert", "sequence", "data") if zero_data else ("fsdp", "expert", "sequence")), name
