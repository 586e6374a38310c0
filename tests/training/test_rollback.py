"""Going back: exact, durable, and bounded, whatever moment the run is killed at."""

import errno
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from llamajax import disk
from llamajax.checkpoint.local_tier import LocalTier
from llamajax.checkpoint.read import Saved
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.training import CheckpointConfig
from llamajax.data.rows.position import PassedOver, next_row
from llamajax.errors import CheckpointError
from llamajax.training import rollback
from llamajax.training.bad_steps import GoBack
from llamajax.training.rollback import PASSED_OVER_FILE, agreed, go_back, read_passed_over, steps_left_behind
from llamajax.watch import run_log
from tests import runs
from tests.checkpoint import states
from tests.tiny import tiny_config


def window(after_step, first_row=0, num_rows=8):
    """As JSON has it."""
    return {"after_step": after_step, "first_row": first_row, "num_rows": num_rows, "reason": "step 9: bad", "time": 1.5}


def save_steps(run_dir, steps):
    """Checkpoints, by step, with what the run had passed over when each was saved."""
    states.use_mesh()
    with Checkpointer(run_dir, CheckpointConfig(keep_last=9)) as checkpointer:
        for step, passed_over in steps.items():
            checkpointer.save(step, states.state_of(step), {"data": {"passed_over": passed_over}})


def test_checkpoints_behind_the_place_that_a_run_went_back_to_go(tmp_path):
    """After a kill between the record and their removal; those saved since know of it, and stay."""
    first, second = window(4), window(6)
    save_steps(tmp_path, {2: [], 4: [], 5: [], 6: [first], 7: [first], 8: [first, second]})
    (tmp_path / PASSED_OVER_FILE).write_text(json.dumps([first, second]))
    with Checkpointer(tmp_path, states.CONFIG) as checkpointer:
        passed_over = read_passed_over(tmp_path, checkpointer)
        assert passed_over == (PassedOver(**first), PassedOver(**second))
        assert states.names_in(tmp_path) == ["2", "4", "6", "8"]
        assert checkpointer.newest == 8
        checkpointer.drop([8])
        assert checkpointer.newest == 6
        restored = checkpointer.restore(states.abstract(), before=6)
        assert restored is not None
        assert restored.step == 4


def test_the_record_of_another_run_removes_nothing(tmp_path):
    save_steps(tmp_path, {2: [], 5: [window(4)], 6: [window(4)]})
    (tmp_path / PASSED_OVER_FILE).write_text(json.dumps([window(3), window(2)]))
    with Checkpointer(tmp_path, states.CONFIG) as checkpointer:
        read_passed_over(tmp_path, checkpointer)
    assert states.names_in(tmp_path) == ["2", "5", "6"]


def test_steps_whose_own_words_are_damaged_are_not_removed_for_them(tmp_path):
    """They are set aside with all they hold when they are to be restored."""
    save_steps(tmp_path, {2: [], 5: []})
    (tmp_path / "checkpoints" / "5" / "meta.json").write_text("{}")
    assert steps_left_behind(tmp_path / "checkpoints", (PassedOver(**window(2)),)) == []


def test_steps_that_cannot_be_asked_now_are_not_taken_for_the_runs_own(tmp_path, monkeypatch):
    save_steps(tmp_path, {2: [], 5: []})

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk, "_PAUSES_S", ())
    monkeypatch.setattr(pathlib.Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Input/output error"):
        steps_left_behind(tmp_path / "checkpoints", (PassedOver(**window(2)),))


@pytest.mark.parametrize(
    ("steps", "damaged", "expected"), [([10, 20], [], 10), ([5, 10, 20], [10], 5), ([10, 20], [10], 20), ([20], [], 20)]
)
def test_what_goes_wrong_again_from_the_same_step_goes_back_to_an_older_one(tmp_path, steps, damaged, expected):
    """Where there is a good one; its rows are counted from there, and those since are passed over."""
    save_steps(tmp_path, {step: [] for step in steps})
    for step in damaged:
        (tmp_path / "checkpoints" / str(step) / "meta.json").unlink()
    config = tiny_config(str(tmp_path), checkpoint=CheckpointConfig(keep_last=9))
    rows, before = config.train.rows_after, (PassedOver(**window(20, first_row=640, num_rows=160)),)
    bad = GoBack("step 25: bad", first_step=25, last_step=25, pass_over=True)
    with Checkpointer(tmp_path, config.checkpoint) as checkpointer:
        restored, passed_over = go_back(bad, config, states.abstract(), checkpointer, before)
        assert restored is not None
        assert (restored.step, checkpointer.newest) == (expected, expected)
        assert states.bits(restored.state) == states.bits(states.state_of(expected))
    assert passed_over[:-1] == before
    assert (passed_over[-1].after_step, passed_over[-1].first_row) == (expected, next_row(expected, rows, before))
    assert next_row(expected, rows, passed_over) == next_row(25, rows, before)
    assert json.loads((tmp_path / PASSED_OVER_FILE).read_text())[-1]["after_step"] == expected
    left = {str(step) for step in steps if step <= expected}
    assert {name for name in states.names_in(tmp_path) if name.isdecimal()} == left


def test_what_goes_wrong_again_from_another_step_does_not(tmp_path):
    """Nor do steps that are only computed again."""
    save_steps(tmp_path, {10: [], 20: []})
    config = tiny_config(str(tmp_path), checkpoint=CheckpointConfig(keep_last=9))
    with Checkpointer(tmp_path, config.checkpoint) as checkpointer:
        for after_step, pass_over in [(20, False), (10, True)]:
            bad = GoBack("step 25: bad", first_step=25, last_step=25, pass_over=pass_over)
            before = (PassedOver(**window(after_step)),)
            restored, _ = go_back(bad, config, states.abstract(), checkpointer, before)
            assert restored is not None
            assert restored.step == 20


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["before the record", "before the removal", "after it", "after a local save"])
def test_no_kill_brings_back_a_local_step_that_the_run_went_back_behind(tmp_path, monkeypatch, moment):
    """Nor does a disk of a host that failed when the step was to be deleted, or was elsewhere."""
    states.use_mesh()
    settings = CheckpointConfig(local_dir=str(tmp_path / "local"), local_every=5)
    config = tiny_config(str(tmp_path / "run"), checkpoint=settings)
    bad = GoBack("step 35: bad", first_step=25, last_step=35, pass_over=True)
    killed_in = {"before the record": (rollback, "write_atomically"), "before the removal": (Checkpointer, "drop")}

    def save_locally(checkpointer, step, passed_over):
        checkpointer.save_locally(step, states.state_of(step), {"data": {"passed_over": passed_over}}, {})
        checkpointer._local.wait()

    def die(*_, **__):
        raise Killed

    def live_and_die():
        with monkeypatch.context() as patched, Checkpointer(tmp_path / "run", settings) as checkpointer:
            for step in (10, 28):
                checkpointer.save(step, states.state_of(step), {"data": {"passed_over": []}})
            for step in (20, 30):
                save_locally(checkpointer, step, [])
            patched.setattr(LocalTier, "drop_above", lambda *_: None)
            if moment in killed_in:
                patched.setattr(*killed_in[moment], die)
            restored, _ = go_back(bad, config, states.abstract(), checkpointer, ())
            assert restored is not None
            assert restored.step == 20
            if moment == "after a local save":
                save_locally(checkpointer, 25, json.loads((tmp_path / "run" / PASSED_OVER_FILE).read_text()))
            die()

    with pytest.raises(Killed):
        live_and_die()
    with Checkpointer(tmp_path / "run", settings) as checkpointer:
        passed_over = read_passed_over(tmp_path / "run", checkpointer)
        restored = checkpointer.restore(states.abstract(), passed_over=passed_over)
        assert restored is not None
        if moment == "before the record":  # it will meet the bad step again
            assert (restored.step, passed_over) == (30, ())
            return
        assert restored.step == (25 if moment == "after a local save" else 20)
        assert agreed(tmp_path / "run", passed_over, restored) == passed_over
        assert [(window.after_step, window.first_row, window.num_rows) for window in passed_over] == [(20, 640, 480)]
        assert states.names_in(tmp_path / "run") == [".identity", "10"]


def restored_with(passed_over):
    return Saved(step=9, meta={"data": {"passed_over": passed_over}}, files=pathlib.Path())


def test_what_one_of_record_and_checkpoint_lost_the_other_knows():
    both = (PassedOver(**window(2)), PassedOver(**window(4)))
    assert agreed(pathlib.Path(), both, restored_with([])) == both
    assert agreed(pathlib.Path(), both, restored_with([window(2)])) == both
    assert agreed(pathlib.Path(), (), restored_with([window(2), window(4)])) == both
    with pytest.raises(CheckpointError, match=r"passed_over.json does not belong to the run of checkpoint 9; restore"):
        agreed(pathlib.Path(), both, restored_with([window(3)]))


@pytest.mark.parametrize("content", ["[{", '{"after_step": 3}', "[3]", json.dumps([window(-1)]), json.dumps([window("4")])])
def test_a_damaged_record_is_named(tmp_path, content):
    save_steps(tmp_path, {2: []})
    (tmp_path / PASSED_OVER_FILE).write_text(content)
    with (
        Checkpointer(tmp_path, states.CONFIG) as checkpointer,
        pytest.raises(CheckpointError, match=r"passed_over.json is damaged \(.*\); restore it, or remove it") as info,
    ):
        read_passed_over(tmp_path, checkpointer)
    assert "\n" not in str(info.value)


POISON = {"nan": [60, 68], "spike": [170]}
"""Steps 8 and 9 are skipped, and the second is one too many; the run goes on from step 5 with row 72, so that row 170 is in
step 18; from step 15 it goes on with row 176."""
FIRST_ROWS = {step: 8 * (step - 1) + (step > 5) * 32 + (step > 15) * 24 for step in range(1, 21)}


def start(config, *overrides, **poison):
    train = ["--config", str(config), "--train.max_nonfinite_steps=2", "--recovery.spike_zscore=20", *overrides]
    train += ["--recovery.spike_window=16", f"--xla.compilation_cache={config.parent / 'programs'}"]
    command = [sys.executable, "-m", "tests.training.poisoned", json.dumps(POISON | poison), *train]
    env = os.environ | {"PYTHONPATH": str(runs.ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def first_rows(path):
    """First rows by step, as last loaded."""
    pairs = (line.split() for line in path.read_text().splitlines())
    return {int(step): int(first) for step, first in pairs}


@pytest.mark.slow
def test_a_run_goes_back_past_bad_rows_and_kills_change_nothing(tmp_path):
    """Killed before and after the first rollback is recorded, and after the second, it ends like the one that was not."""
    config = runs.write_config(tmp_path)
    unbroken, broken = tmp_path / "run", tmp_path / "broken"
    output = runs.finish(start(config, rows=str(tmp_path / "rows")))
    lines = [line for line in output.splitlines() if line.startswith("rollback ")]
    assert len(lines) == 2
    assert lines[0].endswith(
        "step 9: gradients were not finite in 2 steps in a row (train.max_nonfinite_steps=2); going back to step 5, passing"
        " over rows 40 to 71 (1 of at most 3 times)"
    )
    assert lines[1].endswith("going back to step 15, passing over rows 152 to 175 (2 of at most 3 times)")
    rows = first_rows(tmp_path / "rows")
    assert {step: rows[step] for step in FIRST_ROWS} == FIRST_ROWS
    assert len(runs.losses(unbroken)) == 20
    assert runs.committed_steps(unbroken) == {5, 10, 15, 20}

    events = [json.loads(line) for line in (unbroken / "events.jsonl").read_text().splitlines()]
    rollbacks = [event for event in events if event["event"] == "rollback"]
    assert [(event["step"], event["to_step"], event["first_row"], event["num_rows"]) for event in rollbacks] == [
        (9, 5, 40, 32), (18, 15, 152, 24),
    ]  # fmt: skip
    assert rollbacks[1]["loss"] > 50
    assert rollbacks[1]["zscore"] > 20
    dropped = [json.loads(line) for line in (unbroken / "rolled_back.jsonl").read_text().splitlines()]
    assert {6, 7, 8, 9, 16, 17, 18} <= {record["step"] for record in dropped}
    summary = run_log.summarize(run_log.read_run(unbroken))
    assert summary.restarts == 0, "going back is none"
    assert summary.goodput is not None
    assert math.fsum(summary.goodput.seconds.values()) == pytest.approx(summary.wall_time_s)
    lost_s = sum(event["lost_s"] for event in events if event["event"] == "start")
    assert lost_s == pytest.approx(sum(record["perf/step_time_s"] for record in dropped), abs=0.01), "once"
    assert summary.goodput.seconds["lost work"] >= lost_s
    meta = json.loads((unbroken / "checkpoints" / "20" / "meta.json").read_text())
    assert meta["data"]["position"] == FIRST_ROWS[20] + 8
    assert meta["data"]["passed_over"] == json.loads((unbroken / PASSED_OVER_FILE).read_text())

    for kill in ("before", "after", "after"):
        runs.finish(start(config, f"--run_dir={broken}", kill=kill), expected_code=-signal.SIGKILL)
    runs.finish(start(config, f"--run_dir={broken}"))
    assert runs.losses(broken) == runs.losses(unbroken)
    metas = [json.loads((run / "checkpoints/20/meta.json").read_text()) for run in (unbroken, broken)]
    for meta in metas:
        for passed_over in meta["data"]["passed_over"]:
            del passed_over["time"]
    assert metas[0]["data"] == metas[1]["data"]
    assert metas[0]["recent_losses"] == metas[1]["recent_losses"]

    shutil.rmtree(broken)
    output = runs.finish(start(config, f"--run_dir={broken}", "--recovery.max_rollbacks=1"), expected_code=93)
    last = output.splitlines()[-1]
    assert last.startswith("step 18: loss 5")
    assert (
        "has already rolled back 1 of at most 1 times (recovery.max_rollbacks=1); step 15 is the newest checkpoint" in last
    )
