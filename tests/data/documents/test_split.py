"""A hash of the text decides what is held out, and copies stay together."""

import numpy as np
import pytest

from llamajax.data.documents import split
from llamajax.data.documents.split import is_held_out, plain_hash, split_hash


def test_the_split_follows_the_hash():
    hashes = np.array([split_hash(str(n)) for n in range(20_000)], np.uint64)
    for fraction in (0.0, 0.01, 0.5):
        assert abs(np.mean(is_held_out(hashes, fraction)) - fraction) < 0.01
    assert not is_held_out(0, 0.0)
    assert is_held_out(2**64 - 2**12, 1 - 2**-53)


@pytest.mark.parametrize("twin", ["a\nb", "a\nb\n", "a\r\nb\r\n", "\n\n a\nb \t\n\n", "a\nb\u2028"])
def test_copies_that_differ_in_white_space_around_them_are_together(twin):
    assert split_hash(twin) == split_hash("a\nb") != split_hash("a\n b")


def test_a_text_that_ends_with_a_line_is_hashed_as_it_is():
    """So that splits of such texts stay as they were before white space was left out."""
    assert split_hash("def f():\n    pass\n") == plain_hash("def f():\n    pass\n")


def test_long_texts_are_known_by_their_beginning(monkeypatch):
    monkeypatch.setattr(split, "HEAD_CHARS", 10)
    text = "0123456789"
    assert split_hash(text) == split_hash(text + "\n") == split_hash(text + " and what follows" * 9)
    assert split_hash(text) != split_hash("x" + text)
    lines = "a\n" * 40
    assert split_hash(lines) == split_hash(lines.replace("\n", "\r\n"))
