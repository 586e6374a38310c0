"""GPU figures by the name jax gives a device and by that of the configuration, and the timed peak of other devices."""

import typing

import jax
import pytest

from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from llamajax.estimates.gpus import GPUS, find_gpu, planned_gpu
from llamajax.parallel import mesh
from llamajax.planning.xla.compile import target_config
from llamajax.watch import peak as peak_module
from llamajax.watch.peak import measure_matmul_flops, peak_flops


@pytest.mark.parametrize(
    ("device_kind", "name", "peak_flops"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", "H100", 989.5e12),
        ("NVIDIA H200", "H200", 989.5e12),
        ("NVIDIA B200", "B200", 2250e12),
        ("NVIDIA GB200", "GB200", 2500e12),
        ("NVIDIA GeForce RTX 3060", "RTX-3060-12GB", 25.5e12),
        ("NVIDIA GeForce RTX 3090", "RTX-3090", 71.2e12),
        ("NVIDIA GeForce RTX 4090", "RTX-4090", 165.2e12),
        ("NVIDIA GeForce RTX 5090", "RTX-5090", 209.5e12),
        ("NVIDIA A10G", "A10G", 70e12),
        ("NVIDIA L4", "L4", 121e12),
        ("NVIDIA L40S", "L40S", 362.05e12),
    ],
)
def test_finds_the_gpus_of_the_table(device_kind, name, peak_flops):
    gpu = find_gpu(device_kind)
    assert gpu is not None
    assert (gpu.name, gpu.peak_flops) == (name, peak_flops)


@pytest.mark.parametrize(
    "device_kind",
    [
        "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A10", "NVIDIA L40", "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3060 Ti", "NVIDIA GeForce RTX 5090 Laptop GPU", "cpu", "",
    ],
)  # fmt: skip
def test_slower_cards_of_the_same_name_do_not_get_its_figures(device_kind):
    assert find_gpu(device_kind) is None


def test_measures_under_a_mesh_of_all_devices_and_leaves_it_in_place():
    whole = mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2))
    jax.set_mesh(whole)
    flops = measure_matmul_flops("float32", min_seconds=0.0)
    assert flops > 0
    assert jax.sharding.get_mesh() == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_emulated_devices_share_the_measured_peak(monkeypatch, dtype):
    monkeypatch.setattr(peak_module, "measure_matmul_flops", lambda dtype: 80e9)
    peak = peak_flops(dtype)
    assert peak.flops_per_sec == 10e9
    assert str(peak) == (f"10.0 GFLOP/s per device (measured matmul peak, {dtype}, 8 emulated devices share the machine)")


def test_a_known_gpu_is_not_measured(monkeypatch):
    class H100:
        device_kind = "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(jax, "local_devices", lambda: [H100()])
    assert str(peak_flops("bfloat16")) == "989.5 TFLOP/s per device (H100 data sheet, bfloat16)"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name.lower())
def test_the_compiler_is_told_what_the_table_says(gpu):
    text = target_config(gpu)
    assert f"device_memory_size: {gpu.memory_bytes}\n" in text
    assert f"core_count: {gpu.cores}\n" in text
    assert f"memory_bandwidth: {gpu.memory_bandwidth:.0f}\n" in text
    assert f'device_description_str: "{gpu.description}"\n' in text
    assert f"threads_per_core_limit: {2048 if gpu.link == 'NVLink' else 1536}\n" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name.lower())
def test_the_peak_is_what_the_tensor_cores_do_at_the_boost_clock(gpu):
    """Multiply-adds per core and cycle, dense, summed in float32: no figure with sparsity, none of sums in float16."""
    per_core = {"A100": 1024, "H100": 2048, "B200": 4096, "RTX-4090": 256, "RTX-5090": 256, "L40S": 512}[gpu.family]
    # Data sheets of modules count with a lower clock than the highest.
    assert 0.87 < gpu.peak_flops / (2 * per_core * gpu.cores * gpu.clock_ghz * 1e9) < 1.01


def test_nodes_of_cards_without_a_usual_network_need_its_bandwidth():
    for gpu in GPUS:
        assert (gpu.node_bandwidth is None) == gpu.name.startswith("RTX-")
    alone = planned_gpu(HardwareConfig(gpu="rtx-3090"))
    assert (alone.gpu_bandwidth, alone.node_bandwidth) == (31.5e9, None)
    assert planned_gpu(HardwareConfig(gpu="l4", nodes=2)).node_bandwidth == 12.5e9
    with pytest.raises(ConfigError, match=r"^node_bandwidth: nodes of rtx-3090 have no usual network; set "):
        HardwareConfig(gpu="rtx-3090", nodes=2)
    assert planned_gpu(HardwareConfig(gpu="rtx-3090", nodes=2, node_bandwidth=1.25e9)).node_bandwidth == 1.25e9


def test_a_plan_takes_the_bandwidths_that_are_set():
    usual = planned_gpu(HardwareConfig(gpu="h100"))
    assert (usual.gpu_bandwidth, usual.node_bandwidth) == (450e9, 400e9)
    slow = planned_gpu(HardwareConfig(gpu="h100", node_bandwidth=50e9))
    assert (slow.gpu_bandwidth, slow.node_bandwidth) == (450e9, 50e9)


@pytest.mark.parametrize(("gpus_per_node", "bandwidth"), [(4, 200e9), (8, 400e9), (16, 800e9)])
def test_the_usual_network_has_as_many_ports_as_the_node_has_gpus(gpus_per_node, bandwidth):
    assert planned_gpu(HardwareConfig(gpu="h100", gpus_per_node=gpus_per_node)).node_bandwidth == bandwidth
    set_by_hand = HardwareConfig(gpu="h100", gpus_per_node=gpus_per_node, node_bandwidth=400e9)
    assert planned_gpu(set_by_hand).node_bandwidth == 400e9


def test_a_plan_needs_a_gpu():
    with pytest.raises(ConfigError, match=r"hardware\.gpu: .*h200"):
        planned_gpu(HardwareConfig())


def test_every_gpu_that_can_be_configured_is_known():
    names = typing.get_args(typing.get_type_hints(HardwareConfig)["gpu"])
    assert set(names) == {"none"} | {gpu.name.lower() for gpu in GPUS}
