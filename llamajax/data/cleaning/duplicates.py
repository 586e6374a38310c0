"""Compares texts for copies and near duplicates, and finds candidates among millions.

Near duplicates (Broder 1997): the similarity of two texts is the Jaccard index of their sets of runs of words. A signature
of P minima estimates it. The P minima are cut into bands, and two texts that agree on a whole band are candidates (Leskovec,
Rajaraman, Ullman, Mining of Massive Datasets, section 3.4). The number of rows per band is chosen so that a share `RECALL`
of the pairs at the threshold agree on a band; more similar pairs do so more often. The final decision compares sets instead
of signatures, because 128 minima distinguish 0.80 from 0.75 in only five of six cases.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int64, UInt32, UInt64

from llamajax.config.cleaning import NearDuplicateConfig
from llamajax.data.cleaning.words import run_hashes, word_hashes, words_of

RECALL = 0.99
"""Minimum share of pairs with exactly the threshold's similarity that become candidates."""
NEIGHBOURS = 64
"""Number of preceding texts on the same band that a text is compared with; fewer in large crowds."""
CROWD_PAIRS = 2**18
"""Approximate number of comparisons for one value of a band."""
ESTIMATE_SIGMAS = 4.0
"""Number of standard deviations below the threshold at which a candidate is dropped without comparing its sets."""

_BATCH_RUNS = 2**22


def digest_of(text: str) -> bytes:
    """Returns 128 bits that copies share: texts equal except for white space at their ends and for line endings."""
    return hashlib.blake2b(text.replace("\r\n", "\n").strip().encode(), digest_size=16).digest()


def set_of(text: str, config: NearDuplicateConfig) -> UInt64[np.ndarray, "runs"]:
    """Returns the sorted, unique hashes of the text's runs of words; a text shorter than a run is one run."""
    hashes = word_hashes(words_of(text))
    return np.unique(run_hashes(hashes, min(config.ngram, max(len(hashes), 1))))


def jaccard(one: UInt64[np.ndarray, "m"], other: UInt64[np.ndarray, "n"]) -> float:
    """Returns the Jaccard index of two sorted sets: shared members over all members; 0 if both are empty."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)


def signatures(sets: Sequence[UInt64[np.ndarray, "_"]], config: NearDuplicateConfig) -> UInt32[np.ndarray, "texts minima"]:
    """Returns the R-MinHash of every set, from rensa; sets are complete, so the order of members does not matter."""
    from rensa import RMinHash  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]  # optional, untyped

    rows = [np.zeros((0, config.num_permutations), np.uint32)]
    start = 0
    while start < len(sets):
        end, size = start, 0
        while end < len(sets) and (end == start or size + len(sets[end]) <= _BATCH_RUNS):
            size += len(sets[end])
            end += 1
        offsets = np.concatenate([[0], np.cumsum([len(members) for members in sets[start:end]])])
        flat = np.concatenate(sets[start:end])
        made = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets, config.num_permutations, config.signature_seed)
        rows.append(np.array(made.to_rows(), np.uint32))
        start = end
    return np.concatenate(rows)


def bands_of(config: NearDuplicateConfig) -> tuple[int, int]:
    """Returns the number of bands of a signature and of minima per band: the longest bands that reach `RECALL`."""
    length = config.num_permutations
    recalls = {
        minima: 1 - (1 - config.threshold**minima) ** (length // minima)  # for independent minima
        for minima in range(1, length + 1)
    }
    minima = max((minima for minima, recall in recalls.items() if recall >= RECALL), default=1)
    return length // minima, minima


def band_keys(
    of_texts: UInt32[np.ndarray, "texts minima"], config: NearDuplicateConfig
) -> UInt64[np.ndarray, "bands texts"]:
    """Returns a hash of every band of every signature."""
    num_bands, minima = bands_of(config)
    keys = np.zeros((num_bands, len(of_texts)), np.uint64)
    for band in range(num_bands):
        for text_minima in of_texts[:, band * minima : (band + 1) * minima].T:
            keys[band] = run_hashes(keys[band] ^ text_minima.astype(np.uint64), 1)
    return keys


def crowds(keys: UInt64[np.ndarray, "texts"]) -> Iterator[Int64[np.ndarray, "_"]]:
    """Yields the indices of equal keys, in order, for each key that occurs more than once."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    starts = np.concatenate([[0], ends])
    ends = np.concatenate([ends, [len(keys)]])
    for crowd in np.flatnonzero(ends - starts > 1):
        yield order[starts[crowd] : ends[crowd]]


def alike_in_crowd(of_crowd: UInt32[np.ndarray, "members minima"], least: float) -> Int64[np.ndarray, "pairs 2"]:
    """Returns pairs of members with an estimated similarity of at least `least`.

    Each member is compared with the first one and with the `NEIGHBOURS` before it.
    """
    size = len(of_crowd)
    distances = range(1, min(size - 1, max(min(NEIGHBOURS, CROWD_PAIRS // size), 1)) + 1)
    pairs = [np.zeros((0, 2), np.int64)]
    for distance in distances:
        estimates = (of_crowd[distance:] == of_crowd[:-distance]).mean(axis=1)
        seconds = np.flatnonzero(estimates >= least) + distance
        pairs.append(np.stack([seconds - distance, seconds], axis=1))
    seconds = np.flatnonzero((of_crowd == of_crowd[0]).mean(axis=1) >= least)
    seconds = seconds[seconds > distances[-1]]
    pairs.append(np.stack([np.zeros_like(seconds), seconds], axis=1))
    return np.concatenate(pairs)


def least_estimate(config: NearDuplicateConfig) -> float:
    """Returns the estimate below which two texts almost certainly are less similar than the threshold."""
    sigma = math.sqrt(config.threshold * (1 - config.threshold) / config.num_permutations)
    return config.threshold - ESTIMATE_SIGMAS * sigma


class Clusters:
    """Clusters of texts, each represented by its first text."""

    def __init__(self, num_texts: int) -> None:
        self._first = np.arange(num_texts)

    def first(self, text: int) -> int:
        """Returns the first text of the text's cluster."""
        while self._first[text] != text:
            self._first[text] = self._first[self._first[text]]
            text = int(self._first[text])
        return text

    def join(self, one: int, other: int) -> None:
        """Merges the clusters of both texts."""
        low, high = sorted((self.first(one), self.first(other)))
        self._first[high] = low
