"""The timeline of a replayed step: when every kernel and collective runs, and which lane waits for which transfer."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from llamajax.planning.cost.network import Collective, LinkKind

Lane = Literal["compute", "intra_node", "inter_node", "copy", "to_host", "from_host", "inter_domain"]
"""A lane of the timeline; `copy` carries asynchronous copies within the device."""
LANES: tuple[Lane, ...] = ("compute", "intra_node", "inter_node", "copy")
"""Lanes of every timeline."""
HOST_LANES: tuple[Lane, ...] = ("to_host", "from_host")
"""Lanes of copies between the device and host memory, which go both ways at once."""
ALL_LANES: tuple[Lane, ...] = (*LANES, *HOST_LANES, "inter_domain")
"""All lanes, in the order in which they are drawn."""


@dataclass(frozen=True, slots=True)
class Event:
    """Work that occupies a lane; times in seconds from the start of the enclosing computation."""

    lane: Lane
    name: str
    kind: str
    """`matmul`, `attention`, `memory`, `copy`; the kind of a collective; `wait` where the compute lane waits."""
    op_name: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Loop:
    """A `while` in the timeline: equal iterations are stored once."""

    name: str
    op_name: str
    start: float
    iterations: tuple[tuple[int, float, tuple["Event | Loop", ...]], ...]
    """Number of iterations, seconds of one, and its events."""

    @property
    def num_iterations(self) -> int:
        return sum(count for count, _, _ in self.iterations)

    @property
    def seconds(self) -> float:
        return sum(count * period for count, period, _ in self.iterations)


@dataclass(frozen=True, slots=True)
class CollectiveUse:
    """Cost of one collective instruction over a whole step."""

    collective: Collective
    is_sync: bool
    """Whether the compute lane waits all the time: XLA runs it synchronously, or nothing runs between start and done."""
    in_loop: bool
    count: int
    """Executions per step."""
    seconds: float
    """Seconds of transfer over all executions."""
    exposed_s: float
    """Seconds of these in which the compute lane waits."""

    @property
    def hidden_s(self) -> float:
        return self.seconds - self.exposed_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step on one device. Seconds and bytes are per step and device."""

    step_time_s: float
    """`compute_s + slowdown_s + exposed_comm_s + exposed_copy_s`."""
    compute_s: float
    """Seconds of kernels, undisturbed."""
    slowdown_s: float
    """Additional seconds of kernels because collectives run at the same time."""
    comm_s: float
    """Seconds of collectives, hidden or not."""
    exposed_comm_s: float
    """Seconds of waiting for collectives."""
    exposed_copy_s: float
    """Seconds of waiting for asynchronous copies."""
    exposed_host_copy_s: float
    """Those of waiting for copies to and from host memory."""
    host_copies: dict[Lane, float]
    """Bytes that a device copies to and from host memory, by lane; empty if none."""
    wire_bytes: dict[LinkKind, float]
    """Bytes that a device sends, on average over devices."""
    flops: int
    """FLOPs executed in matrix products, recomputation included."""
    rematerialized_flops: int
    """The part of these FLOPs that XLA recomputes to save memory, beyond `model.remat`."""
    compute_by_kind: dict[str, float]
    """`compute_s` by kind of kernel."""
    elementwise_bytes: int
    """Bytes read and written by kernels without matrix products, and by copies."""
    num_kernels: int
    """Number of kernels that the device runs one after the other."""
    collectives: tuple[CollectiveUse, ...]
    sync_collectives_in_loops: int
    """Collective instructions in loop bodies that hide behind nothing."""
    not_understood: dict[str, int]
    """Instructions with a guessed cost, by opcode and call target."""
    events: tuple[Event | Loop, ...]
    latencies: dict[str, float]
    """Seconds of every kernel, transfer and loop, by its name in XLA's scheduler."""

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """Returns the lanes that a step on its machine uses."""
        left_out = () if self.host_copies else HOST_LANES
        left_out = left_out if "inter_domain" in self.wire_bytes else (*left_out, "inter_domain")
        return tuple(lane for lane in ALL_LANES if lane not in left_out)

    @property
    def exposed_fraction(self) -> float:
        return self.exposed_comm_s / self.step_time_s


def perfetto(timeline: Timeline, *, max_events: int = 50_000) -> dict[str, Any]:
    """Returns the timeline as a Chrome trace, for ui.perfetto.dev: one thread per lane, times in microseconds.

    With more than `max_events` events, long loops show their first two iterations and their last.
    """
    shorten = _count(timeline.events) > max_events
    trace: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": ALL_LANES.index(lane), "name": "thread_name", "args": {"name": lane.replace("_", " ")}}
        for lane in timeline.lanes
    ]
    for event, start in _flat(timeline.events, 0.0, shorten):
        args, lane = {"op_name": event.op_name}, ALL_LANES.index(event.lane)
        times = {"ts": start * 1e6, "dur": event.seconds * 1e6}
        trace.append({"ph": "X", "pid": 0, "tid": lane, "name": event.name, "cat": event.kind, **times, "args": args})
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def _count(events: tuple[Event | Loop, ...]) -> int:
    return sum(
        sum(times * _count(inner) for times, _, inner in event.iterations) if isinstance(event, Loop) else 1
        for event in events
    )


def _flat(events: tuple[Event | Loop, ...], begin: float, shorten: bool) -> Iterator[tuple[Event, float]]:
    """Yields every event with its start from the beginning of the step, loops unrolled."""
    for event in events:
        start = begin + event.start
        if isinstance(event, Event):
            yield event, start
            continue
        for times, period, inner in event.iterations:
            for iteration in range(times):
                if not shorten or iteration < 2 or iteration == times - 1:
                    yield from _flat(inner, start + iteration * period, shorten)
            start += times * period


def layer_loops(timeline: Timeline) -> tuple[Loop, Loop] | None:
    """Returns the loops over the layers, forward and backward, at any nesting depth; None if the step has no such pair.

    Among all pairs of a forward and a backward loop of the same length, it is the pair that takes the most time. XLA may
    move one iteration out of a loop, and then drops the loop's name, so the direction follows from the instructions inside.
    """
    loops = [loop for loop in _loops(timeline.events) if loop.num_iterations > 1]
    shares = [_backward_share(loop) for loop in loops]
    pairs = [
        (forward, backward)
        for forward, forward_share in zip(loops, shares, strict=True)
        for backward, backward_share in zip(loops, shares, strict=True)
        if forward_share < 0.1 and backward_share > 0.9 and abs(forward.num_iterations - backward.num_iterations) <= 1
    ]
    return max(pairs, key=lambda pair: pair[0].seconds + pair[1].seconds, default=None)


def tick_loops(timeline: Timeline, fill: int, both: int, drain: int) -> tuple[Loop, Loop, Loop] | None:
    """Returns the loops over the ticks of a pipeline, which have these numbers of iterations: the longest such loop with
    both passes, and the longest ones before and after it. None if the step has no such loops: XLA writes out a loop with one
    iteration."""
    loops = [event for event in timeline.events if isinstance(event, Loop)]

    def longest(among: list[Loop], count: int) -> list[Loop]:
        return sorted((loop for loop in among if loop.num_iterations == count), key=lambda loop: -loop.seconds)[:1]

    for middle in longest(loops, both):
        place = loops.index(middle)
        for first, last in itertools.product(longest(loops[:place], fill), longest(loops[place + 1 :], drain)):
            return first, middle, last
    return None


def _loops(events: tuple[Event | Loop, ...]) -> Iterator[Loop]:
    for event in events:
        if isinstance(event, Loop):
            yield event
            for _, _, inner in event.iterations:
                yield from _loops(inner)


def _backward_share(loop: Loop) -> float:
    """Returns the share of time of the named kernels that jax has named as parts of a derivative's transpose."""
    named = [event for event, _ in _flat((loop,), 0.0, True) if event.lane == "compute" and event.op_name]
    backward = sum(event.seconds for event in named if "transpose(" in event.op_name)
    return backward / (sum(event.seconds for event in named) or 1.0)
