"""Reports of a process about itself, and how often it times its devices."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from llamajax.watch import hosts


class Devices:
    """Devices with rounds of 10 ms."""

    rounds = 0

    def seconds(self, num_rounds: int) -> float:
        Devices.rounds += num_rounds
        return 0.01


@pytest.fixture
def of_first(monkeypatch):
    monkeypatch.setattr(hosts, "DeviceProbe", Devices)
    peers: Any = SimpleNamespace(rank=0, reports={})
    peers.report = lambda values: peers.reports.update({0: values})
    return hosts.Hosts(peers, 2, 1.15), peers


def test_a_slow_loader_of_another_process_is_named_and_told_in_the_file(of_first, tmp_path):
    figures, peers = of_first
    named = []
    for step in range(1, 101):
        figures.add_step(1.0, 0.001, 0.002, was_late=True)
        if step % 8 == 0:
            peers.reports[1] = {"step": step, "data": 0.3, "host": 0.002, "step_time": 1.0, "name": "gpu017"}
        changes, _ = figures.report(step)
        named += changes
    ((slow),) = named
    assert (slow.process, slow.kind, figures.name(1)) == (1, "data", "gpu017")
    assert slow.line("gpu017") == (
        "slow       process 1 (gpu017) waits for its batches 300.0 ms per step, the median 1.0 ms, since step 8"
    )
    figures.write(tmp_path, at_once=True)
    rows = json.loads((tmp_path / "hosts.json").read_text())
    assert [(row["process"], row["data_s"]) for row in rows] == [(0, pytest.approx(0.001)), (1, 0.3)]


def test_reports_of_before_the_run_went_back_are_not_compared(of_first):
    _, peers = of_first
    peers.reports |= {0: {"step": 100}, 1: {"step": 100}}
    hosts.Hosts(peers, 2, 1.15)
    assert not peers.reports


def test_what_the_devices_did_not_wait_for_delays_nobody(of_first):
    figures, peers = of_first
    for _ in range(10):
        figures.add_step(1.0, 0.3, 0.2, was_late=False)
    figures.report(16)
    assert (peers.reports[0]["data"], peers.reports[0]["host"]) == (0.0, 0.0)


@pytest.mark.parametrize(("step_time_s", "every"), [(100.0, 8), (0.75, 8), (0.74, 16), (0.1, 64)])
def test_devices_are_timed_as_often_as_it_costs_little(of_first, step_time_s, every):
    """Three rounds of 10 ms or more, up to 32, cost less than 0.5% of any number of steps, the first ones too."""
    figures, _ = of_first
    Devices.rounds = 0
    probes = []
    for step in range(1, 1001):
        if step > 1:
            figures.add_step(step_time_s, 0.0, 0.0, was_late=False)
        if figures.probe_due(step):
            figures.probe()
            probes.append(step)
            assert 0.01 * Devices.rounds <= hosts.PROBE_SHARE * step * step_time_s * 1.001
        figures.report(step)
    assert probes == list(range(every, 1001, every))
    assert Devices.rounds / len(probes) == min(32, int(hosts.PROBE_SHARE * every * step_time_s / 0.01 + 1e-6))


def test_devices_are_timed_after_the_same_steps_wherever_a_run_goes_on(of_first):
    figures, _ = of_first
    probes = []
    for step in range(94, 151):
        figures.add_step(1.0, 0.0, 0.0, was_late=False)
        if figures.probe_due(step):
            figures.probe()
            probes.append(step)
        figures.report(step)
    assert probes == [104, 112, 120, 128, 136, 144]
