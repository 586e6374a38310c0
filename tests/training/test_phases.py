"""Limits of phases, by a clock that only moves when told to."""

import contextlib
import math
import threading

import pytest

from llamajax.config.recovery import WatchdogConfig
from llamajax.training.phases import Phases

CONFIG = WatchdogConfig(factor=4, start_s=10, compile_s=100, load_s=50, step_s=20, save_s=30, evaluate_s=40)


class Clock:
    """Seconds."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def phases(clock):
    return Phases(CONFIG, clock)


def test_a_phase_is_overdue_at_its_floor(phases, clock):
    phases.begin("start")
    assert phases.deadline() == 1010
    clock.now = 1005
    phases.begin("compile")
    assert phases.deadline() == 1105


def test_nobody_watches_what_is_in_no_phase(phases):
    assert phases.deadline() == math.inf
    assert phases.of(threading.get_ident()) is None


def test_limits_are_learnt_from_the_longest_of_their_kind(phases, clock):
    for took in (1, 8, 3):
        phases.begin("step")
        clock.now += took
    phases.begin("step")
    assert phases.limit("step") == 4 * 8
    assert phases.limit("save") == 30


def test_longer_steps_are_allowed_what_their_first_one_took(phases, clock):
    for took in (1, 8):
        phases.begin("step")
        clock.now += took
    phases.begin("first step")
    phases.forget("step")
    assert phases.limit("step") == 20
    clock.now += 90
    phases.begin("step")
    assert phases.deadline() == clock.now + 4 * 90


def test_the_first_step_has_the_limit_of_compiling_and_says_what_the_second_may_take(phases, clock):
    """Else a run whose steps take longer than the floor would end at its second, at every start."""
    phases.begin("first step")
    assert phases.deadline() == clock.now + 100
    clock.now += 90
    phases.begin("step")
    assert phases.deadline() == clock.now + 4 * 90
    assert phases.limit("first step") == 100
    clock.now += 7
    phases.begin("step")
    assert phases.limit("step") == 4 * 7


def test_the_clock_of_the_outer_phase_stands_still(phases, clock):
    phases.begin("step")
    clock.now += 15
    with phases.within("save"):
        assert phases.deadline() == clock.now + 30
        clock.now += 25
        with phases.within("evaluate"):
            clock.now += 35
        assert phases.deadline() == clock.now + 5
    assert phases.deadline() == clock.now + 5
    clock.now += 1
    phases.begin("step")
    assert phases.limit("step") == 4 * 16
    assert phases.limit("save") == 4 * 25
    assert phases.limit("evaluate") == 4 * 35


def test_a_phase_that_ends_by_an_error_teaches_nothing(phases, clock):
    with contextlib.suppress(OSError), phases.within("save"):
        clock.now += 29
        raise OSError
    assert phases.limit("save") == 30
    assert phases.deadline() == math.inf


def test_a_phase_in_the_background_has_its_own_clock(phases, clock):
    begun, may_end = threading.Event(), threading.Event()

    def save():
        with phases.within("save"):
            begun.set()
            may_end.wait()

    phases.begin("step")
    thread = threading.Thread(target=save)
    thread.start()
    begun.wait()
    clock.now += 12
    phases.begin("step")
    assert phases.deadline() == 1030
    clock.now += 10
    may_end.set()
    thread.join()
    assert phases.deadline() == 1012 + 48
    assert phases.limit("save") == 4 * 22


def test_time_in_which_the_process_stood_still_does_not_count(phases, clock):
    phases.begin("step")
    clock.now += 1000
    phases.stand_still(995)
    assert phases.deadline() == clock.now + 15


def test_progress_begins_the_limit_anew(phases, clock):
    phases.begin("load")
    clock.now += 49
    phase = phases.of(threading.get_ident())
    assert phase is not None
    phase.restart(clock.now)
    assert phases.deadline() == clock.now + 50
    clock.now += 2
    phases.begin("load")
    assert phases.limit("load") == 4 * 49, "what it took until then is what the next may take"


def test_without_a_watchdog_nothing_has_a_limit(clock):
    phases = Phases(WatchdogConfig(enabled=False), clock)
    phases.begin("step")
    assert phases.deadline() == math.inf
