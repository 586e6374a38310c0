"""Cleaning of documents before they are tokenized: filters, languages, held-out texts, duplicates.

The papers: C4, arXiv 1910.10683, section 2.2; Gopher, arXiv 2112.11446, appendix A.1; mGPT, arXiv 2204.07580; GPT-3, arXiv
2005.14165, appendix C. Values in parentheses are theirs.
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
    """Rules that judge each document alone; a rule that is unset is off. Words are separated by white space."""

    c4_lines: bool = False
    """C4: keep only the lines of a document that end with . ! ? or \", but not with an ellipsis, have at least five words,
    and do not mention javascript or the site's policies; cut marks such as [1] and [edit] out of them. The other rules see
    what is left. For prose in English."""
    min_chars: PositiveIntOrUnset = None
    """Minimum number of characters."""
    max_chars: PositiveIntOrUnset = None
    """Maximum number of characters."""
    min_words: PositiveIntOrUnset = None
    """Minimum number of words (Gopher: 50)."""
    max_words: PositiveIntOrUnset = None
    """Maximum number of words (Gopher: 100,000)."""
    min_mean_word_length: PositiveFloatOrUnset = None
    """Minimum mean number of characters per word (Gopher: 3)."""
    max_mean_word_length: PositiveFloatOrUnset = None
    """Maximum mean number of characters per word (Gopher: 10)."""
    max_symbols_per_word: PositiveFloatOrUnset = None
    """Maximum number of # signs per word, and of ellipses per word (Gopher: 0.1)."""
    max_ellipsis_lines: Share | None = None
    """Maximum share of the lines, not counting blank ones, that end with an ellipsis (Gopher: 0.3)."""
    max_bullet_lines: Share | None = None
    """Maximum share of the lines that begin with a bullet (Gopher: 0.9)."""
    min_alphabetic_words: Share | None = None
    """Minimum share of the words that contain a letter (Gopher: 0.8)."""
    min_stop_words: PositiveIntOrUnset = None
    """Minimum number of the `stop_words` that a document contains (Gopher: 2)."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Lower-case words that all prose contains; the default is Gopher's list for English."""
    min_sentences: PositiveIntOrUnset = None
    """Minimum number of sentences, counted by the marks that end them (C4: 3)."""
    lorem_ipsum: bool = False
    """C4: remove documents that contain `lorem ipsum`."""
    curly_braces: bool = False
    """C4: remove documents that contain {, which are code rather than prose."""
    bad_words: str | None = None
    """C4: file with one word or phrase per line; documents that contain one of them, in any case, are removed."""
    max_repeated_lines: Share | None = None
    """Maximum share of the lines that repeat an earlier line (Gopher: 0.3)."""
    max_repeated_line_chars: Share | None = None
    """Maximum share of the characters in such lines (Gopher: 0.2)."""
    max_repeated_paragraphs: Share | None = None
    """Maximum share of the paragraphs that repeat an earlier paragraph (Gopher: 0.3)."""
    max_repeated_paragraph_chars: Share | None = None
    """Maximum share of the characters in such paragraphs (Gopher: 0.2)."""
    repeated_ngrams: bool = False
    """Remove documents that repeat themselves by the bounds of Gopher's table A1: the most frequent run of 2, 3 or 4 words
    may hold 20, 18, 16% of the characters of all words, and runs of 5 to 10 words that came before 15, 14, 13, 12, 11,
    10%."""
    min_compression: PositiveFloatOrUnset = None
    """mGPT: minimum ratio of a text's UTF-8 bytes to its size after zlib; a text that compresses less is noise. The ratio
    depends on language and length: it is 1.4 to 3.3 for Python's help texts, and about 1.2 for one sentence."""
    max_compression: PositiveFloatOrUnset = None
    """mGPT: maximum of the same ratio; a text that compresses more repeats itself."""

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
    """Languages to keep, as the built-in model of py3langid detects them (140 codes of ISO 639; zxx means no language)."""

    keep: tuple[str, ...] = ()
    """Codes of languages, such as [en, de]; empty: keep all documents without detection."""
    min_probability: Share = 0.5
    """Minimum probability that the model assigns to the language; it is rarely high for texts shorter than a sentence."""

    def broken_rules(self) -> Iterator[str]:
        if len(set(self.keep)) < len(self.keep):
            yield "keep: names a language twice; name each once"


@dataclass(frozen=True, kw_only=True)
class DecontaminationConfig(Section):
    """Removal of documents that contain parts of the texts that will judge the model, such as benchmarks (GPT-3, appendix
    C). Words are compared in lower case and without punctuation."""

    paths: tuple[str, ...] = ()
    """Files, directories or globs with those texts: records (.jsonl, or .json with one array, also compressed), or else one
    text per file; empty: off."""
    text_keys: tuple[str, ...] = ("text",)
    """Fields of a JSONL line that contain the texts; each field must exist."""
    ngram: PositiveInt = 13
    """Number of words in a row that must match; held-out texts with fewer words cannot be found."""
    min_hits: PositiveInt = 1
    """Number of matching n-grams from which a document is removed."""
    min_share: Share = 0.0
    """Share of all n-grams of the document that must match as well; above 0, long documents may quote."""

    def broken_rules(self) -> Iterator[str]:
        if not self.text_keys or not all(self.text_keys):
            yield "text_keys: must not be empty; name the fields with the texts"


@dataclass(frozen=True, kw_only=True)
class NearDuplicateConfig(Section):
    """Removal of near-duplicates: MinHash and locality-sensitive hashing find candidates, and the exact Jaccard similarity
    decides each (Broder 1997; Lee et al., arXiv 2107.06499)."""

    enabled: bool = False
    """Keep only the first of several similar documents."""
    threshold: Similarity = 0.8
    """Similarity from which documents are duplicates: n-grams that both contain, divided by n-grams that either contains. A
    document similar to one that is similar to the first is removed too."""
    ngram: PositiveInt = 5
    """Number of words in an n-gram; in Chinese, Japanese, Thai and similar scripts a character is a word. Shorter documents
    are one n-gram."""
    num_permutations: Permutations = 128
    """Length of a signature, with four bytes per entry. Longer signatures find no more pairs, but fewer false candidates."""
    signature_seed: Seed = 0
    """Seed of the signatures."""


@dataclass(frozen=True, kw_only=True)
class CleaningConfig(Section):
    """Cleaning of documents before they are tokenized, in the order of these sections, all off by default. `chat` sources
    are not cleaned. A report beside the remaining documents counts what each step removed, with examples."""

    filters: FilterConfig = field(default_factory=FilterConfig)
    """Rules that judge each document alone."""
    languages: LanguageConfig = field(default_factory=LanguageConfig)
    """Languages to keep."""
    decontamination: DecontaminationConfig = field(default_factory=DecontaminationConfig)
    """Removal of held-out texts."""
    exact_duplicates: bool = False
    """Keep only the first of identical documents, over all sources. White space at the ends and the kind of line ends do not
    count (mGPT, here by 128 bits)."""
    near_duplicates: NearDuplicateConfig = field(default_factory=NearDuplicateConfig)
    """Removal of near-duplicates, over all sources."""
    max_examples: NonNegativeInt = 5
    """Documents that the report shows for each reason of removal, with the beginnings of their texts, and pairs of
    duplicates that it shows."""

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
        """Returns one `key: rule; remedy` line for every package that a step needs and this Python does not have."""
        needed = {"languages": ("languages.keep", "py3langid"), "near_duplicates": ("near_duplicates.enabled", "rensa")}
        return [
            f"{key}: {package} is not installed; {_EXTRA}"
            for step, (key, package) in needed.items()
            if step in self.steps and importlib.util.find_spec(package) is None
        ]
