"""Where the pattern of a pre-tokenizer splits a text, whatever comes before and behind."""

import functools
import re

import tokenizers
from tokenizers import pre_tokenizers

_TOKENS = re.compile(
    r"(?P<atom>\[(?:[^\[\]\\]|\\.)+\]|\\[pP]\{\^?\w+\}|\\[sSdDwWnrt]|\\[^\w\s]|[^\\\[\](){}|*+?^$])"
    r"|(?P<open>\((?!\?)|\(\?i?:)|(?P<close>\))|(?P<bar>\|)|(?P<times>[*+?]|\{\d+(?:,\d*)?\})"
)
"""What is understood of a regular expression; nothing in it looks around or back."""
_ENDS_SPACES = r"\s+(?!\S)"
"""Looks ahead, but only from behind a space."""


def may_span(pattern: str, left: str, right: str) -> bool:
    """Whether a match of the pattern may hold the two neighbouring characters, of which the first is no space.

    Where none may, no try of one looks across either: both sides are split as each is by itself. An alternative may hold
    both where a part of it matches the first character, and the same or a later part the second. What stands in
    parentheses counts as one part. A pattern that is not understood may hold anything.
    """
    parts: list[list[str]] = []
    depth = at = 0
    pattern = pattern.replace(_ENDS_SPACES, r"\s+")
    while at < len(pattern):
        if (token := _TOKENS.match(pattern, at)) is None:
            return True
        at = token.end()
        if token["bar"] and not depth:
            if _spans(parts, left, right):
                return True
            parts = []
        if not depth and (token["open"] or token["atom"]):
            parts.append([])
        if token["atom"]:
            parts[-1].append(token["atom"])
        depth += bool(token["open"]) - bool(token["close"])
    return _spans(parts, left, right)


def _spans(parts: list[list[str]], left: str, right: str) -> bool:
    lefts, rights = ([n for n, atoms in enumerate(parts) if any(_matches(a, c) for a in atoms)] for c in (left, right))
    return bool(lefts and rights) and lefts[0] <= rights[-1]


@functools.lru_cache(maxsize=2**16)
def _matches(atom: str, char: str) -> bool:
    """Whether it does, in either case of letters."""
    either = tokenizers.Regex(f"{atom}|(?i:{atom})")
    return not pre_tokenizers.Split(either, "removed").pre_tokenize_str(char)
