"""Other devices, same run: accumulation follows, rows do not."""

import errno
import json
import os
from pathlib import Path

import pytest

from llamajax import disk
from llamajax.checkpoint import manifest
from llamajax.config.batch_ramp import BatchRampConfig
from llamajax.config.domains import DomainConfig
from llamajax.config.file import config_to_dict
from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig, ParallelConfig, num_parts
from llamajax.config.training import TrainConfig
from llamajax.errors import ConfigError
from llamajax.training.elastic import fit, for_devices, rows_per_device
from tests.tiny import tiny_config


def config_of(num_rows=48, grad_accum_steps=1, mesh=MeshConfig(), **sections):  # noqa: B008  (frozen)
    train = TrainConfig(num_steps=10, global_batch_size=num_rows, grad_accum_steps=grad_accum_steps)
    divisible = {"model.embed_dim": 48, "model.mlp_dim": 48}
    return tiny_config(mesh=mesh, train=train, **sections).changed(divisible)


def began_on(config, num_devices):
    return {"mesh": config.mesh.axis_sizes(num_devices), "grad_accum_steps": config.train.grad_accum_steps}


def accumulation(config, began_devices, num_devices):
    return for_devices(config, num_devices, began_on(config, began_devices)).train.grad_accum_steps


def test_a_device_never_holds_more_rows_and_there_are_no_needless_steps():
    config = config_of(48, grad_accum_steps=2)
    steps = {n: accumulation(config, 8, n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)}
    assert steps == {1: 16, 2: 8, 3: 8, 4: 4, 6: 4, 8: 2, 12: 2, 16: 1, 24: 1, 48: 1}
    for began_devices in (1, 2, 8, 12):
        for num_devices in (1, 2, 4, 8, 16, 24):
            began = began_on(config, began_devices)
            fitted = for_devices(config, num_devices, began)
            mesh = fitted.mesh.axis_sizes(num_devices)
            assert not fitted.undivided(mesh)
            assert fitted.rows_per_device(mesh) <= rows_per_device(48, began)
            if num_devices == began_devices:
                assert fitted == config


def test_axes_that_share_rows_count_as_one():
    config = config_of(48, mesh=MeshConfig(data=2, fsdp=-1, tensor=2))
    assert accumulation(config, 16, 8) == 2
    assert num_parts("batch", config.mesh.axis_sizes(8)) == 4


def test_other_settings_follow_where_they_must():
    """The GPUs that forms are chosen for; and the type of a sum that is none."""
    hardware = HardwareConfig(gpu="h100", nodes=2, gpus_per_node=8)
    config = config_of(48, grad_accum_steps=1, hardware=hardware)
    for num_devices, (nodes, per_node) in {8: (1, 8), 4: (1, 4), 12: (3, 4), 24: (3, 8)}.items():
        fitted = for_devices(config, num_devices, began_on(config, 16))
        assert (fitted.hardware.nodes, fitted.hardware.gpus_per_node) == (nodes, per_node)
        assert not fitted.problems()
    domains = tuple(DomainConfig(name=name, network="roce", nodes=1) for name in ("a", "b"))
    hardware = HardwareConfig(gpu="h100", nodes=2, domains=domains, domain_bandwidth=1e9)
    apart = config_of(48, mesh=MeshConfig(pipeline=2), parallel=ParallelConfig(zero=1), hardware=hardware)
    assert for_devices(apart, 8, began_on(apart, 16)).hardware == apart.hardware
    narrow = config_of(48, grad_accum_steps=2).changed({"train.grad_accum_dtype": "bfloat16"})
    assert for_devices(narrow, 16, began_on(narrow, 8)).train.grad_accum_dtype == "float32"
    assert for_devices(narrow, 4, began_on(narrow, 8)).train.grad_accum_dtype == "bfloat16"


def checkpoint(run_dir: Path, step: int, config, *, mesh: dict[str, int] | None = None, began=None) -> Path:
    """A step that says of itself what a run's does, without arrays."""
    step_dir = run_dir / "checkpoints" / str(step)
    step_dir.mkdir(parents=True)
    meta = {"config": config_to_dict(config), "mesh": mesh} | ({} if began is None else {"began": began})
    (step_dir / "meta.json").write_text(json.dumps(meta))
    manifest.write(step_dir, manifest.records_of(step_dir, ["meta.json"]))
    return step_dir


def test_micro_batches_on_other_devices_fit_every_batch_of_a_ramp():
    ramp = BatchRampConfig(start=24, increment=8, sequences=1000)
    config = config_of(48, grad_accum_steps=6).changed({"train.global_batch_ramp": ramp})
    fitted = {n: for_devices(config, n, began_on(config, 8)).train for n in (1, 2, 4, 8)}
    assert {n: train.grad_accum_steps for n, train in fitted.items()} == {1: 48, 2: 24, 4: 12, 8: 6}
    wide = config.changed({"train.grad_accum_steps": 6})
    narrow = for_devices(wide, 4, {"mesh": wide.mesh.axis_sizes(2), "grad_accum_steps": 6}).train
    assert (narrow.grad_accum_steps, narrow.micro_batch_size) == (6, 8), "16 rows would not divide the increments"
    assert {train.batch_phases for train in fitted.values()} == {config.train.batch_phases}
    with pytest.raises(ConfigError, match=r"^train.global_batch_ramp: 8 rows cannot be divided over fsdp\(16\)"):
        for_devices(config, 16, began_on(config, 8))


def test_a_run_that_begins_is_as_its_user_wrote_it(tmp_path):
    config = config_of(48, grad_accum_steps=2)
    fitted = fit(config, tmp_path)
    assert (fitted.config, fitted.began, fitted.line) == (config, began_on(config, 8), None)


def test_a_run_says_what_its_new_devices_change(tmp_path):
    config = config_of(48)
    checkpoint(tmp_path, 5, config, began=began_on(config, 16))
    fitted = fit(config, tmp_path)  # on the eight of these tests
    assert fitted.config.train.grad_accum_steps == 2
    assert fitted.began == began_on(config, 16)
    assert fitted.line == (
        "8 devices instead of 16: mesh fsdp 8, 2 accumulation steps of 24 rows (was 1 of 48), same global batch and rows"
    )


def test_a_run_says_that_its_balance_loss_counts_over_other_micro_batches(tmp_path):
    config = config_of(48, mesh=MeshConfig(expert=4)).changed({"model.experts.num_experts": 8})
    checkpoint(tmp_path, 5, config, began=began_on(config, 16))
    balanced, by_row = {"model.experts.balance_loss": 0.01}, {"model.experts.balance_over": "row"}
    lines = [fit(config.changed(changes), tmp_path).line for changes in (balanced, balanced | by_row, {})]
    said = "same global batch and rows, but a balance loss over other micro-batches: model.experts.balance_over=batch"
    assert [line is not None and line.endswith(said) for line in lines] == [True, False, False]


def test_checkpoints_that_do_not_say_how_their_run_began_say_where_they_were_written(tmp_path):
    config = config_of(48)
    checkpoint(tmp_path, 5, config, mesh=config.mesh.axis_sizes(4))
    assert fit(config, tmp_path).config.train.grad_accum_steps == 1
    assert fit(config, tmp_path).began["mesh"]["fsdp"] == 4


def test_a_step_that_is_damaged_is_not_asked(tmp_path):
    config = config_of(48)
    checkpoint(tmp_path, 5, config, began=began_on(config, 16))
    meta = checkpoint(tmp_path, 6, config, began=began_on(config, 16)) / "meta.json"
    meta.write_text(meta.read_text().replace("16", "32"))
    checkpoint(tmp_path, 7, config, began=began_on(config, 16)).joinpath("manifest.json").unlink()
    assert fit(config, tmp_path).config.train.grad_accum_steps == 2


def test_a_run_whose_checkpoints_cannot_be_read_now_is_not_taken_for_a_new_one(tmp_path, monkeypatch):
    config = config_of(48)
    checkpoint(tmp_path, 5, config, began=began_on(config, 16))

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "_PAUSES_S", ())
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Input/output error"):
        fit(config, tmp_path)


def test_who_changes_the_accumulation_gets_it(tmp_path):
    config = config_of(48)
    checkpoint(tmp_path, 5, config, began=began_on(config, 16))
    by_hand = config.changed({"train.grad_accum_steps": 3})
    fitted = fit(by_hand, tmp_path)
    assert (fitted.config, fitted.began, fitted.line) == (by_hand, began_on(by_hand, 8), None)


def test_devices_that_cannot_share_the_rows_are_refused_with_those_that_can(tmp_path):
    config = config_of(36)
    checkpoint(tmp_path, 5, config, began=began_on(config, 4))
    message = (
        r"36 rows cannot be divided over fsdp\(8\); the run in .* began on 4 devices and cannot continue on 8; continue on"
    )
    with pytest.raises(ConfigError, match=rf"global_batch_size: {message} 3, 4, 6 or 12") as info:
        fit(config, tmp_path)
    assert "\n" not in str(info.value)
    fixed = config_of(36, mesh=MeshConfig(fsdp=4))
    checkpoint(tmp_path / "fixed", 5, fixed, began=began_on(fixed, 4))
    with pytest.raises(ConfigError, match=r"mesh: .* but there are 8 devices; .* cannot continue on 8; continue on 4$"):
        fit(fixed, tmp_path / "fixed")
