"""Programs without jax for the launcher to start: each test writes its own, of a few lines."""

import os
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence

from tests import runs

HEAD = """
import os, pathlib, signal, subprocess, sys, time
from llamajax.processes import heartbeat
here, rank = pathlib.Path(__file__).parent, int(os.environ["LLAMAJAX_PROCESS_ID"])
with (here / f"lives.{rank}").open("a") as file:
    file.write(f"{os.getpid()}\\n")
life = len((here / f"lives.{rank}").read_text().splitlines())
def commit(step):
    (here / "run" / "checkpoints" / str(step)).mkdir(parents=True)
def hold_python():  # its lock, in a native call
    import ctypes
    ctypes.PyDLL(None).sleep(600)
"""


class Launch:
    """A launcher that runs, of processes that run `body`."""

    def __init__(
        self, directory: pathlib.Path, body: str, *options: str, num_processes: int = 2, program: Sequence[str] = ()
    ) -> None:
        self.directory = directory
        self.config = runs.write_config(directory)
        (directory / "run").mkdir()
        (directory / "program.py").write_text(HEAD + textwrap.dedent(body))
        environment = os.environ | {"PYTHONPATH": f"{runs.ROOT}:{directory}", "TMPDIR": str(directory)}
        launcher = [sys.executable, "-m", "llamajax.launch", "-n", str(num_processes), "--module", "program"]
        settings = ["--config", str(self.config), f"--mesh.num_cpu_devices={8 // num_processes}", *program]
        self.process = subprocess.Popen(
            [*launcher, *options, *(() if "--backoff_s" in options else ("--backoff_s", "0.1")), "--", *settings],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def end(self, code: int) -> tuple[list[str], list[str]]:
        """The lines on stdout; the launcher's own on stderr, without their label and without the first one of a life."""
        output, errors = self.process.communicate(timeout=120)
        assert self.process.returncode == code, errors
        own = [line.removeprefix("launch     ") for line in errors.splitlines() if line.startswith("launch ")]
        return output.splitlines(), [line for line in own if "they meet at" not in line]

    def pids(self, rank: int) -> list[int]:
        """PIDs of all lives of a rank so far."""
        path = self.directory / f"lives.{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Until something happens, which must be before the launcher ends."""
        runs.wait_until(reached, [self.process])
        assert reached()

    def wait_for_file(self, name: str) -> None:
        self.wait_for((self.directory / name).exists)


def seconds_until_gone(*pids: int) -> float:
    """How long it takes until none of these processes runs."""
    started = time.monotonic()
    while any(runs_still(pid) for pid in pids):
        assert time.monotonic() - started < 60
        time.sleep(0.01)
    return time.monotonic() - started


def runs_still(pid: int) -> bool:
    """Whether a process runs; one that only waits for its parent to look does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
