"""What a process sends of itself, and how often it times its devices."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from llamajax.watch import hosts


@pytest.fixture
def of_first(monkeypatch):
    monkeypatch.setattr(hosts, "DeviceProbe", lambda: SimpleNamespace(seconds=lambda: 0.01))
    peers: Any = SimpleNamespace(rank=0, reports={})
    peers.report = lambda values: peers.reports.update({0: values})
    return hosts.Hosts(peers, 2, 1.15), peers


def test_a_slow_loader_of_another_process_is_named_and_told_in_the_file(of_first, tmp_path):
    figures, peers = of_first
    named = []
    for step in range(1, 101):
        figures.add_step(1.0, 0.001, 0.002)
        if step % 10 == 0:
            peers.reports[1] = {"step": step, "data": 0.3, "host": 0.002, "step_time": 1.0, "name": "gpu017"}
        changes, _ = figures.report(step)
        named += changes
    ((slow),) = named
    assert (slow.process, slow.kind, figures.name(1)) == (1, "data", "gpu017")
    assert slow.line("gpu017") == (
        "slow       process 1 (gpu017) waits for its batches 300.0 ms per step, the median 1.0 ms, since step 20"
    )
    figures.write(tmp_path, at_once=True)
    rows = json.loads((tmp_path / "hosts.json").read_text())
    assert [(row["process"], row["data_s"]) for row in rows] == [(0, pytest.approx(0.001)), (1, 0.3)]


@pytest.mark.parametrize(("step_time_s", "most", "least"), [(100.0, 100, 100), (1e-9, 8, 4)])
def test_devices_are_timed_as_often_as_it_costs_little(of_first, step_time_s, most, least):
    figures, _ = of_first
    probes = []
    for step in range(1, 1001):
        figures.add_step(step_time_s, 0.0, 0.0)
        if figures.probe_due(step):
            figures.probe()
            probes.append(step)
        figures.report(step)
    assert least <= len(probes) <= most
