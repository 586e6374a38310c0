"""R13 and R14: run directories that others use too, and directories in odd places."""

import os
import pathlib
import signal
from collections.abc import Mapping
from typing import Any

from llamajax.errors import CheckpointError
from tests import runs
from tests.faults import results, scene
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, broken, golden
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

OTHERS: dict[str, Mapping[str, Any]] = {
    "a second writer": {},
    "another learning rate": {"optimizer.learning_rate": 0.02},
    "another batch": {"train.global_batch_size": 16},
    "another model": {"model.mlp_dim": 64},
    "another seed": {"seed": 2},
    "kills while deleting": {},
}
"""Other claimants of the run's directory, with the settings that differ."""
PLACES = (
    "unicode", "spaces and quotes", "200 characters", "a link", "checkpoints are a link", "relative", "read-only", "SIGHUP",
)  # fmt: skip


def run_races(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """R13: the second one is refused, by one line; the first one goes on."""

    def one(a_try: Try) -> Figures:
        golden(where, 1, {})
        with broken(where, 1, by_hand=True) as first:
            wanted = a_try.rng.randint(6, 30)
            if a_try.kind == "kills while deleting":
                for point in a_try.rng.sample(["committed", "delete", "deleting"], 3):
                    first.lay(point, 0, "kill")
                    first.wait_for_fault(point, 0)
                    first.wait(lambda: not first.running, STARTS_S, "end of what was killed", or_ended=True)
                    go_on(first, point)
            else:
                first.wait(lambda: first.step >= wanted, ENDS_S, f"step {wanted}")
            if a_try.kind.startswith("another"):  # after the first has ended in the middle
                assert first.signal(first.pids()[0], signal.SIGTERM), "had ended before it could be stopped"
                first.finish()
                assert first.step < scene.NUM_STEPS, "did all its steps, whatever the signal"
            if a_try.kind == "a second writer":
                first.lay("step", 0, "hold")
                first.wait_for_fault("step", 0)
            if a_try.kind != "kills while deleting":
                must_be_refused(where, first, OTHERS[a_try.kind])
            first.release()
            if a_try.kind.startswith("another"):
                first.start()
            assert first.finish()[-1] == 0, first.last_line
            first.must_equal_golden()
            names = {path.name for path in (first.run_dir / "checkpoints").iterdir()}
            assert all(name.isdecimal() for name in names), f"left over: {sorted(names)}"
        return {}

    return results.attempt("R13", list(OTHERS), count, seed, one, jobs=jobs)


def go_on(killed: BrokenRun, point: str) -> None:
    """Starts what was killed while old checkpoints were to go; it must go on from the newest, which was committed before."""
    saved = [event["step"] for event in killed.events if event["event"] == "save"]
    newest, num_starts = scene.newest_whole(killed.run_dir), len(killed.starts)
    assert point == "delete" or newest >= saved[-1], f"killed at {point}, it has step {newest}, not {saved[-1]}"
    killed.start()
    killed.wait(lambda: len(killed.starts) > num_starts, STARTS_S, "next start")
    assert killed.starts[num_starts] >= newest, f"went on from {killed.starts[num_starts]}, not from {newest}"


def must_be_refused(where: Scene, first: BrokenRun, settings: Mapping[str, Any]) -> None:
    """A second run in the directory of the first ends at once, with one line."""
    with broken(where, 1, settings, by_hand=True, run_dir=first.run_dir) as second:
        codes = second.finish()
        assert codes == [CheckpointError.exit_code], f"ended with {codes}: {second.last_line}"
        assert "Traceback" not in second.output
        assert str(first.run_dir) in second.last_line or "global_batch_size" in second.last_line, second.last_line


def run_places(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """R14: a run works wherever it may write, and says in one line where it may not."""

    def one(a_try: Try) -> Figures:
        golden(where, 1, {})
        folder = where.new_directory("place")
        run_dir, cwd = place(a_try.kind, folder)
        hangs_up = a_try.kind == "SIGHUP"  # of a terminal, to the launcher
        with BrokenRun(where, 1, by_hand=not hangs_up, run_dir=run_dir, cwd=cwd) as run:
            run.start()
            if a_try.kind == "read-only":
                codes = run.finish()
                assert codes[0] not in (0, 70, None), f"ended with {codes}"
                assert codes[0] > 0, f"ended with {codes}"
                assert "Traceback" not in run.output
                assert str(run_dir) in run.last_line, run.last_line
                return {}
            wanted = a_try.rng.randint(3, 40)
            run.wait(lambda: run.step >= wanted, ENDS_S, f"step {wanted}")
            number = signal.SIGHUP if hangs_up else a_try.rng.choice([signal.SIGTERM, signal.SIGKILL])
            pid = run.processes[-1].pid if hangs_up else run.pids()[0]
            assert run.signal(pid, number), "had ended before the signal"
            run.wait(lambda: not run.running, ENDS_S, "end")
            newest, step = scene.newest_whole(run.run_dir), run.step
            assert step < scene.NUM_STEPS, "did all its steps, whatever the signal"
            killed = number == signal.SIGKILL
            assert run.codes == [-number if killed else 0], f"ended with {run.codes}: {run.last_line}"
            assert killed or newest == step, f"stopped after step {step}, but step {newest} is the newest checkpoint"
            run.start()
            assert run.finish()[-1] == 0, run.last_line
            assert run.starts[-1] == newest
            run.must_equal_golden()
        return {}

    return results.attempt("R14", PLACES, count, seed, one, jobs=jobs)


def place(kind: str, folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The run directory of a kind, and the working directory."""
    real = folder / "elsewhere"
    real.mkdir()
    match kind:
        case "unicode":
            return folder / "läuft 実行 🏃" / "run", runs.ROOT
        case "spaces and quotes":
            return folder / 'it\'s a "run" (1) [x] $HOME %d' / "run", runs.ROOT
        case "200 characters":
            return folder / ("x" * 200) / "run", runs.ROOT
        case "a link":
            (folder / "run").symlink_to(real, target_is_directory=True)
        case "checkpoints are a link":
            (folder / "run").mkdir()
            (folder / "run" / "checkpoints").symlink_to(real, target_is_directory=True)
        case "read-only":
            if os.geteuid() == 0:  # to whom permissions are nothing
                return pathlib.Path("/proc/run"), runs.ROOT
            folder.chmod(0o555)
    return folder / "run", folder if kind == "relative" else runs.ROOT
