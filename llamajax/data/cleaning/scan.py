"""First pass, over one part at a time: judges every document by the rules and computes the hashes that reveal copies.

A part is a group of files. Its documents are recorded in chunks of about `CHUNK_BYTES` of text, in order, so that a killed
process loses at most one chunk and holds only one in memory.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamajax.config.cleaning import CleaningConfig
from llamajax.data import cache
from llamajax.data.cleaning.document_rules import Rules, Verdict, Work, judge
from llamajax.data.cleaning.duplicates import band_keys, digest_of, set_of, signatures
from llamajax.data.cleaning.texts import Text, whole_texts
from llamajax.data.documents.file_groups import HashedGroup

CHUNK_BYTES = 2**26
"""Number of bytes of text per chunk."""
CHUNK_DOCUMENTS = 2**16
"""Maximum number of documents per chunk."""
SNIPPET_CHARS = 600
"""Number of leading characters of a text that are kept as an example."""
PAIR_CHARS = 2000
"""Number of leading characters of a text that is shown beside another."""


@dataclass(frozen=True)
class Part:
    """A group of files, and the names of the files that are made from it."""

    entry: Path
    """Directory of these files."""
    source: int
    """Index of its source among the sources that are cleaned."""
    number: int
    """Number of the part, counted over all sources."""
    group: HashedGroup

    @property
    def name(self) -> str:
        """Prefix of the names of its files."""
        return f"source-{self.source:03d}.part-{self.number:06d}"

    def chunk_path(self, chunk: int) -> Path:
        """Returns the path of a chunk's scan."""
        return self.entry / f"{self.name}-{chunk:06d}.scan"

    def chunk_paths(self) -> list[Path]:
        """Returns the paths of existing chunks, in order, up to the first that is missing."""
        return list(itertools.takewhile(Path.exists, map(self.chunk_path, itertools.count())))


@dataclass(frozen=True)
class ScanTask:
    """One part to scan."""

    part: Part
    rules: Rules


def scan(task: ScanTask) -> dict[str, Work]:
    """Writes the missing chunks of a part; returns the work done, by step.

    A chunk has these arrays, for the documents that stay so far:

    - positions: int64 [documents], index among all texts of the part;
    - sizes: int64 [documents], UTF-8 bytes;
    - digests: uint64 [2 * documents], the halves of `digest_of` side by side, for exact duplicates;
    - signatures: uint32 [documents * num_permutations], one document after the other, for near duplicates;
    - bands: uint64 [bands * documents], one band after the other, for near duplicates.

    Raises:
        DataError: a file cannot be read or has changed since it was hashed.
        DiskError: the disk fails.
    """
    work = {step: Work() for step in task.rules.config.steps}
    texts = whole_texts(task.part.group.documents())
    num_texts = num_passed = 0  # texts in the chunks so far; the iterator's share of them
    for number in itertools.count():
        path = task.part.chunk_path(number)
        if path.exists():
            info = cache.read_arrays(path).info
        else:
            next(itertools.islice(texts, num_texts - num_passed, num_texts - num_passed), None)
            arrays, info = _next_chunk(texts, num_texts, task.rules, work)
            task.part.group.check_unchanged()
            cache.write_arrays(path, arrays, info)
            num_passed = num_texts + info["read"]
        num_texts += info["read"]
        if info["last"]:
            break
    return work


def _next_chunk(
    texts: Iterator[Text], first: int, rules: Rules, work: dict[str, Work]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    chunk = _Chunk(rules.config)
    for text in texts:
        chunk.take(first, text, judge(text.text, rules, work) if text.text else Verdict(""))
        if chunk.is_full:
            break
    else:
        chunk.info["last"] = True
    return chunk.arrays(work), chunk.info


class _Chunk:
    """Judged documents of a chunk, with counts."""

    def __init__(self, config: CleaningConfig) -> None:
        self._config = config
        self._kept: list[str] = []
        self._positions: list[int] = []
        self._sizes: list[int] = []
        self._steps = [step for step in config.steps if step in ("filters", "languages", "decontamination")]
        self.info: dict[str, Any] = {
            "read": 0, "last": False, "empty": 0, "bad": 0, "long": 0, "first_bad": "", "before": [0, 0], "cut": [0, 0],
            "after": {step: [0, 0] for step in self._steps}, "removed": {}, "languages": {}, "examples": {},
            "cut_examples": [],
        }  # fmt: skip

    @property
    def is_full(self) -> bool:
        return self.info["before"][1] >= CHUNK_BYTES or self.info["read"] >= CHUNK_DOCUMENTS

    def take(self, first: int, text: Text, verdict: Verdict) -> None:
        """Adds the next text; `first` is the position of the chunk's first text."""
        info, position = self.info, first + self.info["read"]
        info["read"] += 1
        info["long"] += text.ends_cut
        if not text.text:
            info["bad" if text.error else "empty"] += 1
            info["first_bad"] = info["first_bad"] or text.error
            return
        size, size_left = len(text.text.encode()), len(verdict.text.encode())
        _count(info["before"], size)
        if verdict.language:
            _count(info["languages"].setdefault(verdict.language, [0, 0]), size_left)
        if verdict.reason:
            _count(info["removed"].setdefault(verdict.reason, [0, 0]), size)
            examples = info["examples"].setdefault(verdict.reason, [])
            if len(examples) < self._config.max_examples:
                examples.append([position, text.text[:SNIPPET_CHARS], verdict.found[:SNIPPET_CHARS]])
        elif size_left < size:
            _count(info["cut"], size - size_left)
            if len(info["cut_examples"]) < self._config.max_examples:
                info["cut_examples"].append([position, text.text[:PAIR_CHARS], verdict.text[:PAIR_CHARS]])
        condemned_by = verdict.reason.partition(".")[0]
        for step in itertools.takewhile(lambda step: step != condemned_by, self._steps):
            _count(info["after"][step], size_left)
        if not verdict.reason:
            self._kept.append(verdict.text)
            self._positions.append(position)
            self._sizes.append(size_left)

    def arrays(self, work: dict[str, Work]) -> dict[str, np.ndarray]:
        arrays = {"positions": np.array(self._positions, np.int64), "sizes": np.array(self._sizes, np.int64)}
        config, kept = self._config, self._kept
        if "exact_duplicates" in work:
            arrays["digests"] = _timed(work["exact_duplicates"], kept, lambda: _digests(kept))
        if "near_duplicates" in work:
            arrays |= _timed(work["near_duplicates"], kept, lambda: _of_near_duplicates(kept, config))
        return arrays


def _count(counts: list[int], size: int) -> None:
    counts[0] += 1
    counts[1] += size


def _timed(work: Work, texts: Sequence[str], make: Callable[[], Any]) -> Any:
    started = time.process_time()
    made = make()
    work.add(len(texts), started)
    return made


def _digests(texts: Sequence[str]) -> np.ndarray:
    return np.frombuffer(b"".join(map(digest_of, texts)), "<u8")


def _of_near_duplicates(texts: Sequence[str], config: CleaningConfig) -> dict[str, np.ndarray]:
    near = config.near_duplicates
    of_texts = signatures([set_of(text, near) for text in texts], near)
    return {"signatures": of_texts.ravel(), "bands": band_keys(of_texts, near).ravel()}
