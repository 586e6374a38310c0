"""The files a run writes about itself: exact, in order, and whole after a kill."""

import json
import math
import struct
import threading
from typing import Any

import pytest

from llamajax.errors import ConfigError
from llamajax.watch import run_log


def test_floats_read_back_bit_for_bit():
    (number,) = struct.unpack("<f", struct.pack("<I", 0x3E2AAAAB))  # the float32 next to 1/6
    for value in (number, 0.1, 5e-324, -0.0, 1.7976931348623157e308):
        back = json.loads(run_log.encode({"step": 1, "x": value}))["x"]
        assert struct.pack("<d", back) == struct.pack("<d", value)


def test_numbers_that_are_not_finite_stay_valid_json(tmp_path):
    line = run_log.encode({"step": 1, "time": 1.0, "a": math.nan, "b": math.inf, "c": -math.inf})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(line, parse_constant=refuse) == {"step": 1, "time": 1.0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    series = run_log.read_run(tmp_path).series
    assert math.isnan(series["a"][1][0])
    assert series["b"][1][0] == math.inf
    assert series["c"][1][0] == -math.inf


def lines(*steps):
    return "".join(run_log.encode({"step": step, "time": 100.0 + step, "train/loss": 1 / step}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("text", "last_step", "kept"),
    [
        (lines(1, 2, 3, 4), 2, lines(1, 2)),
        (lines(1, 2, 3, 4), 4, lines(1, 2, 3, 4)),
        (lines(1, 2, 3, 4), 0, ""),
        (lines(1, 2, 2, 3), 2, lines(1, 2, 2)),  # an evaluation after step 2
        (lines(1, 2) + '{"step": 3, "time": 1', 9, lines(1, 2)),  # torn by a kill
        (lines(1, 2) + '{"ste', 1, lines(1)),
        (lines(1, 9) + "\0\0\0\0", 9, lines(1, 9)),
        ("", 5, ""),
    ],
)
def test_lines_that_will_be_computed_again_are_dropped(tmp_path, text, last_step, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    run_log.drop_later_steps(path, last_step)
    assert path.read_text() == kept


def test_a_damaged_line_in_the_middle_is_named_and_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(1, 2) + "garbage\n" + lines(4, 5))
    run_log.drop_later_steps(path, 4)
    assert path.read_text() == lines(1, 2) + "garbage\n" + lines(4)
    log = run_log.read_run(tmp_path)
    assert log.series["train/loss"][0].tolist() == [1, 2, 4]
    assert log.warning == f"{path}:3: not a record, skipped; restore the file or remove the line"


@pytest.mark.parametrize(
    "bad",
    [
        "[1]", "1", "null", "{", "\udcff", "[" * 10**5, '{"time": 1.0}', '{"step": 3}', '{"step": 3, "time": NaN}',
        '{"step": -3, "time": 1.0}', '{"step": 1e3, "time": 1.0}', f'{{"step": {10**20}, "time": 1.0}}',
        f'{{"step": 3, "time": {10**400}}}',
        '{"step": 3, "time": 1.0, "x": [1]}', '{"step": 3, "time": 1.0, "x": "abc"}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_lines_that_are_no_records_are_left_out(tmp_path, bad, name):
    (tmp_path / "metrics.jsonl").write_text(lines(1, 2))
    with (tmp_path / name).open("ab") as file:
        file.write(bad.encode(errors="surrogateescape") + b"\n")
    log = run_log.read_run(tmp_path)
    assert log.series["train/loss"][0].tolist() == [1, 2]
    assert (log.events, len(log.damaged)) == ([], 1)
    assert log.damaged[0].startswith(str(tmp_path / name))
    assert run_log.summarize(log).step == 2


def test_a_clock_that_goes_back_makes_no_negative_time(tmp_path):
    """The second start is an hour before the first, by its machine's clock."""
    (tmp_path / "metrics.jsonl").write_text(
        run_log.encode({"step": 1, "time": 5010.0, "perf/step_time_s": 8.0}) + "\n"
        + run_log.encode({"step": 2, "time": 1430.0, "perf/step_time_s": 9.0}) + "\n"
    )  # fmt: skip
    times = [("start", 0, 5000.0), ("stop", 1, 5020.0), ("start", 1, 1400.0)]
    events = [{"time": time, "event": name, "step": step} for name, step, time in times]
    (tmp_path / "events.jsonl").write_text("".join(run_log.encode(event) + "\n" for event in events))
    summary = run_log.summarize(run_log.read_run(tmp_path))
    assert (summary.wall_time_s, summary.steps_time_s) == (50.0, 17.0)
    (tmp_path / "events.jsonl").write_text(run_log.encode(events[0]) + "\n")
    assert run_log.summarize(run_log.read_run(tmp_path)).wall_time_s == 17.0


def test_reads_a_run_in_progress(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(lines(1, 2) + '{"step": 3, "ti')
    (tmp_path / "events.jsonl").write_text('{"time": 1.0, "event": "start", "step": 0}\n{"time": 2.0, "ev')
    log = run_log.read_run(tmp_path)
    assert log.series["train/loss"][0].tolist() == [1, 2]
    assert [event["event"] for event in log.events] == ["start"]


@pytest.mark.parametrize("make", ["nothing", "directory", "no step"])
def test_says_what_is_missing(tmp_path, make):
    run_dir = tmp_path / "run"
    if make != "nothing":
        run_dir.mkdir()
    if make == "no step":
        (run_dir / "metrics.jsonl").write_text("")
    message = {"nothing": "no such directory", "directory": r"has no metrics\.jsonl", "no step": "holds no step yet"}[make]
    with pytest.raises(ConfigError, match=message):
        run_log.read_run(run_dir)


def test_summary(tmp_path):
    metrics = [
        {
            "step": s,
            "time": 1000.0 + 2 * s,
            "train/loss": 40.0 - s,
            "perf/step_time_s": 2.0,
            "perf/mfu": 0.4 if s > 1 else 0.1,
        }
        for s in range(1, 31)
    ]
    evals = [{"step": 30, "time": 1061.0, "eval/loss": value, "eval/bits_per_byte": value / 3} for value in (9.0, 12.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(run_log.encode(record) + "\n" for record in metrics + evals))
    events = [
        {"time": 1000.0, "event": "start", "step": 0, "num_steps": 30, "num_params": 7, "tokens_per_step": 100},
        {"time": 1020.0, "event": "start", "step": 8, "num_steps": 30, "num_params": 7, "tokens_per_step": 100},
        {"time": 1100.0, "event": "stop", "step": 30, "reason": "finished"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(run_log.encode(record) + "\n" for record in events))
    log = run_log.read_run(tmp_path)
    assert [steps.tolist() for steps in log.series["eval/loss"]] == [[30], [12.0]], "the last of a repeated evaluation"
    summary = run_log.summarize(log)
    assert summary == run_log.RunSummary(
        step=30,
        num_steps=30,
        num_params=7,
        tokens=3000,
        train_loss=sum(40.0 - s for s in range(11, 31)) / 20,
        eval_loss=12.0,
        eval_bits_per_byte=4.0,
        tokens_per_sec=None,
        tokens_per_sec_per_device=None,
        mfu=0.4,
        mfu_full_attention=None,
        steps_time_s=60.0,
        wall_time_s=100.0,
        goodput=summary.goodput,
        restarts=1,
        stop_reason="finished",
    )


def test_the_training_loss_of_the_summary_leaves_out_skipped_steps(tmp_path):
    losses = [4.0, math.nan, 2.0]
    metrics = [{"step": s, "time": 1.0, "train/loss": loss} for s, loss in enumerate(losses, start=1)]
    (tmp_path / "metrics.jsonl").write_text("".join(run_log.encode(record) + "\n" for record in metrics))
    assert run_log.summarize(run_log.read_run(tmp_path)).train_loss == 3.0


class SlowFile:
    """A disk that takes a write when it is let, and counts them."""

    def __init__(self, file):
        self._file, self.is_let, self.writes = file, threading.Event(), []

    def write(self, content):
        assert self.is_let.wait(60)
        self.writes.append(bytes(content))
        return self._file.write(content)

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_slow_disk_is_told_once_and_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(run_log, "_CALM_S", 0)
    told: list[str] = []
    path = tmp_path / "metrics.jsonl"
    with run_log.Appender(path, told.append) as file:
        slow: Any = SlowFile(file._file)
        file._file = slow
        for number in range(100):
            file.append_record(b"%d\n" % number)
        slow.is_let.set()
        file.wait()
        assert path.read_text() == "".join(f"{number}\n" for number in range(100))
        assert len(slow.writes) == 2  # the one that was slow, and the rest
        file.append_record(b"100\n")
        assert slow.writes[-1] == b"100\n"
    assert told == [
        f"{path}: its disk is slow; the run continues and writes it later",
        f"{path}: its disk is no longer slow; every record is written",
    ]
