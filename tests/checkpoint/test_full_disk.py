"""A disk that fills up under a run: the run goes on, its state is saved as soon as that is possible, no record is lost.

While it is full, this process may not write files of more than 8,000 bytes: a limit of the kernel that needs no rights, and
whose errors take the way of every error of `write`. Checkpoints are larger, and metrics.jsonl before step 20.
"""

import json
import resource
import threading
import time
import types

import pytest

from llamajax.checkpoint import write as checkpoint
from llamajax.config.file import load_config
from llamajax.data.rows.loader import Loader
from llamajax.errors import SaveError
from llamajax.training import loop, stages
from llamajax.training import run as train
from tests import runs

FULL_AT = 20
"""The step whose save is the first to fail."""


class Disk:
    """The disk of this process, and what a run says about it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.save_failed = threading.Event()
        self._hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def fill(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, self._hard))

    def make_room(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._hard, self._hard))

    def tell(self, line: str) -> None:
        self.told.append(line)
        self.save_failed.set()


@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(train, "say", disk.tell)
    yield disk
    disk.make_room()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """27 steps, saved every five; compiled once for all runs."""
    path = runs.write_config(tmp_path_factory.mktemp("full_disk"), num_steps=27, eval_every=None, eval_batches=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "compile_here", one_program(stages.compile_here))
        yield load_config(path, ["metrics.tensorboard=true"])


def one_program(compile_here):
    programs = []

    def compile_or_reuse(run, lowered):
        programs.extend(() if programs else (compile_here(run, lowered),))
        return programs[0]

    return compile_or_reuse


def run(monkeypatch, config, run_dir, before_step) -> None:
    """Trains; `before_step` is called with the number of every step before it."""

    class Watched(Loader):
        def __next__(self):
            position, batch = super().__next__()
            before_step(position + 1)
            return position, batch

    monkeypatch.setattr(loop, "Loader", Watched)
    train.run(config.changed({"run_dir": str(run_dir)}))


def fill(disk, run_dir) -> None:
    """Fills the disk once the save before is committed."""
    runs.wait_until(lambda: FULL_AT - 5 in runs.committed_steps(run_dir), [])
    disk.fill()


def test_a_save_that_failed_is_told_at_once_and_made_good_soon(disk, config, tmp_path, monkeypatch, capfd):
    def before_step(step):
        if step == FULL_AT:
            fill(disk, tmp_path)
        if step == FULL_AT + 1:
            assert disk.save_failed.wait(timeout=120), "the run was not told that step 20 could not be saved"
            disk.make_room()

    run(monkeypatch, config, tmp_path, before_step)
    assert disk.told[0] == (
        f"{tmp_path}/checkpoints: step 20 cannot be saved: File too large; it will be tried again;"
        " step 15 is the newest checkpoint"
    )
    committed = runs.committed_steps(tmp_path)
    assert {5, 10, 15, 25, 27} < committed
    assert committed & {21, 22, 23, 24}
    assert list(runs.losses(tmp_path)) == list(range(1, 28))
    err = capfd.readouterr().err
    assert f"{tmp_path}/metrics.jsonl: cannot be written: File too large; the run continues and writes it later" in err
    assert "metrics.jsonl: is written again; records that came late: " in err
    assert "Traceback" not in err


def test_the_last_state_is_saved_once_there_is_room(disk, config, tmp_path, monkeypatch):
    """However many saves failed before."""
    monkeypatch.setattr(
        checkpoint, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: disk.make_room())
    )
    run(monkeypatch, config, tmp_path, lambda step: fill(disk, tmp_path) if step == FULL_AT else None)
    assert runs.committed_steps(tmp_path) == {5, 10, 15, 27}
    assert list(runs.losses(tmp_path)) == list(range(1, 28))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events][-1] == "stop"
    assert {event["step"] for event in events if event["event"] == "save"} >= {20, 25, 27}


@pytest.mark.slow
def test_a_run_whose_state_cannot_be_saved_says_so_and_goes_on_from_the_newest(disk, config, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(checkpoint, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    with pytest.raises(SaveError) as caught:
        run(monkeypatch, config, tmp_path, lambda step: fill(disk, tmp_path) if step == FULL_AT else None)
    disk.make_room()
    assert str(caught.value) == (
        f"{tmp_path}/checkpoints: step 27 cannot be saved: File too large; check the disk and run the same command again;"
        " step 15 is the newest checkpoint"
    )
    assert caught.value.exit_code == 74
    num_lost = 27 - runs.steps_on_record(tmp_path)
    assert num_lost > 5
    assert f"/metrics.jsonl: records lost: {num_lost}; File too large" in capfd.readouterr().err
    run(monkeypatch, config, tmp_path, lambda step: None)
    assert list(runs.losses(tmp_path)) == list(range(1, 28))
    assert max(runs.committed_steps(tmp_path)) == 27
