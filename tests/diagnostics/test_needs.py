"""What a run needs of a host."""

import importlib.util

import pytest

from llamajax.config.file import load_config
from llamajax.diagnostics import host, needs
from llamajax.diagnostics.nvidia_smi import parse_rows
from tests import runs
from tests.diagnostics import nvidia
from tests.diagnostics.test_gpus import told

CARDS = parse_rows(nvidia.H100, nvidia.FIELDS)
EIGHT = [{**card, "index": str(number)} for number, card in enumerate(CARDS * 2)]


def cluster(*changes: str):
    """Llama-3.1 8B, for 8 H200."""
    settings = {"hardware.gpu": "h100"} | dict(change.split("=", 1) for change in changes)
    return load_config("llama3_1_8b_8xh200", [f"{key}={value}" for key, value in settings.items()])


def test_files(tmp_path, monkeypatch):
    config = load_config(runs.write_config(tmp_path))
    assert told(needs.check_files(config)) == [
        ("files", "ok", "all files, folders and packages that the configuration names")
    ]
    missing = load_config(runs.write_config(tmp_path), [f"data.tokenizer.path={tmp_path}/none.json"])
    assert told(needs.check_files(missing)) == [
        ("files", "fail", f"data.tokenizer.path: no file matches {tmp_path}/none.json")
    ]
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "s3fs" else find_spec(name, *rest))
    remote = load_config(runs.write_config(tmp_path), ["data.sources=[{kind: text, paths: ['s3://bucket/x.txt']}]"])
    assert told(needs.check_files(remote)) == [("files", "fail", "data.sources: s3:// needs s3fs")]


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    text = tmp_path / "words.txt"
    text.write_text("some words")
    config = load_config(runs.write_config(tmp_path), [f"data.sources=[{{kind: text, paths: ['{text}']}}]"])
    assert [status for _, status, _ in told(needs.check_files(config))] == ["ok"]

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refuse)
    assert told(needs.check_files(config)) == [("files", "fail", f"data.sources.0: {text}: Permission denied")]


def test_devices():
    assert told(needs.check_devices(cluster(), EIGHT, 1)) == []
    assert told(needs.check_devices(cluster(), (), 1)) == [("devices", "fail", "the run needs GPUs, and this host has none")]
    assert told(needs.check_devices(cluster(), EIGHT, 2))[0] == ("devices", "warn", "2 host(s) here, but hardware.nodes=1")
    found = told(needs.check_devices(cluster(), CARDS, 1))
    assert found[0] == ("devices", "fail", "4 GPUs, but hardware.gpus_per_node=8")
    other = told(needs.check_devices(cluster("hardware.gpu=h200"), EIGHT, 1))
    assert other == [("devices", "warn", "NVIDIA H100 80GB HBM3, but hardware.gpu=h200 is NVIDIA H200")]


def test_a_mesh_that_the_cards_do_not_fill():
    config = cluster("hardware.gpu=none", "mesh.tensor=3", "mesh.fsdp=1")
    ((check, status, text), *_) = told(needs.check_devices(config, CARDS, 1))
    assert (check, status) == ("mesh", "fail")
    assert text.endswith("(over 4 GPUs)")


def test_a_state_that_is_larger_than_the_cards():
    small = [{**card, "memory.total": "8192"} for card in EIGHT]
    assert told(needs.check_devices(cluster(), small, 1))[-1] == (
        "GPU memory", "fail", "weights and moments alone take 11.2 GiB per GPU of 8.00 GiB",
    )  # fmt: skip


def test_emulated_devices(tmp_path, monkeypatch):
    config = load_config(runs.write_config(tmp_path))
    assert told(needs.check_devices(config, (), 1))[0][1] == "ok"
    assert told(needs.check_host_memory(config, 8, 8))[0][1] == "ok"
    monkeypatch.setattr(needs, "total_memory", lambda: 1 << 10)
    assert told(needs.check_host_memory(config, 8, 8))[0][1] == "fail"


@pytest.mark.parametrize(("memory", "status"), [(2 << 40, "ok"), (1 << 30, "fail")])
def test_host_memory_of_offload(memory, status, monkeypatch):
    monkeypatch.setattr(needs, "total_memory", lambda: memory)
    config = load_config("llama2_7b_1mi_8xa100_80gb")
    assert config.offload.names
    assert [found for _, found, _ in told(needs.check_host_memory(config, 8, 8))] == [status]
    assert told(needs.check_host_memory(cluster(), 8, 8)) == []
    assert "auto is resolved" in told(needs.check_host_memory(cluster("offload.activations=auto"), 8, 8))[0][2]


def test_folders(tmp_path):
    config = cluster(
        f"run_dir={tmp_path}", "checkpoint.keep_last=2", "checkpoint.local_dir=/local", "checkpoint.local_every=10"
    )
    found = needs.folders(config, 2)
    _, least, all_kept = found["run_dir"]
    assert all_kept == 3 * least
    assert found["checkpoint.local_dir"][1:] == (least / 2, 2 * least)
    (tmp_path / "checkpoints" / "100").mkdir(parents=True)
    assert needs.folders(config, 1)["run_dir"][2] == 2 * least


def test_total_memory_is_that_of_the_host(tmp_path):
    assert host.total_memory(tmp_path) == 0
    assert host.total_memory() > 1 << 28
