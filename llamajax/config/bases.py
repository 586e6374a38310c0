"""A configuration file with the files that its `base` names, merged into one tree that keeps each file's places."""

import os
from collections.abc import Sequence
from typing import NoReturn

from llamajax.config import shipped
from llamajax.config.keys import REMOVED
from llamajax.config.yaml_text import MAX_BYTES, Node, Place, Problems, read_one
from llamajax.errors import show_path

MAX_FILES = 50


def read_file(path: str, problems: Problems) -> Node:
    """Returns the keys and values of a YAML file, merged over the files that its `base` names.

    Sections merge key by key; lists and single values replace. Of several bases, later ones win.

    Args:
        path: the file, or the name of a shipped configuration.
        problems: receives the mistakes that do not stop reading.

    Raises:
        ConfigError: the file or a base cannot be read, or bases form a cycle; everything in `problems`, too.
    """
    path = _found(path, problems)
    root = _Reader(problems).read(path, ())
    if _is_stored(path):
        for key in REMOVED:
            _drop(root, key.split("."))
    return root


def files_of(path: str) -> list[str]:
    """Returns the paths of all files that `read_file` reads for `path`, the file itself first.

    Raises:
        ConfigError: see `read_file`.
    """
    problems = Problems()
    reader = _Reader(problems)
    reader.read(_found(path, problems), ())
    return reader.files


def _found(path: str, problems: Problems) -> str:
    if (found := shipped.find_config(path)) is None:
        problems.stop(Place(0, show_path(path)), shipped.no_config(path))
    return found


def _is_stored(path: str) -> bool:
    """Whether a file is the config.yaml that a run, perhaps of an earlier version, wrote beside its checkpoints."""
    folder, name = os.path.split(path)
    return name == "config.yaml" and os.path.isdir(os.path.join(folder, "checkpoints"))


def _drop(node: Node | None, key: Sequence[str]) -> None:
    if node is not None and isinstance(node.content, dict):
        if len(key) == 1:
            node.content.pop(key[0], None)
        else:
            _drop(node.content.get(key[0]), key[1:])


class _Reader:
    """Reads a file and its bases, and counts the files."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.files: list[str] = []

    def read(self, path: str, above: tuple[str, ...]) -> Node:
        """Returns the merged tree of a file that the files `above` lead to, the outermost first."""
        before = len(self.files) * MAX_BYTES  # places of bases come before those of the file that names them
        self.files.append(path)
        own = read_one(path, self.problems, before)
        assert isinstance(own.content, dict)
        named = own.content.pop("base", None)
        if named is None:
            return own
        below: Node | None = None
        for base in self._bases(named):
            found = shipped.find_base(str(base.content), os.path.dirname(path))
            if found is None:
                self._stop(base, shipped.no_base(str(base.content), os.path.dirname(path)))
            chain = (*above, path, found)
            if os.path.realpath(found) in map(os.path.realpath, chain[:-1]):
                self._stop(base, f"bases form a cycle: {' -> '.join(map(show_path, chain))}; remove one of them")
            if len(self.files) == MAX_FILES:
                self._stop(base, f"more than {MAX_FILES} files; merge some of them")
            node = self.read(found, chain[:-1])
            below = node if below is None else merged(below, node)
        return own if below is None else merged(below, own)

    def _bases(self, named: Node) -> list[Node]:
        items = named.content if isinstance(named.content, list) else [named]
        for item in items:
            if not isinstance(item.content, str) or item.is_null() or not item.content:
                self._stop(item, f"must be a file or a list of files, not {item.describe()}")
        return items

    def _stop(self, node: Node, message: str) -> NoReturn:
        self.problems.stop(node.place, f"base: {message}")


def merged(below: Node, above: Node) -> Node:
    """Returns `above` over `below`; a section with no lines of its own leaves the one below as it is."""
    if not isinstance(below.content, dict) or not (above.is_null() or isinstance(above.content, dict)):
        return above
    content = dict(below.content)
    for name, node in (above.content if isinstance(above.content, dict) else {}).items():
        content[name] = merged(content[name], node) if name in content else node
    return Node(content, above.place)
