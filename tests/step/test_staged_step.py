"""Stages that run programs of their own: the loop that drives them, and gradients equal to one device's."""

import functools
import weakref
from typing import Any

import jax
import numpy as np
import pytest
from jax import P

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.stage_meshes import stage_meshes
from llamajax.parallel.stage_order import order_1f1b
from llamajax.step.staged_step import StagedStep, StagePrograms, compile_staged
from llamajax.step.state import abstract_state, init_state
from llamajax.step.step import train_step
from tests.step.test_offload import EXPERTS
from tests.tiny import random_rows, resolved, single_device_mesh, tiny_config, to_device

EACH = ("mesh.data", "mesh.fsdp", "mesh.sequence", "mesh.tensor")


class Kept:
    """Values that a stage keeps for the backward pass of a micro-batch."""

    def __init__(self, stage: int, index: int):
        self.stage, self.index = stage, index


class Scene:
    """Stages whose programs add up numbers, and which note what is kept."""

    def __init__(self, stages: int, micro_batches: int):
        self.meshes = stage_meshes(make_mesh(MeshConfig(pipeline=stages, fsdp=1), jax.devices()[:stages]))
        self.kept, self.most = weakref.WeakSet[Kept](), [0] * stages
        there, back = ([functools.partial(way, s) for s in range(stages - 1)] for way in (self.forward, self.backward))
        programs = [*map(StagePrograms, there, back), StagePrograms(None, self.both)]
        rest: Any = {"begin": None, "end": None, "total": None, "activations": [None] * stages}
        order = order_1f1b(stages, micro_batches)
        self.step: Any = StagedStep(meshes=self.meshes, stages=programs, order=order, **rest)

    def forward(self, stage, weights, batch, index, came):
        assert (weights, batch) == (f"weights {stage}", f"batch {stage}")
        kept = Kept(stage, int(index))
        self.kept.add(kept)
        self.most[stage] = max(self.most[stage], sum(own.stage == stage for own in self.kept))
        with jax.set_mesh(self.meshes[stage]):
            x = jax.device_put(np.float32(index), P()) if came is None else came
            return 10 * x + stage + 1, kept

    def backward(self, stage, weights, batch, index, kept, dy, total):
        assert (kept.stage, kept.index) == (stage, int(index))
        assert dy.sharding.device_set == set(self.meshes[stage].devices.flat)
        with jax.set_mesh(self.meshes[stage]):
            return dy + 1000, [*total, float(dy)]

    def both(self, weights, batch, index, came, total):
        assert came.sharding.device_set == set(self.meshes[-1].devices.flat)
        return came, [*total, float(came)]

    def totals(self):
        weights, batches = ([f"{what} {s}" for s in range(len(self.meshes))] for what in ("weights", "batch"))
        return self.step.accumulate(weights, batches, [[] for _ in self.meshes])


def test_every_micro_batch_goes_through_all_stages_and_back():
    scene = Scene(3, 4)
    first, middle, last = scene.totals()
    assert last == [100 * number + 12 for number in range(4)]
    assert middle == last
    assert first == [1000 + value for value in middle]


def test_stages_keep_the_values_of_at_most_p_minus_s_micro_batches():
    scene = Scene(4, 8)
    scene.totals()
    assert scene.most == [4, 3, 2, 0]  # the last stage runs both passes in one program
    assert not scene.kept


def results(state):
    """The first moments after one step, in proportion to the gradients, and the biases of experts."""
    leaves = jax.tree_util.tree_leaves_with_path((state.model, state.opt_state))
    named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}
    return {name: value for name, value in named.items() if ".mu" in name or ".mlp.bias" in name}


def check(counts: tuple[int, ...], axes: dict[str, int], **changes) -> None:
    config = tiny_config(mesh=MeshConfig(num_cpu_devices=1)).changed(
        {"model.num_layers": sum(counts), "train.global_batch_size": 16, "optimizer.grad_clip_norm": None} | changes
    )
    rows = random_rows(config, 0)
    with jax.set_mesh(single_device_mesh()):
        plain = config.changed({"train.grad_accum_steps": 1, "model.remat": "none"})
        state, metrics = train_step(resolved(plain), init_state(plain), to_device(plain, rows))
        expected, like = results(state), metrics
    staged = config.changed(
        {"mesh.pipeline": len(counts), "mesh.stages": counts, "parallel.zero": 1}
        | dict.fromkeys(EACH, 1)
        | axes
        | {"mesh.num_cpu_devices": len(counts) * int(np.prod([*axes.values()]))}
    )
    with jax.set_mesh(make_mesh(staged.mesh, jax.devices()[: staged.mesh.num_cpu_devices])):
        step, _ = compile_staged(resolved(staged), abstract_state(staged))
        state, metrics = step(init_state(staged), to_device(staged, rows))
        assert metrics.keys() == like.keys()
        for name in ("loss", *(name for name in like if name.startswith("expert_"))):
            np.testing.assert_allclose(metrics[name], like[name], rtol=1e-5, err_msg=name)
        assert results(state).keys() == expected.keys()
        for name, own in results(state).items():
            atol = 1e-5 * np.abs(expected[name]).max()
            np.testing.assert_allclose(own, expected[name], rtol=0, atol=atol, err_msg=name)


def test_gradients_equal_those_of_one_device():
    """A tied model of as many layers as two stages could share evenly."""
    check((1, 3), {}, **{"train.grad_accum_steps": 4, "model.tie_embeddings": True})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "axes", "changes"),
    [
        ((3, 5), {"mesh.fsdp": 2, "mesh.tensor": 2}, {"train.grad_accum_steps": 4, "model.remat": "full"}),
        (
            (2, 2),
            {"mesh.fsdp": 1, "mesh.expert": 2, "mesh.tensor": 2},
            {"train.grad_accum_steps": 4, "parallel.expert_parts": 2, "parallel.expert_slots": 0.0}
            | {f"model.experts.{name}": x for name, x in (EXPERTS | {"first_dense_layers": 1}).items()},
        ),
        pytest.param(
            *((1, 2, 3, 2), {"mesh.fsdp": 2}, {"train.grad_accum_steps": 8, "model.remat": "save_attention_qkv"}),
            marks=pytest.mark.long,
        ),
        (
            (1, 3),
            {"mesh.data": 2, "mesh.sequence": 2},
            {"train.grad_accum_steps": 4, "parallel.sequence": "ring", "parallel.zero_data": 1, "model.qk_norm": True},
        ),
        pytest.param(
            (2, 6),
            {"mesh.fsdp": 2},
            {"model.layer_types": ("sliding_attention", "full_attention"), "model.sliding_window": 4},
            marks=pytest.mark.long,
        ),
        pytest.param(
            *((1, 2), {"mesh.fsdp": 2}, {"train.grad_accum_steps": 1, "train.frozen": ("embedding", "layers.mlp.")}),
            marks=pytest.mark.long,
        ),
        (
            (1, 2),
            {"mesh.fsdp": 2, "mesh.tensor": 2},
            {"train.grad_accum_steps": 2, "model.matmul_dtype": "float8_unrounded"},
        ),
    ],
    ids=["3+5, fsdp, tensor", "experts", "1+2+3+2, fsdp", "sequence in a ring, over data", "windows", "frozen", "float8"],
)
def test_gradients_of_every_form_equal_those_of_one_device(counts, axes, changes):
    check(counts, axes, **changes)
