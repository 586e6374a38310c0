"""Devices that differ are told, the steps computed again, and what comes back ends the run; by arrays of eight devices."""

import socket
from typing import Any

import jax
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.config.recovery import RecoveryConfig
from llamajax.errors import CorruptionError
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.training import replicas
from llamajax.training.bad_steps import GoBack
from llamajax.training.replicas import Replicas, Suspects, suspected
from tests.faults.flips import Flip, flipped

HOST = socket.gethostname()


class Run:
    """Stands in for the loop: a state that is split over `fsdp`, and what is told of it."""

    def __init__(self, every: int | None = 100, **axes: Any) -> None:
        self.mesh = make_mesh(MeshConfig(**axes))
        jax.set_mesh(self.mesh)
        weights = np.arange(64, dtype=np.float32).reshape(8, 8)
        self.state = {name: jax.device_put(weights, spec(None, "embed")) for name in ("up", "down")}
        self.replicas = Replicas(RecoveryConfig(checksum_every=every), self.state)
        self.events = []

    def check(self, step: int, *flips: Flip) -> None:
        state = self.state
        for flip in flips:
            state = flipped(state, flip)
        self.replicas.check(step, state, lambda name, **facts: self.events.append((name, facts)))

    def kinds(self) -> list[str]:
        assert {name for name, _ in self.events} <= {"corruption"}
        return [facts["kind"] for _, facts in self.events]


OF_5, OF_2 = Flip("up", place=5, bit=40), Flip("down", place=2, bit=7)


def test_what_does_not_come_back_was_an_accident(capsys):
    run = Run(data=4, fsdp=2)
    assert "checksums  256 B of 256 B per device, every 100 steps and before each checkpoint" in capsys.readouterr().out
    run.check(0)
    run.check(100)
    with pytest.raises(GoBack) as caught:
        run.check(200, OF_5)
    assert caught.value.reason == f"step 200: device 5 (process 0 on {HOST}) differs from its replicas in up"
    assert (caught.value.first_step, caught.value.last_step, caught.value.pass_over) == (101, 200, False)
    run.check(50)
    run.check(100)
    assert run.kinds() == ["suspected"]
    run.check(200)
    facts = {"devices": [5], "arrays": ["up"], "steps": [101, 200]}
    assert run.events == [("corruption", {"kind": kind, **facts}) for kind in ("suspected", "transient")]
    told = f"step 200: recomputed, all replicas are equal: device 5 (process 0 on {HOST}) had a transient fault\n"
    assert capsys.readouterr().err == told
    with pytest.raises(GoBack):
        run.check(300, OF_5)
    run.check(300)
    assert capsys.readouterr().err.endswith("had a transient fault, 2 times so far; have the hardware checked\n")


@pytest.mark.parametrize("step", [50, 150, 200])
def test_what_comes_back_ends_the_run(step):
    """At the same step, at another one, or as soon as the checkpoint is read."""
    run = Run(data=4, fsdp=2)
    with pytest.raises(GoBack):
        run.check(200, OF_5, OF_2)
    with pytest.raises(CorruptionError, match=rf"^step {step}: device 5 \(process 0 on {HOST}\) differs") as caught:
        run.check(step, OF_5)
    assert "in up, again after a rollback" in str(caught.value)
    assert "exclude the device or use another machine, and start the run again" in str(caught.value)
    assert caught.value.exit_code == 6
    assert run.kinds() == ["suspected", "lasting"]
    assert run.events[-1][1]["devices"] == [5]


def test_hosts_are_named_where_there_are_several():
    run = Run(data=4, fsdp=2)
    run.replicas._hosts = ["left", "right"]
    with pytest.raises(GoBack):
        run.check(200, OF_5)
    with pytest.raises(CorruptionError, match=r"device 5 \(process 0 on left\).*; exclude left and start the run again"):
        run.check(200, OF_5)


def test_another_device_that_differs_lets_the_run_go_back_once_more(capsys):
    run = Run(data=4, fsdp=2)
    for step, flip in [(200, OF_5), (100, OF_2)]:
        with pytest.raises(GoBack):
            run.check(step, flip)
    run.check(100)
    assert run.replicas.due(200)
    run.check(200)
    assert run.kinds() == ["suspected", "suspected", "transient"]
    assert run.events[-1][1]["devices"] == [2, 5]


def test_of_several_processes_that_see_something_one_tells_it(monkeypatch):
    """So that what is sent does not grow with their number; all go by what the first of them sees."""
    run = Run(data=4, fsdp=2)
    seen, sent = {"up": [5]}, []

    def of_four(value):
        sent.append(value)
        return [False, True, True, True] if isinstance(value, bool) else [None, seen, None, None]

    monkeypatch.setattr(replicas, "everyones", of_four)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    with pytest.raises(GoBack, match=r"device 5 .* in up"):
        run.check(200, OF_2)
    assert sent == [True, None]


def test_of_two_that_differ_nobody_knows_which():
    run = Run(data=2, fsdp=4)
    with pytest.raises(
        GoBack, match=r"device 1 .* and device 5 .* hold different bits, and no majority says which is right"
    ):
        run.check(200, OF_5)


def test_a_state_that_differs_from_the_start_goes_back_to_it():
    run = Run(data=8)
    with pytest.raises(GoBack) as caught:
        run.check(0, OF_5)
    assert (caught.value.first_step, caught.value.last_step) == (1, 0)


def test_when_it_compares():
    run = Run(data=4, fsdp=2, every=30)
    assert [step for step in range(1, 101) if run.replicas.due(step)] == [30, 60, 90]
    with pytest.raises(GoBack):
        run.check(50, OF_5)
    assert [step for step in range(1, 101) if run.replicas.due(step)] == [30, 50, 60, 90]


def test_where_nothing_lies_on_two_devices_nothing_is_compared(capsys):
    run = Run(fsdp=8)
    assert "checksums  every array is stored on one device only: there are no replicas to compare" in capsys.readouterr().out
    assert not run.replicas.due(100)
    run.check(100, OF_5)
    assert not run.events


def test_comparing_can_be_left_out(capsys):
    run = Run(data=8, every=None)
    assert not run.replicas.due(100)
    run.check(100, OF_5)
    assert "checksums" not in capsys.readouterr().out


def test_a_device_that_is_wrong_by_majority_explains_what_two_differ_in():
    held_by = {"many": np.array([[0, 1, 2, 3]]), "two": np.array([[0, 2], [1, 3]])}
    assert suspected({"many": [2], "two": [0, 2]}, held_by) == Suspects(frozenset({2}), frozenset())
    assert suspected({"many": [2], "two": [1, 3]}, held_by) == Suspects(frozenset({2}), frozenset({1, 3}))
    assert suspected({"two": [0, 1, 2, 3]}, held_by) == Suspects(frozenset(), frozenset({0, 1, 2, 3}))
