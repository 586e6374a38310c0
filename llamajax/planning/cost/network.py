"""The bytes that a collective sends over each kind of link, and the time that NCCL needs for it.

Times are latency plus bytes over bandwidth, with the latencies of NCCL's own tuner (its source, src/graph/tuning.cc, version
2.26), which chooses among its protocols by the same sum: fast ones that waste bandwidth, slow ones that do not.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llamajax.estimates.machine import Machine
from llamajax.planning.cost.experts import FURTHER_ROUNDS, Loads
from llamajax.planning.xla.hlo import Computation, Instruction, Module, num_bytes

LinkKind = Literal["intra_node", "inter_node", "inter_domain"]
"""Kinds of links. `inter_domain` joins nodes of unlike networks; machines without domains have none."""

_KINDS = (
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Protocol:
    """One of NCCL's protocols to move a chunk; seconds per step."""

    bandwidth: float
    """Share of the links' bandwidth that carries payload."""
    base: float
    gpu_hop: float
    node_hop: float
    """Seconds per hop in a ring with several GPUs per node."""
    lone_node_hop: float
    """Seconds per hop with one GPU per node, and in trees."""
    post: float
    """Least time of any hop once the network takes part."""


_PROTOCOLS = (
    Protocol(0.5, 6.6e-6, 0.6e-6, 2.7e-6, 5.0e-6, 1e-6),  # LL
    Protocol(0.92, 14.0e-6, 1.9e-6, 4.0e-6, 8.5e-6, 1e-6),  # LL128
    Protocol(1.0, 8.4e-6, 3.4e-6, 14.0e-6, 14.0e-6, 3e-6),  # Simple
)
_TREE_BANDWIDTH = 0.92
"""Bandwidth of an all-reduce along a tree, relative to a ring's."""
_RAGGED_BASE, _RAGGED_PEER = 270e-6, 12e-6
"""Seconds that a ragged all-to-all takes besides its bytes, and for each device of a group: it waits for the host, which
sends every peer its part by itself (16 to 64 A100, jax 0.10: openxla/xla#46982)."""
_POST = 1e-6
"""Seconds to post one message to one peer of an all-to-all."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One execution of one collective, as one device sees it."""

    name: str
    kind: str
    axis: str
    """Mesh axes along which devices take part, such as `data+fsdp`; `?` if the groups match no axes."""
    group_size: int
    num_nodes: int
    """Nodes that one group spans."""
    num_bytes: int
    """Bytes of the whole array: gathered, reduced, or exchanged."""
    wire_bytes: dict[LinkKind, float]
    """Bytes that a device sends, on average over devices."""
    seconds: float

    @property
    def link(self) -> LinkKind:
        """Returns the slowest kind of link that it needs."""
        if self.wire_bytes.get("inter_domain"):
            return "inter_domain"
        return "inter_node" if self.num_nodes > 1 else "intra_node"


def collective_kind(opcode: str) -> str | None:
    """Returns `all-gather` for `all-gather` and `all-gather-start`; None for other opcodes than collectives."""
    kind = opcode.removesuffix("-start")
    return kind if kind in _KINDS else None


def collective(
    instruction: Instruction,
    computation: Computation,
    module: Module,
    machine: Machine,
    mesh: Mapping[str, int],
    loads: Loads | None = None,
) -> Collective:
    """Returns the cost of a collective, or of its `-start`.

    Args:
        instruction: the collective.
        computation: the instruction's computation.
        module: the computation's module.
        machine: the machine that it runs on.
        mesh: sizes of the mesh axes, outer to inner; their product is the number of devices.
        loads: loads of experts. A ragged all-to-all sends the filled rows of the mean device, in the time that those of the
            busiest take.
    """
    kind = collective_kind(instruction.opcode)
    assert kind is not None, instruction.opcode
    shapes = computation.operand_shapes(instruction)
    sent, slower = sum(map(num_bytes, shapes)), 1.0
    if kind == "ragged-all-to-all":  # of an array; others are the result's first content, offsets and sizes
        mean, busiest = loads.filled(is_further=FURTHER_ROUNDS in instruction.op_name) if loads else (1.0, 1.0)
        sent, slower = round(mean * num_bytes(shapes[0])), busiest / mean
    if kind == "collective-permute":
        return _permute(instruction, sent, module.num_devices, machine, mesh)
    groups = instruction.replica_groups(module.num_devices)
    n = groups.shape[1]
    nodes = groups // machine.gpus_per_node
    m, d = _most_in_a_group(nodes), _most_in_a_group(_domains_of(nodes, machine))
    machine = _joined(nodes, machine)
    whole = sent * n if kind == "all-gather" else sent
    g = n / m
    passed = whole * (n - 1) / n
    match kind:
        case "all-reduce":
            seconds, passed = all_reduce_seconds(whole, n, m, machine), 2 * passed
            inter = passed / g if m > 1 else 0.0
        case "all-to-all" | "ragged-all-to-all":
            inter = whole * (n - g) / n
            seconds = _all_to_all_seconds(slower * (passed - inter), slower * inter, n, m, machine)
            seconds += _RAGGED_BASE + _RAGGED_PEER * n if kind == "ragged-all-to-all" else 0.0
        case _:
            seconds = ring_seconds(passed, n - 1, m - 1, n, m, machine)
            inter = passed / g if m > 1 else 0.0
    # A ring leaves every domain once, and an all-to-all sends an equal part to every device of the other domains.
    between = (whole * (d - 1) / d if "all-to-all" in kind else passed * d / n) if d > 1 else 0.0
    wire = _wire(passed - inter, inter, between, machine)
    return Collective(instruction.name, kind, axis_of(groups, mesh), n, m, whole, wire, seconds)


def _domains_of(nodes: np.ndarray, machine: Machine) -> np.ndarray:
    """Returns the index of the domain of every node; 0 on a machine without domains."""
    last = np.cumsum([domain.num_nodes for domain in machine.domains])[:-1]
    return np.searchsorted(last, nodes, side="right")


def _most_in_a_group(places: np.ndarray) -> int:
    """Returns the largest number of different places in a group, int [groups, devices]."""
    return int((np.diff(np.sort(places, axis=1), axis=1) > 0).sum(axis=1).max(initial=0)) + 1


def _joined(nodes: np.ndarray, machine: Machine) -> Machine:
    """Returns the machine with one network: the slowest that groups of nodes, int [groups, devices], need."""
    if not machine.domains:
        return machine
    several = nodes[(nodes != nodes[:, :1]).any(axis=1)]
    domains = _domains_of(several, machine)
    links = [machine.domains[index].node_bandwidth for index in np.unique(domains)]
    links += [machine.domain_bandwidth] if (domains != domains[:, :1]).any() else []
    return dataclasses.replace(machine, gpu=dataclasses.replace(machine.gpu, node_bandwidth=min(links, default=None)))


def _wire(intra: float, inter: float, between: float, machine: Machine) -> dict[LinkKind, float]:
    """Returns bytes by kind of link.

    Args:
        intra: bytes within nodes.
        inter: bytes between nodes.
        between: bytes of these that cross domains.
        machine: the machine.
    """
    found: dict[LinkKind, float] = {"intra_node": intra, "inter_node": inter - between}
    if machine.domains:
        found["inter_domain"] = between
    return found


def num_communicators(module: Module) -> int:
    """Returns the number of different divisions of the devices into groups of more than one, among all collectives of a
    program."""
    groups = {
        instruction.replica_groups(module.num_devices).tobytes()
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if collective_kind(instruction.opcode) and "replica_groups" in instruction.attributes
        if instruction.replica_groups(module.num_devices).shape[1] > 1
    }
    return len(groups)


def ring_seconds(passed: float, steps: int, node_steps: int, n: int, m: int, machine: Machine) -> float:
    """Returns the time of an all-gather or a reduce-scatter along a ring of `n` devices on `m` nodes.

    Every device passes `passed` bytes on in `steps` steps; `node_steps` of them lead to another node: one link of the ring
    in n / m.
    """
    if n == 1:
        return _PROTOCOLS[0].base
    g = n / m
    inter = passed / g / machine.node_link if m > 1 else 0.0
    intra = passed * (g - 1) / g / machine.gpu_link if m > 1 else passed / machine.gpu_link

    def seconds(protocol: Protocol) -> float:
        gpu_hop = max(protocol.gpu_hop, protocol.post if m > 1 else 0.0)
        node_hop = protocol.lone_node_hop if g == 1 else protocol.node_hop
        latency = protocol.base + (steps - node_steps) * gpu_hop + node_steps * node_hop
        return latency + max(inter, intra) / protocol.bandwidth

    return min(map(seconds, _PROTOCOLS))


def all_reduce_seconds(whole: float, n: int, m: int, machine: Machine) -> float:
    """Returns the time of an all-reduce of `whole` bytes by `n` devices on `m` nodes.

    It is the better of a ring, which scatters and gathers, and a pair of trees.
    """
    ring = ring_seconds(2 * whole * (n - 1) / n, 2 * (n - 1), 2 * (m - 1), n, m, machine)
    if m == 1:
        return ring
    g = n / m
    slowest = min(machine.gpu_link, machine.node_link * g)
    tree = min(
        protocol.base
        + 2 * ((g - 1) * protocol.gpu_hop + math.log2(m) * protocol.lone_node_hop)
        + 2 * whole / (slowest * _TREE_BANDWIDTH * protocol.bandwidth)
        for protocol in _PROTOCOLS
    )
    return min(ring, tree)


def _all_to_all_seconds(intra: float, inter: float, n: int, m: int, machine: Machine) -> float:
    simple = _PROTOCOLS[-1]
    latency = simple.base + (simple.node_hop if m > 1 else simple.gpu_hop) + (n - 1) * _POST
    return latency + max(intra / machine.gpu_link, inter / machine.node_link)


def _permute(instruction: Instruction, sent: int, num_devices: int, machine: Machine, mesh: Mapping[str, int]) -> Collective:
    pairs = np.array(instruction.dims("source_target_pairs")).reshape(-1, 2)
    nodes = pairs // machine.gpus_per_node
    domains = _domains_of(nodes, machine)
    crossing = int((nodes[:, 0] != nodes[:, 1]).sum())
    between = int((domains[:, 0] != domains[:, 1]).sum())
    moving = int((pairs[:, 0] != pairs[:, 1]).sum())
    machine = _joined(nodes, machine)
    wire = _wire(
        sent * (moving - crossing) / num_devices, sent * crossing / num_devices, sent * between / num_devices, machine
    )
    simple = _PROTOCOLS[-1]
    hop, link = (simple.node_hop, machine.node_link) if crossing else (simple.gpu_hop, machine.gpu_link)
    axes = _differing_axes(pairs, mesh)
    size = math.prod(mesh[axis] for axis in axes)
    seconds = simple.base + hop + sent / link
    return Collective(
        instruction.name, "collective-permute", "+".join(axes) or "?", size, 2 if crossing else 1, sent, wire, seconds
    )


def axis_of(groups: np.ndarray, mesh: Mapping[str, int]) -> str:
    """Returns the mesh axes, joined by `+`, that divide the devices into `groups`, int [groups, devices]; `?` if there are
    none."""
    axes = _differing_axes(groups, mesh)
    return "+".join(axes) if axes and math.prod(mesh[axis] for axis in axes) == groups.shape[1] else "?"


def _differing_axes(groups: np.ndarray, mesh: Mapping[str, int]) -> list[str]:
    """Returns the axes along which devices of one group differ."""
    coordinates = np.unravel_index(groups, list(mesh.values()))
    return [axis for axis, places in zip(mesh, coordinates, strict=True) if (places != places[:, :1]).any()]
