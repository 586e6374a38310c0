"""Finds documents that contain parts of held-out texts, by runs of words (GPT-3, arXiv 2005.14165, appendix C).

GPT-3 cut matches out of a document and ignored frequent runs. Here the whole document is left out.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from llamajax.config.cleaning import DecontaminationConfig
from llamajax.config.data import SourceConfig
from llamajax.data.cache import read_arrays, write_arrays
from llamajax.data.cleaning.texts import whole_texts
from llamajax.data.cleaning.words import run_hashes, word_hashes, words_of
from llamajax.data.documents.file_groups import HashedGroup, group_files
from llamajax.data.documents.sources import Source
from llamajax.data.documents.text_files import holds_records

_KEY = "data.cleaning.decontamination"


def held_out_groups(config: DecontaminationConfig, cache_dir: Path, log: Callable[[str], None]) -> list[HashedGroup]:
    """Returns the files with held-out texts, with a source per text field for files of records.

    Raises:
        DataError: a file is missing or cannot be read.
        DiskError: the disk fails.
    """
    found = Source(SourceConfig(kind="text", paths=config.paths), _KEY, cache_dir)
    records, texts = [], []
    for path in found.files():
        with found.format.reading(path):
            (records if holds_records(path) else texts).append(str(path))
    sources = [SourceConfig(kind="jsonl", paths=tuple(records), text_key=key) for key in config.text_keys if records]
    sources += [SourceConfig(kind="text", paths=tuple(texts))] if texts else []
    return [group for source in sources for group in group_files(Source(source, _KEY, cache_dir), cache_dir, log)]


def write_runs(path: Path, groups: Sequence[HashedGroup], length: int) -> None:
    """Writes the sorted hashes of all runs of `length` words of held-out texts, and how many texts are too short for one.

    The lock of the file's folder must be held.
    """
    runs = [np.zeros(0, np.uint64)]
    num_texts = num_short = 0
    for group in groups:
        for text in whole_texts(group.documents()):
            of_text = run_hashes(word_hashes(words_of(text.text)), length)
            runs.append(np.unique(of_text))
            num_texts += 1
            num_short += not len(of_text)
    write_arrays(path, {"runs": np.unique(np.concatenate(runs))}, {"texts": num_texts, "too_short": num_short})


class HeldOut:
    """Runs of words of the held-out texts."""

    def __init__(self, runs: UInt64[np.ndarray, "runs"], config: DecontaminationConfig) -> None:
        """Stores the sorted hashes."""
        self._runs = runs
        self._config = config

    def hits(self, text: str) -> tuple[int, int, str]:
        """Returns the number of runs in the text, how many of them are held out, and the words of the first of these."""
        words, length = words_of(text), self._config.ngram
        of_text = run_hashes(word_hashes(words), length)
        if not len(of_text) or not len(self._runs):
            return len(of_text), 0, ""
        places = np.minimum(np.searchsorted(self._runs, of_text), len(self._runs) - 1)
        found = np.flatnonzero(self._runs[places] == of_text)
        first = " ".join(words[found[0] : found[0] + length]) if len(found) else ""
        return len(of_text), len(found), first

    def condemns(self, num_runs: int, num_hits: int) -> bool:
        """Returns whether a document with these counts of runs and hits is left out."""
        return num_hits >= self._config.min_hits and num_hits >= self._config.min_share * num_runs


@functools.lru_cache(1)
def read_held_out(path: Path, config: DecontaminationConfig) -> HeldOut:
    """Returns the runs that `write_runs` wrote; cached in memory.

    Raises:
        DamagedError: the file is missing or damaged.
    """
    return HeldOut(read_arrays(path).arrays["runs"][:], config)
