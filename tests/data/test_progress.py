"""How far tokenizing is, where there is no terminal."""

import threading
import time

import pytest

from llamajax.data import progress


def test_progress_never_ends_in_infinity(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "REPORT_EVERY_S", -1.0)
    for total in (0, 1000):
        log: list[str] = []
        shown = progress.TokenizingProgress(total, log.append)
        for bytes_read in (0, 300, 2000):
            shown.advance(1, 3, bytes_read)
        shown.finish_group(1000)
        assert len(log) == 4
        assert log[0].startswith("tokenizing 0%, ")
        assert "left" not in log[0]
        assert not [line for line in log if "inf" in line or "nan" in line or "-" in line]
        assert ("s left" in log[1]) == (total > 0)


def test_the_seconds_of_what_tells_nothing_itself(monkeypatch: pytest.MonkeyPatch):
    told, log = threading.Event(), []

    def take(line: str) -> None:
        log.append(line)
        told.set()

    monkeypatch.setattr(progress, "REPORT_EVERY_S", 0.01)
    before = progress.signs()
    with progress.seconds_told("training", take):
        while not told.is_set() or progress.signs() == before:
            time.process_time()  # computes
    assert log[0] == "training: 0 s so far"
    assert log[-1] == "training: done in 0 s"
    monkeypatch.setattr(progress, "REPORT_EVERY_S", 100.0)
    log.clear()
    with progress.seconds_told("training", take):
        pass
    assert not log
