"""Tests of llamajax.processes.heartbeat."""

import time

from llamajax.processes.heartbeat import EVERY_S, Heartbeat, prepare, read


def test_what_is_told_is_read(tmp_path):
    heartbeat = Heartbeat(str(tmp_path), 3)
    before = read(tmp_path, 3)
    assert before is not None
    heartbeat.tell(phase="save", doing="ü" * 1000, step=10**9, deadline=12.5)
    heartbeat.tell(ended_by=2)
    beat = read(tmp_path, 3)
    assert beat is not None
    assert (beat.pid, beat.phase, beat.step, beat.deadline, beat.ended_by) == (before.pid, "save", 10**9, 12.5, 2)
    assert beat.doing == "ü" * 80
    assert (tmp_path / "3").stat().st_size == 1024
    assert (tmp_path / "3").stat().st_mode & 0o777 == 0o600


def test_room_is_taken_beforehand_and_says_nothing(tmp_path):
    prepare(tmp_path, 3)
    size = (tmp_path / "3").stat().st_size
    assert read(tmp_path, 3) is None
    Heartbeat(str(tmp_path), 3)
    assert read(tmp_path, 3) is not None
    assert (tmp_path / "3").stat().st_size == size
    assert (tmp_path / "3").stat().st_mode & 0o777 == 0o600


def test_it_goes_on_beating(tmp_path):
    Heartbeat(str(tmp_path), 0)
    first = read(tmp_path, 0)
    deadline = time.monotonic() + 60
    while (now := read(tmp_path, 0)) is None or now == first:
        assert time.monotonic() < deadline
        time.sleep(EVERY_S / 5)


def test_without_a_launcher_nothing_is_written(tmp_path):
    Heartbeat(None, 0).tell(step=1)
    Heartbeat(str(tmp_path / "gone"), 0).tell(step=1)
    assert not list(tmp_path.iterdir())


def test_what_is_no_beat_is_none(tmp_path):
    assert read(tmp_path, 0) is None
    for content in ("", "{", "[]", "{}", '{"pid": 1, "more": 2}'):
        (tmp_path / "0").write_text(content)
        assert read(tmp_path, 0) is None
