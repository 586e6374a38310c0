"""Copies are all found, and near duplicates by their exact similarity: recall and precision on edits of real texts."""

import itertools
import math
import random

import numpy as np
import pytest

from llamajax.config.cleaning import CleaningConfig, NearDuplicateConfig
from llamajax.data.cleaning import duplicates
from llamajax.data.cleaning.duplicates import (
    RECALL,
    Clusters,
    alike_in_crowd,
    band_keys,
    bands_of,
    crowds,
    digest_of,
    jaccard,
    set_of,
    signatures,
)
from llamajax.data.cleaning.words import words_of
from tests.data.cleaning.cleaned import edited, jsonl, real_texts, run_clean, texts_of

NEAR = NearDuplicateConfig(enabled=True)


def true_similarity(one: str, other: str, ngram: int = 5) -> float:
    """Compares the sets of words themselves, without hashes."""
    sets = []
    for words in (words_of(one), words_of(other)):
        length = min(ngram, len(words))
        sets.append({tuple(words[at : at + length]) for at in range(len(words) - length + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def seeded(num_texts: int, seed: int) -> tuple[list[str], list[tuple[int, int]]]:
    """Texts in a drawn order, of which half are edits of the other half, little to much; and the pairs by their places."""
    draw = random.Random(seed)
    originals = real_texts(num_texts)
    texts = [*originals, *(edited(text, draw.randrange(1, 30), draw) for text in originals)]
    order = draw.sample(range(len(texts)), len(texts))
    place = {text: at for at, text in enumerate(order)}
    return [texts[at] for at in order], [(place[at], place[at + num_texts]) for at in range(num_texts)]


def test_copies_are_all_found_and_nothing_else(tmp_path):
    draw = random.Random(0)
    originals = real_texts(300)
    assert len(set(originals)) == 300
    changes = (lambda text: text, lambda text: f"\n {text}\t\n", lambda text: text.replace("\n", "\r\n"))
    copies = [draw.choice(changes)(text) for text in draw.choices(originals, k=200)]
    others = [f"{text}." for text in originals[:50]]  # nearly, but no copies
    texts = draw.sample([*originals, *copies, *others], 550)
    sources = [jsonl(tmp_path / f"{number}.jsonl", texts[number::3]) for number in range(3)]
    in_order = [text for number in range(3) for text in texts[number::3]]

    cleaned = run_clean(sources, CleaningConfig(exact_duplicates=True), tmp_path / "cache")
    left = [text for source in cleaned for text in texts_of(source)]
    first_of: dict[str, str] = {}
    for text in in_order:
        first_of.setdefault(text.replace("\r\n", "\n").strip(), text)
    assert left == list(first_of.values())
    assert len(left) == 350


def test_near_duplicates_are_found_by_their_exact_similarity(tmp_path):
    """At least 95% of the pairs at 0.8 or above are found; each removed document is that similar to another."""
    texts, pairs = seeded(400, seed=1)
    similar = [pair for pair in pairs if true_similarity(texts[pair[0]], texts[pair[1]]) >= 0.8]
    assert len(similar) > 100
    assert len(pairs) - len(similar) > 100
    config = CleaningConfig(near_duplicates=NEAR)
    (cleaned,) = run_clean([jsonl(tmp_path / "a.jsonl", texts)], config, tmp_path / "cache")
    left = set(texts_of(cleaned))
    left_out = {at for at, text in enumerate(texts) if text not in left}

    found = [pair for pair in similar if max(pair) in left_out]
    assert len(found) >= 0.95 * len(similar), f"{len(found)} of {len(similar)}"
    assert not [pair for pair in similar if min(pair) in left_out and max(pair) not in left_out]
    partner = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    for at in left_out:  # some are like a text that is no seeded copy
        others = [partner[at], *(other for other in range(len(texts)) if other != at)]
        assert any(true_similarity(texts[at], texts[other]) >= 0.8 for other in others), texts[at]


@pytest.mark.parametrize("threshold", [0.5, 0.65, 0.8, 0.9, 1.0])
def test_pairs_at_the_threshold_become_candidates(threshold):
    config = NearDuplicateConfig(enabled=True, threshold=threshold)
    num_bands, minima = bands_of(config)
    assert num_bands * minima <= config.num_permutations
    assert 1 - (1 - threshold**minima) ** num_bands >= RECALL

    draw, texts = random.Random(2), real_texts(300)
    edits = [edited(text, draw.randrange(1, 30), draw) for text in texts]
    of_texts = signatures([set_of(text, config) for text in [*texts, *edits]], config)
    keys = band_keys(of_texts, config)
    agree = (keys[:, :300] == keys[:, 300:]).any(axis=0)
    similarities = np.array([true_similarity(*pair) for pair in zip(texts, edits, strict=True)])
    assert agree[similarities >= threshold].mean() >= 0.98 or not (similarities >= threshold).any()
    estimates = (of_texts[:300] == of_texts[300:]).mean(axis=1)
    errors = estimates - similarities
    assert abs(errors.mean()) < 0.01
    assert errors.std() < 1.2 * math.sqrt(0.25 / config.num_permutations)


def test_sets_have_the_similarity_of_their_words():
    texts, pairs = seeded(60, seed=3)
    for ngram in (1, 5, 9):
        config = NearDuplicateConfig(enabled=True, ngram=ngram)
        for one, other in pairs:
            found = jaccard(set_of(texts[one], config), set_of(texts[other], config))
            assert found == true_similarity(texts[one], texts[other], ngram)


def test_short_and_empty_texts():
    assert jaccard(set_of("Hello, world", NEAR), set_of("hello world!", NEAR)) == 1
    assert jaccard(set_of("hello world", NEAR), set_of("hello there", NEAR)) == 0
    assert jaccard(set_of("... !", NEAR), set_of("", NEAR)) == 0, "what has no words is like nothing"
    assert signatures([], NEAR).shape == (0, 128)


def test_signatures_do_not_depend_on_what_is_beside_them(monkeypatch):
    sets = [set_of(text, NEAR) for text in [*real_texts(40), "", "one"]]
    together = signatures(sets, NEAR)
    monkeypatch.setattr(duplicates, "_BATCH_RUNS", 500)
    assert np.array_equal(signatures(sets, NEAR), together)
    assert np.array_equal(np.concatenate([signatures([members], NEAR) for members in sets]), together)
    assert not np.array_equal(signatures(sets, NearDuplicateConfig(enabled=True, signature_seed=1)), together)


def test_crowds_are_the_places_of_equal_keys():
    keys = np.array([7, 3, 7, 1, 3, 7], np.uint64)
    assert [crowd.tolist() for crowd in crowds(keys)] == [[1, 4], [0, 2, 5]]
    assert not list(crowds(np.zeros(0, np.uint64)))
    assert not list(crowds(np.arange(5, dtype=np.uint64)))


def test_in_a_crowd_all_are_compared_while_it_is_small(monkeypatch):
    rng = np.random.default_rng(0)
    of_crowd = rng.integers(0, 2, (50, 32), np.uint32)
    expected = {
        (one, other)
        for one, other in itertools.combinations(range(50), 2)
        if (of_crowd[one] == of_crowd[other]).mean() >= 0.6
    }
    assert {tuple(pair) for pair in alike_in_crowd(of_crowd, 0.6).tolist()} == expected
    monkeypatch.setattr(duplicates, "NEIGHBOURS", 3)
    near = {(one, other) for one, other in expected if other - one <= 3 or one == 0}
    assert {tuple(pair) for pair in alike_in_crowd(of_crowd, 0.6).tolist()} == near


def test_clusters_do_not_depend_on_the_order_of_pairs():
    pairs = [(4, 7), (1, 4), (7, 9), (2, 3), (0, 9), (5, 6)]
    for order in itertools.islice(itertools.permutations(pairs), 0, None, 97):
        clusters = Clusters(10)
        for one, other in order:
            clusters.join(one, other)
        assert [clusters.first(text) for text in range(10)] == [0, 0, 2, 2, 0, 5, 5, 0, 8, 0]


def test_copies_share_a_digest():
    assert digest_of(" a\r\nb \n") == digest_of("a\nb")
    assert digest_of("a b") != digest_of("a  b")
    assert len(digest_of("")) == 16
