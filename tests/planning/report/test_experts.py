"""Figures of experts in a plan."""

import io

import pytest
from rich.console import Console

from llamajax.estimates.formulas import expert_weights, num_active_params, num_params
from llamajax.planning.report import figures
from llamajax.planning.report.experts import expert_figures
from llamajax.planning.report.text import print_estimate
from llamajax.units import format_count
from llamajax.watch import console
from tests.estimates.test_experts import run


def test_figures_of_experts():
    config = run({"expert": 4, "fsdp": 2}, **{"hardware.expert_imbalance": 1.5})
    own = sum(expert_weights(config.model).values())
    told = expert_figures(config)
    assert told is not None
    assert (told["num_params"], told["of_device"]) == (own, 4)
    assert [told[f"{name}_bytes"] for name in ("weight", "moment", "gradient")] == [4 * own / 8, 8 * own / 8, 4 * own / 8]
    assert (told["tokens"], told["busiest"], told["places"], told["rounds"]) == (512, 768, 640, 2)
    assert told["all_to_alls"] == 5
    replicas = expert_figures(run({"data": 2, "expert": 4}))
    assert replicas is not None
    assert replicas["weight_bytes"] == 4 * own / 4
    assert expert_figures(config.changed({"mesh.expert": 1, "mesh.fsdp": 8, "model.experts.num_experts": 0})) is None


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_an_estimate_names_active_parameters_and_loads(monkeypatch, imbalance):
    file = io.StringIO()
    monkeypatch.setattr(console, "CONSOLE", Console(file=file, width=120, highlight=False))
    config = run({"expert": 4, "fsdp": 2}, **{"hardware.expert_imbalance": imbalance})
    told = figures.estimated_figures(config, "no compiler")
    assert told["num_active_params"] == num_active_params(config.model)
    print_estimate(config, told)
    lines = {line.partition(" ")[0]: line for line in file.getvalue().splitlines()}
    total, active = num_params(config.model), num_active_params(config.model)
    assert lines["run"].endswith(f"{format_count(total)} parameters ({total:,}), {format_count(active)} of them active")
    assert "16 per layer, of which a token chooses 2" in lines["experts"]
    rounds = "640: one round" if imbalance == 1 else "640; the busiest gets 1.5 times as many: 2 rounds"
    assert (
        f"512 tokens of a micro-batch come to a GPU per layer, which has room for {rounds}; a GPU sends" in lines["tokens"]
    )
