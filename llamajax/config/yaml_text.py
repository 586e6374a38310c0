"""Strict YAML: text becomes a tree that knows the line of everything in it and has no types yet.

Ordinary YAML loading changes what people wrote without a word (`017` is 15, `1:30` is 90, `no` is False,
`3e-4` is text, the second of two equal keys wins) and forgets where it stood. Here every scalar stays text
until somebody knows which type it must have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import yaml

from llamajax.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_VALUES = 10_000
MAX_DEPTH = 20
MAX_PROBLEMS = 50

_REMEDIES = {
    "'\\t'": "indent with spaces",
    "cannot start any token": "text that begins so needs quotes",
    "scanning an alias": "text that begins with * needs quotes",
    "scanning an anchor": "text that begins with & needs quotes",
    "mapping values are not allowed": "check the indentation; text with a colon in it needs quotes",
}
"""Remedies for what PyYAML says in these words."""


class Place(NamedTuple):
    """Where something was written."""

    order: int
    """The line, or a number above `MAX_BYTES` outside the file: problems are told in this order."""
    text: str
    """`file:line`, or `--key` for an override."""


class Problems:
    """The mistakes found so far, to be raised together."""

    def __init__(self) -> None:
        self._found: list[tuple[Place, str]] = []

    def add(self, place: Place, message: str, key: str = "") -> None:
        """Notes one mistake, about `key` if the place does not say so; raises when more would only be noise."""
        self._found.append((place, f"{key}: {message}" if key and place.text != f"--{key}" else message))
        if len(self._found) == MAX_PROBLEMS:
            self.stop(Place(2 * MAX_BYTES, place.text), "there are more mistakes; mend these first")

    def stop(self, place: Place, message: str) -> NoReturn:
        """Raises everything noted and one last mistake, after which nothing more can be found."""
        self._found.append((place, message))
        raise self.error()

    def raise_if_any(self) -> None:
        """Raises everything noted, if anything is."""
        if self._found:
            raise self.error()

    def error(self) -> ConfigError:
        """One line for every mistake noted, in the order of their places."""
        ordered = sorted(self._found, key=lambda found: found[0].order)
        return ConfigError("\n".join(f"{place.text}: {message}" for place, message in ordered))


@dataclass
class Node:
    """A value as it was written."""

    content: "str | list[Node] | dict[str, Node]"
    place: Place
    """The line of its key, for an item of a list its own."""
    style: Literal["plain", "quoted", "argument"] = "plain"
    """Quoted text is text; plain text may be a number; an argument lost its quotes to the shell and may be either."""

    def is_null(self) -> bool:
        """Whether this says that there is no value."""
        if self.style == "argument":
            return self.content == "null"
        return self.style == "plain" and self.content in ("", "~", "null", "Null", "NULL")

    def describe(self) -> str:
        """What this is, for a message."""
        if isinstance(self.content, dict):
            return "keys and values"
        if isinstance(self.content, list):
            return "a list"
        if self.content:
            return show(self.content)
        return "nothing" if self.style == "plain" else "empty text"


def show(text: str) -> str:
    """Text as it can stand in a message of one line."""
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return short if short.isprintable() else repr(short)


def read_yaml(text: str, place: Callable[[int], Place], problems: Problems) -> Node | None:
    """The one document in `text`; None when it cannot be read, with the reason noted.

    Duplicate keys and keys that are not names are noted as well; the rest is read on. Reading stops at the first
    anchor or tag and at the limits above, so that no text takes long.

    Args:
        place: where a line (counted from 1) of `text` is.
    """
    try:
        return _Reader(text, place, problems).document()
    except _RefusedError as error:
        problems.add(place(error.line), str(error))
    except yaml.MarkedYAMLError as error:
        problems.add(*_explain(error, place))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.add(place(line), f"not valid YAML: character {text[error.position]!r} is not allowed")
    return None


def _explain(error: yaml.MarkedYAMLError, place: Callable[[int], Place]) -> tuple[Place, str]:
    """A syntax error in one line, with a remedy where it is known."""
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    remedy = next((f"; {remedy}" for cause, remedy in _REMEDIES.items() if cause in reason), "")
    start, end = error.context_mark or error.problem_mark, error.problem_mark or error.context_mark
    if start is None or end is None:
        return place(1), f"not valid YAML: {show(reason)}"
    begun = f" (begun in line {start.line + 1})" if start.line < end.line else ""
    return place(end.line + 1), f"not valid YAML: {' '.join(reason.split())[:200]}{begun}{remedy}"


class _RefusedError(Exception):
    """Valid YAML that no configuration needs."""

    def __init__(self, line: int, message: str) -> None:
        """`line` counts from 0, as PyYAML does."""
        super().__init__(message)
        self.line = line + 1


class _Reader:
    """Turns the events that PyYAML finds in a text into nodes."""

    def __init__(self, text: str, place: Callable[[int], Place], problems: Problems) -> None:
        self.loader = yaml.SafeLoader(text)
        self.place, self.problems, self.num_values = place, problems, 0

    def next_event(self) -> Any:
        try:
            return self.loader.get_event()
        except (ValueError, OverflowError) as error:  # from chr() and int(), which PyYAML gives any escape or version
            raise _RefusedError(self.loader.line, f"not valid YAML: {show(str(error))}") from error

    def document(self) -> Node:
        self.next_event()
        if isinstance(start := self.next_event(), yaml.StreamEndEvent):
            raise _RefusedError(start.start_mark.line, "holds no settings")
        node = self.node(self.next_event(), None, depth=0)
        self.next_event()
        if not isinstance(end := self.next_event(), yaml.StreamEndEvent):
            raise _RefusedError(end.start_mark.line, "a second document begins; keep one of them")
        return node

    def node(self, event: Any, place: Place | None, depth: int) -> Node:
        """The value that begins with `event`, `depth` levels deep; `place` is its key's, if it has one."""
        line = event.start_mark.line
        self.num_values += 1
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _RefusedError(line, "anchors and aliases are not supported; write the value out, or quote & and *")
        if event.tag is not None:
            tag = show(event.tag.replace("tag:yaml.org,2002:", "!!"))
            raise _RefusedError(line, f"the tag {tag} is not supported; write a plain value, or quote !")
        if depth > MAX_DEPTH:
            raise _RefusedError(line, f"nested deeper than {MAX_DEPTH} levels")
        if self.num_values > MAX_VALUES:
            raise _RefusedError(line, f"more than {MAX_VALUES:,} values, so this cannot be a configuration")
        place = place or self.place(line + 1)
        if isinstance(event, yaml.ScalarEvent):
            return Node(event.value, place, "quoted" if event.style else "plain")
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(self.items(depth), place)
        return Node(self.entries(depth), place)

    def items(self, depth: int) -> list[Node]:
        items = []
        while not isinstance(event := self.next_event(), yaml.SequenceEndEvent):
            items.append(self.node(event, None, depth + 1))
        return items

    def entries(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := self.next_event(), yaml.MappingEndEvent):
            key = self.node(event, None, depth + 1)
            value = self.node(self.next_event(), key.place, depth + 1)
            if not isinstance(key.content, str):
                self.problems.add(key.place, f"a key must be a name, not {key.describe()}")
            elif key.content in entries:
                first = entries[key.content].place
                self.problems.add(key.place, f"duplicate key '{show(key.content)}', also at {first.text}; keep one")
            else:
                entries[key.content] = value
        return entries
