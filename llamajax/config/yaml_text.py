"""Strict YAML: reads a file as a tree that keeps the line of every value and has no types yet.

Ordinary YAML loading silently changes what people wrote (`017` is 15, `1:30` is 90, `no` is False, `3e-4` is text, the
second of two equal keys wins) and forgets where it was. Here every scalar stays text until its type is known.
"""

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import yaml

from llamajax.errors import ConfigError, show, show_path, without_passwords

COPIES = "LLAMAJAX_CONFIG_COPIES"
"""Environment variable with a JSON object: the copy to read in place of each configuration file, by the file's absolute
path. The launcher sets it, so that an edit after the launch does not change restarts."""
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
"""Remedies for PyYAML's messages that contain these words."""


class Place(NamedTuple):
    """Place where something was written."""

    order: int
    """Line, below 0 in bases and above `MAX_BYTES` outside files: mistakes are reported in this order."""
    text: str
    """Text `file:line`, or `--key` for an override."""


class Problems:
    """Mistakes found so far, to be raised together."""

    def __init__(self) -> None:
        self._found: list[tuple[Place, str]] = []

    def add(self, place: Place, message: str, key: str = "") -> None:
        """Notes one mistake, about `key` if the place does not name it; raises when more mistakes would only be noise."""
        message = without_passwords(message)
        self._found.append((place, f"{key}: {message}" if key and place.text != f"--{key}" else message))
        if len(self._found) == MAX_PROBLEMS:
            self.stop(Place(2 * MAX_BYTES, place.text), "more mistakes follow; fix these first")

    def stop(self, place: Place, message: str) -> NoReturn:
        """Raises everything noted and one last mistake, after which nothing more can be found."""
        self._found.append((place, message))
        raise self.error()

    def raise_if_any(self) -> None:
        """Raises everything noted, if anything is."""
        if self._found:
            raise self.error()

    def error(self) -> ConfigError:
        """Returns one line for every mistake noted, in the order of their places."""
        ordered = sorted(self._found, key=lambda found: found[0].order)
        return ConfigError("\n".join(f"{place.text}: {message}" for place, message in ordered))


@dataclass
class Node:
    """Value as it was written."""

    content: "str | list[Node] | dict[str, Node]"
    place: Place
    """Line of the value's key; for an item of a list, its own line."""
    style: Literal["plain", "quoted", "argument"] = "plain"
    """Quoted text is text; plain text may be a number; an argument lost its quotes to the shell and may be either."""

    def is_null(self) -> bool:
        """Whether this says that a setting has no value."""
        if self.style == "argument":
            return self.content == "null"
        return self.style == "plain" and self.content in ("", "~", "null", "Null", "NULL")

    def describe(self) -> str:
        """Returns a description for a message."""
        if isinstance(self.content, dict):
            return "keys and values"
        if isinstance(self.content, list):
            return "a list"
        if self.content:
            return show(self.content)
        return "nothing" if self.style == "plain" else "empty text"


def _copy_of(path: str) -> str:
    """Returns the path of the launcher's copy of a file, or else the path itself."""
    return json.loads(os.environ.get(COPIES, "{}")).get(os.path.abspath(path), path)


def is_readable(path: str) -> bool:
    """Whether a file, or the launcher's copy of it, exists."""
    return os.path.exists(_copy_of(path))


def read_one(path: str, problems: Problems, before: int = 0) -> Node:
    """Returns the keys and values of one YAML file, without its bases.

    Args:
        path: the file.
        problems: receives the mistakes that do not stop reading.
        before: how far the places of this file come before those of other files, in lines.

    Raises:
        ConfigError: the file cannot be read, or holds no keys; everything in `problems`, too.
    """
    name = show_path(path)
    whole = Place(-before, name)
    try:
        with open(_copy_of(path), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        folder, base = os.path.split(path)
        others = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        close = [show_path(os.path.join(folder, other)) for other in difflib.get_close_matches(base, others, n=1)]
        problems.stop(whole, "no such file" + (f"; did you mean {close[0]}?" if close else ""))
    except (OSError, ValueError) as error:  # ValueError: a path that contains NUL
        reason = (isinstance(error, OSError) and error.strerror) or error
        problems.stop(whole, f"cannot be read: {reason}; name a YAML file that you may read")
    if len(data) > MAX_BYTES:
        problems.stop(whole, "is larger than 1 MiB, so this cannot be a configuration")

    def place(line: int) -> Place:
        return Place(line - before, f"{name}:{line}")

    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.stop(place(line), f"byte 0x{data[error.start]:02x} is not UTF-8 text; save the file as UTF-8")
    root = read_yaml(text, place, problems)
    if root is None:
        raise problems.error()
    if not isinstance(root.content, dict):
        problems.stop(root.place, f"must hold sections with keys, not {root.describe()}")
    return root


def read_yaml(text: str, place: Callable[[int], Place], problems: Problems) -> Node | None:
    """Returns the one document in `text`; None if it cannot be read, with the reason noted.

    Duplicate keys and keys that are not names are noted as well. Reading stops at the first anchor or tag and at the limits
    above, so that no text takes long.

    Args:
        text: YAML.
        place: returns the place of a line, counted from 1, of `text`.
        problems: receives the mistakes.
    """
    try:
        return _tree(_Loader(text).document(), place, problems)
    except _RefusedError as error:
        message, line = error.args
        problems.add(place(line + 1), message)
    except yaml.MarkedYAMLError as error:
        problems.add(*_explain(error, place))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problems.add(place(line), f"not valid YAML: character {text[error.position]!r} is not allowed")
    return None


def _explain(error: yaml.MarkedYAMLError, place: Callable[[int], Place]) -> tuple[Place, str]:
    """Returns a syntax error in one line, with a remedy if one is known."""
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    remedy = next((f"; {remedy}" for cause, remedy in _REMEDIES.items() if cause in reason), "")
    start, end = error.context_mark, error.problem_mark
    assert end is not None  # errors of scanning and parsing always have a place
    begun = f" (begun in line {start.line + 1})" if start is not None and start.line < end.line else ""
    return place(end.line + 1), f"not valid YAML: {' '.join(reason.split())[:200]}{begun}{remedy}"


class _RefusedError(Exception):
    """Text that PyYAML can read but no configuration needs; holds a message and the line, counted from 0."""


class _Loader(yaml.SafeLoader):
    """PyYAML's composer of nodes, which checks each node before it is built."""

    depth = num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line
        self.num_values += 1
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _RefusedError("anchors and aliases are not supported; write the value out, or quote & and *", line)
        if event.tag is not None:
            tag = show(event.tag.replace("tag:yaml.org,2002:", "!!"))
            raise _RefusedError(f"the tag {tag} is not supported; write a plain value, or quote !", line)
        if self.depth > MAX_DEPTH:
            raise _RefusedError(f"nested deeper than {MAX_DEPTH} levels", line)
        if self.num_values > MAX_VALUES:
            raise _RefusedError(f"more than {MAX_VALUES:,} values, so this cannot be a configuration", line)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def document(self) -> yaml.Node:
        """Returns the one document of the text."""
        try:
            if not self.check_node():
                raise _RefusedError("holds no settings", self.peek_event().start_mark.line)
            document = self.get_node()
            if self.check_node():
                raise _RefusedError("a second document starts here; keep one of them", self.peek_event().start_mark.line)
        except (ValueError, OverflowError) as error:  # from chr() and int(), to which PyYAML passes any escape or version
            raise _RefusedError(f"not valid YAML: {show(str(error))}", self.line) from error
        assert document is not None
        return document


def _tree(node: yaml.Node, place: Callable[[int], Place], problems: Problems, at: Place | None = None) -> Node:
    """Returns a node of PyYAML as a `Node`; `at` is the place of its key, if it has one."""
    at = at or place(node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return Node(node.value, at, "quoted" if node.style else "plain")
    if isinstance(node, yaml.SequenceNode):
        return Node([_tree(item, place, problems) for item in node.value], at)
    entries: dict[str, Node] = {}
    for key_node, value_node in node.value:
        key = _tree(key_node, place, problems)
        value = _tree(value_node, place, problems, key.place)
        if not isinstance(key.content, str):
            problems.add(key.place, f"a key must be a name, not {key.describe()}")
        elif key.content in entries:
            first = entries[key.content].place
            problems.add(key.place, f"duplicate key '{show(key.content)}', also at {first.text}; keep one")
        else:
            entries[key.content] = value
    return Node(entries, at)
