"""What `offload: auto` resolves to on planned clusters, and what it says; nothing is compiled."""

import pytest

from llamajax.config.file import load_config
from llamajax.config.offload import OffloadConfig
from llamajax.config.run import Config
from llamajax.estimates.device_memory import host_bytes
from llamajax.estimates.formulas import mesh_sizes
from llamajax.estimates.host_memory import host_room
from llamajax.estimates.machine import planned_machine
from llamajax.step.offload_form import layer_costs
from llamajax.step.resolve import ResolvedRun, formula_bytes, resolve_planned, with_placed_state

AUTO = OffloadConfig(activations="auto", optimizer="auto", parameters="auto", gradient_dtype="bfloat16")


def planned(name: str, **changes) -> ResolvedRun:
    on_card = {
        "activations": "none",
        "fraction": "null",
        "optimizer": "none",
        "parameters": "none",
        "gradient_dtype": "float32",
    }
    run = load_config(name, [f"offload.{key}={value}" for key, value in on_card.items()])
    return resolve_planned(run.changed({"offload": AUTO, **changes}))


def budget(run: ResolvedRun) -> float:
    assert run.gpu is not None
    return run.memory_fraction * run.gpu.memory_bytes


def needed(run: ResolvedRun) -> int:
    return sum(formula_bytes(run.config, run.mesh).values())


def test_where_all_fits_nothing_moves():
    run = planned("llama2_7b_8xa100_80gb", **{"model.remat": "save_attention"})
    offload = run.config.offload
    assert (offload.activations, offload.optimizer, offload.parameters) == ("none", "none", "none")
    assert run.reasons["offload"].startswith("nothing: ")
    assert "should fit the card" in run.reasons["offload"]


def test_as_much_of_the_state_moves_as_the_card_needs():
    """13B on one card of 80 GB: the state alone takes 145 GiB, and with one array less in host memory it would not fit."""
    run = planned("llama2_13b_1xa100_80gb", **{"model.remat": "full"})
    offload = run.config.offload
    assert 0.9 < offload.state_share < 1
    assert (offload.names, offload.parameters) == (("input",), "none")
    assert needed(run) <= budget(run)
    less = run.config.changed({"offload.optimizer": offload.state_share - 0.05})
    assert sum(formula_bytes(less, run.mesh).values()) > budget(run)
    assert f"{offload.state_share:.0%} of weights and moments" in run.reasons["offload"]


def test_copies_of_layers_move_last():
    run = planned("llama3_1_8b_sft_1xrtx_4090", **{"model.remat": "full"})
    assert (run.config.offload.state_share, run.config.offload.parameters) == (1.0, "all")
    assert run.config.parallel.stack == "prefetch"
    assert run.config.parallel.grad_reduce == "micro"
    assert needed(run) <= budget(run)
    assert "copies and gradients of layers" in run.reasons["offload"]


def test_the_host_is_a_limit_too():
    roomy = planned("llama3_1_405b_1024xh100", **{"model.remat": "save_attention_qkv_mlp"})
    tight = planned(
        "llama3_1_405b_1024xh100", **{"model.remat": "save_attention_qkv_mlp", "hardware.host_memory": float(2**40)}
    )
    for run in (roomy, tight):
        assert host_bytes(run.config, run.mesh) <= host_room(run.config) * 1.001
        assert needed(run) <= budget(run)
    assert host_bytes(tight.config, tight.mesh) < 0.6 * host_bytes(roomy.config, roomy.mesh)
    told = planned("llama3_1_405b_1024xh100", **{"model.remat": "save_attention_qkv_mlp", "offload.tiers.host_bytes": 1e9})
    assert "should not fit" in told.reasons["offload"]


def test_auto_remat_saves_more_with_host_memory():
    """Layers whose values wait on the host are faster than layers that compute them again."""
    with_host = planned("llama3_1_405b_1024xh100", **{"model.remat": "auto"})
    without = planned("llama3_1_405b_1024xh100", **{"model.remat": "auto", "offload": OffloadConfig()})
    assert (without.config.model.remat, with_host.config.model.remat) == ("full", "save_attention_qkv_mlp")
    assert with_host.reasons["remat"].endswith("with values in host memory")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mesh.pipeline": 2, "mesh.fsdp": 4, "parallel.zero": 1}, "nothing: a pipeline keeps its values on the card"),
        ({"parallel.stack": "scan"}, "nothing: parallel.stack: scan cannot bring values back"),
        ({"mesh.num_cpu_devices": 8}, "nothing: there is no GPU, or hardware.gpu does not name it"),
    ],
)
def test_where_nothing_can_wait_auto_moves_nothing(changes, reason):
    changes = {"train.grad_accum_steps": 16, "train.global_batch_size": 1024, **changes}
    run = planned("llama2_7b_8xa100_80gb", **changes)
    assert run.reasons["offload"].startswith(reason)
    assert (run.config.offload.names, run.config.offload.state_share) == ((), 0.0)


def test_the_place_of_the_state_is_the_same_for_every_policy():
    """Training and plans compile several policies with one state."""
    config = load_config("llama2_13b_1xa100_80gb").changed({"offload": AUTO, "model.remat": "auto"})
    placed = with_placed_state(config, mesh_sizes(config))
    assert 0 < placed.offload.state_share <= 1
    assert placed.offload.activations == "auto"
    for remat in ("full", "save_attention"):
        run = resolve_planned(placed.changed({"model.remat": remat}))
        assert run.config.offload.state_share == placed.offload.state_share
    assert with_placed_state(placed, mesh_sizes(config)) == placed


def test_the_costs_of_a_layer_are_those_of_its_products_and_attention():
    config: Config = load_config("llama2_70b_8xa100_80gb")
    run = resolve_planned(config)
    costs, machine = layer_costs(run.config, run.mesh), planned_machine(config)
    tokens, matrices = 16 * 4096, 8192 * (8 * 10 * 128) + 8192 * 8192 + 3 * 8192 * 28672
    rate = 312e12 * machine.calibration.matmul_efficiency
    scores = 2 * 8192 * 4096 * tokens / (312e12 * machine.calibration.attention_efficiency)
    assert costs.forward_s == pytest.approx(2 * matrices * tokens / rate + scores)
    again = 2 * (matrices - 8192 * 28672) * tokens / rate + scores  # all but the last product
    backward = 4 * matrices * tokens / rate + 2.5 * scores * (
        machine.calibration.attention_efficiency / machine.calibration.attention_backward_efficiency
    )
    assert costs.backward_s == pytest.approx(backward + again)
    assert costs.sizes == {"input": 2 * 8192 * tokens}
