"""Stretches of a file have each of its lines once, and know where it is."""

import gzip
import itertools
import random

import pytest

from llamajax.data.documents import lines
from llamajax.data.documents.lines import Span, lines_before, lines_extent, read_lines


def spans(size, step):
    return [Span(at, min(at + step, size)) for at in range(0, size, step)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("last_end", [b"", b"\n"])
def test_stretches_have_every_line_once(tmp_path, seed, last_end, monkeypatch):
    rng, path = random.Random(seed), tmp_path / "a.jsonl"
    monkeypatch.setattr(lines, "READ_BYTES", rng.choice([1, 7, 2**20]))
    ends = [rng.choice([b"\n", b"\r\n", b"\n\n", b" \n"]) for _ in range(60)]
    path.write_bytes(b"".join(b"x" * rng.randrange(30) + end for end in ends).rstrip() + last_end)
    whole, size = path.read_bytes(), path.stat().st_size
    expected = [(n, line) for n, line in enumerate(whole.splitlines(keepends=True), 1) if not line.isspace()]
    assert [(line.place.number, line.text) for line in read_lines(path, 100)] == expected
    for step in (1, 2, 13, 100, size - 1, size):
        found = [(str(line.place), line.text) for span in spans(size, step) for line in read_lines(path, 100, span)]
        assert found == [(f"{path}:{number}", line) for number, line in expected]
        extents = [lines_extent(path, span) for span in spans(size, step)]
        assert [start for start, _ in extents] == [0, *(end for _, end in extents)][:-1]
        assert extents[-1][1] == size


def test_the_rest_of_a_long_line_is_passed_over(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"a" * 50 + b"\n" + b"b" * 5 + b"\n" + b"c" * 80)
    for step in (9, 51, 1000):
        found = [line for span in spans(path.stat().st_size, step) for line in read_lines(path, 10, span)]
        assert [line.text for line in found] == [b"a" * 11, b"bbbbb\n", b"c" * 11]
        assert [str(line.place) for line in found] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_progress_reaches_the_end_of_a_compressed_file(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"abc\n" * 1000))
    found = list(read_lines(path, 10))
    assert [line.text for line in found] == [b"abc\n"] * 1000
    assert found[-1].bytes_read == path.stat().st_size
    assert all(a.bytes_read <= b.bytes_read for a, b in itertools.pairwise(found))


def test_lines_are_counted_on(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"ab\n" * 100)
    monkeypatch.setattr(lines, "READ_BYTES", 8)
    for end in (30, 60, 299, 3, 0, 300):
        assert lines_before(path, end) == end // 3
