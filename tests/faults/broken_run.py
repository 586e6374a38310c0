"""A run that is about to be broken: its processes, the faults laid for it, and what it leaves behind."""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from tests import runs
from tests.faults import scene
from tests.faults.scene import NUM_STEPS, End, Scene

NO_LAUNCHER = importlib.util.find_spec("llamajax.launch") is None
STARTS_S = 60.0
"""In which a run, if not held up, has begun to train."""
ENDS_S = 120.0
"""In which a run, if not held up, has done all its steps."""
_CHANGE_NOTHING = ("watchdog.", "distributed.", "checkpoint.", "xla.", "data.cache_dir")


class BrokenRun:
    """Processes of one run, started by `python -m llamajax.launch`, or by hand; a context manager that leaves none."""

    def __init__(
        self,
        where: Scene,
        num_processes: int,
        settings: Mapping[str, Any] | None = None,
        *,
        by_hand: bool = False,
        launch: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        step_s: float = 0.03,
        run_dir: pathlib.Path | None = None,
        cwd: pathlib.Path = runs.ROOT,
    ) -> None:
        """Prepares a run that is not started yet.

        Args:
            where: what it shares with others.
            num_processes: on this machine, with a device each.
            settings: that differ from the scene's.
            by_hand: without the launcher; nobody then starts it again.
            launch: options of the launcher.
            environment: variables besides the usual ones.
            step_s: seconds that a step takes at least.
            run_dir: another place for it.
            cwd: working directory; `run_dir` is told relative to another one than the project's.
        """
        self.scene, self.num_processes, self.by_hand = where, num_processes, by_hand or NO_LAUNCHER
        self.settings = dict(settings or {})
        self.folder = where.new_directory(f"{num_processes}")
        self.run_dir = run_dir or self.folder / "run"
        self.processes: list[subprocess.Popen[bytes]] = []
        self._launch, self._cwd = ("--backoff_s=0.1", "--max_restarts=20", *launch), cwd
        self._environment = where.environment(self.folder, step_s) | dict(environment or {})
        self.started_at = 0.0
        """When it was first started, in seconds since 1970."""
        for name in ("laid", "fired"):
            (self.folder / name).mkdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()
        if exc_info[0] is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        """Starts it, or starts it again; the same command each time."""
        self.started_at = self.started_at or time.time()
        own = {"run_dir": str(self._told_run_dir), **self.settings}
        if not self.by_hand:
            launcher = [sys.executable, "-m", "llamajax.launch", "-n", str(self.num_processes), *self._launch]
            self._popen([*launcher, "--module", scene.CHILD, "--", *scene.arguments(self.scene.config, own)])
            return
        address = runs.free_address()
        for rank in range(self.num_processes):
            together = {
                "distributed.enabled": "true", "distributed.coordinator_address": address,
                "distributed.num_processes": self.num_processes, "distributed.process_id": rank,
            } if self.num_processes > 1 else {}  # fmt: skip
            self._popen(scene.command(self.scene.config, own | together))

    @property
    def _told_run_dir(self) -> pathlib.Path:
        return self.run_dir if self._cwd == runs.ROOT else self.run_dir.relative_to(self._cwd)

    def start_rank(
        self,
        rank: int,
        settings: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        cwd: pathlib.Path | None = None,
    ) -> None:
        """Starts one process by hand, with what it needs to find the others in `settings`."""
        own = {"run_dir": str(self.run_dir), **self.settings, **settings, "distributed.process_id": rank}
        self._popen(scene.command(self.scene.config, own), environment, cwd)

    def _popen(
        self, command: list[str], environment: Mapping[str, str] | None = None, cwd: pathlib.Path | None = None
    ) -> None:
        log = self.folder / f"log.{len(list(self.folder.glob('log.*')))}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=cwd or self._cwd,
                env=self._environment | dict(environment or {}), start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)

    @property
    def output(self) -> str:
        """Output of all its processes, one after the other."""
        logs = sorted(self.folder.glob("log.*"), key=lambda path: int(path.suffix[1:]))
        return "\n".join(path.read_text(errors="replace") for path in logs)

    @property
    def running(self) -> bool:
        """Whether what was started by the campaign is still there."""
        return any(process.poll() is None for process in self.processes)

    @property
    def step(self) -> int:
        """Steps on record."""
        return runs.steps_on_record(self.run_dir)

    @property
    def starts(self) -> list[int]:
        """The step that each start of its loop went on from."""
        return [event["step"] for event in self.events if event["event"] == "start"]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events that the run recorded."""
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def pids(self) -> list[int]:
        """PIDs of the newest process of each rank; empty until all ranks have begun."""
        paths = [self.folder / f"pids.{rank}" for rank in range(self.num_processes)]
        if not all(path.exists() for path in paths):
            return []
        return [int(path.read_text().split()[-1]) for path in paths]

    def lay(self, point: str, rank: int, do: str, **how: Any) -> None:
        """Lays a fault for the next time that the rank comes to the point."""
        hidden = self.folder / "laid" / f".{point}.{rank}"
        hidden.write_text(json.dumps({"do": do, "point": point, **how}))
        hidden.rename(self.folder / "laid" / f"{point}.{rank}")

    def fired(self, point: str, rank: int) -> dict[str, Any] | None:
        """When and where a fault happened; None as long as it did not."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.folder / "fired" / f"{point}.{rank}").read_text())
        return None

    def release(self) -> None:
        """Lets whoever is held (`hold`) go on."""
        (self.folder / "release").touch()

    def wait(self, reached: Callable[[], bool], timeout_s: float, what: str, *, or_ended: bool = False) -> float:
        """Waits, for `timeout_s` seconds of a quiet machine; how long it took. That the run ends meanwhile is a failure,
        unless `or_ended`."""

        def looks() -> bool:
            if reached():
                return True
            if self.running:
                return False
            assert or_ended or reached(), f"{what}: but it ended with {self.codes}: {self.last_line}"
            return True

        return scene.wait_until(looks, timeout_s * self.scene.slowness, f"{what} ({self.last_line})")

    def wait_or_end(self, seconds: float) -> bool:
        """Waits that long; whether the run still goes on."""
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.running

    def wait_for_fault(self, point: str, rank: int, timeout_s: float = ENDS_S) -> dict[str, Any]:
        """Waits until a fault has happened."""
        self.wait(lambda: self.fired(point, rank) is not None, timeout_s, f"fault {point} of rank {rank}", or_ended=True)
        fault = self.fired(point, rank)
        assert fault is not None, f"the run ended before it came to {point}: {self.last_line}"
        return fault

    def finish(self, timeout_s: float = ENDS_S) -> list[int | None]:
        """Exit codes of all that were started by the campaign, once they have ended."""
        self.wait(lambda: not self.running, timeout_s, "end of the run")
        return self.codes

    @property
    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    @property
    def last_line(self) -> str:
        """The last that was printed."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else "nothing was printed"

    def signal(self, pid: int, number: signal.Signals) -> bool:
        """Sends a signal to a process of this run; whether it was still there."""
        with contextlib.suppress(ProcessLookupError):
            if pid in self.left():
                os.kill(pid, number)
                return True
        return False

    def kill_all(self) -> None:
        """Kills its processes; the launcher may end the others when the first is gone."""
        were_there = [self.signal(pid, signal.SIGKILL) for pid in self.pids()]
        assert were_there[:1] == [True], f"had ended before it could be killed: {self.last_line}"

    def left(self) -> list[int]:
        """Processes of this run that are still there, whoever started them."""
        return scene.processes_of(self.folder)

    def must_leave_none(self) -> None:
        """Fails if a process is left some seconds after the run has ended."""
        scene.wait_until(lambda: not self.left(), 5 * self.scene.slowness, "end of all processes of the run")

    def must_equal_golden(self, environment: Mapping[str, str] | None = None) -> None:
        """Fails unless the run has ended as one that nobody broke, to the bit."""
        End(self.run_dir).must_equal(golden(self.scene, self.num_processes, self.settings, environment))

    def end(self) -> None:
        """Kills whatever is left of it."""
        scene.end_processes(self.folder)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)


def golden(
    where: Scene, num_processes: int, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> End:
    """How the run ends if nobody breaks it; the same program, started by hand once."""

    numbers = {key: value for key, value in settings.items() if not key.startswith(_CHANGE_NOTHING)}

    def make() -> End:
        with BrokenRun(where, num_processes, numbers, by_hand=True, environment=environment, step_s=0) as run:
            run.start()
            codes = run.finish(STARTS_S + ENDS_S + 0.2 * int(numbers.get("train.num_steps", NUM_STEPS)))
            assert not any(codes), f"a run that nobody broke ended with {codes}: {run.output[-2000:]}"
            return End(run.run_dir)

    return where.golden(num_processes, numbers | dict(environment or {}), make)


def passing_over(tried: BrokenRun, environment: Mapping[str, str]) -> End:
    """How the run ends if nobody breaks it, and it is told from the beginning which rows to pass over."""
    with BrokenRun(tried.scene, tried.num_processes, tried.settings, by_hand=True, environment=environment, step_s=0) as run:
        run.run_dir.mkdir()
        shutil.copy(tried.run_dir / "passed_over.json", run.run_dir)
        run.start()
        codes = run.finish(STARTS_S + ENDS_S + 0.2 * int(tried.settings.get("train.num_steps", NUM_STEPS)))
        assert not any(codes), f"a run that nobody broke ended with {codes}: {run.output[-2000:]}"
        assert not any(event["event"] == "rollback" for event in run.events), "told what to pass over, it still went back"
        return End(run.run_dir)


@contextlib.contextmanager
def broken(*args: Any, **kwargs: Any) -> Iterator[BrokenRun]:
    """A `BrokenRun` that is started."""
    with BrokenRun(*args, **kwargs) as run:
        run.start()
        yield run
