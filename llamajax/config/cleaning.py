"""What is kept of the documents before they are tokenized: filters, languages, held-out texts, copies.

The papers: C4, arXiv 1910.10683, section 2.2; Gopher, arXiv 2112.11446, appendix A.1; mGPT, arXiv 2204.07580; GPT-3, arXiv
2005.14165, appendix C. Values in brackets are theirs.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated

from llamajax.config.rules import (
    Bound,
    NonNegativeInt,
    PositiveFloatOrUnset,
    PositiveInt,
    PositiveIntOrUnset,
    Section,
    Seed,
    Share,
)

Similarity = Annotated[float, Bound(lambda value: 0.5 <= value <= 1, "must be at least 0.5 and at most 1")]
Permutations = Annotated[int, Bound(lambda value: 16 <= value <= 1024, "must be at least 16 and at most 1024")]

_EXTRA = "run pip install 'llamajax[quality]', or turn it off"


@dataclass(frozen=True, kw_only=True)
class FilterConfig(Section):
    """Rules that look at one document alone; those that are unset look at nothing. Words are what white space divides."""

    c4_lines: bool = False
    """C4: of a document only the lines stay that end with . ! ? or ", but not with an ellipsis, have at least five words,
    and do not speak of javascript or of the site's policies; marks such as [1] and [edit] are cut out of them. The other
    rules see what is left. For prose in English."""
    min_chars: PositiveIntOrUnset = None
    """Characters of a document, at least."""
    max_chars: PositiveIntOrUnset = None
    """Characters of a document, at most."""
    min_words: PositiveIntOrUnset = None
    """Words of a document, at least (Gopher: 50)."""
    max_words: PositiveIntOrUnset = None
    """Words of a document, at most (Gopher: 100,000)."""
    min_mean_word_length: PositiveFloatOrUnset = None
    """Characters of a word, on average, at least (Gopher: 3)."""
    max_mean_word_length: PositiveFloatOrUnset = None
    """Characters of a word, on average, at most (Gopher: 10)."""
    max_symbols_per_word: PositiveFloatOrUnset = None
    """Signs # over words, and ellipses over words, at most, each (Gopher: 0.1)."""
    max_ellipsis_lines: Share | None = None
    """Share of the lines, blank ones left out, that end with an ellipsis, at most (Gopher: 0.3)."""
    max_bullet_lines: Share | None = None
    """Share of the lines that begin with a bullet, at most (Gopher: 0.9)."""
    min_alphabetic_words: Share | None = None
    """Share of the words that have a letter, at least (Gopher: 0.8)."""
    min_stop_words: PositiveIntOrUnset = None
    """How many of `stop_words` a document has, at least (Gopher: 2)."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Lower-case words that prose is never without; these are Gopher's, for English."""
    min_sentences: PositiveIntOrUnset = None
    """Sentences of a document, at least, counted by the marks that end them (C4: 3)."""
    lorem_ipsum: bool = False
    """C4: leave out what holds `lorem ipsum`."""
    curly_braces: bool = False
    """C4: leave out what holds {, which is code rather than prose."""
    bad_words: str | None = None
    """C4: a file with a word or phrase on each line; leave out what holds one of them, in any case."""
    max_repeated_lines: Share | None = None
    """Share of the lines that are the same as one before them, at most (Gopher: 0.3)."""
    max_repeated_line_chars: Share | None = None
    """Share of the characters that are in such lines, at most (Gopher: 0.2)."""
    max_repeated_paragraphs: Share | None = None
    """Share of the paragraphs that are the same as one before them, at most (Gopher: 0.3)."""
    max_repeated_paragraph_chars: Share | None = None
    """Share of the characters that are in such paragraphs, at most (Gopher: 0.2)."""
    repeated_ngrams: bool = False
    """Leave out what repeats itself by the bounds of Gopher's table A1: of the characters of all words, the most frequent
    run of 2, 3 or 4 words may hold 20, 18, 16%, and runs of 5 to 10 words that came before 15, 14, 13, 12, 11, 10%."""
    min_compression: PositiveFloatOrUnset = None
    """mGPT: UTF-8 bytes over those that zlib makes of them, at least; what compresses less is noise. Depends on language
    and length: of Python's help texts it is 1.4 to 3.3, of one sentence about 1.2."""
    max_compression: PositiveFloatOrUnset = None
    """mGPT: the same, at most; what compresses more repeats itself."""

    @property
    def is_on(self) -> bool:
        """Whether any rule is set."""
        return any(getattr(self, rule.name) not in (None, False) for rule in fields(self) if rule.name != "stop_words")

    def broken_rules(self) -> Iterator[str]:
        for what in ("chars", "words", "mean_word_length", "compression"):
            least, most = getattr(self, f"min_{what}"), getattr(self, f"max_{what}")
            if least is not None and most is not None and least > most:
                yield f"min_{what}: {least} is above max_{what}={most}, which leaves nothing; lower it"
        if self.min_stop_words is not None and self.min_stop_words > len(self.stop_words):
            yield f"min_stop_words: {self.min_stop_words} is above the {len(self.stop_words)} stop_words; lower it"
        if any(word != word.lower() or len(word.split()) != 1 for word in self.stop_words):
            yield "stop_words: must be lower-case words without white space; correct them"
        if self.bad_words == "":
            yield "bad_words: must not be empty; name a file, or remove it"


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(Section):
    """Which languages stay, as py3langid tells them by its own model (140 codes of ISO 639; zxx is no language)."""

    keep: tuple[str, ...] = ()
    """Codes of languages, such as [en, de]; empty: all documents stay, and nobody looks."""
    min_probability: Share = 0.5
    """How sure the model has to be, by its own words; of what is shorter than a sentence it rarely is."""

    def broken_rules(self) -> Iterator[str]:
        if len(set(self.keep)) < len(self.keep):
            yield "keep: names a language twice; name each once"


@dataclass(frozen=True, kw_only=True)
class DecontaminationConfig(Section):
    """Documents that hold parts of texts that a model is to be judged by, such as benchmarks, are left out (GPT-3,
    appendix C). Words are compared in lower case and without punctuation."""

    paths: tuple[str, ...] = ()
    """Files, directories or globs with those texts: records (.jsonl, or .json with one array, also compressed), or else one
    text per file; empty: no step."""
    text_keys: tuple[str, ...] = ("text",)
    """The fields of a line of JSONL that hold them, each of which must be there."""
    ngram: PositiveInt = 13
    """Words in a row that must be the same; held-out texts with fewer cannot be found."""
    min_hits: PositiveInt = 1
    """Such rows of words that condemn a document."""
    min_share: Share = 0.0
    """Share that they must be of all its rows of words, besides; above 0, long documents may quote."""

    def broken_rules(self) -> Iterator[str]:
        if not self.text_keys or not all(self.text_keys):
            yield "text_keys: must not be empty; name the fields with the texts"


@dataclass(frozen=True, kw_only=True)
class NearDuplicateConfig(Section):
    """Documents that are alike: candidates by MinHash and locality-sensitive hashing, each decided by its exact Jaccard
    similarity (Broder 1997; Lee et al., arXiv 2107.06499)."""

    enabled: bool = False
    """Keep only the first document of those that are alike."""
    threshold: Similarity = 0.8
    """Rows of words that two documents share over all that they have, from which on they are alike. What is like something
    that is like the first is left out as well."""
    ngram: PositiveInt = 5
    """Words in a row; a character of Chinese, Japanese, Thai and their like is a word. Shorter documents are one row."""
    num_permutations: Permutations = 128
    """Length of a signature, of four bytes each; more of them find no more pairs, but propose fewer that are none."""
    signature_seed: Seed = 0
    """Seed of the signatures."""


@dataclass(frozen=True, kw_only=True)
class CleaningConfig(Section):
    """Steps between reading and tokenizing, in the order of these sections, all off by default; `chat` sources pass
    untouched. What each of them took is told in a report, with examples, beside the documents that stay."""

    filters: FilterConfig = field(default_factory=FilterConfig)
    """By what a document is like."""
    languages: LanguageConfig = field(default_factory=LanguageConfig)
    """By its language."""
    decontamination: DecontaminationConfig = field(default_factory=DecontaminationConfig)
    """By what it holds of held-out texts."""
    exact_duplicates: bool = False
    """Keep only the first of documents that are the same, over all sources, but for white space at their ends and the way
    their lines end (mGPT, by 128 bits here)."""
    near_duplicates: NearDuplicateConfig = field(default_factory=NearDuplicateConfig)
    """Of those that are alike, over all sources, keep only the first."""
    max_examples: NonNegativeInt = 5
    """Documents in the report for each reason to leave them out, with the beginnings of their texts; and pairs of
    duplicates."""

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps that are on, in order."""
        on = {
            "filters": self.filters.is_on,
            "languages": bool(self.languages.keep),
            "decontamination": bool(self.decontamination.paths),
            "exact_duplicates": self.exact_duplicates,
            "near_duplicates": self.near_duplicates.enabled,
        }
        return tuple(name for name, is_on in on.items() if is_on)

    def missing_packages(self) -> list[str]:
        """One `key: rule; remedy` line for every package that a step needs and this Python does not have."""
        needed = {"languages": ("languages.keep", "py3langid"), "near_duplicates": ("near_duplicates.enabled", "rensa")}
        return [
            f"{key}: {package} is not installed; {_EXTRA}"
            for step, (key, package) in needed.items()
            if step in self.steps and importlib.util.find_spec(package) is None
        ]
