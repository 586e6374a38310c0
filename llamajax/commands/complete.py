"""Completes command lines of `llamajax` for shells. A shell asks at every press of TAB, so this imports almost nothing:
`options.json`, which scripts/reference.py writes, has the options and settings of all verbs, each with its type, a tab and
the first sentence about it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
SCRIPTS = {shell: _HERE / f"completion.{shell}" for shell in ("bash", "zsh", "fish")}
"""Scripts that ask for candidates, by shell."""
TABLE = _HERE / "options.json"
FILES = ":files"
"""Candidate that stands for the names of files, which shells complete themselves."""

_CONFIGS = _HERE.parent / "configs"  # as `config.shipped`, the import of which takes as long as all else
_NUMBERS = ("INT", "FLOAT", "N", "I/N")
"""Types of values that are no names of files."""


def candidates(words: Sequence[str]) -> list[str]:
    """Returns the words that may replace the last word of a command line, each with a tab and its meaning if it has one.

    Dotted settings are completed part by part: `--tr` to `--train.`, then `--train.num_steps`.

    Args:
        words: the words after `llamajax` up to the cursor; the last one may be empty.
    """
    *before, current = words or [""]
    if before[:1] == ["launch"] and "--" in before:
        before = ["train", *before[before.index("--") + 1 :]]
    table: dict[str, Any] = json.loads(TABLE.read_text())
    known = table["verbs"]
    verb = max((name for name in known if name.split() == before[: name.count(" ") + 1]), key=len, default=None)
    deeper = _next_words(known, before)
    if verb is None or deeper:
        deeper |= {"--help": "", "--version": ""} if not before else {}
        return _shown({word: text for word, text in deeper.items() if word.startswith(current)})
    spec, rest = known[verb], before[verb.count(" ") + 1 :]
    told = spec["options"] | {f"--{key}": text for key, text in table["settings"].get(spec["settings"], {}).items()}
    options = {option: tuple(text.split("\t")) for option, text in told.items()}
    asked = rest[-1] if rest else ""
    if current.startswith("-") and "=" in current:
        option, equals, text = current.partition("=")
        return list(_values(option, options, text, f"{option}{equals}"))
    if asked == "--help":
        topics = {key.removeprefix("--"): ("", text) for key, (_, text) in options.items() if key.startswith("--")}
        return _shown(_next_parts(topics, current))
    if not current.startswith("-") and options.get(_general(asked), [""])[0]:
        return list(_values(asked, options, current))
    if spec["positional"] and not current.startswith("-"):
        return [word for word in spec["positional"] if word == FILES or word.startswith(current)]
    return _shown(_next_parts(options, current))


def _next_words(known: Mapping[str, Any], before: list[str]) -> dict[str, str]:
    """Returns the words with which a verb goes on after those `before`, such as `hf` after `convert`, and their meanings."""
    found: dict[str, str] = {}
    for name, spec in known.items():
        words = name.split()
        if len(words) > len(before) and words[: len(before)] == before:
            is_last = len(words) == len(before) + 1
            found.setdefault(words[len(before)], spec["text"] if is_last else "")
    return found


def _next_parts(options: Mapping[str, Sequence[str]], current: str) -> dict[str, str]:
    """Returns the options that begin with `current`, each up to its next dot, and their meanings; of a section only what is
    in it."""
    found: dict[str, str] = {}
    begins = _general(current)
    for option, (kind, text) in options.items():
        if option.startswith(begins) and kind != "SECTION":
            part, dot, _ = option.removeprefix(begins).partition(".")
            of_section = options.get(f"{begins}{part}", ("", ""))[1]
            found.setdefault(f"{current}{part}{dot}", of_section if dot else text)
    return found


def _values(option: str, options: Mapping[str, Sequence[str]], current: str, prefix: str = "") -> Iterator[str]:
    """Yields the values of an option that begin with `current`, after a `prefix`."""
    kind = options.get(_general(option), ("TEXT", ""))[0]
    kinds = [one for one in re.sub(r"\[.*\]", "", kind).split("|") if one not in ("", "null")]
    choices = [one for one in kinds if one == one.lower()]
    if option == "--config":
        choices = sorted(path.stem for path in _CONFIGS.glob("*.yaml"))
    yield from (f"{prefix}{choice}" for choice in choices if choice.startswith(current))
    if not {*kinds} <= {*choices, *_NUMBERS}:
        yield FILES


def _general(option: str) -> str:
    """Returns a dotted key with 0 for every number, as `config.keys.general` does."""
    return re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "0", option)


def _shown(found: Mapping[str, str]) -> list[str]:
    return [f"{word}\t{text}" if text else word for word, text in found.items()]
