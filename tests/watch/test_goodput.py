"""Where the time of a run went: every second in one part, whatever became of clocks and processes."""

import math
import random
from typing import Any

import numpy as np
import pytest

from llamajax.watch.goodput import PARTS, Goodput, goodput


def event(name, time, step=0, **facts):
    return {"time": float(time), "event": name, "step": step, **facts}


def started(began, time, step=0, **facts):
    """A start whose process needed half of its time to start, a third to compile, the rest to load."""
    seconds = time - began
    parts = {"start_s": seconds / 2, "compile_s": seconds / 3, "load_s": seconds / 6}
    return event("start", time, step, began=float(began), **parts, **facts)


def steps(*times, step_time_s=8.0, data_wait_s=2.0):
    """Series of steps that were finished at these times."""
    number = np.arange(1, len(times) + 1)
    columns = {"time": times, "perf/step_time_s": [step_time_s] * len(times), "perf/data_wait_s": [data_wait_s] * len(times)}
    return {key: (number, np.array(values, np.float64)) for key, values in columns.items()}


def wall_s(series, events):
    result = goodput(series, events)
    assert result is not None
    return result.wall_s


def split(series, events):
    """Seconds of all parts that have some, after checking what holds for every split."""
    result = goodput(series, events)
    assert result is not None
    assert list(result.seconds) == list(PARTS)
    assert min(result.seconds.values()) >= 0
    assert math.fsum(result.seconds.values()) == pytest.approx(result.wall_s, abs=1e-6)
    assert 0 <= result.share <= 1
    return {part: pytest.approx(seconds) for part, seconds in result.seconds.items() if seconds > 1e-9}


def test_one_life():
    events = [
        started(1000, 1060),
        event("compile", 1060, from_cache=False),
        event("pause", 1080, 2, doing="saving", seconds=3.0),
        event("save", 1080, 2),
        event("pause", 1090, 3, doing="evaluating", seconds=1.5),
        event("pause", 1099, 4, doing="comparing replicas", seconds=0.25),
        event("stop", 1100, 4, reason="finished"),
    ]
    parts = split(steps(1068, 1076, 1088, 1098), events)
    assert parts == {
        "productive": 24.0, "data wait": 8.0, "compile": 20.0, "start": 30.0, "load": 10.0, "save": 3.0, "evaluation": 1.5,
        "replicas": 0.25, "other": 3.25,
    }  # fmt: skip


def test_a_kill_loses_steps_and_what_no_record_tells():
    """Killed at 1,110, noticed at once; three steps of 8 s are computed again, and 6 s of a fourth were under way."""
    events = [
        started(1000, 1060),
        event("save", 1080, 2),
        event("restart", 1110, 2),
        started(1120, 1180, 2, lost_steps=3, lost_s=24.0, newest_record=1104.0),
        event("stop", 1200, 4, reason="finished"),
    ]
    parts = split(steps(1068, 1076, 1188, 1196), events)
    assert parts["lost work"] == 24.0 + 6.0
    assert parts["restart"] == 10.0
    assert (parts["productive"], parts["data wait"], parts["start"]) == (24.0, 8.0, 60.0)
    assert wall_s(steps(1068, 1076, 1188, 1196), events) == 200.0


def test_without_a_launcher_a_kill_is_at_the_newest_record():
    events = [started(1000, 1060), started(1120, 1180, 2, lost_s=24.0, newest_record=1104.0)]
    parts = split(steps(1068, 1076, 1188, 1196), events)
    assert (parts["lost work"], parts["restart"]) == (24.0, 16.0)


def test_starts_that_came_to_no_step_are_part_of_the_restart():
    restarts = [event("restart", time) for time in (1110, 1140, 1170)]
    events = [started(1000, 1060), *restarts, started(1200, 1260, 2, newest_record=1110.0)]
    assert split(steps(1068, 1076), events)["restart"] == 90.0


def test_a_finished_run_loses_nothing_until_it_is_extended():
    events = [
        started(1000, 1060),
        event("stop", 1088, 2, reason="finished"),
        started(5000, 5060, 2, lost_s=0.0, newest_record=1076.0),
        event("stop", 5080, 4, reason="finished"),
    ]
    series = steps(1068, 1076, 5068, 5076)
    assert "restart" not in split(series, events)
    assert wall_s(series, events) == 88.0 + 80.0


def test_an_error_loses_what_came_after_the_newest_record_and_a_signal_nothing():
    for reason, lost in (("OSError: no space", 12.0), ("stopped", 0.0), (None, 12.0)):
        events = [
            started(1000, 1060),
            event("stop", 1088, 2, reason=reason),
            started(1098, 1158, 2, lost_s=0.0, newest_record=1076.0),
        ]
        parts = split(steps(1068, 1076), events)
        assert parts.get("lost work", 0.0) == lost
        assert parts["restart"] == 10.0


def test_going_back_within_a_process_loads_and_is_no_restart():
    events = [
        started(1000, 1060),
        event("stop", 1090, 3, reason="GoBack: step 3: loss is a spike"),
        event("rollback", 1091, 3, to_step=2),
        event("start", 1094, 2, lost_s=8.0, newest_record=1088.0),
        event("stop", 1112, 4, reason="finished"),
    ]
    parts = split(steps(1068, 1076, 1102, 1110), events)
    assert "restart" not in parts
    assert parts["load"] == 10.0 + 4.0
    assert parts["lost work"] == 8.0 + 2.0


def test_runs_of_older_versions():
    """They wrote neither when their process began nor what they dropped; the time after a stop is known to be down."""
    events = [
        event("start", 1000),
        event("start", 1040, 2),
        event("stop", 1060, 3, reason="stopped"),
        event("start", 1070, 3),
    ]
    assert split(steps(1010, 1020, 1050, 1080), events) == {
        "productive": 24.0, "data wait": 8.0, "restart": 10.0, "other": 38.0,
    }  # fmt: skip
    assert goodput(steps(1010), []) is None


def test_clocks_that_go_back_make_no_time_negative():
    events = [started(5000, 5030), event("stop", 5060, 2, reason="stopped"), started(1400, 1430, 2, newest_record=5050.0)]
    parts = split(steps(5040, 5050, 1440), events)
    assert "restart" not in parts
    assert parts["productive"] == 18.0
    assert wall_s(steps(5040, 5050, 1440), events) == 60.0 + 40.0


def test_facts_that_are_no_seconds_count_nothing():
    bad = {"began": "x", "start_s": -1.0, "compile_s": None, "load_s": math.nan, "lost_s": True, "newest_record": []}
    events = [event("start", 1000, **bad), event("pause", 1010, doing=3, seconds="y"), event("stop", 1020, reason=7)]
    events += [event("start", 1030, **bad), event("stop", 1040, reason="finished")]
    assert split(steps(1005), events)["productive"] == 6.0


def test_every_second_has_one_part_in_any_story():
    """Random events, times that go back, and facts that contradict each other."""
    draw = random.Random(0)
    names = ["start", "stop", "restart", "pause", "save", "rollback"]
    for _ in range(500):
        events = [started(100, 200)]
        for _ in range(draw.randrange(12)):
            facts: dict[str, Any] = {
                key: draw.choice([draw.uniform(0, 300), None]) for key in ("began", "start_s", "lost_s", "newest_record")
            }
            facts |= {"doing": "saving", "seconds": draw.uniform(0, 9), "reason": draw.choice(["finished", "stopped", "x"])}
            events.append(event(draw.choice(names), draw.uniform(0, 1000), **facts))
        split(steps(*(draw.uniform(0, 1000) for _ in range(draw.randrange(1, 9)))), events)


def test_the_line_names_the_largest_loss_first():
    seconds = dict.fromkeys(PARTS, 0.0) | {"productive": 931.0, "data wait": 20.0, "compile": 48.8, "other": 0.2}
    assert str(Goodput(wall_s=1000.0, seconds=seconds)) == "93.1%: compile 4.9%, data wait 2.0%"
    assert str(Goodput(wall_s=0.0, seconds=dict.fromkeys(PARTS, 0.0))) == "0.0%"
