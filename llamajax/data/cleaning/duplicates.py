"""Copies of texts and texts that are alike: what is compared, and how candidates are found among millions.

Near duplicates (Broder 1997): the similarity of two texts is the Jaccard index of their sets of runs of words. A signature
of P minima estimates it; its P minima are cut into bands, and two texts that agree on a whole band are candidates (Leskovec,
Rajaraman, Ullman, Mining of Massive Datasets, section 3.4). Rows per band are chosen so that `RECALL` of the pairs at the
threshold agree on a band; more similar ones do so more often. Candidates are decided by their sets, not by signatures: 128
minima tell 0.80 from 0.75 in five of six cases only.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int64, UInt32, UInt64

from llamajax.config.cleaning import NearDuplicateConfig
from llamajax.data.cleaning.words import run_hashes, word_hashes, words_of

RECALL = 0.99
"""Share of the pairs with just the threshold's similarity that are to become candidates, at least."""
NEIGHBOURS = 64
"""Texts that a text is compared with of those before it that agree on a band; in crowds, fewer."""
CROWD_PAIRS = 2**18
"""Comparisons for one value of a band, roughly."""
ESTIMATE_SIGMAS = 4.0
"""Standard deviations that a candidate's estimate may lie below the threshold before its sets are not even looked at."""

_BATCH_RUNS = 2**22


def digest_of(text: str) -> bytes:
    """128 bits that copies share: texts that are the same but for white space at their ends and the way their lines end."""
    return hashlib.blake2b(text.replace("\r\n", "\n").strip().encode(), digest_size=16).digest()


def set_of(text: str, config: NearDuplicateConfig) -> UInt64[np.ndarray, "runs"]:
    """Hashes of the text's runs of words, sorted, each once; of a shorter text, all its words are the one run."""
    hashes = word_hashes(words_of(text))
    return np.unique(run_hashes(hashes, min(config.ngram, max(len(hashes), 1))))


def jaccard(one: UInt64[np.ndarray, "m"], other: UInt64[np.ndarray, "n"]) -> float:
    """Members that both sorted sets have over all that they have; 0 of nothing."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / max(len(one) + len(other) - shared, 1)


def signatures(sets: Sequence[UInt64[np.ndarray, "_"]], config: NearDuplicateConfig) -> UInt32[np.ndarray, "texts minima"]:
    """R-MinHash of every set, by rensa: full sets, so the order of members does not matter."""
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
    """Bands of a signature, and the minima in each: as many as leave `RECALL`, since longer bands propose fewer pairs."""
    length = config.num_permutations
    recalls = {
        minima: 1 - (1 - config.threshold**minima) ** (length // minima)  # of independent minima
        for minima in range(1, length + 1)
    }
    minima = max((minima for minima, recall in recalls.items() if recall >= RECALL), default=1)
    return length // minima, minima


def band_keys(
    of_texts: UInt32[np.ndarray, "texts minima"], config: NearDuplicateConfig
) -> UInt64[np.ndarray, "bands texts"]:
    """A hash of every band of every signature."""
    num_bands, minima = bands_of(config)
    keys = np.zeros((num_bands, len(of_texts)), np.uint64)
    for band in range(num_bands):
        for text_minima in of_texts[:, band * minima : (band + 1) * minima].T:
            keys[band] = run_hashes(keys[band] ^ text_minima.astype(np.uint64), 1)
    return keys


def crowds(keys: UInt64[np.ndarray, "texts"]) -> Iterator[Int64[np.ndarray, "_"]]:
    """The places of equal keys, in order, where there are several."""
    order = np.argsort(keys, kind="stable")
    ends = np.flatnonzero(np.diff(keys[order])) + 1
    starts = np.concatenate([[0], ends])
    ends = np.concatenate([ends, [len(keys)]])
    for crowd in np.flatnonzero(ends - starts > 1):
        yield order[starts[crowd] : ends[crowd]]


def alike_in_crowd(of_crowd: UInt32[np.ndarray, "members minima"], least: float) -> Int64[np.ndarray, "pairs 2"]:
    """Pairs of members whose estimated similarity is `least` or more; everyone is compared with the first and with the
    `NEIGHBOURS` before."""
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
    """The estimate below which two texts are hardly as similar as the threshold."""
    sigma = math.sqrt(config.threshold * (1 - config.threshold) / config.num_permutations)
    return config.threshold - ESTIMATE_SIGMAS * sigma


class Clusters:
    """Which texts belong together, by the first of them."""

    def __init__(self, num_texts: int) -> None:
        self._first = np.arange(num_texts)

    def first(self, text: int) -> int:
        """The first of the text's cluster."""
        while self._first[text] != text:
            self._first[text] = self._first[self._first[text]]
            text = int(self._first[text])
        return text

    def join(self, one: int, other: int) -> None:
        """Makes one cluster of those of both texts."""
        low, high = sorted((self.first(one), self.first(other)))
        self._first[high] = low
