"""R19: the disk of a run is slow, full or failing for a while; the run goes on and tells of it, or is started again."""

import dataclasses
import errno
import pathlib
import shutil
import signal
import subprocess
from dataclasses import dataclass

from tests.faults import results, scene
from tests.faults.broken_run import ENDS_S, STARTS_S, BrokenRun, golden
from tests.faults.results import Figures, Result, Try
from tests.faults.scene import Scene

LASTS_S = 8.0
"""For which, at most, a disk goes on as it is when that has been told."""
NUM_STEPS = 300


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Effects of `disk.c` on file system calls; the numbers of its control file, in order."""

    latency_ms: int = 0
    write_eio: int = 0
    read_eio: int = 0
    room: int = -1
    torn: int = 0
    error: int = errno.ENOSPC
    kib_per_s: int = 0


WELL = Disk()
DISKS = {
    "calls that take 200 ms": Disk(latency_ms=200),
    "20 KiB a second": Disk(kib_per_s=20),
    "EIO in every 50th write": Disk(write_eio=50),
    "EIO in every 50th read, after a kill": Disk(read_eio=50),
    "full in the middle of a save": Disk(room=50_000),
    "full, and writes in part": Disk(room=50_000, torn=1),
    "full by quota": Disk(room=20_000, error=errno.EDQUOT),
    "full from the start": Disk(room=0),
}
TELLS = ("cannot be written", "cannot be saved", "disk is slow", "for the disk of", "for the previous")
"""In one of these words, or by a restart."""


class FaultyDisk:
    """A folder that lies on a disk whose faults can be chosen, for the processes with its `environment`."""

    def __init__(self, where: Scene, folder: pathlib.Path) -> None:
        """Builds the library, if that has not been done."""
        library, source = where.directory / "disk.so", pathlib.Path(__file__).with_name("disk.c")
        if not library.exists():
            made = library.with_suffix(".new")
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"], check=True)
            made.rename(library)
        self.root, self._control = folder / "disk", folder / "disk.control"
        self.root.mkdir()
        self.be(WELL)
        paths = {"LD_PRELOAD": library, "DISK_ROOT": self.root, "DISK_CONTROL": self._control}
        self.environment = {name: str(path) for name, path in paths.items()}

    def be(self, disk: Disk) -> None:
        """From now on the disk does this."""
        new = self._control.with_suffix(".new")
        new.write_text(" ".join(map(str, dataclasses.astuple(disk))))
        new.rename(self._control)

    @property
    def num_struck(self) -> int:
        """Calls that have failed or were slowed."""
        path = self._control.with_name(f"{self._control.name}.struck")
        return path.stat().st_size if path.exists() else 0


def run(count: int, seed: int, where: Scene, jobs: int) -> Result:
    """Gives `count` runs a bad disk for some seconds; half of them keep a local tier there too."""

    def one(a_try: Try) -> Figures:
        num_processes, disk = a_try.rng.choice([1, 2]), DISKS[a_try.kind]
        folder = where.new_directory("disk")
        faulty = FaultyDisk(where, folder)
        settings = {"train.num_steps": NUM_STEPS, "data.cache_dir": str(faulty.root / "cache")}
        if a_try.rng.random() < 0.5:
            settings |= {"checkpoint.local_dir": str(faulty.root / "local"), "checkpoint.local_every": 2}
        golden(where, num_processes, settings)
        with BrokenRun(where, num_processes, settings, environment=faulty.environment, run_dir=faulty.root / "run") as run:
            at_start = "from the start" in a_try.kind
            if at_start:
                faulty.be(disk)
            run.start()
            if not at_start:
                wanted = a_try.rng.randint(6, 60)
                run.wait(lambda: run.step >= wanted, STARTS_S + ENDS_S, f"step {wanted}")
                faulty.be(disk)
            committed = scene.newest_whole(run.run_dir)
            bad_from = run.step
            if "kill" in a_try.kind:
                assert run.signal(run.pids()[0], signal.SIGKILL), "had ended before it could be killed"
            kills = int("kill" in a_try.kind)  # after which reads that fail are tried again without a word

            def tells_or_reads(run: BrokenRun = run, kills: int = kills) -> bool:
                return tells(run, kills) or (kills > 0 and len(run.starts) > 1)

            took = run.wait(tells_or_reads, LASTS_S + STARTS_S, f"telling of {a_try.kind}")
            run.wait_or_end(LASTS_S * a_try.rng.random())
            step = run.step
            faulty.be(WELL)
            assert run.finish(STARTS_S + ENDS_S) == [0], run.last_line
            run.must_leave_none()
            assert faulty.num_struck, "no call failed or took longer"
            assert "Traceback" not in run.output, run.output[-1500:]
            assert all(start >= committed for start in run.starts[1:]), f"started from {run.starts}, not from {committed}"
            run.must_equal_golden()
            figures = {"steps done on a bad disk": max(0, step - bad_from), "starts": len(run.starts)}
        shutil.rmtree(folder, ignore_errors=True)
        return figures if kills else {"s until it is told": took, **figures}

    return results.attempt("R19", list(DISKS), count, seed, one, jobs=jobs)


def tells(run: BrokenRun, kills: int) -> bool:
    """Whether the run, or its launcher, has said something of its disk, and not of `kills` processes killed."""
    return any(words in run.output for words in TELLS) or run.output.count("launch     restart in ") > kills
