"""Processes that join a run, each a program of its own."""

import subprocess
import sys

from tests import runs

PROGRAM = """
import hashlib, sys, threading, time
from llamajax.parallel import startup; from llamajax.processes import peers; from llamajax.training import stop
from llamajax.config.parallel import DistributedConfig
from llamajax.errors import DataError
from llamajax.processes.exit import end_process, exit_code

def work():
    with stop.StopSignal() as signals:
        startup.join_run(DistributedConfig(
            enabled=True, coordinator_address=sys.argv[1], num_processes=int(sys.argv[4]), process_id=rank,
            heartbeat_timeout_s=int(sys.argv[3]), initialization_timeout_s=int(sys.argv[5]),
        ))
        print("joined", peers.everyones(peers.rank()), flush=True)
        {body}

rank = int(sys.argv[2])
end_process(exit_code(work, memory_remedy="", disk="", disk_remedy=""), distributed=True)
"""
WAIT = "threading.Event().wait()"
STARTED: list[subprocess.Popen[str]] = []


def start(
    rank: int, address: str, body: str, *, heartbeat_timeout_s: int = 60, num_processes: int = 2, join_within_s: int = 60
) -> subprocess.Popen[str]:
    options = map(str, (rank, heartbeat_timeout_s, num_processes, join_within_s))
    command = [sys.executable, "-c", PROGRAM.replace("{body}", body), address, *options]
    STARTED.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return STARTED[-1]


def start_joined(body: str, **options: int) -> list[subprocess.Popen[str]]:
    address = runs.free_address()
    processes = [start(rank, address, body, **options) for rank in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined [0, 1]\n", process.communicate()
    return processes


def end(process: subprocess.Popen[str], code: int) -> list[str]:
    """Waits for the process to end with this code; returns its stdout and stderr."""
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, errors
    return [*output.splitlines(), *errors.splitlines()]
