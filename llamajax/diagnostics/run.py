"""Looks at this machine and reports what would keep a run from training: `python -m llamajax.doctor` calls it."""

import json
import os
import platform
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

import llamajax
from llamajax.config.run import Config
from llamajax.diagnostics import devices, gpus, host, needs, network, nvidia_smi, software, storage
from llamajax.diagnostics.findings import Check, Finding
from llamajax.errors import EnvironmentMismatchError
from llamajax.estimates.gpu_memory_budget import memory_fraction
from llamajax.launching.hosts import find_hosts

_LIMIT_S = 60.0
"""Seconds for each check besides the longer limits of external programs."""
_COLORS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_COLUMN = 19


def main(config: Config | None, *, as_json: bool) -> int:
    """Checks the machine and prints every finding; returns 0, or the exit code for a machine that cannot train.

    Args:
        config: the run whose needs are checked too.
        as_json: print one JSON object instead of lines.
    """
    console = Console(highlight=False, force_jupyter=False)
    findings = []
    if not as_json:
        text = f"llamajax {llamajax.__version__} on {socket.gethostname()}, {platform.platform(terse=True)}"
        console.print(text, markup=False, soft_wrap=True)
    for finding in look(config):
        findings.append(finding)
        if not as_json:
            _print(console, finding)
    counts = Counter(finding.status for finding in findings)
    if as_json:
        found = {"llamajax": llamajax.__version__, "host": socket.gethostname(), "findings": [vars(it) for it in findings]}
        print(json.dumps(found, indent=1))
    else:
        told = ", ".join(f"{counts[status]} {status}" for status in _COLORS if counts[status])
        console.print(f"{told}: {'this machine cannot train as asked' if counts['fail'] else 'no failure'}", markup=False)
    return EnvironmentMismatchError.exit_code if counts["fail"] else 0


def look(config: Config | None) -> Iterator[Finding]:
    """Yields the findings of all checks, each as soon as it and those before it are done. Checks run in threads of their
    own, and none is waited for without a limit."""
    environment = devices.environment_of_probe()
    smi = nvidia_smi.read()
    num_cards = len(smi.cards)
    of_devices = Check("jax devices", lambda: devices.check_devices(num_cards, environment))  # first: it takes longest
    yield from Check("software", lambda: _software(num_cards)).findings(_LIMIT_S)
    yield from Check("GPUs", lambda: _cards(smi, config)).findings(_LIMIT_S)
    yield from of_devices.findings(devices.LIMIT_S + _LIMIT_S)
    several = [
        Check("host", lambda: _host(num_cards, config)),
        Check("host name", network.check_name),
        Check("ports", lambda: _ports(config, os.environ)),
    ]
    for check in several:
        yield from check.findings(_LIMIT_S)
    tried = set[int]()
    for name, it in _folders(config).items():  # one after the other: together they would slow each other down
        yield from Check(f"disk {name}", lambda it=(name, *it, tried): storage.check_folder(*it)).findings(_LIMIT_S)
    if config is not None:
        yield from Check("run", lambda: _needs(config, smi)).findings(_LIMIT_S)


def _software(num_cards: int) -> Iterator[Finding]:
    yield from software.check_python()
    yield from software.check_packages()
    yield from software.check_jax(num_cards)
    yield from software.check_variables(os.environ)


def _cards(smi: nvidia_smi.Smi, config: Config | None) -> Iterator[Finding]:
    yield from gpus.check_driver(smi, software.cuda_version())
    yield from gpus.check_cards(smi)
    yield from gpus.check_memory(smi, None if config is None else memory_fraction(config))
    yield from gpus.check_errors(smi)
    yield from gpus.check_links(smi)


def _host(num_cards: int, config: Config | None) -> Iterator[Finding]:
    locks = network.has_fast_ports() or (config is not None and bool(config.offload.names or config.offload.state_share))
    yield from host.check_processors(num_cards)
    yield from host.check_memory()
    yield from host.check_shared_memory(num_cards)
    yield from host.check_limits(locks_memory=locks, num_processes=max(1, num_cards) * _num_hosts())
    yield from host.check_clock()


def _ports(config: Config | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    yield from network.check_meeting_place(None if config is None else config.distributed.coordinator_address, environment)
    yield from network.check_fast_ports()


def _needs(config: Config, smi: nvidia_smi.Smi) -> Iterator[Finding]:
    hosts, local = _num_hosts(), config.mesh.num_cpu_devices or len(smi.cards)
    yield from needs.check_files(config)
    yield from needs.check_devices(config, smi.cards, hosts)
    yield from needs.check_host_memory(config, local, local * hosts)


def _folders(config: Config | None) -> dict[str, tuple[Path, float, float]]:
    """Returns the folders to check: those of the run, or the working directory and the user's cache."""
    if config is not None:
        return needs.folders(config, _num_hosts())
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return {"here": (Path(), 0.0, 0.0), "cache": (Path(cache) / "llamajax", 0.0, 0.0)}


def _num_hosts() -> int:
    """Returns the number of hosts that the launcher's variables name; 1 where they are wrong, which `_ports` reports."""
    try:
        return find_hosts(os.environ).count
    except EnvironmentMismatchError:
        return 1


def _print(console: Console, finding: Finding) -> None:
    line = Text(f"{finding.status:<5} ", _COLORS[finding.status])
    console.print(line + Text(f"{finding.check:<{_COLUMN}} {finding.text}", ""), soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"{'':<6}{'':<{_COLUMN}} -> {finding.remedy}", "italic"), soft_wrap=True)
