"""How far tokenizing is, where there is no terminal."""

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
