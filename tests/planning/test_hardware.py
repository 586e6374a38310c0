"""GPU figures by the name jax gives a device, and the timed peak of every other device."""

import jax
import pytest

from llamajax import mesh
from llamajax.config import MeshConfig
from llamajax.planning import hardware


@pytest.mark.parametrize(
    ("device_kind", "name", "peak_flops"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", "H100", 989.5e12),
        ("NVIDIA H200", "H200", 989.5e12),
    ],
)
def test_finds_the_gpus_of_the_table(device_kind, name, peak_flops):
    gpu = hardware.find_gpu(device_kind)
    assert gpu is not None
    assert (gpu.name, gpu.peak_flops) == (name, peak_flops)


@pytest.mark.parametrize("device_kind", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA L4", "cpu", ""])
def test_slower_cards_of_the_same_name_do_not_get_its_figures(device_kind):
    assert hardware.find_gpu(device_kind) is None


def test_measures_under_a_mesh_of_all_devices_and_leaves_it_in_place():
    whole = mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2))
    jax.set_mesh(whole)
    flops = hardware.measure_matmul_flops("float32", min_seconds=0.0)
    assert flops > 0
    assert jax.sharding.get_mesh() == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_emulated_devices_share_the_measured_peak(monkeypatch, dtype):
    monkeypatch.setattr(hardware, "measure_matmul_flops", lambda dtype: 80e9)
    peak = hardware.peak_flops(dtype)
    assert peak.flops_per_sec == 10e9
    assert str(peak) == (f"10.0 GFLOP/s per device (measured matmul peak, {dtype}, 8 emulated devices share the machine)")


def test_a_known_gpu_is_not_measured(monkeypatch):
    class H100:
        device_kind = "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(jax, "local_devices", lambda: [H100()])
    assert str(hardware.peak_flops("bfloat16")) == "989.5 TFLOP/s per device (H100 data sheet, bfloat16)"
