"""Real faults, put into the parallel code: each is found, and told by its pattern."""

import functools
from unittest import mock

import pytest

from llamajax.config.parallel import PLAIN, MeshConfig
from llamajax.config.run import Config
from llamajax.step import stage
from llamajax.verification.diagnosis import clues
from llamajax.verification.differences import first_difference
from llamajax.verification.reference_run import Side, run_side
from llamajax.verification.scaling import configured_axes, on_one_device, scale_down
from llamajax.verification.variants import run_trials, suspects
from tests.tiny import tiny_config
from tests.verification import faults


def scaled() -> Config:
    """fsdp 2 x sequence 2 x tensor 2, two micro-batches, three layers; heads as many as a head is wide."""
    mesh = MeshConfig(fsdp=2, sequence=2, tensor=2, num_cpu_devices=8)
    config = tiny_config(parallel=PLAIN).changed({"mesh": mesh, "train.grad_accum_steps": 2, "model.num_layers": 3})
    axes = configured_axes(config)
    return scale_down(config, axes, axes)


def run(config: Config, num_steps: int) -> Side:
    return run_side(config, num_steps, lambda stage: None)


@functools.cache
def truth() -> Side:
    return run(on_one_device(scaled()), 2)


def found(fault, *, num_steps: int = 1, mesh_only: str | None = None) -> tuple[str, list[str]]:
    """The first difference that a fault makes, and the clues; `mesh_only`: as if trials had led to that axis."""
    with fault:
        ours = run(scaled(), num_steps)
    first = first_difference(ours, truth())
    assert first is not None
    factors = suspects(ours, []) if mesh_only is None else {mesh_only: 2}
    return f"{first.step} {first}", clues(ours, truth(), factors)


@pytest.mark.slow
def test_without_a_fault_there_is_nothing_to_find():
    assert first_difference(run(scaled(), 2), truth()) is None


def test_a_mean_in_place_of_a_sum():
    first, told = found(faults.mean_scatter("fsdp"), mesh_only="fsdp")
    assert first == "1 gradient of head"
    assert told == [
        "gradient of head is 0.5 times the correct value in all entries, as if divided by the size of fsdp:"
        " a mean where a sum belongs, or a sum that is missing",
        "the loss is equal, and only the gradients of head, embedding differ: check how they are summed",
    ]


def test_parts_given_to_the_wrong_devices():
    first, told = found(faults.turned_scatter("fsdp"))
    assert first == "1 gradient of head"
    assert "wrong places along fsdp: device 0 has the part of 1, device 1 has the part of 0" in told[0]


SLOW_FAULTS = [
    (
        faults.never_summed("final_norm", "sequence"),
        "1 gradient of final_norm.scale",
        "gradient of final_norm.scale has copies that differ along sequence: its devices did not sum",
    ),
    (faults.lost_scatter("fsdp"), "1 gradient of head", "differs only where fsdp is 1 of 0 to 1"),
    (faults.scaled_sum("fsdp", lambda n: n), "1 tokens", "summed once too often over fsdp or sequence or tensor or micro"),
    (faults.first_part_only("sequence"), "1 tokens", "the number of tokens is"),
    (faults.first_part_only("tensor"), "1 loss", "the forward pass is already wrong"),
    (faults.turned_tables(), "1 loss", "the forward pass is already wrong"),
    (faults.next_index("tensor"), "1 loss", "the forward pass is already wrong"),
    (faults.next_layer(), "1 loss", "the forward pass is already wrong"),
    (faults.lost_gradients_of_layer(1), "1 gradient of layers.mlp.w_down", "differs only in layer 1 of 0 to 2"),
    (faults.dropped_micro_batch(), "1 tokens", "the number of tokens is"),
    (faults.swapped_dims("wqkv"), "1 gradient of layers.attention.wqkv", "has its dims 3 and 4 swapped"),
    (faults.stale_moments(0), "1 first moment of embedding", "is zero everywhere: it is lost"),
    (faults.stale_moments(1), "2 first moment of embedding", "up to step 1 all values are equal: the state that a step"),
    (faults.norm_without_one_part(), "1 gradient norm", "as if divided by the size of fsdp"),
]


@pytest.mark.parametrize(
    ("fault", "first", "sentence"),
    [
        pytest.param(*fault, id=str(number), marks=pytest.mark.slow if number % 2 == 0 else pytest.mark.long)
        for number, fault in enumerate(SLOW_FAULTS)
    ],
)
def test_faults_are_found_and_told(fault, first, sentence):
    where, told = found(fault, num_steps=int(first[0]))
    assert where == first
    assert any(sentence in clue for clue in told), told


@pytest.mark.slow
def test_trials_lead_to_the_setting_that_the_fault_needs():
    with faults.mean_of_means():
        ours = run(scaled(), 1)
        trials = run_trials(scaled(), truth(), 1, lambda stage: None)
    first = first_difference(ours, truth())
    assert first is not None
    assert first.kind == "loss"
    assert {trial.key for trial in trials} >= {"mesh.fsdp", "mesh.sequence", "mesh.tensor", "train.grad_accum_steps"}
    assert {trial.key for trial in trials if trial.cured} == {"train.grad_accum_steps"}


@pytest.mark.slow
def test_programs_of_stages_are_verified_and_a_fault_in_them_is_found():
    axes = {"pipeline": 2, "data": 1, "fsdp": 2, "expert": 1, "sequence": 1, "tensor": 2}
    changes = {"model.num_layers": 8, "mesh.stages": (5, 3), "train.grad_accum_steps": 4, "parallel.zero": 1}
    changes |= {f"mesh.{axis}": size for axis, size in axes.items()} | {"mesh.num_cpu_devices": 8}
    config = scale_down(tiny_config().changed(changes), axes, axes)
    assert config.mesh.stages == (2, 1)
    one = run(on_one_device(config), 2)
    assert first_difference(run(config, 2), one) is None
    with mock.patch.object(stage, "add_gradients", lambda total, added: added):
        lost = first_difference(run(config, 1), one)
    assert lost is not None
    assert (lost.step, lost.kind) == (1, "gradient")
