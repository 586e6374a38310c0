"""Applies the rules that judge one document alone, in this order: filters, languages, held-out texts."""

import functools
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llamajax.config.cleaning import CleaningConfig
from llamajax.data.cleaning.contamination import read_held_out
from llamajax.data.cleaning.filters import broken_rule, c4_lines, pattern_of_words
from llamajax.data.cleaning.language import language_of


@dataclass(frozen=True)
class Rules:
    """Everything that the verdict on a single document depends on; sent to the process that judges it."""

    config: CleaningConfig
    bad_words: tuple[str, ...]
    """Lines of the file `filters.bad_words`."""
    held_out: Path
    """File written by `contamination.write_runs`, if that step is on."""


class Verdict(NamedTuple):
    """Decision about a document."""

    text: str
    """The document's text, or the part of it that the filters keep."""
    reason: str = ""
    """The setting that rejects the document, such as `filters.min_words`; empty if it stays."""
    found: str = ""
    """The measured value that broke the rule."""
    language: str = ""
    """Code of the document's language, if it was detected."""


@dataclass
class Work:
    """Work of a step: number of documents it processed, and processor time in seconds."""

    documents: int = 0
    seconds: float = 0.0

    def add(self, documents: int, started: float) -> None:
        """Adds documents, and the time since `started`, a value of `time.process_time`."""
        self.documents += documents
        self.seconds += time.process_time() - started


def kept_text(text: str, config: CleaningConfig) -> str:
    """Returns the part of a document's text that the filters keep."""
    return c4_lines(text) if config.filters.c4_lines else text


def judge(text: str, rules: Rules, work: dict[str, Work]) -> Verdict:
    """Returns the verdict on a text that is not empty, and adds the work done to `work`, by step."""
    text = kept_text(text, rules.config)
    language = ""
    for step, look in (("filters", _filter), ("languages", _language), ("decontamination", _contamination)):
        if step not in work:
            continue
        started = time.process_time()
        verdict = look(text, rules)
        work[step].add(1, started)
        language = verdict.language or language
        if verdict.reason:
            return verdict
    return Verdict(text, language=language)


def _filter(text: str, rules: Rules) -> Verdict:
    if not text:
        return Verdict(text, "filters.c4_lines", "no line is prose")
    finding = broken_rule(text, rules.config.filters, _pattern(rules.bad_words))
    return Verdict(text, f"filters.{finding[0]}", finding[1]) if finding else Verdict(text)


def _language(text: str, rules: Rules) -> Verdict:
    languages = rules.config.languages
    language, probability = language_of(text)
    found = f"{language} {probability:.2f}"
    if language not in languages.keep:
        return Verdict(text, "languages.keep", found, language)
    if probability < languages.min_probability:
        return Verdict(text, "languages.min_probability", found, language)
    return Verdict(text, language=language)


def _contamination(text: str, rules: Rules) -> Verdict:
    held_out = read_held_out(rules.held_out, rules.config.decontamination)
    num_runs, num_hits, first = held_out.hits(text)
    if not held_out.condemns(num_runs, num_hits):
        return Verdict(text)
    return Verdict(text, "decontamination.paths", f"{num_hits:,} of {num_runs:,} runs of words, the first: {first}")


@functools.lru_cache(1)
def _pattern(bad_words: tuple[str, ...]) -> re.Pattern[str] | None:
    return pattern_of_words(bad_words)
