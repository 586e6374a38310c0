"""The plans of all shipped configurations agree with formulas, and are as good as they were: scripts/plans.py."""

import json

import jax
import pytest

from llamajax.config_file import load_config
from llamajax.planning.figures import schedule_figures
from llamajax.planning.fitting import changed
from llamajax.planning.memory import minimum_state_bytes
from llamajax.planning.schedule import make_plan
from scripts.plans import CONFIGS, GOLDEN, plans

WORSE = 1.02
"""More than two percent."""
LEAST = 0.001
"""Of a step: waiting that is shorter is nothing."""


def golden() -> dict[str, dict[str, float]]:
    kept = json.loads(GOLDEN.read_text())
    if jax.__version__ not in kept:
        pytest.skip(f"no plans are kept for jax {jax.__version__}; scripts/plans.py makes them")
    return kept[jax.__version__]


def test_every_plan_is_kept_for_the_locked_version():
    assert json.loads(GOLDEN.read_text())["0.10.2"].keys() == plans().keys()


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize("name", plans())
def test_a_plan_agrees_with_formulas_and_is_no_worse_than_it_was(name):
    before = golden()[name]
    shipped, changes = plans()[name]
    config = changed(load_config(CONFIGS / f"{shipped}.yaml"), changes)
    found = make_plan(config, suggest=False).chosen
    assert found.memory.fits
    told = schedule_figures(config, found)
    assert told["not_understood"] == {}
    assert told["argument_bytes"] == pytest.approx(minimum_state_bytes(config), rel=0.01)
    assert told["flops_factor"] == pytest.approx(1, rel=0.01)
    assert 0.99 < told["wire_bytes_factor"] < 1.1
    assert found.memory.peak_bytes <= WORSE * before["peak_bytes"]
    allowed = max(before["exposed_comm_s"], LEAST * before["step_time_s"])
    assert found.timeline.exposed_comm_s <= WORSE * allowed
