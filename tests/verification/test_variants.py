"""Forms that `auto` may stand for, and plainer runs."""

import dataclasses
import typing

from llamajax.config.parallel import PLAIN, MeshConfig, ParallelConfig
from llamajax.verification.variants import Trial, plainer, possible_forms, suspects
from tests.tiny import tiny_config
from tests.verification.sides import side

MESH = MeshConfig(fsdp=4, tensor=2, num_cpu_devices=8)


def test_each_form_that_auto_may_stand_for_is_verified():
    trained = ParallelConfig(stack="prefetch", sequence="gather", tensor="ring", grad_reduce="step")
    forms = possible_forms(tiny_config(mesh=MESH), trained)
    assert next(iter(forms)) == "trained"
    assert forms["trained"].parallel == trained
    for field in dataclasses.fields(ParallelConfig):
        if field.default == "auto":
            assert any(f"parallel.{field.name}: {value}" in forms for value in typing.get_args(field.type))
    assert forms["parallel.stack: scan"].parallel.stack == "scan"


def test_what_is_set_is_verified_as_it_is():
    set_forms = dataclasses.replace(PLAIN, stack="scan")
    assert not [name for name in possible_forms(tiny_config(mesh=MESH, parallel=set_forms), set_forms) if "stack" in name]


def test_each_plainer_run_has_one_setting_less():
    config = tiny_config(mesh=MESH, parallel=PLAIN).changed({"train.grad_accum_steps": 2, "model.remat": "full"})
    found = {key: (value, own) for key, value, own in plainer(config)}
    assert list(found) == ["mesh.fsdp", "mesh.tensor", "train.grad_accum_steps", "model.remat"]
    value, own = found["mesh.fsdp"]
    assert (value, own.mesh) == (1, MeshConfig(fsdp=1, tensor=2, num_cpu_devices=2))
    assert found["train.grad_accum_steps"][1].train.grad_accum_steps == 1
    auto = {key: own for key, _, own in plainer(tiny_config(mesh=MESH))}
    assert auto["parallel.stack"].parallel.stack == PLAIN.stack


def test_stages_with_own_programs_are_one_of_the_settings_to_try():
    changes = {"mesh.pipeline": 2, "mesh.stages": (1, 2), "mesh.num_cpu_devices": 16, "model.num_layers": 3}
    form = dataclasses.replace(PLAIN, zero=1, stack="unrolled", grad_reduce="step")
    found = {key: own.mesh for key, _, own in plainer(tiny_config(parallel=form, mesh=MESH).changed(changes))}
    assert (found["mesh.stages"].stages, found["mesh.stages"].pipeline) == ((), 2)
    assert found["mesh.pipeline"] == MESH
    assert (found["mesh.tensor"].stages, found["mesh.tensor"].num_cpu_devices) == ((1, 2), 8)


def test_what_cures_is_suspected_and_all_is_where_nothing_does():
    trials = [Trial("mesh.fsdp", 1, False), Trial("mesh.tensor", 1, True), Trial("train.grad_accum_steps", 1, True)]
    assert suspects(side(), trials) == {"tensor": 4, "micro-batches": 2}
    assert suspects(side(), trials[:1]) == {"data": 1, "fsdp": 2, "sequence": 1, "tensor": 4, "micro-batches": 2}
