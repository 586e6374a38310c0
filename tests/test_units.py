"""Numbers with units."""

import pytest

from llamajax import units


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1536, "1.50 KiB"), (50 * 2**20, "50.0 MiB"), (141 * 2**30, "141 GiB"),
     (5000 * 2**40, "5000 TiB")],
)  # fmt: skip
def test_bytes(num_bytes, text):
    assert units.format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (999.9, "1k"), (12_345, "12.3k"), (6_738_415_616, "6.74B"), (2e12, "2T"), (15e15, "15,000T")],
)
def test_counts(count, text):
    assert units.format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (12_345, "3:25:45"), (86_400, "1 day 0:00:00"), (185_145, "2 days 3:25:45")],
)
def test_durations(seconds, text):
    assert units.format_duration(seconds) == text
