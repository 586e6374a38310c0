"""Which of two schedules a plan keeps."""

import dataclasses

import pytest

from llamajax.config import XlaConfig
from llamajax.errors import ConfigError
from llamajax.planning import schedule as planning_schedule
from llamajax.planning.schedule import Plan, make_plan
from tests.planning import plans


def choice(blind, profiled) -> str:
    plan = Plan(config=plans.CONFIG, without_profile=blind, with_profile=profiled)
    return "blind" if plan.chosen is blind else "profiled"


def test_the_faster_schedule_is_kept_but_one_that_fits_before_it():
    fast, slow = plans.schedule(), plans.schedule(seconds=1.0)
    fast_and_large = plans.schedule(peak_bytes=90 * plans.GIB)
    assert choice(slow, fast) == "profiled"
    assert choice(fast, slow) == "blind"
    assert choice(slow, fast_and_large) == "blind"
    assert choice(fast_and_large, slow) == "profiled"
    assert choice(slow, None) == "blind"
    assert choice(fast, plans.schedule()) == "blind"


@pytest.fixture
def compiled(monkeypatch):
    """Compilations in place of real ones; gives the texts of the profiles they were told."""
    profiles = []

    def compile_for(config, *, latency_profile=None):
        if latency_profile is not None:
            with open(latency_profile) as file:
                profiles.append(file.read())
        return plans.step(config)

    monkeypatch.setattr(planning_schedule, "compile_for", compile_for)
    monkeypatch.setattr(planning_schedule, "memory_plan", lambda step, module: plans.memory())
    return profiles


def test_the_second_compilation_is_told_the_latencies(compiled):
    plan = make_plan(plans.CONFIG)
    assert plan.with_profile is not None
    (profile,) = compiled
    assert profile.count("costs { name: ") > 20


def test_one_compilation_without_a_profile(compiled):
    assert make_plan(plans.CONFIG, profile=False).with_profile is None
    assert compiled == []


def test_a_profile_of_ones_own_is_used(compiled, tmp_path):
    file = tmp_path / "measured.pbtxt"
    file.write_text("measured")
    config = dataclasses.replace(plans.CONFIG, xla=XlaConfig(latency_profile=str(file)))
    make_plan(config)
    assert compiled == ["measured"]
    file.unlink()
    with pytest.raises(ConfigError, match=r"^xla\.latency_profile: .*measured\.pbtxt is no file"):
        make_plan(config)


def test_what_does_not_fit_gets_suggestions(compiled, monkeypatch):
    monkeypatch.setattr(planning_schedule, "memory_plan", lambda step, module: plans.memory(90 * plans.GIB))
    suggestion = plans.plan(peak_bytes=90 * plans.GIB).suggestions[0]
    asked = []

    def suggestions(config, compiled, *, step_time):
        assert not compiled.fits
        asked.append(step_time(plans.step(config)))
        return [suggestion]

    monkeypatch.setattr(planning_schedule, "suggestions", suggestions)
    plan = make_plan(plans.CONFIG, profile=False)
    assert plan.suggestions == (suggestion,)
    assert asked == [plan.without_profile.timeline.step_time_s]
