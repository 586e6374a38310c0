"""The plans of all shipped configurations contain what they must, and are as good as they were: scripts/plans.py."""

import json
from typing import Any

import jax
import pytest

from llamajax.config.file import load_config
from llamajax.config.run import Config
from llamajax.estimates.formulas import mesh_sizes, minimum_state_bytes
from llamajax.estimates.gpu_memory_budget import allowance
from llamajax.planning.cost.attention import planned_kernel
from llamajax.planning.cost.flops import planned_flops
from llamajax.planning.plan import make_plan
from llamajax.planning.report.figures import figures
from llamajax.step.resolve import resolve_planned
from scripts.plans import BETTER, CONFIGS, DOCUMENTED, GOLDEN, plans, wrong

WORSE = 1.02
"""More than two percent."""
LEAST = 0.001
"""Shortest wait that counts, as a share of the step."""


def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def shipped(name: str) -> Config:
    config, changes = plans()[name]
    return load_config(CONFIGS / f"{config}.yaml").changed(changes)


def test_every_plan_is_kept():
    kept = golden()
    assert DOCUMENTED in kept
    for section in kept.values():
        assert section.keys() == plans().keys()


@pytest.mark.parametrize("name", plans())
def test_what_is_expected_of_a_program_is_what_its_configuration_asks_for(name):
    wanted, config = golden()["expected"][name], shipped(name)
    flops = planned_flops(resolve_planned(config))
    assert planned_kernel(resolve_planned(config))[0] == wanted["attention_kernel"]
    assert allowance(mesh_sizes(config)).num_communicators == wanted["num_communicators"]
    assert {"weights": flops.weights, "recomputed": flops.recomputed, "attention": flops.attention} == pytest.approx(
        wanted["flops"], rel=1e-9
    )


@pytest.mark.parametrize("name", plans())
def test_no_other_settings_of_xla_were_better(name):
    for version, kept in golden().items():
        if version != "expected":
            assert kept[name]["step_time_s"] <= BETTER * min(kept[name]["alternatives"].values())


IN_CI = ("llama2_13b_1xa100_80gb",)
"""cuDNN's attention on a card whose state is in host memory; test_pipelines.py has stages. `long` has all plans."""


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else pytest.mark.long) for name in plans()]
)
def test_a_plan_contains_what_it_must_and_is_no_worse_than_it_was(name):
    kept = golden()
    if jax.__version__ not in kept:
        pytest.skip(f"no plans are kept for jax {jax.__version__}; scripts/plans.py makes them")
    before, config = kept[jax.__version__][name], shipped(name)
    told = figures(make_plan(config, suggest=False))
    assert wrong(name, told, kept) == []
    assert told["argument_bytes"] == pytest.approx(minimum_state_bytes(config), rel=0.01)
    assert told["peak_bytes"] <= WORSE * before["peak_bytes"]
    assert told["step_time_s"] == pytest.approx(before["step_time_s"], rel=WORSE - 1)
    assert told["elementwise_bytes"] <= WORSE * before["elementwise_bytes"]
    for remat, kept_bytes in before.get("by_remat", {}).items():
        assert told["by_remat"][remat]["elementwise_bytes"] <= WORSE * kept_bytes
    assert told["num_kernels"] <= WORSE * before["num_kernels"]
    assert told["exposed_comm_s"] <= WORSE * max(before["exposed_comm_s"], LEAST * before["step_time_s"])
