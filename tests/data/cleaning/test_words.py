"""Words and the hashes of their runs: alike in every process, different where the words are."""

import os
import subprocess
import sys
from pydoc_data.topics import topics

import numpy as np

from llamajax.data.cleaning.words import repeats, run_hashes, word_hashes, words_of


def hashes_of(text, length):
    return run_hashes(word_hashes(words_of(text)), length).tolist()


def test_words_are_lower_case_without_punctuation():
    assert words_of("The Ünïcode—word_two: don't (stop)!") == ["the", "ünïcode", "word", "two", "don", "t", "stop"]
    assert words_of("  \n.,;") == []


def test_characters_are_words_where_nothing_divides_them():
    assert words_of("中文abc 日本") == ["中", "文", "abc", "日", "本"]
    assert words_of("漢字かな、カナ") == ["漢", "字", "か", "な", "カ", "ナ"]


def test_hashes_are_the_same_in_every_process():
    told_of = "One fine day, in the middle of the night"
    program = f"from tests.data.cleaning.test_words import hashes_of; print(hashes_of({told_of!r}, 5))"
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert told[0].strip() == str(hashes_of("one FINE day in the -- middle of the night", 5))
    assert hashes_of("one fine day in the middle", 5)[0] == 13_445_606_492_797_328_463


def test_runs_have_one_hash_exactly_where_their_words_are_the_same():
    words = words_of(" ".join(topics.values()))[:50_000]
    for length in (1, 3, 13):
        hashes = run_hashes(word_hashes(words), length).tolist()
        runs = [tuple(words[at : at + length]) for at in range(len(words) - length + 1)]
        assert len(hashes) == len(runs)
        assert len(set(zip(hashes, runs, strict=True))) == len(set(runs)) == len(set(hashes))


def test_a_text_with_fewer_words_has_no_run():
    assert len(run_hashes(word_hashes(["one", "two"]), 3)) == 0
    assert len(run_hashes(word_hashes([]), 1)) == 0


def test_repeats_are_what_came_before():
    assert repeats(np.array([3, 1, 3, 2, 1, 3], np.uint64)).tolist() == [2, 4, 5]
    assert repeats(np.zeros(0, np.uint64)).tolist() == []
