"""Where patterns of pre-tokenizers split a text, whatever comes before and behind."""

import functools
import itertools
import json

import pytest
from tokenizers import Regex, pre_tokenizers

from llamajax.data.tokenizers.hf_tokenizer import BYTE_LEVEL_PATTERN
from llamajax.data.tokenizers.split_patterns import may_span
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from tests.data.tokenizers.test_tokenizer import byte_level
from tests.mixed_texts import CODE, SCRIPTS, SPACES
from tests.real_tokenizers import LLAMA3_PATTERN, QWEN2_PATTERN

_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_POSSESSIVE = r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s+"
PUBLISHED = {
    "GPT-2": BYTE_LEVEL_PATTERN,
    "GPT-4": rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_POSSESSIVE}",
    "Llama 3": LLAMA3_PATTERN,
    "Llama 4": _WORD + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Qwen 2": QWEN2_PATTERN,
}


@functools.cache
def splitter(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def pieces(pattern, text):
    return [piece for piece, _ in splitter(pattern).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_end_words_whatever_is_around(name):
    pattern = PUBLISHED[name]
    text = "".join((*SCRIPTS, *CODE)) + "".join(SPACES) + "end"
    places = [at for at in range(1, len(text)) if text[at - 1].isalpha() and text[at] in " \n.,;:!?"]
    assert len(places) > 20
    assert not any(may_span(pattern, *text[at - 1 : at + 1]) for at in places)
    whole = pieces(pattern, text)
    for at in places[:: len(places) // 20]:
        assert pieces(pattern, text[:at]) + pieces(pattern, text[at:]) == whole


def test_where_it_says_so_parts_are_always_those_of_the_whole():
    """Checked on all short texts."""
    patterns = [*PUBLISHED.values(), r"\w+\s?|\S", r"(a|b )+|.", r"[^x]+|x", r"a?\s|a", r"\s(?:a|\.)+", r"'[^']*'|\w+|\s+|'"]
    split = 0
    for pattern in patterns:
        ending = [right for right in " .'" if not may_span(pattern, "a", right)]
        for text in map("".join, itertools.product("a .'", repeat=4)):
            for at in (at for at in range(1, 4) if text[at - 1] == "a" and text[at] in ending):
                whole = pieces(pattern, text)
                if at in itertools.accumulate(map(len, whole)):
                    split += 1
                    assert pieces(pattern, text[:at]) + pieces(pattern, text[at:]) == whole
    assert split > 500


@pytest.mark.parametrize(
    "pattern",
    [r"\w+(?=\s)|.", r"\w+(?!\.)|.", r"(?<=x)\w+", r"\b\w+|.", r"^\w+|.", r"\w+$", r"(\w) \1", r"(?>\w+)", r"[a[b]]|\s",
     r"\X", r"'[^']*'|\w+", r"\w+ ?", r"(?: |\w)+", r"\w.", r"[\w ]+", r"(?:\w+(?: |x))|y", "a\\"],
)  # fmt: skip
def test_what_may_reach_across_or_is_not_understood(pattern):
    assert may_span(pattern, "a", " ")


def test_a_tokenizers_splits_are_known_from_its_pattern(tmp_path):
    byte_level(tmp_path)
    body = json.loads((tmp_path / "tokenizer.json").read_text())
    for pattern, behavior, expected in (
        (LLAMA3_PATTERN, "Isolated", True),
        (r"'[^']*'|\w+|\s", "Isolated", False),
        (LLAMA3_PATTERN, "MergedWithNext", False),
        (r"\p{N}", "Isolated", False),  # no split there
    ):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
        bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        body["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_only]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(body))
        assert load_tokenizer(tmp_path / "tokenizer.json").splits("one two three", 3) == expected
