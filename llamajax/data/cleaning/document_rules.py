"""What the rules that look at one document alone say of it: filters, languages, held-out texts, in this order."""

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
    """All that decides about a document alone; goes to whoever judges it."""

    config: CleaningConfig
    bad_words: tuple[str, ...]
    """What the file `filters.bad_words` holds."""
    held_out: Path
    """The file of `contamination.write_runs`, if that step is on."""


class Verdict(NamedTuple):
    """What becomes of a document."""

    text: str
    """Of it, or what filters leave of it."""
    reason: str = ""
    """The setting that condemns it, such as `filters.min_words`; empty if it stays."""
    found: str = ""
    """What it was found to be."""
    language: str = ""
    """Code of its language, if somebody looked."""


@dataclass
class Work:
    """What a step has done: documents that came to it, and the processor time they took, seconds."""

    documents: int = 0
    seconds: float = 0.0

    def add(self, documents: int, started: float) -> None:
        """Counts documents, and the time since `started`, a value of `time.process_time`."""
        self.documents += documents
        self.seconds += time.process_time() - started


def kept_text(text: str, config: CleaningConfig) -> str:
    """What filters leave of the text of a document that stays."""
    return c4_lines(text) if config.filters.c4_lines else text


def judge(text: str, rules: Rules, work: dict[str, Work]) -> Verdict:
    """The verdict on a text that is not empty; what was done for it is added to `work`, by step."""
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
