"""BPE training taken up again: the same pieces as the plainest way to do it, and merges that give them."""

import itertools
import random
from collections import Counter

import pytest
import tokenizers

from converters.tokenizer_growth import MIN_SAVED, Vocabulary, learn_pieces, new_merges

ALPHABET = "abcd"
OLD = {piece: token for token, piece in enumerate([*ALPHABET, "<b>", "ab", "cd", "abc", "dd"])}
OLD_MERGES = [("a", "b"), ("c", "d"), ("ab", "c"), ("d", "d")]


def bpe(ids: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(tokenizers.models.BPE(ids, merges))


def vocabulary(**changes) -> Vocabulary:
    old = bpe(OLD, OLD_MERGES)
    fields = {
        "ids": {piece: token for piece, token in OLD.items() if piece != "<b>"},
        "taken": frozenset(OLD),
        "first_new_id": 20,
        "words": str.split,
        "encode": lambda words: [old.encode(word).ids for word in words],
        "max_piece_chars": 100,
    }
    return Vocabulary(**{**fields, **changes})


def random_words(alphabet: str, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    words = ("".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 12))) for _ in range(60))
    return Counter({word: rng.randrange(1, 9) for word in words})


def plainly(vocabulary: Vocabulary, word_counts: Counter[str], num_pieces: int) -> tuple[list[str], dict[str, list[str]]]:
    """The new pieces and how each word ends up, by counting everything again for every piece."""
    ids = dict(vocabulary.ids)
    names = {token: piece for piece, token in ids.items()}
    codes = {char: -2 - place for place, char in enumerate(sorted(set("".join(word_counts)) - ids.keys()))}
    chains: dict[str, list[str]] = {}
    for word in word_counts:
        parts = "".join(char if char in ids else f" {char} " for char in word).split()
        chains[word] = [
            name
            for part in parts
            for name in ([part] if part in codes else [names[token] for token in vocabulary.encode([part])[0]])
        ]

    def merge(left: str, right: str) -> list[tuple[str, str]]:
        made: set[tuple[str, str]] = set()
        for word, chain in chains.items():
            merged: list[str] = []
            places = []
            at = 0
            while at < len(chain):
                if chain[at : at + 2] == [left, right]:
                    places.append(len(merged))
                    at += 1
                    merged.append(left + right)
                else:
                    merged.append(chain[at])
                at += 1
            chains[word] = merged
            neighbours = {pair for place in places for pair in (place - 1, place) if 0 <= pair < len(merged) - 1}
            made |= {(merged[pair], merged[pair + 1]) for pair in neighbours}
        return sorted((pair for pair in made if ids.keys() >= set(pair)), key=lambda pair: (ids[pair[0]], ids[pair[1]]))

    pieces: list[str] = []
    while len(pieces) < num_pieces:
        saved: Counter[tuple] = Counter()
        for word, chain in chains.items():
            for left, right in itertools.pairwise(chain):
                if left in ids and right in ids:
                    saved[ids[left], ids[right], left + right] += word_counts[word]
            for name in chain:
                if name not in ids:
                    saved[-1, codes[name], name] += word_counts[word] * (len(name.encode()) - 1)
        able = [
            (-count, key)
            for key, count in saved.items()
            if count >= MIN_SAVED and key[2] not in {*vocabulary.taken, *ids} and len(key[2]) <= vocabulary.max_piece_chars
        ]
        if not able:
            break
        piece = min(able)[1][2]
        ids[piece] = vocabulary.first_new_id + len(pieces)
        pieces.append(piece)
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece)) if {piece[:at], piece[at:]} <= ids.keys()]
        while pairs:
            left, right = pairs.pop(0)
            if left + right in ids:
                pairs += merge(left, right)
    return pieces, chains


@pytest.mark.parametrize("alphabet", ["abcd", "aab", "abcd\u00e9\u6f22\u5b57"], ids=["old", "rows", "unknown"])
@pytest.mark.parametrize("seed", range(6))
def test_pieces_of_the_plainest_way(alphabet, seed):
    words = random_words(alphabet, seed)
    calls: list[None] = []
    learnt = learn_pieces(vocabulary(), words, 40, lambda: calls.append(None))
    assert learnt == plainly(vocabulary(), words, 40)[0]
    assert len(calls) == len(learnt) > 10


@pytest.mark.parametrize("seed", range(6))
def test_merges_encode_as_was_learnt(seed):
    words = random_words("abcd\u00e9\u6f22\u5b57", seed)
    pieces, chains = plainly(vocabulary(), words, 40)
    ids = {**OLD, **{piece: token for token, piece in enumerate(pieces, 20)}}
    grown = bpe(ids, OLD_MERGES + new_merges(vocabulary().ids, pieces))
    for word, chain in chains.items():
        assert grown.encode(word).tokens == [name for name in chain if name in ids]


def test_what_is_never_learnt():
    words = Counter({"<b>": 50, "abab": 30, "da": 1})
    assert learn_pieces(vocabulary(max_piece_chars=3), words, 9, lambda: None) == []
    assert learn_pieces(vocabulary(), words, 9, lambda: None) == ["abab"]
    assert learn_pieces(vocabulary(), Counter(), 9, lambda: None) == []


def test_a_new_piece_may_be_half_of_an_old_one():
    """`bcd` comes to be by a new piece `bc`, as it does in SentencePiece; texts without new pieces stay as they were."""
    ids = {piece: token for token, piece in enumerate(["a", "b", "c", "d", "bcd"])}
    assert new_merges(ids, ["bc", "abc"]) == [("bc", "d"), ("b", "c"), ("a", "bc")]
