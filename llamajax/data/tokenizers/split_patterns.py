"""Analyses where the pattern of a pre-tokenizer splits a text, whatever comes before and after."""

import functools
import re

import tokenizers
from tokenizers import pre_tokenizers

_TOKENS = re.compile(
    r"(?P<atom>\[(?:[^\[\]\\]|\\.)+\]|\\[pP]\{\^?\w+\}|\\[sSdDwWnrt]|\\[^\w\s]|[^\\\[\](){}|*+?^$])"
    r"|(?P<open>\((?!\?)|\(\?i?:)|(?P<close>\))|(?P<bar>\|)|(?P<times>[*+?]|\{\d+(?:,\d*)?\})"
)
"""The supported parts of a regular expression; none of them looks ahead or behind."""
_ENDS_SPACES = r"\s+(?!\S)"
"""A lookahead, but only after white space."""


def may_span(pattern: str, left: str, right: str) -> bool:
    """Returns whether a match of the pattern may contain both neighbouring characters, of which the first is no space.

    If none may, no match attempt looks across either, so both sides are split as if alone. An alternative may contain both
    if one of its parts matches the first character, and the same or a later part the second. A group in parentheses counts
    as one part. A pattern with unsupported parts may match anything.
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
    """Returns whether the atom matches the character, ignoring case."""
    either = tokenizers.Regex(f"{atom}|(?i:{atom})")
    return not pre_tokenizers.Split(either, "removed").pre_tokenize_str(char)
