"""Which host is slow: found soon, and nobody wrongly, on noisy machines too."""

import numpy as np
import pytest

from llamajax.watch.stragglers import KINDS, REPORT_EVERY, Comparison

STEP_S = 1.0


def told(num_processes, num_steps, slow, *, noise=0.03, seed=0):
    """(step, change) of a run; `slow(step, process, kind)` are seconds that a process takes more than 10 ms."""
    rng = np.random.default_rng(seed)
    comparison = Comparison(num_processes, 1.15)
    changes = []
    for step in range(REPORT_EVERY, num_steps + 1, REPORT_EVERY):
        base = 0.01 * (1 + np.abs(rng.normal(0, noise, (num_processes, len(KINDS)))))
        spikes = rng.random(base.shape) < 0.02  # others use the machine too: now and then something takes many times as long
        base *= np.where(spikes, rng.uniform(1.5, 20, base.shape), 1)
        for process in range(num_processes):
            extra = {kind: slow(step, process, kind) for kind in KINDS}
            seconds = {kind: float(base[process, i]) + extra[kind] for i, kind in enumerate(KINDS)}
            comparison.take(process, {"step": step, **seconds})
        changes += [(step, change) for change in comparison.changes(STEP_S)]
    return changes


@pytest.mark.parametrize("num_processes", [2, 4, 64, 1024])
def test_devices_that_are_a_fifth_slower_are_named_within_50_steps(num_processes):
    began, culprit = 100, num_processes - 1

    def slow(step, process, kind):
        return 0.002 * (kind == "device" and process == culprit and began < step <= 400)

    changes = told(num_processes, 600, slow, noise=0.01)
    (step, named), (end, over) = changes
    assert (named.process, named.kind, named.over) == (culprit, "device", False)
    assert step <= began + 50
    assert began < named.since <= step
    assert named.seconds / named.median_s == pytest.approx(1.2, abs=0.03)
    assert (over.process, over.over) == (culprit, True)
    assert end > 400


@pytest.mark.parametrize("kind", ["data", "host"])
def test_time_that_a_host_takes_for_itself_is_compared_with_the_step(kind):
    changes = told(4, 200, lambda step, process, k: 0.2 * STEP_S * (k == kind and process == 2 and step > 100))
    ((step, named),) = changes
    assert (named.process, named.kind) == (2, kind)
    assert step <= 150
    assert not told(4, 200, lambda step, process, k: 0.05 * STEP_S * (k == kind and process == 2))


@pytest.mark.parametrize("num_processes", [2, 4, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise", [0.03, 0.2])
def test_nobody_is_named_for_noise(num_processes, noise):
    assert not told(num_processes, 10_000, lambda *_: 0.0, noise=noise, seed=num_processes)


def test_one_bad_moment_names_nobody():
    assert not told(2, 200, lambda step, process, kind: 5.0 * (process == 1 and step == 100))


def test_a_report_counts_once_and_those_who_say_nothing_are_left_out():
    comparison = Comparison(3, 1.15)
    for _ in range(20):
        for process, seconds in enumerate((0.01, 0.02)):
            comparison.take(process, {"step": 10, "device": seconds, "data": 0.0, "host": 0.0})
    assert comparison.changes(STEP_S) == []
    assert comparison.slowest() is None
    for step in (20, 30, 40, 50, 60):
        for process, seconds in enumerate((0.01, 0.02)):
            comparison.take(process, {"step": step, "device": seconds, "data": 0.0, "host": 0.0})
    (named,) = comparison.changes(STEP_S)
    assert named.line("gpu017") == (
        "slow       process 1 (gpu017) computes 100% slower than the median (20.0 ms against 10.0 ms) since step 20"
    )
    assert comparison.slowest() == (1, pytest.approx(2.0))
    assert comparison.changes(STEP_S) == [], "told once"
