"""The resolution of `auto`: printed with its reason, the same for all callers, never against a setting."""

import dataclasses
import re
from typing import Any

import pytest

from llamajax.config.experts import ExpertsConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import REMATS
from llamajax.config.parallel import AXES, MeshConfig, ParallelConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.step.resolve import MAX_UNROLLED, float8_matmuls, matmul_kernels, resolve, sequence_form, tensor_form
from tests.planning.plans import CONFIG
from tests.tiny import tiny_config

ON_H100 = HardwareConfig(gpu="h100")


def planned(hardware: HardwareConfig = ON_H100, **mesh: Any) -> tuple[Config, dict[str, int]]:
    config = tiny_config(hardware=hardware, mesh=MeshConfig(**mesh))
    return config, config.mesh.axis_sizes(8)


def stack_form(config: Config, axes: dict[str, int]) -> tuple[str, str]:
    run = resolve(config, axes)
    return run.config.parallel.stack, run.reasons["stack"]


@pytest.mark.parametrize(
    ("mesh", "form", "reason"),
    [
        ({"fsdp": 8}, "unrolled", "of weights come from 8 devices"),
        ({"data": 8, "fsdp": 1}, "unrolled", "of gradients are reduced"),
        ({"tensor": 8, "fsdp": 1}, "unrolled", "save for the backward pass are not copied"),
        ({"fsdp": 8, "num_cpu_devices": 8}, "scan", "emulated devices hide nothing"),
    ],
)
def test_weights_are_prefetched_where_there_is_something_to_hide(mesh, form, reason):
    found, told = stack_form(*planned(**mesh))
    assert found == form
    assert reason in told


def test_many_layers_stay_a_loop():
    config, axes = planned(fsdp=8)
    deep = config.changed({"model.num_layers": MAX_UNROLLED + 1})
    assert stack_form(deep, axes)[0] == "prefetch"
    form, reason = stack_form(deep, axes | {"fsdp": 1})
    assert form == "scan"
    assert "there is nothing to gather or to reduce, and 41 layers are too many" in reason


@pytest.mark.parametrize("ring", ["sequence", "tensor"])
def test_rings_make_layers_longer(ring):
    config, axes = planned(ON_H100, fsdp=2, **{ring: 4})
    found = {
        layers: stack_form(config.changed({f"parallel.{ring}": "ring", "model.num_layers": layers}), axes)[0]
        for layers in (MAX_UNROLLED // 4, MAX_UNROLLED // 4 + 1)
    }
    assert list(found.values()) == ["unrolled", "prefetch"]


def test_remat_keeps_what_the_card_holds():
    config, axes = planned(fsdp=8)
    config = config.changed({"model.remat": "auto", "data.seq_len": 1024, "model.max_seq_len": 1024})
    found = {}
    for rows in (8, 1 << 15, 1 << 16, 1 << 20):
        run = resolve(config.changed({"train.global_batch_size": rows}), axes)
        found[rows] = run.config.model.remat
        assert run.reasons["remat"].startswith(f"{run.config.model.remat}: ")
    assert found[8] == "none"
    assert found[1 << 20] == "full"
    kept = [REMATS.index(remat) for remat in found.values()]
    assert kept == sorted(kept)
    assert len(set(kept)) > 2
    for blind in ({"hardware.gpu": "none"}, {"mesh.num_cpu_devices": 8}):
        run = resolve(config.changed(blind), axes)
        assert (run.config.model.remat, run.reasons["remat"][:4]) == ("full", "full")
    assert "remat" not in resolve(config.changed({"model.remat": "none"}), axes).reasons


def test_weights_are_not_prefetched_where_they_would_not_fit():
    config, axes = planned(fsdp=8)
    wide = config.changed({"model.mlp_dim": 2**26})
    form, reason = stack_form(wide, axes)
    assert form == "scan"
    assert "for three layers' weights might not fit" in reason
    assert stack_form(wide.changed({"hardware.gpu": "none"}), axes)[0] == "unrolled"


def test_what_is_asked_for_is_taken():
    config, axes = planned(fsdp=2, sequence=2, tensor=2)
    asked = ParallelConfig(
        stack="scan", sequence="ring", tensor="ring", grad_reduce="step", pipeline="1f1b", pipeline_head="last",
        expert_exchange="blocks",
    )  # fmt: skip
    run = resolve(config.changed({"parallel": asked, "train.grad_accum_steps": 2}), axes)
    assert run.config.parallel == asked
    assert run.reasons == {setting: f"{getattr(asked, setting)}: parallel.{setting} says so" for setting in run.reasons}
    assert set(run.reasons) == {"stack", "sequence", "tensor", "grad_reduce"}


def test_nothing_stays_open_and_only_choices_are_told():
    config, axes = planned(fsdp=8)
    run = resolve(config, axes)
    assert "auto" not in vars(run.config.parallel).values()
    assert set(run.reasons) == {"stack"}
    assert resolve(run.config, axes) == run
    assert hash(resolve(run.config, axes)) == hash(run)


@pytest.mark.parametrize(
    ("mesh", "changes", "form", "reason"),
    [
        ({"fsdp": 8}, {}, "step", "is exposed once, instead of"),
        (
            {"data": 4, "fsdp": 2},
            {"model.num_layers": 32},
            "micro",
            "is exposed in each of 2 micro-batches; once per step it would be",
        ),
        ({"data": 4, "fsdp": 2}, {"model.num_layers": 32, "parallel.zero_data": 1}, "step", "once, instead of"),
        ({"data": 4, "fsdp": 2}, {"model.num_layers": 32, "parallel.stack": "scan"}, "step", "once, instead of"),
        ({"fsdp": 8}, {"train.grad_accum_steps": 1}, "micro", "there is only one micro-batch"),
        ({"fsdp": 8}, {"parallel.zero": 1}, "step", "keeps gradients whole until the end of the step"),
        ({"fsdp": 8}, {"model.vocab_size": 2**27}, "micro", "might not fit"),
        ({"fsdp": 1, "tensor": 8}, {}, "micro", "nothing to reduce"),
    ],
)
def test_gradients_are_reduced_when_the_least_is_waited_for(mesh, changes, form, reason):
    config, axes = planned(**mesh)
    run = resolve(config.changed({"train.grad_accum_steps": 2} | changes), axes)
    assert run.config.parallel.grad_reduce == form
    if run.config.train.grad_accum_steps == 1:
        assert "grad_reduce" not in run.reasons
    else:
        assert run.reasons["grad_reduce"].startswith(f"{form}: ")
        assert reason in run.reasons["grad_reduce"]


def test_a_planned_run_on_emulated_devices_is_not_held_to_the_planned_ones():
    """Their number and memory differ."""
    config = tiny_config(hardware=HardwareConfig(gpu="h100", nodes=4)).changed({"train.grad_accum_steps": 4})
    run = resolve(
        config.changed({"model.mlp_dim": 2**26}),
        dict.fromkeys(AXES, 1) | {"fsdp": 8},
    )
    assert run.config.parallel.grad_reduce == "step"
    assert "might not fit" not in " ".join(run.reasons.values())


def test_whether_a_run_fits_is_asked_of_the_mesh_it_has():
    """Training may find more GPUs than were planned for."""
    config = tiny_config(hardware=ON_H100, mesh=MeshConfig(fsdp=-1))
    large = config.changed({"model.mlp_dim": 2**24, "model.num_layers": 8})
    assert stack_form(large, dict.fromkeys(AXES, 1) | {"fsdp": 8})[0] == "scan"
    assert stack_form(large, dict.fromkeys(AXES, 1) | {"fsdp": 1024})[0] == "unrolled"


@pytest.mark.parametrize("capability", [(8, 0), (7, 0)])
def test_gpus_without_float8_refuse_it_in_one_line(capability):
    config, _ = planned()
    assert float8_matmuls(config.model, capability) == {}
    with pytest.raises(
        ConfigError, match=r"^model\.matmul_dtype: float8 needs GPUs .* 8\.9 .*; set compute_dtype$"
    ) as error:
        float8_matmuls(config.changed({"model.matmul_dtype": "float8"}).model, capability)
    assert f"these have {capability[0]}.{capability[1]}" in str(error.value)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), None])
def test_what_is_multiplied_in_float8_is_told(capability):
    config, _ = planned()
    exempt = config.changed({"model.matmul_dtype": "float8", "model.float8_exempt": ("wo",)})
    (told,) = float8_matmuls(exempt.model, capability).values()
    assert told.startswith("float8 with wqkv, w_gate_up, w_down of each layer; ")
    assert ("no faster" in told) == (capability is None)
    assert ("MFU counts bfloat16's peak" in told) == (capability is not None)


def test_the_kernel_of_experts_is_told_and_one_that_cannot_run_is_refused():
    model = planned()[0].changed({"model.experts": ExpertsConfig(num_experts=4)}).model
    assert matmul_kernels(model, None) == {"expert_kernel": "plain: there is no GPU"}
    assert matmul_kernels(model, (9, 0))["expert_kernel"].startswith("pallas: ")
    with pytest.raises(ConfigError, match=r"^model\.experts\.kernel: plain .* leaves a GPU idle; or set auto$"):
        matmul_kernels(dataclasses.replace(model, experts=ExpertsConfig(num_experts=4, kernel="plain")), (9, 0))


OPEN = {"model.attend_across_documents": True}
PLAIN = {"model.attention_kernel": "plain"}


@pytest.mark.parametrize(
    ("axes", "changes", "form", "reason"),
    [
        ({"fsdp": 16}, {}, "gather", "no row is split"),
        ({"sequence": 4}, PLAIN, "ring", "it computes 56% of the scores of whole rows, and hides"),
        ({"sequence": 2}, PLAIN, "ring", "it computes 62% of"),
        ({"sequence": 4}, {}, "ulysses", "a fused kernel can compute whole rows"),
        ({"sequence": 4}, OPEN, "ulysses", "a fused kernel can compute whole rows"),
        ({"sequence": 4}, {"model.attention_kernel": "cudnn"}, "ring", "it computes"),
        ({"sequence": 4}, {"parallel.sequence": "gather"}, "gather", "parallel.sequence says so"),
        ({"sequence": 4, "tensor": 4}, OPEN, "ring", r"it computes .*\w by gather, .*\w by ring$"),
        ({"sequence": 8}, PLAIN | {"data.seq_len": 1016}, "ulysses", r"it sends the least; .* by gather, .* by ulysses$"),
        ({"sequence": 2}, PLAIN | {"data.seq_len": 1022, "model.num_kv_heads": 1}, "gather", "it sends the least"),
        ({"sequence": 4, "tensor": 4}, {"data.seq_len": 1020}, "gather", "it sends the least; .* by gather$"),
    ],
)
def test_the_form_of_split_rows_and_its_reason(axes, changes, form, reason):
    config = CONFIG.changed({"mesh": MeshConfig(**({"fsdp": -1} | axes))} | changes)
    chosen, why = sequence_form(config, config.mesh.axis_sizes(16))
    assert chosen == form
    assert re.match(reason, why), why
    assert "\n" not in why


def test_split_rows_of_emulated_devices_are_gathered():
    config = CONFIG.changed({"mesh": MeshConfig(sequence=2, num_cpu_devices=8)})
    assert sequence_form(config, config.mesh.axis_sizes(8)) == ("gather", "emulated devices hide nothing")


@pytest.mark.parametrize(
    ("axes", "changes", "form", "reason"),
    [
        ({"fsdp": 16}, {}, "collective", "no matmul is shared"),
        ({"tensor": 4}, {}, "ring", "2,048 tokens per hop"),
        ({"tensor": 4}, {"train.grad_accum_steps": 2}, "collective", "1,024 tokens per hop"),
        ({"tensor": 4, "sequence": 2}, {}, "ring", "2,048 tokens per hop"),
        ({"tensor": 2}, {}, "collective", "2 devices send too little"),
        ({"tensor": 2}, {"data.seq_len": 1023}, "collective", "mesh.tensor does not divide"),
        ({"tensor": 8}, {"parallel.tensor": "ring"}, "ring", "parallel.tensor says so"),
    ],
)
def test_the_form_of_shared_matmuls_and_its_reason(axes, changes, form, reason):
    config = CONFIG.changed({"mesh": MeshConfig(**({"fsdp": -1} | axes))} | changes)
    chosen, why = tensor_form(config, config.mesh.axis_sizes(16))
    assert (chosen, why[: len(reason)]) == (form, reason)
    assert "\n" not in why


def test_shared_matmuls_of_emulated_devices_are_collective():
    config = CONFIG.changed({"mesh": MeshConfig(tensor=2, num_cpu_devices=8)})
    assert tensor_form(config, config.mesh.axis_sizes(8)) == ("collective", "emulated devices hide nothing")
