"""Shared parts of the campaign's runs: a tiny configuration, data, compiled programs, and runs that nobody breaks."""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import sentencepiece
import tensorstore

from tests import runs

NUM_STEPS = 60
SAVE_EVERY = 5
CHILD = "tests.faults.child"


class Scene:
    """A temporary directory for everything, removed at the end."""

    def __init__(self, slowness: float = 1.0, *, offload: bool = False) -> None:
        """Makes the data and the configuration.

        Args:
            slowness: of this machine, beside two quiet cores: all limits of time are multiplied by it, and results say so.
            offload: whether weights, moments and saved values wait in host memory.
        """
        self.slowness = slowness
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="llamajax-faults-"))
        self.config = runs.write_config(self.directory, num_steps=NUM_STEPS, eval_every=20)
        settings = json.loads(self.config.read_text())
        settings["mesh"] = {"num_cpu_devices": 1}
        settings["model"]["num_layers"] = 1
        settings["train"]["grad_accum_steps"] = 1
        settings["checkpoint"] = {"save_every": SAVE_EVERY, "keep_last": 2}
        if offload:
            settings["offload"] = {"activations": ["input"], "optimizer": 1.0, "parameters": "all"}
        self.config.write_text(json.dumps(settings))
        self._golden: dict[tuple[Any, ...], End] = {}
        self._making_golden = threading.Lock()
        self._num_runs = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def end(self) -> None:
        """Kills every process of its runs and removes all files."""
        end_processes(self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)

    def new_directory(self, name: str) -> pathlib.Path:
        """An empty one, for one run."""
        with self._making_golden:
            self._num_runs += 1
            directory = self.directory / "runs" / f"{self._num_runs}-{name}"
        directory.mkdir(parents=True)
        return directory

    def environment(self, folder: pathlib.Path, step_s: float) -> dict[str, str]:
        """Environment of a run with its faults in `folder`: the programs compiled before, and this checkout's code."""
        return os.environ | {
            "PYTHONPATH": str(runs.ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(self.directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "LLAMAJAX_CAMPAIGN": str(folder),
            "TMPDIR": str(folder),
            "LLAMAJAX_CAMPAIGN_STEP_S": str(step_s),
            "OPENBLAS_NUM_THREADS": "1",
        }

    def golden(self, num_processes: int, settings: Mapping[str, Any], make: Callable[[], "End"]) -> "End":
        """How a run of so many processes with these settings ends if nobody breaks it; made once."""
        key = (num_processes, *sorted((name, str(value)) for name, value in settings.items()))
        with threading.Lock() if key in self._golden else _MAKING:
            if key not in self._golden:
                self._golden[key] = make()
        return self._golden[key]


_MAKING = threading.Lock()


def processes_of(folder: pathlib.Path) -> list[int]:
    """Processes of the runs in `folder`, whoever started them: its name is in their environment."""
    mark = b"LLAMAJAX_CAMPAIGN=" + os.fsencode(folder)
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            told = next((text for text in path.read_bytes().split(b"\0") if text.startswith(mark)), b"")
            if told.removeprefix(mark)[:1] in (b"", b"/") and told:
                found.append(int(path.parent.name))
    return found


def end_processes(folder: pathlib.Path) -> None:
    """Kills what `processes_of` finds, until there is none."""
    deadline = time.monotonic() + 10
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


class End:
    """How a run ended: every step's loss, the arrays of its last checkpoint, and the rows that it passed over."""

    def __init__(self, run_dir: pathlib.Path) -> None:
        """Reads it; fails unless each step is on record once, in order."""
        self.losses = runs.losses(run_dir)
        self.step = max(runs.committed_steps(run_dir))
        self.arrays = hashes(run_dir / "checkpoints" / str(self.step))
        record = run_dir / "passed_over.json"
        windows = json.loads(record.read_text()) if record.exists() else []
        self.windows = [(window["first_row"], window["num_rows"]) for window in windows]

    def must_equal(self, golden: Self) -> None:
        """Fails unless this is the same end, to the bit."""
        differing = [step for step, loss in golden.losses.items() if self.losses.get(step) != loss]
        assert not differing, (
            f"loss of step {differing[0]} is {self.losses.get(differing[0])}: {golden.losses[differing[0]]}"
        )
        assert len(self.losses) == len(golden.losses), f"{len(self.losses)} steps on record: {len(golden.losses)}"
        assert self.step == golden.step, f"last checkpoint {self.step}: {golden.step}"
        names = [name for name, sha256 in golden.arrays.items() if self.arrays.get(name) != sha256]
        assert not names, f"{', '.join(names)} differ after step {self.step}"
        assert self.arrays.keys() == golden.arrays.keys()


def hashes(step_dir: pathlib.Path) -> dict[str, str]:
    """SHA-256 of every array of a checkpoint."""
    found = {
        name: hashlib.sha256(f"{array.dtype} {array.shape}".encode() + array.tobytes()) for name, array in arrays(step_dir)
    }
    assert found
    return {name: sha256.hexdigest() for name, sha256 in found.items()}


def arrays(step_dir: pathlib.Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and content of every array of a checkpoint; read by tensorstore, so without the code that is tried."""
    for name in json.loads((step_dir / "arrays.json").read_text()):
        base = {"driver": "file", "path": f"{step_dir / 'state'}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        yield name, tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result().read().result()


def whole(step_dir: pathlib.Path) -> bool:
    """Whether all files of a checkpoint are what its manifest says; without the code that is tried."""
    try:
        records = json.loads((step_dir / "manifest.json").read_text())["files"]
        return bool(records) and all(
            hashlib.sha256((step_dir / path).read_bytes()).hexdigest() == record["sha256"]
            for path, record in records.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def newest_whole(run_dir: pathlib.Path) -> int:
    """The newest step whose checkpoint is whole, 0 if there is none; also while the run goes on."""
    for step in sorted(runs.committed_steps(run_dir), reverse=True):
        if whole(run_dir / "checkpoints" / str(step)):
            return step
    return 0


def wait_until(reached: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Waits; how many seconds it took.

    Raises:
        AssertionError: it took more than `timeout_s`.
    """
    started = time.monotonic()
    while not reached():
        assert time.monotonic() - started < timeout_s, f"{what}: not within {timeout_s:.0f} s"
        time.sleep(0.005)
    return time.monotonic() - started


def command(config: pathlib.Path, settings: Mapping[str, Any], module: str = CHILD) -> list[str]:
    return [sys.executable, "-m", module, *arguments(config, settings)]


def train_tokenizer(text: pathlib.Path, path: pathlib.Path, num_lines: int = 300) -> None:
    """Makes a `tokenizer.model` of the first lines of a text."""
    lines = text.read_text().splitlines()[:num_lines]
    with path.open("wb") as model:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=(json.loads(line)["text"] for line in lines), model_writer=model, vocab_size=320,
            model_type="bpe", byte_fallback=True, minloglevel=2, hard_vocab_limit=False,
        )  # fmt: skip


def arguments(config: pathlib.Path, settings: Mapping[str, Any]) -> list[str]:
    return ["--config", str(config), *(f"--{key}={value}" for key, value in settings.items())]
