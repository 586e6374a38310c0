"""The order of a pipeline's passes: every unit once, after what it needs, in a slot that nobody overwrites."""

import itertools

import jax
import numpy as np
import pytest

from llamajax.parallel.pipeline_schedule import DELAY, PipelineSchedule

SIZES = [
    (p, times * p, v) for p, times, v in itertools.product((2, 3, 4, 8), (1, 2, 4), (1, 2, 4))
] + [(2, 1, 1), (4, 3, 1), (8, 21, 1)]  # fmt: skip


def ticks_of(schedule: PipelineSchedule, *, backward: bool) -> dict[tuple[int, int, int], int]:
    """The tick of each stage's pass of each chunk and micro-batch."""
    ticks, stages = np.meshgrid(np.arange(schedule.ticks), np.arange(schedule.stages), indexing="ij")
    unit = jax.tree.map(np.asarray, (schedule.backward if backward else schedule.forward)(ticks, stages))
    found = {}
    for tick, stage in zip(*np.nonzero(unit.is_valid), strict=True):
        key = int(stage), int(unit.chunk[tick, stage]), int(unit.micro_batch[tick, stage])
        assert key not in found, "a unit runs twice"
        found[key] = int(tick)
    return found


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), SIZES)
def test_every_unit_runs_once_after_what_it_needs(stages, micro_batches, chunks):
    schedule = PipelineSchedule(stages, micro_batches, chunks)
    forward, backward = (ticks_of(schedule, backward=back) for back in (False, True))
    units = set(itertools.product(range(stages), range(chunks), range(micro_batches)))
    assert forward.keys() == backward.keys() == units
    for stage, chunk, micro_batch in units:
        before = (stage - 1, chunk, micro_batch) if stage > 0 else (stages - 1, chunk - 1, micro_batch)
        here, back = forward[stage, chunk, micro_batch], backward[stage, chunk, micro_batch]
        if before in units:  # a permute takes one tick, in both directions
            assert here == forward[before] + 1
            assert back + 1 == backward[before]
        else:
            assert back + 1 <= schedule.ticks
        if (stage, chunk) == (stages - 1, chunks - 1):
            assert back == here + DELAY
    assert max(forward.values()) == schedule.units + stages - 2, "the last tick with a forward pass"
    assert min(backward.values()) >= schedule.fill, "the first ticks have forward passes only"
    assert max(backward.values()) == schedule.ticks - 1


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), SIZES)
def test_a_slot_keeps_its_values_until_their_backward_pass(stages, micro_batches, chunks):
    schedule = PipelineSchedule(stages, micro_batches, chunks)
    forward, backward = (ticks_of(schedule, backward=back) for back in (False, True))
    ticks, of_stage = np.meshgrid(np.arange(schedule.ticks), np.arange(stages), indexing="ij")
    slots = np.asarray(schedule.slot_of(schedule.backward(ticks, of_stage), of_stage))
    for stage in range(stages):
        written: dict[int, int] = {}
        passes = [(tick, False, chunk, k) for (s, chunk, k), tick in backward.items() if s == stage]
        passes += [(tick, True, chunk, k) for (s, chunk, k), tick in forward.items() if s == stage]
        for tick, is_forward, chunk, micro_batch in sorted(passes):  # a slot is read before it is written
            if is_forward:
                written[tick % schedule.slots] = tick
            else:
                assert written[slots[tick, stage]] == forward[stage, chunk, micro_batch]
    assert int(schedule.slot(schedule.slots + 1)) == 1


def test_slots_do_not_grow_with_micro_batches_nor_bytes_with_chunks():
    assert {PipelineSchedule(8, m).slots for m in (8, 32, 128)} == {2 * 8 - 1 + DELAY}
    assert PipelineSchedule(8, 32, 4).slots == 2 * 8 * 4 - 1 + DELAY


def test_chunks_shorten_the_ticks_that_fill_and_drain():
    """Time in passes of a whole stage: m + p - 1 with one chunk, m + (p - 1) / v with v of them, and the delay."""
    for chunks in (1, 2, 4):
        schedule = PipelineSchedule(4, 8, chunks)
        forward_ticks = schedule.units + schedule.stages - 1
        backward_ticks = schedule.ticks - schedule.fill
        assert forward_ticks / chunks == 8 + 3 / chunks
        assert backward_ticks / chunks == 8 + (3 + DELAY) / chunks
