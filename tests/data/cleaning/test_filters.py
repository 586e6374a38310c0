"""Every rule on both sides of its bound, and the rules about repetition beside their definition in plain Python."""

import zlib
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import pytest

from llamajax.config.cleaning import FilterConfig
from llamajax.data.cleaning.filters import (
    REPEATED_RUN_SHARES,
    TOP_RUN_SHARES,
    broken_rule,
    c4_lines,
    pattern_of_words,
)

TEN_LINES = [f"line {number}" for number in "abcdefghij"]
NOISE = "q7Zx9Kp2Vb4Wn6Rt8Ym1Lc3Hd5Jf0Gs" * 2


BOUNDS = [
    ("min_chars", 5, "häuse", "haus", "4 characters"),
    ("max_chars", 5, "häuse", "häuser", "6 characters"),
    ("min_words", 3, "a b\nc", "a b", "2 words"),
    ("max_words", 3, "a b\nc", "a b\tc d", "4 words"),
    ("min_mean_word_length", 3.0, "ab abcd", "ab abc", "2.5 characters per word"),
    ("max_mean_word_length", 3.0, "ab abcd", "abc abcd", "3.5 characters per word"),
    ("max_symbols_per_word", 0.5, "# a # b", "# a ##", "1.00 symbols per word"),
    ("max_symbols_per_word", 0.5, "a... b… c d", "a... b… c", "0.67 symbols per word"),
    ("max_ellipsis_lines", 0.5, "a...\n\nb", "a...\n\nb… \nc", "66.7% of the lines"),
    ("max_bullet_lines", 0.5, "- a\n\nb", "- a\n  • b\nc", "66.7% of the lines"),
    ("min_alphabetic_words", 0.5, "1 2 äx 7b", "1 2 äx", "33.3% of the words"),
    ("min_stop_words", 2, "The cat and me", "the the cat", "1 of them"),
    ("min_sentences", 2, 'He said "no." She left!', "Version 1.2 is out. It", "1 sentences"),
    ("min_sentences", 2, "你好。再见。", "你好。再见", "1 sentences"),
    ("lorem_ipsum", True, "lorem et ipsum", "Lorem Ipsum dolor", "lorem ipsum"),
    ("curly_braces", True, "a (b) [c]", "f() {", "{"),
    ("max_repeated_lines", 0.1, "\n".join([*TEN_LINES[:9], "line a"]), "\n".join([*TEN_LINES[:8], "x", "x", "x"]),
     "18.2% of the lines"),
    ("max_repeated_line_chars", 0.2, "ab\nab\nabcdef", "ab\nab\nabcde", "22.2% of the characters"),
    ("max_repeated_paragraphs", 0.5, "a\nb\n\na\nb", "a\n\na\n \na", "66.7% of them"),
    ("max_repeated_paragraph_chars", 0.25, "ab\n\nab\n\nabcd", "ab\n\nab\n\nabc", "28.6% of the characters"),
    ("min_compression", 1.0, "word " * 40, NOISE[:32], None),
    ("max_compression", 3.0, topics["if"], "word " * 400, None),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "bound", "passes", "breaks", "found"), BOUNDS)
def test_both_sides_of_every_bound(setting: str, bound: Any, passes: str, breaks: str, found: str | None):
    config = FilterConfig(**{setting: bound})
    assert broken_rule(passes, config, None) is None
    finding = broken_rule(breaks, config, None)
    assert finding is not None
    assert finding[0] == setting
    assert found is None or finding[1] == found


def test_every_rule_of_the_section_is_tested():
    elsewhere = {"c4_lines", "stop_words", "bad_words", "repeated_ngrams"}
    assert {case[0] for case in BOUNDS} | elsewhere == vars(FilterConfig()).keys()


def test_without_rules_everything_stays():
    for text in ("", "\n", "{ lorem ipsum ... #", "a" * 10_000):
        assert broken_rule(text, FilterConfig(), None) is None
    assert not FilterConfig().is_on
    assert not FilterConfig(stop_words=("der", "die")).is_on


def test_compression_is_that_of_zlib():
    text = topics["with"]
    ratio = len(text.encode()) / len(zlib.compress(text.encode()))
    assert broken_rule(text, FilterConfig(min_compression=ratio, max_compression=ratio), None) is None
    assert broken_rule(text, FilterConfig(max_compression=ratio * 0.999), None) == ("max_compression", f"{ratio:.2f} to one")


def test_bad_words_are_whole_words_and_phrases():
    pattern = pattern_of_words(["Darn", " blast  it", "", "c++"])
    assert pattern is not None

    def found(text: str) -> str | None:
        finding = broken_rule(text, FilterConfig(), pattern)
        return finding and finding[1]

    assert found("Oh DARN!") == "darn"
    assert found("blast it, he said") == "blast it"
    assert found("no c++ here") == "c++"
    assert found("darning socks, blast\nit, undarn") is None
    assert pattern_of_words(["", "  "]) is None


def test_c4_keeps_lines_that_are_prose():
    kept = [
        "This line of prose is kept.",
        'So is one that ends "with a quotation."',
        "Is a question of five words?",
    ]
    dropped = [
        "",
        "Home | About | Contact us today",
        "Only four words here.",
        "This line trails off somewhere...",
        "Please enable JavaScript to read this page.",
        "By reading on you accept our privacy policy.",
    ]
    mixed = [line for pair in zip(kept, dropped[:3], strict=True) for line in pair] + dropped[3:]
    assert c4_lines("\r\n".join(f"  {line} " for line in mixed)) == "\n".join(kept)
    assert c4_lines("The moon is made of rock.[12] It is[citation needed] old.[edit]") == (
        "The moon is made of rock. It is old."
    )
    assert c4_lines("\n".join(dropped)) == ""


def shares_in_plain_python(text: str) -> dict[int, float]:
    """Returns, by length of a run, the share of the characters of all words that Gopher's table A1 bounds."""
    words = text.split()
    chars = sum(map(len, words))
    shares = {}
    for length in [*TOP_RUN_SHARES, *REPEATED_RUN_SHARES]:
        runs = [tuple(words[at : at + length]) for at in range(len(words) - length + 1)]
        if length in TOP_RUN_SHARES:
            counts = Counter(runs)  # in order of their first place, and so is most_common among equals
            run, count = counts.most_common(1)[0] if counts else ((), 0)
            shares[length] = sum(map(len, run)) * count / chars if count > 1 else 0.0
        else:
            seen, covered = set(), set()
            for at, run in enumerate(runs):
                covered |= set(range(at, at + length)) if run in seen else set()
                seen.add(run)
            shares[length] = sum(len(words[at]) for at in covered) / chars
    return shares


def test_repetition_is_that_of_the_table():
    config, bounds = FilterConfig(repeated_ngrams=True), TOP_RUN_SHARES | REPEATED_RUN_SHARES
    broken = Counter()
    texts = [text[at : at + 3000] for text in topics.values() for at in range(0, len(text), 3000)]
    for text in [*texts, "one two", "word"]:
        shares = shares_in_plain_python(text)
        expected = next((length for length, most in bounds.items() if shares[length] > most), None)
        finding = broken_rule(text, config, None)
        broken[expected] += 1
        if expected is None:
            assert finding is None
        else:
            assert finding is not None
            assert finding[1].startswith(f"{shares[expected]:.1%} is ")
            assert f" of {expected} words" in finding[1]
    assert broken[None] > 50
    assert len(broken) > 3, "texts that break several rows of the table"
