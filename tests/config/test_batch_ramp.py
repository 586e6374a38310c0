"""The ramp of the global batch: the sizes that Megatron-LM takes, and positions that are the sums of all sizes before."""

from fractions import Fraction
from typing import Any

import pytest

from llamajax.config.batch_ramp import BatchRampConfig, batch_phases
from llamajax.config.data import DataConfig, SourceConfig, StageConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import TrainConfig
from llamajax.errors import ConfigError
from tests.tiny import tiny_config

SEQUENCES = 12 * 10**9 // 2048
MT_NLG = BatchRampConfig(start=32, increment=32, sequences=SEQUENCES)


def train(ramp, global_batch_size, **settings):
    return TrainConfig(**{"num_steps": 100, "global_batch_size": global_batch_size, "global_batch_ramp": ramp} | settings)


def ramped(start, increment, sequences, full, **settings):
    ramp = BatchRampConfig(start=start, increment=increment, sequences=sequences)
    return train(ramp, full, grad_accum_steps=full, **settings)


def megatron_sizes(start, increment, sequences, full, num_steps):
    """Sizes by `--rampup-batch-size start increment sequences`: increments by the samples consumed before a step."""
    consumed, per_increment = 0, Fraction(sequences * increment, full - start)
    for _ in range(num_steps):
        size = full if consumed > sequences else start + int(consumed / per_increment) * increment
        yield size
        consumed += size


@pytest.mark.parametrize(
    ("start", "increment", "sequences", "full"),
    [(8, 8, 64, 24), (2, 2, 100, 12), (1, 3, 7, 10), (4, 4, 1, 40), (16, 16, 33, 32), (3, 1, 200, 17), (5, 5, 41, 50)],
)
def test_every_step_has_megatrons_size_and_begins_behind_all_before_it(start, increment, sequences, full):
    run = ramped(start, increment, sequences, full)
    sizes = list(megatron_sizes(start, increment, sequences, full, 90))
    assert [run.batch_size_at(step) for step in range(90)] == sizes
    assert [run.rows_after(step) for step in range(91)] == [sum(sizes[:step]) for step in range(91)]
    phases = run.batch_phases
    assert [phase.batch_size for phase in phases] == list(dict.fromkeys(sizes)) == sorted(set(sizes))
    assert [run.phase_at(phase.from_step) for phase in phases] == list(range(len(phases)))
    assert all(phase.first_row == run.rows_after(phase.from_step) for phase in phases)


def test_the_ramp_of_mt_nlg():
    """32 to 1,920 sequences of 2,048 tokens in the first 12 billion tokens."""
    phases = batch_phases(MT_NLG, 1920)
    assert (len(phases), phases[0], phases[-1].batch_size) == (60, (0, 0, 32), 1920)
    assert 0 <= phases[-1].first_row - SEQUENCES < 1888
    sizes = list(megatron_sizes(32, 32, SEQUENCES, 1920, phases[-1].from_step + 2))
    assert sizes[-3:] == [1888, 1920, 1920]
    config = tiny_config(train=train(MT_NLG, 1920, grad_accum_steps=240, num_steps=20_000))
    assert config.ramp_arithmetic() == (
        "32 to 1,920 sequences by 32 in 60 phases; full after 14,475 of 20,000 steps, 5,861,120 sequences and 93.8M tokens"
    )


def test_without_a_ramp_every_step_is_full():
    run = TrainConfig(num_steps=10, global_batch_size=8)
    assert run.batch_phases == ((0, 0, 8),)
    assert [run.rows_after(step) for step in (0, 1, 7)] == [0, 8, 56]
    assert tiny_config().ramp_arithmetic() == ""


def test_tokens_are_those_of_each_steps_batch_and_rows():
    data = DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=16, stages=(StageConfig(from_step=3, seq_len=32),))
    run = ramped(8, 8, 40, 24, num_steps=10)
    config = tiny_config(data=data, train=run, mesh=MeshConfig()).changed({"model.max_seq_len": 32})
    tokens = [run.batch_size_at(step) * (16 if step < 3 else 32) for step in range(10)]
    assert [config.tokens_after(step) for step in range(11)] == [sum(tokens[:step]) for step in range(11)]
    assert len({run.batch_size_at(step) for step in range(3, 10)}) > 1, "the batch also grows in longer rows"


def test_the_largest_steps_stand_for_all_tokens():
    config = tiny_config(train=ramped(8, 8, 40, 24, num_steps=10), mesh=MeshConfig())
    largest = config.in_largest_steps()
    assert (largest.train.global_batch_ramp, largest.train.global_batch_size) == (BatchRampConfig(), 24)
    assert largest.hardware.token_budget == config.tokens_after(10) < largest.tokens_after(10)
    assert largest.in_largest_steps() is largest


def test_a_phase_has_micro_batches_of_the_same_size():
    run = train(BatchRampConfig(start=4, increment=4, sequences=40), 16, grad_accum_steps=4, grad_accum_dtype="bfloat16")
    phases = [run.in_batches_of(size) for size in (4, 8, 16)]
    assert [(phase.micro_batch_size, phase.grad_accum_steps) for phase in phases] == [(4, 1), (4, 2), (4, 4)]
    assert [phase.grad_accum_dtype for phase in phases] == ["float32", "bfloat16", "bfloat16"]
    assert {len(phase.batch_phases) for phase in phases} == {1}


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ((16, 4), "global_batch_ramp.start: 16 must be below global_batch_size=16; lower it, or remove the ramp"),
        (
            (4, 5),
            "global_batch_ramp.increment: 5 must divide the growth from start=4 to global_batch_size=16, 12; choose a"
            " divisor",
        ),
        (
            (6, 2),
            "global_batch_ramp.start: start=6 and increment=2 must be multiples of the 4 sequences of a micro-batch"
            " (global_batch_size / grad_accum_steps); make grad_accum_steps a multiple of 8",
        ),
    ],
)
def test_a_ramp_that_cannot_be_is_refused_with_what_helps(ramp, message):
    ramp = BatchRampConfig(start=ramp[0], increment=ramp[1], sequences=100)
    with pytest.raises(ConfigError) as caught:
        train(ramp, 16, grad_accum_steps=4)
    assert str(caught.value) == message


def test_every_batch_of_an_interleaved_pipeline_has_a_micro_batch_for_each_stage():
    interleaved: dict[str, Any] = {
        "parallel.zero": 1,
        "parallel.pipeline": "interleaved",
        "mesh.pipeline": 2,
        "mesh.data": 4,
    }
    interleaved["model.num_layers"] = 4
    run = train(BatchRampConfig(start=8, increment=8, sequences=100), 32, grad_accum_steps=8)
    config = tiny_config(train=run, mesh=MeshConfig()).changed(interleaved)
    assert config.placement_problems(8) == []
    (problem,) = config.changed(
        {"train.global_batch_ramp.start": 4, "train.global_batch_ramp.increment": 4}
    ).placement_problems(8)
    assert problem == (
        "train.global_batch_ramp: start and increment must be multiples of 8 sequences, a micro-batch for each of"
        " mesh.pipeline=2 stages, for parallel.pipeline: interleaved; change them, or set 1f1b or auto"
    )


def test_the_remedy_for_micro_batches_helps():
    assert train(BatchRampConfig(start=6, increment=2, sequences=100), 16, grad_accum_steps=8).micro_batch_size == 2
