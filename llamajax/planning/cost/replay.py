"""Replays a scheduled module on the cost model.

One lane computes, in program order. A `-start` queues its transfer in the lane of the slowest link that it needs; its
`-done` makes the compute lane wait until the transfer has ended. Kernels run slower while a collective is in flight. Loop
bodies are replayed once and counted as often as they run.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from llamajax.estimates.machine import Machine
from llamajax.planning.cost.attention import Scores
from llamajax.planning.cost.experts import FURTHER_ROUNDS, Loads
from llamajax.planning.cost.kernels import FREE, CostModel
from llamajax.planning.cost.network import Collective, LinkKind, collective, collective_kind
from llamajax.planning.cost.timeline import ALL_LANES, HOST_LANES, CollectiveUse, Event, Lane, Loop, Timeline
from llamajax.planning.xla.hlo import Computation, Instruction, Module, arrays

Key = tuple[str, str]
"""Identity of an instruction: its computation's name and its own."""
_NETWORK: tuple[Lane, ...] = ("intra_node", "inter_node", "inter_domain")
_HIDES = 0.02
"""Kernels shorter than this share of a collective do not count as hiding it, such as index arithmetic and copies of
scalars."""
_REMATERIALIZED = ".remat"
"""Marks names of instructions that XLA itself recomputes to save memory, such as `fusion.1.remat2`."""
_CONTROL_FLOW = ("while", "call", "conditional")


def replay(
    module: Module,
    machine: Machine,
    mesh: Mapping[str, int],
    scores: Scores | None = None,
    loads: Loads | None = None,
) -> Timeline:
    """Returns the timeline of one execution of `module`.

    Args:
        module: a scheduled module.
        machine: the machine that it runs on.
        mesh: sizes of the mesh axes, outer to inner; their product is the number of devices.
        scores: computed scores of attention, where its kernels skip unseen tiles.
        loads: loads of experts, if the module has some.
    """
    replayer = _Replayer(module, machine, mesh, CostModel(module, machine, scores, loads))
    tally = replayer.run(module.entry, _Clock(), in_loop=False)
    uses = tuple(
        CollectiveUse(
            replayer.collectives[key], replayer.is_sync[key], key in replayer.in_loop, tally.count[key], tally.busy[key],
            tally.exposed[key],
        )
        for key in replayer.collectives
        if tally.count[key]
    )  # fmt: skip
    wire: dict[LinkKind, float] = {"intra_node": 0.0, "inter_node": 0.0}
    wire |= {"inter_domain": 0.0} if machine.domains else {}
    for use in uses:
        for link, size in use.collective.wire_bytes.items():
            wire[link] += use.count * size
    return Timeline(
        step_time_s=tally.seconds,
        compute_s=sum(tally.compute.values()),
        slowdown_s=tally.slowdown,
        comm_s=sum(use.seconds for use in uses),
        exposed_comm_s=sum(use.exposed_s for use in uses),
        exposed_copy_s=sum(seconds for key, seconds in tally.exposed.items() if key not in replayer.collectives),
        exposed_host_copy_s=sum(seconds for key, seconds in tally.exposed.items() if key in replayer.host_copies),
        host_copies={lane: size for lane, size in tally.host_bytes.items() if size},
        wire_bytes=wire,
        flops=tally.flops,
        rematerialized_flops=tally.rematerialized_flops,
        compute_by_kind=dict(tally.compute),
        elementwise_bytes=tally.num_bytes["memory"] + tally.num_bytes["copy"],
        num_kernels=tally.num_kernels,
        collectives=uses,
        sync_collectives_in_loops=sum(use.is_sync and use.in_loop for use in uses),
        not_understood=dict(replayer.costs.not_understood),
        events=tuple(tally.events),
        latencies=replayer.latencies,
    )


@dataclass
class _Clock:
    """The time at which the compute lane continues, and the times at which the other lanes are free again."""

    now: float = 0.0
    queues: dict[Lane, list[tuple[float, Key]]] = field(default_factory=lambda: {lane: [] for lane in ALL_LANES})
    """End and key of each transfer that was sent, in order; finished ones may be missing."""

    def copy(self) -> "_Clock":
        return _Clock(self.now, {lane: list(queue) for lane, queue in self.queues.items()})

    def free(self, lane: Lane) -> float:
        """Returns the time at which the lane has nothing more to do."""
        return max(self.now, self.queues[lane][-1][0]) if self.queues[lane] else self.now

    @property
    def is_idle(self) -> bool:
        return all(self.free(lane) == self.now for lane in ALL_LANES)

    def send(self, lane: Lane, seconds: float, key: Key) -> float:
        """Queues a transfer now and returns its start."""
        start = self.free(lane)
        self.queues[lane] = [sent for sent in self.queues[lane] if sent[0] > self.now]
        self.queues[lane].append((start + seconds, key))
        return start

    def wait(self, lane: Lane, end: float) -> Iterator[tuple[Key, float]]:
        """Waits until `end`, and yields the transfers of the lane that cause the wait, with the seconds of each."""
        for until, key in self.queues[lane]:
            if self.now < until <= end:
                yield key, until - self.now
                self.now = until

    def compute(self, seconds: float, slowdown: float) -> float:
        """Runs a kernel now and returns its delay."""
        beside = max(self.free(lane) for lane in _NETWORK) - self.now
        overlapped = min(seconds * (1 + slowdown), beside)
        late = overlapped - overlapped / (1 + slowdown)
        self.now += seconds + late
        return late


@dataclass
class _Tally:
    """Sums over one execution of a computation."""

    seconds: float = 0.0
    flops: int = 0
    rematerialized_flops: int = 0
    num_kernels: int = 0
    compute: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    host_bytes: dict[Lane, int] = field(default_factory=lambda: defaultdict(int))
    slowdown: float = 0.0
    count: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    busy: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    exposed: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    events: list[Event | Loop] = field(default_factory=list)

    def add(self, other: "_Tally", times: int = 1) -> None:
        """Adds all sums except `seconds` and `events`, which are not additive for parallel work."""
        self.flops += times * other.flops
        self.rematerialized_flops += times * other.rematerialized_flops
        self.slowdown += times * other.slowdown
        self.num_kernels += times * other.num_kernels
        for name in ("compute", "num_bytes", "host_bytes", "count", "busy", "exposed"):
            own = getattr(self, name)
            for key, value in getattr(other, name).items():
                own[key] += times * value


@dataclass(frozen=True, slots=True)
class _Op:
    """One action of the compute lane, in the order of the schedule."""

    action: Literal["kernel", "send", "wait", "enter"]
    """Run a kernel, hand a transfer to another lane, wait for one, enter another computation."""
    instruction: Instruction
    key: Key
    """Key of the instruction; for `wait`, of the instruction that sent."""
    lane: Lane = "compute"
    kind: str = "wait"
    """Kind of the event."""
    seconds: float = 0.0
    flops: int = 0
    num_bytes: int = 0

    def event(self, start: float, seconds: float) -> Event:
        return Event(self.lane, self.instruction.name, self.kind, self.instruction.op_name, start, seconds)


class _Replayer:
    """One replay, with its knowledge of instructions and of the loop bodies already run."""

    def __init__(self, module: Module, machine: Machine, mesh: Mapping[str, int], costs: CostModel):
        self.module = module
        self.machine = machine
        self.mesh = mesh
        self.costs = costs
        self.collectives: dict[Key, Collective] = {}
        self.is_sync: dict[Key, bool] = {}
        self.in_loop: set[Key] = set()
        self.host_copies: set[Key] = set()
        self.latencies: dict[str, float] = {}
        self._programs: dict[str, list[_Op]] = {}
        self._closed: dict[str, _Tally] = {}

    def run(self, computation: Computation, clock: _Clock, *, in_loop: bool) -> _Tally:
        """Executes `computation` from `clock.now` on and moves the clock to its end; its events start at zero."""
        begin, tally = clock.now, _Tally()
        ends: dict[Key, tuple[Lane, float]] = {}
        for op in self._program(computation):
            start = clock.now
            match op.action:
                case "kernel":
                    tally.slowdown += clock.compute(op.seconds, self.machine.calibration.compute_slowdown)
                    tally.compute[op.kind] += op.seconds
                    tally.num_kernels += 1
                    tally.num_bytes[op.kind] += op.num_bytes
                    tally.flops += op.flops
                    if _REMATERIALIZED in op.instruction.name:
                        tally.rematerialized_flops += op.flops
                    tally.events.append(op.event(start - begin, clock.now - start))
                case "send":
                    sent = clock.send(op.lane, op.seconds, op.key)
                    ends[op.key] = (op.lane, sent + op.seconds)
                    tally.count[op.key] += 1
                    tally.busy[op.key] += op.seconds
                    tally.num_bytes[op.kind] += op.num_bytes
                    if op.lane in HOST_LANES:
                        tally.host_bytes[op.lane] += op.num_bytes
                        self.host_copies.add(op.key)
                    tally.flops += op.flops
                    tally.events.append(op.event(sent - begin, op.seconds))
                    if in_loop:
                        self.in_loop.add(op.key)
                case "wait":
                    for key, seconds in clock.wait(*ends[op.key]):
                        tally.exposed[key] += seconds
                    if clock.now > start:
                        tally.events.append(op.event(start - begin, clock.now - start))
                case "enter":
                    tally.events.append(self._enter(op.instruction, clock, tally, begin, in_loop=in_loop))
        tally.seconds = clock.now - begin
        return tally

    def _enter(self, instruction: Instruction, clock: _Clock, tally: _Tally, begin: float, *, in_loop: bool) -> Loop:
        """Runs the computations that a `while`, `call` or `conditional` calls, and adds them to `tally`."""
        start = clock.now - begin
        iterations: list[tuple[int, float, tuple[Event | Loop, ...]]] = []
        if instruction.opcode == "while":
            body = self.module.computations[instruction.called("body")[0]]
            left = self._trips(instruction)
            left = 1 if left is None else left
            # A condition, and a body that never runs, have latencies too.
            for name in instruction.called("condition", "body"):
                self._program(self.module.computations[name])
            in_loop = in_loop or left > 1
            while left:
                # No transfer crosses the ends of a loop body, so once transfers from outside are over, all iterations are
                # equal.
                times = left if clock.is_idle else 1
                inner = self._closed_body(body, clock, in_loop) if clock.is_idle else self.run(body, clock, in_loop=in_loop)
                clock.now += (times - 1) * inner.seconds
                tally.add(inner, times)
                iterations.append((times, inner.seconds, tuple(inner.events)))
                left -= times
        else:
            names = instruction.called("to_apply", "branch_computations", "true_computation", "false_computation")
            branches = []
            for name in names:
                own_clock = clock.copy()
                branches.append((self.run(self.module.computations[name], own_clock, in_loop=in_loop), own_clock))
            inner, own_clock = max(branches, key=lambda branch: branch[0].seconds)
            clock.now, clock.queues = own_clock.now, own_clock.queues
            tally.add(inner)
            iterations.append((1, inner.seconds, tuple(inner.events)))
        self.latencies[instruction.scheduling_name] = clock.now - begin - start
        return Loop(instruction.name, instruction.op_name, start, tuple(iterations))

    def _trips(self, loop: Instruction) -> int | None:
        """Returns the iterations of a `while`; None: they are unknown. Only the devices know how many rounds tokens take to
        their experts, but their loads say it."""
        if loop.trip_count is None and FURTHER_ROUNDS in loop.op_name and self.costs.loads is not None:
            return self.costs.loads.further_rounds
        return loop.trip_count

    def _closed_body(self, body: Computation, clock: _Clock, in_loop: bool) -> _Tally:
        """Runs an iteration that starts with idle lanes, replayed once for all loops and steps that contain it."""
        if body.name not in self._closed:
            self._closed[body.name] = self.run(body, _Clock(), in_loop=in_loop)
        clock.now += self._closed[body.name].seconds
        return self._closed[body.name]

    def _program(self, computation: Computation) -> list[_Op]:
        if computation.name not in self._programs:
            ops = [op for instruction in computation.instructions.values() for op in self._ops(instruction, computation)]
            self._mark_sync(ops)
            # XLA takes copies in one direction for parallel, but they queue: each lasts as long as all of them.
            queued = {lane: sum(op.seconds for op in ops if op.action == "send" and op.lane == lane) for lane in HOST_LANES}
            self.latencies |= {
                op.instruction.scheduling_name: queued.get(op.lane, op.seconds)
                for op in ops
                if op.action in ("kernel", "send")
            }
            # XLA complains about copies whose end has no time.
            copies = {op.key for op in ops if op.action == "send" and op.lane in HOST_LANES}
            self.latencies |= {op.instruction.scheduling_name: 0.0 for op in ops if op.action == "wait" and op.key in copies}
            self._programs[computation.name] = ops
        return self._programs[computation.name]

    def _ops(self, instruction: Instruction, computation: Computation) -> list[_Op]:
        key = (computation.name, instruction.name)
        if instruction.opcode in _CONTROL_FLOW:
            if instruction.opcode == "while" and self._trips(instruction) is None:
                self.costs.not_understood["while of unknown length"] += 1
            return [_Op("enter", instruction, key)]
        if instruction.opcode.endswith("-done"):
            sender = computation.instructions[instruction.operands[0]]
            is_sent = sender.opcode.endswith("-start") and not self.is_sync.get((computation.name, sender.name))
            return [_Op("wait", instruction, (computation.name, sender.name))] if is_sent else []
        hero, place = self._hero(instruction, computation)
        if collective_kind(hero.opcode):
            cost = collective(hero, place, self.module, self.machine, self.mesh, self.costs.loads)
            self.collectives[key] = cost
            self.is_sync[key] = instruction.is_sync or not instruction.opcode.endswith("-start")
            send = _Op("send", instruction, key, cost.link, cost.kind, cost.seconds)
            return [send, _Op("wait", instruction, key)] if self.is_sync[key] else [send]
        cost = self.costs.cost(hero, place)
        if cost is FREE:
            return []
        if instruction.opcode.endswith("-start"):
            lane = _copy_lane(instruction) if cost.kind == "copy" else "copy"
            return [_Op("send", instruction, key, lane, cost.kind, cost.seconds, cost.flops, cost.num_bytes)]
        return [_Op("kernel", instruction, key, "compute", cost.kind, cost.seconds, cost.flops, cost.num_bytes)]

    def _hero(self, instruction: Instruction, computation: Computation) -> tuple[Instruction, Computation]:
        """Returns the instruction that does the actual work, and its computation: a collective or call may be wrapped."""
        if instruction.opcode in ("async-start", "fusion", "fusion-start"):
            inside = self.module.computations[instruction.called("calls")[0]]
            for inner in inside.instructions.values():
                if collective_kind(inner.opcode) or (instruction.opcode == "async-start" and inner.opcode != "parameter"):
                    return inner, inside
        return instruction, computation

    def _mark_sync(self, ops: list[_Op]) -> None:
        """Marks a collective as synchronous if its `-done` follows before any long computation: it hides behind nothing."""
        computed = 0.0
        sent_at: dict[Key, tuple[float, float]] = {}
        for op in ops:
            if op.action == "enter":
                sent_at.clear()  # all collectives in flight hide behind the called computation
            elif op.action == "kernel":
                computed += op.seconds
            elif op.action == "send" and op.key in self.collectives:
                sent_at[op.key] = (computed, op.seconds)
            elif op.key in sent_at:
                before, seconds = sent_at[op.key]
                if computed - before < _HIDES * seconds:
                    self.is_sync[op.key] = True


def _copy_lane(start: Instruction) -> Lane:
    """Returns the lane of an asynchronous copy between the device and host memory."""
    assert isinstance(start.shape, tuple)
    result = start.shape[1 if start.opcode == "fusion-start" else 0]
    return "to_host" if any(array.on_host for array in arrays(result)) else "from_host"
