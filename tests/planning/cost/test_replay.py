"""Replayed schedules, against times added up by hand; and two modules that XLA scheduled."""

import dataclasses
import pathlib

import pytest

from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import Event, Loop, Timeline
from llamajax.planning.xla.parse import parse
from tests.planning.modules import MACHINE, SHARE, memory_s, module

FIXTURES = pathlib.Path(__file__).parent.parent / "hlo"
MESH = {"data": 2, "fsdp": 4}
SLOW = SHARE.compute_slowdown

INSIDE = "replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}"
ACROSS = "replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}"
INPUTS = "%w = f32[1000000]{0} parameter(0)\n%x = f32[16000000]{0} parameter(1)\n"
START = f"%start = (f32[1000000]{{0}}, f32[4000000]{{0}}) all-gather-start(%w), {INSIDE}\n"
DONE = "%done = f32[4000000]{0} all-gather-done(%start)\n"
START2 = f"%start2 = (f32[1000000]{{0}}, f32[2000000]{{0}}) all-gather-start(%w), {ACROSS}\n"
DONE2 = "%done2 = f32[2000000]{0} all-gather-done(%start2)\n"

GATHER = 8.4e-6 + 3 * 3.4e-6 + 3 * 4e6 / (100e9 * SHARE.gpu_link_efficiency)
"""Seconds to gather 4 MB per device among the four of a node."""
GATHER2 = 8.4e-6 + 14e-6 + 4e6 / (10e9 * SHARE.node_link_efficiency)
"""Seconds to gather 4 MB per device with the device of the other node: longer."""
LONG, SHORT = memory_s(192e6), memory_s(12e6)


def kernel(name: str, operand: str = "%x") -> str:
    """`LONG` on %x, `SHORT` on %w."""
    return f"%{name} = f32[{16000000 if operand == '%x' else 1000000}]{{0}} add({operand}, {operand})\n"


def times(lines: str, computations: str = "") -> Timeline:
    timeline = replay(module(INPUTS + lines, computations), MACHINE, MESH)
    assert not timeline.not_understood
    parts = timeline.compute_s + timeline.slowdown_s + timeline.exposed_comm_s + timeline.exposed_copy_s
    assert timeline.step_time_s == pytest.approx(parts)
    return timeline


def test_the_figures_of_the_tests_are_such_that_one_hides_the_other():
    assert SHORT * (1 + SLOW) < GATHER < LONG < GATHER2


def test_a_synchronous_collective_is_exposed():
    timeline = times(kernel("a") + f"%g = f32[4000000]{{0}} all-gather(%w), {INSIDE}\n" + kernel("b"))
    assert timeline.step_time_s == pytest.approx(2 * LONG + GATHER)
    assert (timeline.exposed_comm_s, timeline.comm_s) == (pytest.approx(GATHER), pytest.approx(GATHER))
    (use,) = timeline.collectives
    assert (use.is_sync, use.count, use.in_loop, use.hidden_s) == (True, 1, False, pytest.approx(0))
    assert timeline.exposed_fraction == pytest.approx(GATHER / (2 * LONG + GATHER))


def test_a_collective_hides_behind_a_longer_kernel_and_slows_it_down():
    timeline = times(START + kernel("a") + DONE)
    late = GATHER - GATHER / (1 + SLOW)
    assert timeline.step_time_s == pytest.approx(LONG + late)
    assert (timeline.compute_s, timeline.slowdown_s) == (pytest.approx(LONG), pytest.approx(late))
    assert timeline.exposed_comm_s == 0
    assert not timeline.collectives[0].is_sync


def test_what_outlasts_the_kernel_is_exposed():
    timeline = times(START + kernel("a", "%w") + DONE)
    assert timeline.step_time_s == pytest.approx(GATHER)
    assert timeline.slowdown_s == pytest.approx(SLOW * SHORT)
    assert timeline.exposed_comm_s == pytest.approx(GATHER - SHORT * (1 + SLOW))
    assert timeline.collectives[0].hidden_s == pytest.approx(SHORT * (1 + SLOW))


@pytest.mark.parametrize("between", ["", "%c = s32[] copy(%i)\n"])
def test_a_pair_with_nothing_between_is_synchronous(between):
    timeline = times("%i = s32[] parameter(2)\n" + START + between + DONE + kernel("a"))
    assert timeline.collectives[0].is_sync
    assert timeline.sync_collectives_in_loops == 0  # it is in none


def test_xla_may_run_a_pair_synchronously():
    sync = START.strip() + ', backend_config={"collective_backend_config":{"is_sync":true}}\n'
    timeline = times(sync + kernel("a") + DONE)
    assert timeline.step_time_s == pytest.approx(GATHER + LONG)
    assert timeline.collectives[0].is_sync


def test_transfers_over_the_same_links_queue():
    """The second starts when the first ends; what is waited for is charged to the one that runs then."""
    again = START.replace("%start", "%again").replace("all-gather-%again", "all-gather-start")
    timeline = times(START + again + kernel("a", "%w") + DONE.replace("%done", "%late").replace("%start", "%again") + DONE)
    assert timeline.step_time_s == pytest.approx(2 * GATHER)
    first, second = timeline.collectives
    assert (first.collective.name, second.collective.name) == ("start", "again")
    assert (first.exposed_s, second.exposed_s) == (pytest.approx(GATHER - SHORT * (1 + SLOW)), pytest.approx(GATHER))


def test_transfers_over_different_links_run_side_by_side():
    timeline = times(START + START2 + DONE + DONE2)
    assert timeline.step_time_s == pytest.approx(GATHER2)
    assert timeline.wire_bytes == {"intra_node": 12e6, "inter_node": 4e6}


TUPLE = "(f32[1000000]{0}, f32[16000000]{0})"
BODY = f"%t = {TUPLE} parameter(0)\n%w = f32[1000000]{{0}} get-tuple-element(%t), index=0\n"
BODY += "%x = f32[16000000]{0} get-tuple-element(%t), index=1\n"
CONDITION = f"cond:\n%t = {TUPLE} parameter(0)\n%r = pred[] constant(true)\n\n"


def loop(body: str, *, trips: int | None) -> tuple[str, str]:
    config = f'{{"known_trip_count":{{"n":"{trips}"}}}}' if trips is not None else "{}"
    lines = f"%t = {TUPLE} tuple(%w, %x)\n%while = {TUPLE} while(%t), condition=%cond, body=%body, backend_config={config}\n"
    return lines, f"{CONDITION}body:\n{BODY}{body}%out = {TUPLE} tuple(%w, %x)"


def test_loops_count_as_often_as_they_run():
    lines, computations = loop(START + kernel("a", "%w") + DONE, trips=5)
    timeline = times(lines + kernel("b"), computations)
    assert timeline.step_time_s == pytest.approx(5 * GATHER + LONG)
    (use,) = timeline.collectives
    assert (use.count, use.in_loop, use.seconds) == (5, True, pytest.approx(5 * GATHER))
    assert timeline.wire_bytes["intra_node"] == 5 * 12e6
    assert timeline.sync_collectives_in_loops == 0
    (found,) = [event for event in timeline.events if isinstance(event, Loop)]
    assert (found.num_iterations, found.seconds, len(found.iterations)) == (5, pytest.approx(5 * GATHER), 1)


def test_synchronous_collectives_in_loops_are_counted_once_each():
    lines, computations = loop(f"%g = f32[4000000]{{0}} all-gather(%w), {INSIDE}\n" + START + DONE + kernel("a"), trips=3)
    assert times(lines, computations).sync_collectives_in_loops == 2
    once, computations = loop(START + DONE, trips=1)
    assert times(once, computations).sync_collectives_in_loops == 0


def test_a_transfer_from_outside_slows_the_first_iterations():
    """It is over in the second iteration: the first kernel and a part of the second are slowed down."""
    lines, computations = loop(kernel("a"), trips=10)
    timeline = times(START2 + lines + DONE2, computations)
    assert timeline.step_time_s == pytest.approx(10 * LONG + GATHER2 - GATHER2 / (1 + SLOW))
    assert timeline.exposed_comm_s == 0
    (found,) = [event for event in timeline.events if isinstance(event, Loop)]
    counts = [count for count, _, _ in found.iterations]
    assert sum(counts) == 10
    assert counts[-1] > 1
    assert not timeline.collectives[0].in_loop
    assert not timeline.collectives[0].is_sync


def test_a_transfer_inside_a_loop_queues_behind_one_from_outside():
    lines, computations = loop(START2 + DONE2, trips=3)
    outer = START2.replace("%start2", "%outer").replace("all-gather-%outer", "all-gather-start")
    timeline = times(outer + lines + DONE2.replace("%start2", "%outer"), computations)
    assert timeline.step_time_s == pytest.approx(4 * GATHER2)


def test_loops_nest():
    inner = f"inner:\n{BODY}{kernel('k')}%o = {TUPLE} tuple(%w, %x)\n\n"
    trips = 'backend_config={"known_trip_count":{"n":"4"}}'
    lines, computations = loop(f"%u = {TUPLE} while(%t), condition=%cond, body=%inner, {trips}\n", trips=3)
    assert times(lines, inner + computations).step_time_s == pytest.approx(12 * LONG)


def test_a_loop_of_unknown_length_is_listed():
    lines, computations = loop(kernel("a"), trips=None)
    timeline = replay(module(INPUTS + lines, computations), MACHINE, MESH)
    assert timeline.not_understood == {"while of unknown length": 1}
    assert timeline.step_time_s == pytest.approx(LONG)


def test_of_branches_the_longest_counts():
    branches = f"short:\n{BODY}{kernel('k', '%w')}\n\nlong:\n{BODY}{kernel('k')}"
    lines = f"%i = s32[] parameter(2)\n%t = {TUPLE} tuple(%w, %x)\n"
    lines += "%c = f32[] conditional(%i, %t, %t), branch_computations={%short, %long}\n"
    assert times(lines, branches).step_time_s == pytest.approx(LONG)
    called = times(f"%t = {TUPLE} tuple(%w, %x)\n%c = f32[] call(%t), to_apply=%long\n", branches)
    assert called.step_time_s == pytest.approx(LONG)


def test_copies_to_the_host_run_beside_kernels():
    """Twice 4 MB over the bus and back: one copy hides, the other is waited for, none is communication."""
    copy = "%{0} = (f32[1000000]{{0:S(5)}}, f32[1000000]{{0}}, u32[]) copy-start(%w)\n"
    done = "%{0}d = f32[1000000]{{0:S(5)}} copy-done(%{0})\n"
    seconds = SHARE.kernel_s + 4e6 / SHARE.host_bandwidth
    assert seconds < LONG
    timeline = times(copy.format("c") + kernel("a") + done.format("c") + copy.format("d") + done.format("d"))
    assert timeline.step_time_s == pytest.approx(LONG + seconds)
    assert timeline.exposed_copy_s == pytest.approx(seconds)
    assert (timeline.comm_s, timeline.exposed_comm_s) == (0, 0)


@pytest.mark.parametrize("opcode", ["async", "fusion"])
def test_a_collective_may_be_wrapped_up(opcode):
    wrapped = f"wrapped:\n%p = f32[1000000]{{0}} parameter(0)\n%g = f32[4000000]{{0}} all-gather(%p), {INSIDE}"
    start = f"%start = ((f32[1000000]{{0}}), f32[4000000]{{0}}) {opcode}-start(%w), calls=%wrapped\n"
    timeline = times(start + kernel("a", "%w") + f"%done = f32[4000000]{{0}} {opcode}-done(%start)\n", wrapped)
    assert timeline.step_time_s == pytest.approx(GATHER)
    assert (timeline.collectives[0].collective.axis, timeline.collectives[0].is_sync) == ("fsdp", False)


def test_an_unknown_pair_is_listed_and_guessed():
    timeline = replay(module(INPUTS + "%s = f32[] send(%x)\n%d = f32[] send-done(%s)\n"), MACHINE, MESH)
    assert timeline.not_understood == {"send": 1}


@pytest.mark.parametrize("version", ["0.10", "0.12"])
def test_replays_what_xla_scheduled(version):
    """Four layers x + silu(x a) b on 2,048 rows, a [1024, 2048] and b [2048, 1024] per device, fully rematerialised.

    The last layer's backward pass is peeled off its loop by XLA. A layer takes 2 products forward, 1 again, 4 backward.
    """
    module = parse((FIXTURES / f"fsdp_jax_{version}.hlo").read_text())
    timeline = replay(module, MACHINE, {"data": 2, "fsdp": 4, "tensor": 2})
    assert not timeline.not_understood
    assert timeline.flops == 4 * 7 * 2 * 2048 * 1024 * 2048
    weights = 2 * 2 * 1024 * 2048  # bytes of a layer's two, in bfloat16
    sent: dict[tuple[str, str], float] = {}
    for use in timeline.collectives:
        key = (use.collective.kind, use.collective.axis)
        sent[key] = sent.get(key, 0) + use.count * sum(use.collective.wire_bytes.values())
    assert sent == {
        ("all-gather", "fsdp"): 2 * 4 * weights * 3 / 4,
        ("reduce-scatter", "fsdp"): 4 * weights * 3 / 4,
        ("all-reduce", "data"): 4 * weights,  # whole gradients, before they are scattered
        ("all-reduce", "tensor"): 2 * 4 * 2 * (2 * 2048 * 1024) / 2,
    }
    assert sum(timeline.wire_bytes.values()) == sum(sent.values())
    assert timeline.sync_collectives_in_loops == {"0.10": 1, "0.12": 2}[version]
    assert 0 < timeline.exposed_comm_s < timeline.comm_s < timeline.step_time_s
    assert all(isinstance(event, Event | Loop) for event in timeline.events)


def test_what_xla_computes_again_is_told_apart():
    dot = "f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    program = module(
        f"%x = f32[64,64]{{1,0}} parameter(0)\n%a = {dot}\n%a.remat2 = {dot}\n%r = f32[64,64]{{1,0}} add(%a, %a.remat2)"
    )
    timeline = replay(program, MACHINE, {"fsdp": program.num_devices})
    assert (timeline.flops, timeline.rematerialized_flops) == (2 * 2 * 64**3, 2 * 64**3)


HOST = "f32[1000000]{0:S(5)}"
HOST_COPIES = f"""\
%h = {HOST} parameter(2)
%a = ({HOST}, f32[1000000]{{0}}, u32[]) copy-start(%w)
%b = ({HOST}, f32[1000000]{{0}}, u32[]) copy-start(%w)
%c = (f32[1000000]{{0}}, {HOST}, u32[]) copy-start(%h)
%d = f32[1000000]{{0}} copy-done(%c)
%e = {HOST} copy-done(%a)
%f = {HOST} copy-done(%b)
"""


def test_copies_within_the_device_are_not_those_of_the_host():
    copy = "%c = (f32[1000000]{0}, f32[1000000]{0}, u32[]) copy-start(%w)\n%d = f32[1000000]{0} copy-done(%c)\n"
    timeline = times(copy)
    assert timeline.exposed_copy_s == timeline.step_time_s > 0
    assert timeline.exposed_host_copy_s == 0
    assert timeline.host_copies == {}


def test_copies_to_the_host_and_back_have_a_lane_each():
    """They run at once in both directions, and queue within one; XLA is given the time of the whole queue."""
    timeline = times(HOST_COPIES)
    one = timeline.latencies["c"]
    assert one == pytest.approx(SHARE.kernel_s + 4e6 / MACHINE.host_link)
    assert timeline.host_copies == {"to_host": 8e6, "from_host": 4e6}
    assert timeline.step_time_s == timeline.exposed_copy_s == timeline.exposed_host_copy_s == pytest.approx(2 * one)
    lanes = {event.name: event.lane for event in timeline.events if isinstance(event, Event) and event.kind == "copy"}
    assert lanes == {"a": "to_host", "b": "to_host", "c": "from_host"}
    assert timeline.latencies["a"] == timeline.latencies["b"] == pytest.approx(2 * one)


def test_gpus_that_share_a_link_share_its_bandwidth():
    shared = dataclasses.replace(MACHINE, gpus_per_host_link=2)
    alone, both = (replay(module(INPUTS + HOST_COPIES), machine, MESH) for machine in (MACHINE, shared))
    kernels = 2 * SHARE.kernel_s
    assert both.step_time_s - kernels == pytest.approx(2 * (alone.step_time_s - kernels))
