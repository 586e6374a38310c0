"""Collectives: the bytes they send and their time, by hand; and the mesh axes they belong to."""

import dataclasses

import numpy as np
import pytest

from llamajax.estimates.machine import Domain, Machine
from llamajax.planning.cost.network import Collective, axis_of, collective
from tests.planning.modules import MACHINE, SHARE, module

GPU_LINK = 100e9 * SHARE.gpu_link_efficiency
NODE_LINK = 10e9 * SHARE.node_link_efficiency
MESH = {"data": 2, "fsdp": 4}
"""On the test machine of four GPUs per node: fsdp lies inside a node, data across."""


def found(
    line: str,
    size: str = "bf16[8388608]{0}",
    *,
    num_devices: int = 8,
    mesh: dict[str, int] = MESH,
    machine: Machine = MACHINE,
) -> Collective:
    program = module(f"%x = {size} parameter(0)\n%r = {size} {line}", num_devices=num_devices)
    return collective(program.entry.root, program.entry, program, machine, mesh)


MIB16 = 2 * 8388608
INSIDE, ACROSS, ALL = "{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}", "{{0,1,2,3,4,5,6,7}}"


def test_all_gather_inside_a_node():
    """Four devices with 16 MiB each: 48 MiB pass every link in 3 steps, by the protocol without overhead."""
    gather = found(f"all-gather-start(%x), replica_groups={INSIDE}, dimensions={{0}}")
    assert (gather.kind, gather.axis, gather.group_size, gather.num_nodes) == ("all-gather", "fsdp", 4, 1)
    assert gather.num_bytes == 4 * MIB16
    assert gather.wire_bytes == {"intra_node": 3 * MIB16, "inter_node": 0}
    assert gather.seconds == pytest.approx(8.4e-6 + 3 * 3.4e-6 + 3 * MIB16 / GPU_LINK)
    assert gather.link == "intra_node"


def test_a_ring_through_all_nodes_crosses_once_per_node():
    """Eight devices pass 14 MiB on; one of four links leaves the node, over which a device has 10 GB/s."""
    scatter = found(f"reduce-scatter(%x), replica_groups={ALL}, dimensions={{0}}")
    passed = MIB16 * 7 / 8
    assert (scatter.axis, scatter.group_size, scatter.num_nodes, scatter.num_bytes) == ("data+fsdp", 8, 2, MIB16)
    assert scatter.wire_bytes == {"intra_node": passed * 3 / 4, "inter_node": passed / 4}
    simple = 8.4e-6 + 6 * 3.4e-6 + 14e-6 + passed / 4 / NODE_LINK
    assert scatter.seconds == pytest.approx(simple)
    assert scatter.link == "inter_node"


def test_replicas_reduce_their_shards_side_by_side():
    """Hybrid sharding: a device per node in every group, so all of a device's bytes leave the node."""
    reduced = found(f"all-reduce(%x), replica_groups={ACROSS}, to_apply=%add")
    assert (reduced.axis, reduced.group_size, reduced.num_nodes) == ("data", 2, 2)
    assert reduced.wire_bytes == {"intra_node": 0, "inter_node": MIB16}
    assert reduced.seconds == pytest.approx(8.4e-6 + 2 * 14e-6 + MIB16 / NODE_LINK)


def test_an_all_reduce_through_all_nodes_goes_around_twice():
    reduced = found(f"all-reduce(%x), replica_groups={ALL}, to_apply=%add")
    passed = 2 * MIB16 * 7 / 8
    assert reduced.wire_bytes == {"intra_node": passed * 3 / 4, "inter_node": passed / 4}
    assert reduced.seconds == pytest.approx(8.4e-6 + 12 * 3.4e-6 + 2 * 14e-6 + passed / 4 / NODE_LINK)


def test_a_small_all_reduce_takes_the_protocol_without_waiting():
    reduced = found(f"all-reduce(%x), replica_groups={INSIDE}, to_apply=%add", "f32[16]{0}")
    assert reduced.seconds == pytest.approx(6.6e-6 + 6 * 0.6e-6 + 2 * 64 * 3 / 4 / GPU_LINK / 0.5)


def test_many_nodes_reduce_along_a_tree():
    """64 nodes: 2 * 63 steps of a ring, but 2 * 6 of a pair of trees."""
    mesh = {"data": 64, "fsdp": 4}
    groups = "mesh['data'=64,'fsdp'=4] {'data'}"
    reduced = found(f"all-reduce(%x), replica_groups={groups}, to_apply=%add", "f32[16]{0}", num_devices=256, mesh=mesh)
    assert reduced.num_nodes == 64
    assert reduced.seconds == pytest.approx(6.6e-6 + 2 * 6 * 5e-6 + 2 * 64 / (NODE_LINK * 0.92 * 0.5))


def test_all_to_all_sends_to_everyone_an_equal_part():
    exchanged = found(f"all-to-all(%x), replica_groups={ALL}")
    assert exchanged.wire_bytes == {"intra_node": MIB16 * 3 / 8, "inter_node": MIB16 / 2}
    assert exchanged.seconds == pytest.approx(8.4e-6 + 14e-6 + 7e-6 + MIB16 / 2 / NODE_LINK)


@pytest.mark.parametrize(
    ("pairs", "axis", "wire", "seconds"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", "fsdp", (1, 0), 8.4e-6 + 3.4e-6 + MIB16 / GPU_LINK),
        ("{{0,4},{1,5},{2,6},{3,7},{4,0},{5,1},{6,2},{7,3}}", "data", (0, 1), 8.4e-6 + 14e-6 + MIB16 / NODE_LINK),
        ("{{0,1},{1,4}}", "data+fsdp", (1 / 8, 1 / 8), 8.4e-6 + 14e-6 + MIB16 / NODE_LINK),
    ],
)
def test_permutes(pairs, axis, wire, seconds):
    permute = found(f"collective-permute-start(%x), source_target_pairs={pairs}")
    assert permute.axis == axis
    assert tuple(permute.wire_bytes.values()) == tuple(MIB16 * share for share in wire)
    assert permute.seconds == pytest.approx(seconds)


UNLIKE = dataclasses.replace(
    MACHINE,
    domains=(Domain(num_nodes=2, node_bandwidth=80e9), Domain(num_nodes=2, node_bandwidth=20e9)),
    domain_bandwidth=4e9,
)
"""Four nodes in two domains: a GPU has 20, 5, and between the domains 1 GB/s."""
STAGES = {"pipeline": 2, "data": 2, "fsdp": 4}


def across_domains(line: str) -> Collective:
    return found(line, num_devices=16, mesh=STAGES, machine=UNLIKE)


def test_a_collective_within_domains_takes_the_slowest_ones_network():
    """Groups of both domains: the step waits for the slower one."""
    groups = "mesh['pipeline'=2,'data'=2,'fsdp'=4] {'data'}"
    reduced = across_domains(f"all-reduce(%x), replica_groups={groups}, to_apply=%add")
    assert (reduced.axis, reduced.link) == ("data", "inter_node")
    assert reduced.wire_bytes == {"intra_node": 0, "inter_node": MIB16, "inter_domain": 0}
    assert reduced.seconds == pytest.approx(8.4e-6 + 2 * 14e-6 + MIB16 / (5e9 * SHARE.node_link_efficiency))
    first = across_domains("all-reduce(%x), replica_groups={{0,4},{1,5}}, to_apply=%add")
    assert first.seconds == pytest.approx(8.4e-6 + 2 * 14e-6 + MIB16 / (20e9 * SHARE.node_link_efficiency))
    inside = across_domains(f"all-gather(%x), replica_groups={INSIDE}, dimensions={{0}}")
    assert inside.wire_bytes == {"intra_node": 3 * MIB16, "inter_node": 0, "inter_domain": 0}
    assert (inside.link, inside.seconds) == ("intra_node", pytest.approx(8.4e-6 + 3 * 3.4e-6 + 3 * MIB16 / GPU_LINK))


def test_a_permute_between_stages_crosses_domains():
    pairs = ",".join(f"{{{device},{(device + 8) % 16}}}" for device in range(16))
    permute = across_domains(f"collective-permute-start(%x), source_target_pairs={{{pairs}}}")
    assert (permute.axis, permute.link) == ("pipeline", "inter_domain")
    assert permute.wire_bytes == {"intra_node": 0, "inter_node": 0, "inter_domain": MIB16}
    assert permute.seconds == pytest.approx(8.4e-6 + 14e-6 + MIB16 / (1e9 * SHARE.node_link_efficiency))


def test_a_ring_leaves_every_domain_once_and_an_all_to_all_sends_half():
    everyone = f"{{{{{','.join(map(str, range(16)))}}}}}"
    scatter = across_domains(f"reduce-scatter(%x), replica_groups={everyone}, dimensions={{0}}")
    passed = MIB16 * 15 / 16
    assert scatter.wire_bytes == {"intra_node": passed * 12 / 16, "inter_node": passed / 8, "inter_domain": passed / 8}
    assert scatter.seconds == pytest.approx(
        8.4e-6 + 12 * 3.4e-6 + 3 * 14e-6 + passed / 4 / (1e9 * SHARE.node_link_efficiency)
    )
    exchanged = across_domains(f"all-to-all(%x), replica_groups={everyone}")
    assert exchanged.wire_bytes == {"intra_node": MIB16 * 3 / 16, "inter_node": MIB16 / 4, "inter_domain": MIB16 / 2}
    assert (scatter.link, exchanged.link) == ("inter_domain", "inter_domain")


def test_several_arrays_go_together():
    program = module(
        f"""%x = bf16[100]{{0}} parameter(0)
        %y = f32[100]{{0}} parameter(1)
        %r = ((bf16[100]{{0}}, f32[100]{{0}}), (bf16[400]{{0}}, f32[400]{{0}})) all-gather-start(%x, %y), \
replica_groups={INSIDE}, dimensions={{0}}"""
    )
    assert collective(program.entry.root, program.entry, program, MACHINE, MESH).num_bytes == 4 * (200 + 400)


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        ([[0, 1, 2, 3, 4, 5, 6, 7]], "data+fsdp+tensor"),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], "tensor"),
        ([[4, 0], [1, 5], [2, 6], [3, 7]], "data"),
        ([[0, 1, 4, 5], [2, 3, 6, 7]], "data+tensor"),
        ([[0, 3], [1, 2], [4, 7], [5, 6]], "?"),
        ([[0], [1], [2], [3], [4], [5], [6], [7]], "?"),
    ],
)
def test_axes(groups, axis):
    assert axis_of(np.array(groups), {"data": 2, "expert": 1, "fsdp": 2, "tensor": 2}) == axis


def test_a_group_of_one_sends_nothing():
    alone = found("all-gather(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, dimensions={0}")
    assert sum(alone.wire_bytes.values()) == 0


def test_a_faster_network_changes_only_what_crosses_it():
    line = f"all-gather(%x), replica_groups={INSIDE}, dimensions={{0}}"
    program = module(f"%x = f32[1000]{{0}} parameter(0)\n%r = f32[4000]{{0}} {line}")
    faster = dataclasses.replace(MACHINE, gpu=dataclasses.replace(MACHINE.gpu, node_bandwidth=400e9))
    own, other = (collective(program.entry.root, program.entry, program, machine, MESH) for machine in (MACHINE, faster))
    assert own == other
