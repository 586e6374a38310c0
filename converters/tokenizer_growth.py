"""Learns new pieces for a BPE tokenizer by continuing its training on new text.

New merges follow all old ones, so a text is first encoded as before and then shortened. All old tokens keep their ids.
"""

import heapq
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MIN_SAVED = 2
"""Number of tokens that a new piece must save in the sample, so that nothing is learnt from a single occurrence."""

_BARRIER = -1
"""Separates words, and replaces tokens that never merge, such as single bytes of unknown characters."""
_UNKNOWN = -2
"""Code of the first unknown character; each further one gets the next lower number."""
_LOW = 2**32 - 1
"""Mask of the low 32 bits. A pair is one number: the first token in the high 32 bits, the second in the low 32 bits."""
_WORDS_AT_ONCE = 1024


@dataclass(frozen=True)
class Vocabulary:
    """Facts about a tokenizer that further training needs."""

    ids: Mapping[str, int]
    """Ids of the pieces that merges create and use."""
    taken: frozenset[str]
    """Names of all tokens; no new piece may reuse one."""
    first_new_id: int
    """Lowest id above those of all tokens."""
    words: Callable[[str], Iterable[str]]
    """Splits a text into words; no piece crosses a word boundary."""
    encode: Callable[[Sequence[str]], list[list[int]]]
    """Returns the token ids of words (or pieces) unchanged: nothing is normalized, cut or added."""
    max_piece_chars: int
    """Maximum length of a new piece, in characters."""


def learn_pieces(
    vocabulary: Vocabulary, word_counts: Mapping[str, int], num_pieces: int, on_piece: Callable[[], None]
) -> list[str]:
    """Continues BPE training (Sennrich et al., arXiv:1508.07909): repeatedly adds the piece that saves most tokens.

    A pair of neighbours saves one token at each occurrence. A character without a piece counts one token per byte, as byte
    fallback encodes it.

    Args:
        vocabulary: the tokenizer.
        word_counts: number of occurrences of each word.
        num_pieces: number of pieces to add; fewer are added if no further piece saves `MIN_SAVED` tokens.
        on_piece: called after each new piece, for progress.

    Returns:
        The new pieces in merge order; each joins two older pieces, or is a character.
    """
    chains = _Chains(vocabulary, word_counts)
    pieces: list[str] = []
    while len(pieces) < num_pieces and (piece := chains.best()) is not None:
        chains.add(piece)
        pieces.append(piece)
        on_piece()
    return pieces


def new_merges(ids: Mapping[str, int], pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the merges for new pieces, in order; they follow all old merges.

    As in SentencePiece, any two neighbours that spell a piece merge into it, if one of the three is new. A merge takes the
    position of the newest of its three pieces; at that position, merges that use the piece precede merges that create it.

    Args:
        ids: ids of the old pieces that merges create and use.
        pieces: the new pieces.
    """
    ages = dict.fromkeys(ids, 0) | {piece: place for place, piece in enumerate(pieces, 1)}
    order = {piece: place for place, piece in enumerate(ages)}
    found = []
    for piece, age in ages.items():
        for left, right in _splits(piece, ages):
            if newest := max(age, ages[left], ages[right]):
                found.append((newest, age == newest, order[left], order[right], (left, right)))
    return [merge for *_, merge in sorted(found)]


def _splits(piece: str, known: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields every split of a piece into two known pieces."""
    for at in range(1, len(piece)):
        if piece[:at] in known and piece[at:] in known:
            yield piece[:at], piece[at:]


def _different(ascending: np.ndarray) -> np.ndarray:
    return ascending[np.flatnonzero(np.diff(ascending, prepend=-1))]


def _encode(vocabulary: Vocabulary, words: Sequence[str], codes: Mapping[str, int]) -> Iterator[list[int]]:
    """Yields the tokens of each word, with unknown characters as their `codes`."""
    unknown = re.compile(f"([{re.escape(''.join(codes))}])" if codes else "((?!))")  # the latter matches nothing
    for at in range(0, len(words), _WORDS_AT_ONCE):
        split = [unknown.split(word) for word in words[at : at + _WORDS_AT_ONCE]]  # every second part is unknown
        encoded = iter(vocabulary.encode([part for parts in split for part in parts[::2]]))
        for parts in split:
            chain = next(encoded)
            for char in parts[1::2]:
                chain += [codes[char], *next(encoded)]
            yield chain


class _Chains:
    """All words as chains of tokens, with the number of tokens that each possible new piece would save.

    The chains follow one another, separated by barriers. A position has a token, neighbours that change as tokens merge,
    and the number of occurrences of its word.
    """

    def __init__(self, vocabulary: Vocabulary, word_counts: Mapping[str, int]) -> None:
        self._ids = dict(vocabulary.ids)
        self._texts = {token: piece for piece, token in self._ids.items()}
        self._next_id = vocabulary.first_new_id
        self._taken, self._max_chars = vocabulary.taken, vocabulary.max_piece_chars
        unknown = sorted(set().union(*word_counts) - self._ids.keys())
        self._codes = {char: _UNKNOWN - place for place, char in enumerate(unknown)}
        self._chars = {code: char for char, code in self._codes.items()}
        tokens, lengths = array("i", [_BARRIER]), array("i", [1])
        for chain in _encode(vocabulary, list(word_counts), self._codes):
            tokens.extend(chain)
            tokens.append(_BARRIER)
            lengths.append(len(chain) + 1)
        self._token = np.frombuffer(tokens, np.int32)
        self._token[(self._token >= 0) & ~np.isin(self._token, list(self._texts))] = _BARRIER
        self._weight = np.repeat(np.array([0, *word_counts.values()], np.int32), np.frombuffer(lengths, np.int32))
        places = np.arange(len(self._token), dtype=np.int32)
        self._before, self._after = np.maximum(places - 1, 0), np.minimum(places + 1, len(places) - 1)
        self._later: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        self._index_start()

    def _index_start(self) -> None:
        """Records the positions of each pair and unknown character, and the tokens that each would save."""
        keys = self._keys(np.arange(len(self._token), dtype=np.int32))
        at = np.flatnonzero(keys != _BARRIER).astype(np.int32)
        keys = keys[at]
        self._places = at[np.argsort(keys, kind="stable")]
        keys.sort(kind="stable")
        first = np.flatnonzero(np.diff(keys, prepend=_BARRIER))
        self._keys_at_start, self._first = keys[first], np.append(first, len(keys))
        saved = np.add.reduceat(self._weight[self._places], first, dtype=np.int64) if len(first) else first
        for place, key in enumerate(self._keys_at_start[self._keys_at_start < 0].tolist()):
            saved[place] *= len(self._chars[key].encode()) - 1
        worth = saved >= MIN_SAVED
        self._saved = dict(zip(self._keys_at_start[worth].tolist(), saved[worth].tolist(), strict=True))
        self._heap = [(-saved, key) for key, saved in self._saved.items()]
        heapq.heapify(self._heap)

    def best(self) -> str | None:
        """Returns the piece that would save most tokens; None if no piece may be added."""
        while self._heap:
            promised, key = heapq.heappop(self._heap)
            saved = self._saved.get(key, 0)
            if saved < MIN_SAVED:
                continue
            if saved < -promised:
                heapq.heappush(self._heap, (-saved, key))
                continue
            text = self._chars[key] if key < 0 else self._text(key)
            if text not in self._taken and text not in self._ids and len(text) <= self._max_chars:
                return text
        return None

    def add(self, piece: str) -> None:
        """Adds a piece and merges all pairs that spell it."""
        token = self._ids[piece] = self._next_id
        self._texts[token] = piece
        self._next_id += 1
        if piece in self._codes:
            at = self._find(self._codes[piece])
            self._token[at] = token
            pairs = self._count(np.concatenate([self._before[at], at]), 1)
        else:
            pairs = [self._ids[left] << 32 | self._ids[right] for left, right in _splits(piece, self._ids)]
        while pairs:  # a new token may be half of an existing piece
            pair = pairs.pop(0)
            if (whole := self._ids.get(self._text(pair))) is not None:
                pairs += self._merge(pair, whole)

    def _merge(self, pair: int, whole: int) -> list[int]:
        """Replaces all occurrences of a pair by a token. Returns the pairs that this creates."""
        at = self._find(pair)
        if pair >> 32 == pair & _LOW:  # in a run of equal tokens, only every second position starts a pair
            continues = np.append(False, self._after[at[:-1]] == at[1:]) if len(at) else np.zeros(0, bool)
            place = np.arange(len(at))
            row_start = np.maximum.accumulate(np.where(continues, 0, place))
            at = at[(place - row_start) % 2 == 0]
        gone = self._after[at]
        self._count(np.concatenate([self._before[at], at, gone]), -1)
        self._token[at], self._token[gone] = whole, _BARRIER
        after = self._after[gone]
        self._after[at], self._before[after] = after, at
        return self._count(np.concatenate([self._before[at], at]), 1)

    def _find(self, key: int) -> np.ndarray:
        """Returns the positions of a pair or an unknown character, ascending."""
        place = np.searchsorted(self._keys_at_start, key)
        known = place < len(self._keys_at_start) and self._keys_at_start[place] == key
        at_start = self._places[self._first[place] : self._first[place + 1]] if known else self._places[:0]
        at = _different(np.sort(np.concatenate([at_start, *self._later.pop(key, [])])))
        return at[self._keys(at) == key]

    def _keys(self, at: np.ndarray) -> np.ndarray:
        """Returns the key at each position, int64: a pair, an unknown character, or -1 if nothing can merge there."""
        first, second = self._token[at].astype(np.int64), self._token[self._after[at]]
        return np.where((first >= 0) & (second >= 0), first << 32 | second, np.minimum(first, _BARRIER))

    def _count(self, at: np.ndarray, sign: int) -> list[int]:
        """Adds or subtracts the savings of the pairs at some positions. Returns these pairs."""
        at = _different(np.sort(at))
        keys = self._keys(at)
        at, keys = at[keys >= 0], keys[keys >= 0]
        order = np.argsort(keys, kind="stable")
        at, keys = at[order], keys[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        if not len(keys):
            return []
        pairs = keys[first].tolist()
        changes = (sign * np.add.reduceat(self._weight[at], first, dtype=np.int64)).tolist()
        ends = [*first[1:].tolist(), len(at)]
        for pair, change, start, end in zip(pairs, changes, first.tolist(), ends, strict=True):
            if sign > 0:
                self._saved[pair] = self._saved.get(pair, 0) + change
                self._later[pair].append(at[start:end])
                heapq.heappush(self._heap, (-self._saved[pair], pair))
            elif pair in self._saved:
                self._saved[pair] += change
        return pairs

    def _text(self, pair: int) -> str:
        return self._texts[pair >> 32] + self._texts[pair & _LOW]
