"""Texts that tokenizer libraries are likely to read differently, for comparing two libraries."""

import functools
import random
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

# ruff: noqa: RUF001 (needs characters that look like others)

_SPACES = (
    " ", "  ", "   ", " " * 17, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r", "\r\n", "\r\n\r\n", " \n", "\n ",
    " \t \n\t ", "\u00a0", "\u1680", "\u180e", "\u2003", "\u2009", "\u2028", "\u2029", "\u202f", "\u205f",
    "\u3000", "\u0085", "\x0b", "\x0c", "\x1c", "\x1f", "\u200b", "\ufeff", "\u2581", "\u2581\u2581",
    " \u2581 "
)  # fmt: skip
_DIGITS = (
    "0", "12", "123", "1234", "12345678901", "3.14", "1,000", "1e-9", "0x1F", "½", "²", "Ⅷ", "①", "٣٤٥٦",
    "१२३४", "０１２", "𝟘𝟙"
)  # fmt: skip
_WORDS = (
    "word", "Word", "WORD", "camelCase", "snake_case", "don't", "I'LL", "they've", "l'eau", "x's", "y'S",
    "Straße", "ẞ", "ſ", "İı", "naïve", "łódź", "Ξεσκεπάζω", "Съешь", "שָׁלוֹם", "مُحَمَّد", "ऋषियों", "ক্ষ",
    "นี้", "မြန်མာ", "狐狸", "ガギ", "ｶﾞ", "한글", "\u1112\u1161\u11ab", "ệ", "e\u0323\u0302", "A\u030a",
    "\u212b", "\u2126", "\u0344", "ﬁ", "ﷺ", "℃", "a\u0301\u0316", "q\u0307\u0323", "\u0301", "𝔘𝔫", "𠜎", "𓀀"
)  # fmt: skip
_SYMBOLS = (
    ".", "...", "?!", "---", "===", "((", "]]", "{}", "//", "\\n", "\"", "'", "''", "`", "«»", "„“", "—", "…",
    "·", "€", "$1", "@", "#", "&amp;", "<|", "|>", "<", ">", "</", "[", "]", "<0x0A>", "<0xE2>", "<unk>",
    "<s>", "</s>", "＜s＞", "⁇", "。", "、", "「", "😀", "👍🏽", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈",
    "🇩🇪🇫🇷", "❤\ufe0f", "1\ufe0f\u20e3", "\u200d", "\u200c", "\u00ad", "\u2060", "\u202e", "\u0000", "\x01",
    "\x07", "\x1b[0m", "\x7f", "\x80", "\x9f", "\ue000", "\ufffd", "\ufffe", "\uffff", "\U0010ffff",
    "\U000e0041", "\u0378", "z̸̢̛͎͙͗ä̴́l̵g̶o̷"
)  # fmt: skip
_LONG = (
    "a" * 5000, "ab" * 2000, "-" * 3000, " " * 3000, "\n" * 3000, "9" * 3000, "狐" * 2000, "\u0301" * 500,
    "😀" * 500, "\u0000" * 500
)  # fmt: skip

_NUM_MIXED = 300
_ROW, _PIECES = 64, 500


@functools.cache
def hard_texts() -> tuple[str, ...]:
    """Returns the test texts, which are always the same.

    They contain all kinds of characters, alone and randomly mixed, long runs, both normal forms of composed characters, and
    characters from all over Unicode.
    """
    draw = random.Random(0)
    pieces = (*_SPACES, *_DIGITS, *_WORDS, *_SYMBOLS)
    mixed = ["".join(draw.choices(pieces, k=draw.randint(2, 30))) for _ in range(_NUM_MIXED)]
    spaced = ["".join(piece + draw.choice(_SPACES) for piece in draw.choices(pieces, k=20)) for _ in range(_NUM_MIXED // 4)]
    texts = [*pieces, *_LONG, *mixed, *spaced, *_unicode(draw)]
    composed = [unicodedata.normalize(form, text) for form in ("NFC", "NFD") for text in (*_WORDS, *mixed[:50])]
    return tuple(dict.fromkeys([*texts, *composed]))


def texts_of_all_characters() -> Iterator[str]:
    """Yields each assigned character below the private planes, after a space, before one and by its neighbour."""
    known = [sign for code in range(0xE0000) if unicodedata.category(sign := chr(code)) not in ("Cn", "Cs")]
    for start in range(0, len(known), _ROW):
        yield "".join(f" {sign}" for sign in known[start : start + _ROW])
        yield "".join(known[start : start + _ROW])


def texts_of_tokens(vocab_size: int, decode: Callable[[Sequence[int]], str], special: Iterable[str]) -> Iterator[str]:
    """Yields texts of all pieces of a vocabulary, shuffled, of its special tokens, and of variations of these."""
    ids = [*range(vocab_size)]
    random.Random(1).shuffle(ids)
    yield from (decode(ids[at : at + _PIECES]) for at in range(0, len(ids), _PIECES))
    for token in special:
        wide = "".join(chr(ord(sign) + 0xFEE0) if "!" <= sign <= "~" else sign for sign in token)
        yield from (token, f"a{token}b", f" {token} \n", token[:-1], token[1:], token.upper(), token.lower(), wide)


def _unicode(draw: random.Random) -> Iterator[str]:
    """Yields a twelfth of all characters below the private planes, in rows, and random rows from all planes."""
    rows = range(0, 0x32000, _ROW)
    for start in (*rows[:32], *rows[32::12]):
        yield "".join(chr(code) for code in range(start, start + _ROW) if not 0xD800 <= code < 0xE000)
    all_of_them = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    yield from ("".join(map(chr, draw.choices(all_of_them[:limit], k=40))) for limit in (0x100, 0x800, 0x3000, 0x32000) * 10)
