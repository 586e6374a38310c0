"""Which groups of layers write their saved values to a disk, and what remains in memory."""

import dataclasses
import math

import pytest

from llamajax.config.machine import HardwareConfig
from llamajax.config.offload import ON_CARD, OffloadConfig, TiersConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import TrainConfig
from llamajax.estimates.device_memory import host_bytes
from llamajax.step.layer_groups import (
    bytes_in_flight,
    file_bytes,
    further_card_bytes,
    groups_of,
    needed_host_bytes,
    written_bytes,
)
from llamajax.step.resolve import formula_bytes, offload_choice, resolve_planned
from tests.tiny import tiny_config

LAYER = 4 * 4096 * 2 * (2 * 4096 + 32 * 2)
"""Bytes of a layer's input and attention's output, and of the logarithm of its sums, in fp32."""
FAST = {"data.seq_len": 4096, "hardware.nvme_bandwidth": 1e12}


def planned(**changes):
    """A model of 7 billion parameters on eight GPUs, whose values wait on a disk."""
    config = tiny_config(
        mesh=MeshConfig(),
        hardware=HardwareConfig(gpu="h200"),
        train=TrainConfig(num_steps=10, global_batch_size=64),
        offload=OffloadConfig(activations=("input", "attention"), tiers=TiersConfig(nvme_dir="unused")),
    )
    model = {
        "embed_dim": 4096, "mlp_dim": 11008, "num_layers": 32, "num_heads": 32, "num_kv_heads": 32, "head_dim": 128,
        "max_seq_len": 4096, "remat": "save_attention", "compute_dtype": "bfloat16",
    }  # fmt: skip
    run = resolve_planned(config.changed({f"model.{name}": value for name, value in model.items()} | changes))
    return run.config, run.mesh


def of(**changes):
    return [(group.start, group.count, group.is_away) for group in groups_of(*planned(**changes))]


def test_groups_have_at_least_64_mib_and_cover_all_layers():
    assert of(**FAST) == [(layer, 1, layer < 31) for layer in range(32)]
    # 8 * 128 tokens of 2 * 4096 + 64 numbers: 16.1 MiB.
    assert [(start, count) for start, count, _ in of(**FAST | {"data.seq_len": 128})] == [(4 * n, 4) for n in range(8)]
    assert of(**FAST | {"data.seq_len": 16}) == [(0, 16, True), (16, 16, False)]
    odd = groups_of(*planned(**FAST | {"model.num_layers": 5}), size=2)
    assert [(group.start, group.count, group.is_away) for group in odd] == [(0, 2, True), (2, 2, True), (4, 1, False)]


def test_a_slow_disk_leaves_more_layers_in_memory():
    counts = [sum(away for *_, away in of(**FAST | {"hardware.nvme_bandwidth": rate})) for rate in (1e6, 1e9, 3e9, 1e10)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert 0 < counts[1] < counts[3]


def test_the_disks_of_a_usual_node_count_unless_told():
    """A DGX has one disk per GPU, which writes 3.8 GB/s; for other nodes none is known, and all groups but one write."""
    usual = of(**{"data.seq_len": 4096})
    assert usual == of(**FAST | {"hardware.nvme_bandwidth": 3.8e9})
    assert sum(away for *_, away in usual) < 31
    unknown = of(**{"data.seq_len": 4096, "hardware.gpu": "l40s"})
    assert sum(away for *_, away in unknown) == 31


def test_bytes_follow_from_the_groups():
    config, mesh = planned(**FAST | {"train.grad_accum_steps": 2})
    assert file_bytes(config, mesh) == 31 * LAYER
    assert written_bytes(config, mesh) == 2 * 31 * LAYER
    assert bytes_in_flight(config, mesh) == needed_host_bytes(config, mesh) == 3 * LAYER


@pytest.mark.parametrize("kept", [1, 3])
def test_memory_is_that_of_one_program_but_for_what_waits_on_the_disk(monkeypatch, kept):
    """As one program, at least 30 layers' values wait on the host, and those of one stay on the card."""
    monkeypatch.setattr("llamajax.step.layer_groups.first_kept", lambda sizes, *_: len(sizes) - kept)
    config, mesh = planned(**{"data.seq_len": 4096, "train.grad_accum_steps": 2})
    on_host = dataclasses.replace(config, offload=dataclasses.replace(config.offload, tiers=TiersConfig()))
    assert further_card_bytes(config, mesh) == (kept - 1) * LAYER
    assert further_card_bytes(on_host, mesh) == 0
    on_card = [formula_bytes(own, mesh)["activations"] for own in (config, on_host)]
    assert on_card[0] - on_card[1] == (kept - 1) * LAYER
    assert needed_host_bytes(on_host, mesh) == host_bytes(on_host, mesh) >= 30 * LAYER
    assert needed_host_bytes(dataclasses.replace(config, offload=ON_CARD), mesh) == 0


def test_auto_counts_the_disk_in_place_of_the_hosts_memory():
    def limits(**changes):
        config, mesh = planned(**{"data.seq_len": 4096} | changes)
        auto = config.changed({"offload.activations": "auto"})
        chosen = offload_choice(auto, mesh, 80e9).chosen
        assert chosen is not None
        return chosen.limits

    assert limits().bandwidth == 3.8e9
    assert limits(**FAST).bandwidth == 50e9  # the link to the host
    assert limits().host_bytes == math.inf
    assert limits(**{"offload.tiers.nvme_bytes": 8e12}).host_bytes == 1e12
    tight = planned(**{"data.seq_len": 4096, "offload.tiers.nvme_bytes": 8e6, "offload.activations": "auto"})[0]
    assert not tight.offload.names
