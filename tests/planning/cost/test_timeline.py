"""Results of a timeline: the trace for Perfetto, and the loops over layers."""

import dataclasses
import itertools
import pathlib

import pytest

from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import LANES, Event, Loop, Timeline, layer_loops, perfetto, tick_loops
from llamajax.planning.xla.parse import parse
from tests.planning.modules import MACHINE

FIXTURE = pathlib.Path(__file__).parent.parent / "hlo" / "fsdp_jax_0.10.hlo"
EMPTY = Timeline(
    host_copies={},
    step_time_s=12.0, compute_s=0.0, slowdown_s=0.0, comm_s=0.0, exposed_comm_s=0.0, exposed_copy_s=0.0,
    exposed_host_copy_s=0.0, wire_bytes={}, flops=0, rematerialized_flops=0,
    compute_by_kind={}, elementwise_bytes=0, num_kernels=0,
    collectives=(), sync_collectives_in_loops=0, not_understood={}, events=(), latencies={},
)  # fmt: skip


def timeline(*events: Event | Loop) -> Timeline:
    return dataclasses.replace(EMPTY, events=events)


def kernel(start: float) -> Event:
    return Event("compute", "dot", "matmul", "jit(f)/dot", start, 1.0)


def test_a_trace_unrolls_loops():
    """A loop at second 1 of two iterations of 2 seconds and one of 3, its kernel half a second in."""
    loop = Loop("while", "jit(f)/while", 1.0, ((2, 2.0, (kernel(0.5),)), (1, 3.0, (kernel(0.5),))))
    trace = perfetto(timeline(kernel(0.0), loop, Event("inter_node", "ag", "all-gather", "", 8.0, 4.0)))
    named = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert [(event["tid"], event["args"]["name"]) for event in named] == [
        (0, "compute"), (1, "intra node"), (2, "inter node"), (3, "copy"),
    ]  # fmt: skip
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in slices] == [0.0, 1.5e6, 3.5e6, 5.5e6, 8e6]
    assert slices[1] == {
        "ph": "X", "pid": 0, "tid": 0, "name": "dot", "cat": "matmul", "ts": 1.5e6, "dur": 1e6,
        "args": {"op_name": "jit(f)/dot"},
    }  # fmt: skip
    assert slices[-1]["tid"] == LANES.index("inter_node")


def test_a_long_trace_shows_the_first_and_last_iterations():
    loop = Loop("while", "", 0.0, ((100, 1.0, (kernel(0.0),)),))
    trace = perfetto(timeline(loop), max_events=99)
    assert [event["ts"] for event in trace["traceEvents"] if event["ph"] == "X"] == [0.0, 1e6, 99e6]
    assert len(perfetto(timeline(loop), max_events=100)["traceEvents"]) == 100 + len(LANES)


def test_the_trace_of_a_real_module_has_every_lane_in_order():
    found = replay(parse(FIXTURE.read_text()), MACHINE, {"data": 2, "fsdp": 4, "tensor": 2})
    slices = [event for event in perfetto(found)["traceEvents"] if event["ph"] == "X"]
    for lane in range(3):
        own = [event for event in slices if event["tid"] == lane]
        assert own
        for before, after in itertools.pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    compute = [event["dur"] for event in slices if event["tid"] == 0]
    assert sum(compute) == pytest.approx(found.step_time_s * 1e6)


def test_finds_the_loops_over_layers():
    found = replay(parse(FIXTURE.read_text()), MACHINE, {"data": 2, "fsdp": 4, "tensor": 2})
    loops = layer_loops(found)
    assert loops is not None
    forward, backward = loops
    assert (forward.num_iterations, backward.num_iterations) == (4, 3)
    assert forward.op_name == "jit(step)/jvp()/shard_map/while"
    assert forward.seconds / 4 < backward.seconds / 3
    assert layer_loops(timeline(kernel(0.0))) is None


def test_loops_of_layers_are_told_from_others():
    """Micro-batches around them, chunks of attention in them, chunks of the loss beside them, which takes longer."""

    def loop(count: int, op_name: str, *inside: Event | Loop, start: float = 0.0) -> Loop:
        own = Event("compute", "k", "memory", op_name, sum(event.seconds for event in inside), 1.0)
        return Loop("while", "", start, ((count, own.start + own.seconds, (*inside, own)),))

    forward = loop(8, "jvp()/while/dot", loop(4, "jvp()/while/attention"))
    backward = loop(8, "transpose(jvp())/while/dot", loop(4, "transpose(jvp())/while/attention"), start=100.0)
    loss = loop(100, "jvp(loss)/dot", start=200.0)
    micro = loop(4, "while/add", forward, loss, backward)
    assert layer_loops(timeline(micro)) == (forward, backward)


def test_ticks_of_a_pipeline_are_three_loops():
    """Other loops of the step come between them, also of the same length; a loop of one iteration is written out."""

    def loop(count: int, seconds: float = 1.0) -> Loop:
        return Loop("while", "jit(train_step)/while", 0.0, ((count, seconds, ()),))

    fill, both, drain = loop(3), loop(8), loop(4)
    step = timeline(loop(3, 0.1), fill, kernel(1.0), both, loop(2), drain, loop(8, 0.1))
    assert tick_loops(step, 3, 8, 4) == (fill, both, drain)
    assert tick_loops(step, 1, 8, 4) is None
    assert tick_loops(step, 3, 9, 4) is None
