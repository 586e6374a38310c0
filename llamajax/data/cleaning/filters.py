"""Filter rules about a single document, from C4, Gopher and mGPT; `FilterConfig` says where each rule comes from."""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Int64, UInt64

from llamajax.config.cleaning import FilterConfig
from llamajax.data.cleaning.words import repeats, run_hashes, word_hashes

C4_WORDS_PER_LINE = 5
"""Minimum number of words per line in C4."""
TOP_RUN_SHARES = {2: 0.20, 3: 0.18, 4: 0.16}
"""Gopher, table A1: maximum share of characters in the most frequent run of words, by length of the run."""
REPEATED_RUN_SHARES = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
"""Gopher, table A1: maximum share of characters in runs of words that occurred before, by length of the run."""

_C4_MARKS = (".", "!", "?", '"')
_C4_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_C4_NO_PROSE = (
    "javascript", "terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies",
)  # fmt: skip
_ELLIPSES = ("...", "…")
_BULLETS = ("•", "‣", "●", "▪", "-", "*")
_SENTENCE_END = re.compile("[.!?\u2026]+[\"'\u201d\u2019)\\]]*(?=\\s|$)|[\u3002\uff01\uff1f]")
_PARAGRAPH_END = re.compile(r"\n\s*\n")

Finding = tuple[str, str]
"""A setting's name, and the value measured in a document that breaks the rule."""


def c4_lines(text: str) -> str:
    """Returns the lines of a text that C4 keeps (section 2.2, with the details of its published program), stripped.

    C4 also drops sequences of three sentences that occurred before in any document. No step here does that.
    """
    return "\n".join(kept for line in text.splitlines() if (kept := _c4_line(line)))


def _c4_line(line: str) -> str:
    line = _C4_CITATION.sub("", line.strip())
    is_prose = (
        line.endswith(_C4_MARKS)
        and not line.endswith(_ELLIPSES)
        and len(line.split()) >= C4_WORDS_PER_LINE
        and not any(sign in line.lower() for sign in _C4_NO_PROSE)
    )
    return line if is_prose else ""


def broken_rule(text: str, config: FilterConfig, bad_words: re.Pattern[str] | None) -> Finding | None:
    """Returns the first rule that the text breaks, or None.

    Args:
        text: text of a document, filtered by `c4_lines` if that is on.
        config: the rules.
        bad_words: pattern from `pattern_of_words`.
    """
    return next(_findings(_Parts(text, config), bad_words), None)


def pattern_of_words(words: Sequence[str]) -> re.Pattern[str] | None:
    """Returns a pattern for any of the words or phrases, as whole words of a text in lower case; None if there are none."""
    phrases = sorted({" ".join(word.lower().split()) for word in words} - {""})
    if not phrases:
        return None
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, phrases))})(?!\w)")


class _Parts:
    """A text, with the parts of it that several rules use."""

    def __init__(self, text: str, config: FilterConfig) -> None:
        self.text = text
        self.config = config

    @cached_property
    def words(self) -> list[str]:
        return self.text.split()

    @cached_property
    def lines(self) -> list[str]:
        return [stripped for line in self.text.splitlines() if (stripped := line.strip())]

    @cached_property
    def paragraphs(self) -> list[str]:
        return _PARAGRAPH_END.split(self.text.strip())

    @cached_property
    def lower(self) -> str:
        return self.text.lower()

    @cached_property
    def stop_words(self) -> set[str]:
        return set(self.config.stop_words) & {word.lower() for word in self.words}

    def per_word(self, count: float) -> float:
        return count / max(len(self.words), 1)


_MEASURES: dict[str, tuple[Callable[[_Parts], float], str]] = {
    "chars": (lambda parts: len(parts.text), "{:,} characters"),
    "words": (lambda parts: len(parts.words), "{:,} words"),
    "mean_word_length": (lambda parts: parts.per_word(sum(map(len, parts.words))), "{:.1f} characters per word"),
    "symbols_per_word": (lambda parts: parts.per_word(_symbols(parts.text)), "{:.2f} symbols per word"),
    "ellipsis_lines": (lambda parts: _share(line.endswith(_ELLIPSES) for line in parts.lines), "{:.1%} of the lines"),
    "bullet_lines": (lambda parts: _share(line.startswith(_BULLETS) for line in parts.lines), "{:.1%} of the lines"),
    "alphabetic_words": (lambda parts: _share(map(_has_letter, parts.words)), "{:.1%} of the words"),
    "stop_words": (lambda parts: len(parts.stop_words), "{} of them"),
    "sentences": (lambda parts: sum(1 for _ in _SENTENCE_END.finditer(parts.text)), "{:,} sentences"),
    "repeated_lines": (lambda parts: len(_repeated(parts.lines)) / max(len(parts.lines), 1), "{:.1%} of the lines"),
    "repeated_line_chars": (lambda parts: _repeated_chars(parts.lines), "{:.1%} of the characters"),
    "repeated_paragraphs": (lambda parts: len(_repeated(parts.paragraphs)) / len(parts.paragraphs), "{:.1%} of them"),
    "repeated_paragraph_chars": (lambda parts: _repeated_chars(parts.paragraphs), "{:.1%} of the characters"),
    "compression": (lambda parts: _compression(parts.text.encode()), "{:.2f} to one"),
}
"""Measure behind each pair of settings `min_...` and `max_...`, and the text that reports its value."""


def _findings(parts: _Parts, bad_words: re.Pattern[str] | None) -> Iterator[Finding]:
    config = parts.config
    for what, (measure, words) in _MEASURES.items():
        least, most = getattr(config, f"min_{what}", None), getattr(config, f"max_{what}", None)
        if least is None and most is None:
            continue
        value = measure(parts)
        if least is not None and value < least:
            yield f"min_{what}", words.format(value)
        if most is not None and value > most:
            yield f"max_{what}", words.format(value)
    if config.lorem_ipsum and "lorem ipsum" in parts.lower:
        yield "lorem_ipsum", "lorem ipsum"
    if config.curly_braces and "{" in parts.text:
        yield "curly_braces", "{"
    if bad_words is not None and (found := bad_words.search(parts.lower)):
        yield "bad_words", found[0]
    if config.repeated_ngrams and parts.words:
        yield from _repeated_runs(parts.words)


def _share(holds: Iterable[bool]) -> float:
    """Returns the share of items that are true; 0 if there are no items."""
    held = list(holds)
    return sum(held) / max(len(held), 1)


def _has_letter(word: str) -> bool:
    return word.isalpha() or any(map(str.isalpha, word))


def _symbols(text: str) -> int:
    return max(text.count("#"), sum(map(text.count, _ELLIPSES)))


def _repeated(parts: Sequence[str]) -> list[str]:
    """Returns the parts that equal an earlier one."""
    return [part for part, count in Counter(parts).items() for _ in range(count - 1)]


def _repeated_chars(parts: Sequence[str]) -> float:
    return sum(map(len, _repeated(parts))) / max(sum(map(len, parts)), 1)


def _compression(encoded: bytes) -> float:
    return len(encoded) / len(zlib.compress(encoded))


def _repeated_runs(words: Sequence[str]) -> Iterator[Finding]:
    hashes, lengths = word_hashes(words), np.fromiter(map(len, words), np.int64, len(words))
    for length, most in TOP_RUN_SHARES.items():
        if (share := _top_run_share(hashes, lengths, length)) > most:
            yield "repeated_ngrams", f"{share:.1%} is one run of {length} words"
    for length, most in REPEATED_RUN_SHARES.items():
        if (share := _repeated_run_share(hashes, lengths, length)) > most:
            yield "repeated_ngrams", f"{share:.1%} is in runs of {length} words that occurred before"


def _top_run_share(hashes: UInt64[np.ndarray, "words"], lengths: Int64[np.ndarray, "words"], length: int) -> float:
    """Returns the share of characters in the most frequent run of `length` words, if it occurs at least twice."""
    runs, first, counts = np.unique(run_hashes(hashes, length), return_index=True, return_counts=True)
    if not len(runs) or counts.max() < 2:
        return 0.0
    start = first[counts == counts.max()].min()  # ties go to the earliest run, whatever its hash
    return float(counts.max() * lengths[start : start + length].sum() / lengths.sum())


def _repeated_run_share(hashes: UInt64[np.ndarray, "words"], lengths: Int64[np.ndarray, "words"], length: int) -> float:
    """Returns the share of characters in runs of `length` words that occurred before; overlapping runs count once."""
    starts = repeats(run_hashes(hashes, length))
    edges = np.zeros(len(hashes) + 1, np.int64)
    edges[starts] += 1
    edges[starts + length] -= 1
    return float(lengths[np.cumsum(edges[:-1]) > 0].sum() / lengths.sum())
