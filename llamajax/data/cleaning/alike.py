"""Second pass, over all documents that the first pass kept: finds exact copies and near duplicates.

Candidates are found band by band from sorted hashes, which takes 16 bytes of memory per document and band. The final
decision compares the sets of runs, which are stored only for candidates.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt64

from llamajax.config.cleaning import CleaningConfig
from llamajax.data import cache, progress
from llamajax.data.cleaning.document_rules import Work, kept_text
from llamajax.data.cleaning.duplicates import Clusters, alike_in_crowd, crowds, jaccard, least_estimate, set_of
from llamajax.data.cleaning.scan import Part
from llamajax.data.cleaning.survivors import CANDIDATES_FILE, DECISIONS_FILE, Survivors
from llamajax.data.cleaning.texts import whole_texts

STAYS, EXACT, NEAR = range(3)
"""Values in the file of decisions, one per document."""
CROWD_DOCUMENTS = 2**16
"""Documents that agree on a band are compared in groups of this size, each with the first document of all."""
HISTOGRAM_BINS = 20
"""Number of bins in the histogram of pair similarities, from 0 to 1."""


@dataclass(frozen=True)
class BandTask:
    """One band to search for candidates."""

    entry: Path
    band: int
    config: CleaningConfig

    @property
    def path(self) -> Path:
        """Path of the band's pairs."""
        return self.entry / f"band-{self.band:03d}.pairs"


@dataclass(frozen=True)
class SetsTask:
    """One part with candidates to store sets for."""

    part: Part
    config: CleaningConfig


def find_candidates(task: BandTask) -> Work:
    """Writes the pairs of documents that agree on a band and have similar enough signatures, unless already done.

    The arrays are firsts and seconds, int64 [pairs]. Returns the work done; its document count is 0.
    """
    work, started = Work(), time.process_time()
    if task.path.exists():
        return work
    survivors, near = Survivors(task.entry), task.config.near_duplicates
    originals = np.flatnonzero(survivors.firsts == np.arange(len(survivors)))
    pairs = [np.zeros((0, 2), np.int64)]
    for crowd in crowds(survivors.keys(task.band)[originals]):
        for start in range(0, len(crowd), CROWD_DOCUMENTS):
            members = originals[np.unique(np.append(crowd[start : start + CROWD_DOCUMENTS], crowd[0]))]
            signatures = survivors.signatures(members.tolist(), near.num_permutations)
            pairs.append(members[alike_in_crowd(signatures, least_estimate(near))])
        progress.gets_on()
    firsts, seconds = np.concatenate(pairs).T
    cache.write_arrays(task.path, {"firsts": firsts, "seconds": seconds}, {})
    work.add(0, started)
    return work


def gather_candidates(entry: Path, tasks: Sequence[BandTask]) -> None:
    """Writes the candidates of all bands, each pair once, in order, in the format of `find_candidates`."""
    files = [cache.read_arrays(task.path).arrays for task in tasks]
    pairs = np.concatenate([np.stack([file["firsts"][:], file["seconds"][:]], axis=1) for file in files])
    firsts, seconds = np.unique(pairs, axis=0).T
    cache.write_arrays(entry / CANDIDATES_FILE, {"firsts": firsts, "seconds": seconds}, {})


def write_sets(task: SetsTask) -> Work:
    """Writes the sets of a part's candidates, one file per chunk that has any, unless already done.

    Returns the work done; its document count is 0.

    A file's arrays: documents, int64 [n], numbers of the documents; offsets, int64 [n + 1]; runs, uint64 [offsets[n]].

    Raises:
        DataError: a file cannot be read or has changed since it was hashed.
        DiskError: the disk fails.
    """
    part, work, started = task.part, Work(), time.process_time()
    candidates = _candidates(part.entry)
    texts = enumerate(whole_texts(part.group.documents()))
    for start, end, positions in Survivors(part.entry).positions_of(part):
        documents = candidates[(start <= candidates) & (candidates < end)]
        path = _sets_path(part.entry, start)
        if not len(documents) or path.exists():
            continue
        wanted = set(positions[documents - start].tolist())
        found = ((position, text) for position, text in texts if position in wanted)
        sets = [
            set_of(kept_text(text.text, task.config), task.config.near_duplicates)
            for _, text in itertools.islice(found, len(wanted))
        ]
        part.group.check_unchanged()
        offsets = np.cumsum([0, *map(len, sets)])
        cache.write_arrays(path, {"documents": documents, "offsets": offsets, "runs": np.concatenate(sets)}, {})
    work.add(0, started)
    return work


def decide(entry: Path, parts: Sequence[Part], config: CleaningConfig) -> None:
    """Writes the decision about every document (reasons, uint8 [documents]), with counts and example pairs.

    Documents connected by a chain of pairs at or above the threshold form a cluster; its first document stays.
    """
    survivors = Survivors(entry)
    firsts = survivors.firsts
    is_copy = firsts != np.arange(len(firsts))
    reasons = np.where(is_copy, EXACT, STAYS).astype(np.uint8)
    copies = np.flatnonzero(is_copy)[: config.max_examples]
    info: dict[str, Any] = {"copies": [[int(firsts[copy]), int(copy), 1.0] for copy in copies]}
    if config.near_duplicates.enabled:
        sets = _Sets(entry, survivors, parts)
        clusters, alike, histogram = Clusters(len(firsts)), [], [0] * HISTOGRAM_BINS
        file = cache.read_arrays(entry / CANDIDATES_FILE).arrays
        for one, other in zip(map(int, file["firsts"][:]), map(int, file["seconds"][:]), strict=True):
            progress.gets_on()
            if clusters.first(one) == clusters.first(other):
                continue
            similarity = jaccard(sets[one], sets[other])
            histogram[min(int(similarity * HISTOGRAM_BINS), HISTOGRAM_BINS - 1)] += 1
            if similarity >= config.near_duplicates.threshold:
                clusters.join(one, other)
                alike.append([one, other, similarity])
        for document in {document for one, other, _ in alike for document in (one, other)}:
            if clusters.first(document) != document:
                reasons[document] = NEAR
        to_show = [pair for pair in alike if clusters.first(pair[1]) == pair[0]]
        info |= {
            "candidates": len(file["firsts"]), "histogram": histogram, "alike": to_show[: config.max_examples],
            "clusters": len({clusters.first(one) for one, _, _ in alike}),
        }  # fmt: skip
    cache.write_arrays(entry / DECISIONS_FILE, {"reasons": reasons}, info)


class _Sets:
    """Sets of all candidates by document number."""

    def __init__(self, entry: Path, survivors: Survivors, parts: Sequence[Part]) -> None:
        self._entry = entry
        self._starts = np.array([start for part in parts for start, end, _ in survivors.positions_of(part) if start < end])
        self._open: dict[int, tuple[np.ndarray, dict[str, cache.CheckedArray]]] = {}

    def __getitem__(self, document: int) -> UInt64[np.ndarray, "runs"]:
        start = int(self._starts[np.searchsorted(self._starts, document, side="right") - 1])
        if start not in self._open:
            if len(self._open) >= 2**12:
                self._open.clear()
            arrays = cache.read_arrays(_sets_path(self._entry, start)).arrays
            self._open[start] = arrays["documents"][:], arrays
        documents, arrays = self._open[start]
        row = int(np.searchsorted(documents, document))
        begin, end = arrays["offsets"][row : row + 2].tolist()
        return arrays["runs"][begin:end]


def _candidates(entry: Path) -> Int64[np.ndarray, "documents"]:
    arrays = cache.read_arrays(entry / CANDIDATES_FILE).arrays
    return np.unique(np.concatenate([arrays["firsts"][:], arrays["seconds"][:]]))


def _sets_path(entry: Path, start: int) -> Path:
    return entry / f"from-{start:012d}.sets"
