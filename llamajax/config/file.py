"""Turns a YAML file and dotted overrides into a `Config`, or names every mistake in them; and writes settings as YAML.

All of it works for any `Settings`, including those of the other entry points.
"""

import dataclasses
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

import yaml

from llamajax import disk
from llamajax.config.bases import read_file
from llamajax.config.keys import item_type, join, keys, unknown_key, written_kind
from llamajax.config.left_out import complete
from llamajax.config.rules import Settings
from llamajax.config.run import Config
from llamajax.config.scalars import other_reading, read_scalar
from llamajax.config.yaml_text import MAX_BYTES, Node, Place, Problems, read_yaml
from llamajax.errors import ConfigError, show

Root = TypeVar("Root", bound=Settings)

_INVALID: Any = object()
"""Placeholder for a value that cannot be built; the reason is noted."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration in a YAML file, with overrides such as `"train.num_steps=10"`.

    Settings of the model that are left out come from the weights that `init_from` names; of a model on the Hugging Face Hub,
    only the file that describes it is fetched. Other files that the configuration names need not exist, so that another
    machine's configuration can be read.

    Args:
        path: the file, or the name of a shipped configuration, such as `quickstart`.
        overrides: settings that replace those of the file, as `key=value` texts.

    Raises:
        ConfigError: one `file:line: key: rule; remedy` line for every mistake.
        DiskError: the disk with these weights fails, which may pass.
    """
    pairs = [(key, text if equals else None) for key, equals, text in (item.partition("=") for item in overrides)]
    return read_config(Config, os.fspath(path), pairs, Problems())


def read_config(
    root_class: type[Root],
    path: str | None,
    overrides: Sequence[tuple[str, str | None]],
    problems: Problems,
    check: Callable[[Root], list[str]] | None = None,
) -> Root:
    """Returns the settings in `path`, changed by (key, text) overrides; the text None is a missing value.

    Args:
        root_class: the class of the settings.
        path: the YAML file, or the name of a shipped configuration; None: only overrides and defaults.
        overrides: in the order in which they were given.
        problems: mistakes found before.
        check: returns what else is wrong with settings that break no rule, one `key: rule; remedy` line each.

    Raises:
        ConfigError: everything in `problems`, and what is found here.
        DiskError: see `complete`.
    """
    root = read_file(path, problems) if path is not None else Node({}, Place(0, "command line"))
    builder = _Builder(problems, root_class)
    repeatable = {key for key, _, field in keys(root_class) if field.metadata.get("repeatable")}
    for index, (key, text) in enumerate(overrides):
        place = Place(MAX_BYTES + 1 + index, show(f"--{key}"))
        undone = [other for other, _ in overrides[:index] if f"{other}.".startswith(f"{key}.") and key not in repeatable]
        if key in undone:
            problems.add(place, "given twice; keep one")
        elif undone:
            problems.add(place, f"replaces --{show(undone[0])}, given before it; leave one of them out")
        else:
            builder.override(root, key, text, place)
    without_weights = complete(root, path, problems) if root_class is Config else None
    config = builder.section(root_class, root, "")
    builder.add_missing(without_weights)
    problems.raise_if_any()
    for rule in config.problems() + (check(config) if check else []):
        key, _, message = rule.partition(": ")
        problems.add(_place_of(key, root), message, key)
    problems.raise_if_any()
    return config


def read_value(config: Config, key: str, text: str) -> Any:
    """Returns the value that the command line `--key text` would set in `config`, for `Config.changed`.

    Raises:
        ConfigError: no such key exists, or its type has no such value: one `--key: rule; remedy` line each.
    """
    problems, place = Problems(), Place(0, show(f"--{key}"))
    builder = _Builder(problems, Config)
    found = builder.override(_skeleton(config_to_dict(config), place), key, text, place)
    value = builder.value(*found, key) if found else None
    builder.add_missing()
    problems.raise_if_any()
    return value


def _skeleton(value: Any, place: Place) -> Node:
    """Returns the sections, lists and keys of `config_to_dict`, without the values."""
    if isinstance(value, dict):
        return Node({name: _skeleton(inner, place) for name, inner in value.items()}, place)
    return Node([_skeleton(item, place) for item in value] if isinstance(value, list) else "", place)


def config_to_dict(config: Settings) -> dict[str, Any]:
    """Returns every field as plain dicts, lists, numbers and text, ready for JSON and YAML."""
    return dataclasses.asdict(
        config, dict_factory=lambda items: {name: list(x) if isinstance(x, tuple) else x for name, x in items}
    )


def settings_of(root_class: type[Root], tree: Any) -> Root:
    """Returns the settings from which `config_to_dict` made `tree`; the file that holds it may come from another program.

    Raises:
        ConfigError: the tree holds something else, or breaks a rule: a line for every mistake.
    """
    problems = Problems()
    builder = _Builder(problems, root_class)
    node = read_yaml(yaml.dump(tree, Dumper=_Dumper), lambda line: Place(0, "stored"), problems)
    settings = builder.section(root_class, node, "") if node is not None else None
    builder.add_missing()
    problems.raise_if_any()
    assert isinstance(settings, root_class)
    return settings


def dotted(tree: Any, above: str = "") -> dict[str, Any]:
    """Returns everything in nested dicts and lists by its dotted key, such as `mesh.fsdp` or `data.sources.0.kind`."""
    if not isinstance(tree, dict | list):
        return {above: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    inner = (dotted(value, join(above, str(key))) for key, value in items)
    return {key: value for part in inner for key, value in part.items()}


def write_config(config: Settings, path: Path) -> None:
    """Writes the configuration to a file, atomically; the file can itself be run."""
    text = dump_config(config)
    disk.write_atomically(path, text.encode())


def dump_config(config: Settings) -> str:
    """Returns every setting as YAML, which reads back to an equal configuration."""
    return yaml.dump(config_to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """YAML writer that also quotes text which YAML readers disagree about, such as `3e-4`."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if other_reading(data) else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def _place_of(key: str, root: Node) -> Place:
    """Returns the place where a dotted key is set, or else that of the innermost section around it."""
    node = root
    for name in key.split("."):
        if isinstance(node.content, dict) and name in node.content:
            node = node.content[name]
        elif isinstance(node.content, list) and name.isdecimal():
            node = node.content[int(name)]
        else:
            break
    return node.place


class _Builder:
    """Builds the configuration from a tree, and notes mistakes in `problems`."""

    def __init__(self, problems: Problems, root_class: type) -> None:
        self.problems = problems
        self.root_class = root_class
        self.missing: dict[str, Place] = {}
        self.meant: set[str] = set()
        """Keys that were probably meant by an unknown key."""

    def override(self, root: Node, key: str, text: str | None, place: Place) -> tuple[Any, Node] | None:
        """Puts `text` at a dotted key of the tree; returns its type and node, or None if the key or the text is wrong."""
        node, kind, above, repeatable = root, self.root_class, "", False
        for name in key.split("."):
            if dataclasses.is_dataclass(kind):
                fields = {field.name: field for field in dataclasses.fields(kind)}
                if name not in fields:
                    return self.add_unknown(place, join(above, name), fields)
                if node.is_null():  # its lines are commented out
                    node.content = {}
                if not isinstance(node.content, dict):
                    return None  # not a section in the file either; `section` reports its line
                kind, repeatable = fields[name].type, "repeatable" in fields[name].metadata
                node = node.content.setdefault(name, Node({} if dataclasses.is_dataclass(kind) else "", place))
            elif isinstance(node.content, list) and re.fullmatch("[0-9]{1,4}", name) and int(name) < len(node.content):
                node, kind = node.content[int(name)], item_type(kind)
            else:
                inner = f"{len(node.content)} item(s), counted from 0" if isinstance(node.content, list) else "no keys"
                return self.problems.add(place, f"no such key; {above} has {inner}")
            above = join(above, name)
        if text is None and kind is bool:
            text = "true"
        if text is None:
            self.problems.add(place, f"needs a value; write --{key} VALUE or --{key}=VALUE")
            if repeatable:
                node.content = []
            return None
        value = Node(text, place, "argument")
        if repeatable:
            before = node.content if isinstance(node.content, list) and node.place.text == place.text else []
            value = Node([*before, Node(text, place, "quoted")], place)
        elif item_type(kind) or dataclasses.is_dataclass(kind):
            value = read_yaml(text, lambda line: place, self.problems) or node
        node.content, node.place, node.style = value.content, place, value.style
        return kind, node

    def section(self, cls: Any, node: Node, key: str) -> Any:
        """Returns a dataclass from a mapping; `_INVALID` if it cannot be built."""
        if not isinstance(node.content, dict):
            return self._invalid(node.place, key, f"must be a section with keys of its own, not {node.describe()}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name, child in node.content.items():
            if name not in fields:
                self.add_unknown(child.place, join(key, name), fields)
        values = {}
        for name, field in fields.items():
            if name in node.content:
                values[name] = self.value(field.type, node.content[name], join(key, name))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self.missing[join(key, name)] = node.place
                values[name] = _INVALID
        if any(value is _INVALID for value in values.values()):
            return _INVALID
        try:
            return cls(**values)
        except ConfigError as error:
            for rule in str(error).splitlines():
                name, _, message = rule.partition(": ")
                self._invalid(_place_of(name, node), join(key, name), message)
            return _INVALID

    def value(self, kind: Any, node: Node, key: str, otherwise: str = "") -> Any:
        """Returns a value of a field's type; `_INVALID` if it cannot be built, for which there is a remedy `otherwise`."""
        if typing.get_origin(kind) is Annotated:  # the section checks its bounds
            kind = typing.get_args(kind)[0]
        if typing.get_origin(kind) in (Union, types.UnionType):
            if node.is_null() and types.NoneType in typing.get_args(kind):
                return None
            written, several = written_kind(kind, node.content), typing.get_args(item_type(kind))
            return self.value(written, node, key, f"; or write a list of {', '.join(several)}" if several else "")
        if dataclasses.is_dataclass(kind):
            return self.section(kind, node, key)
        if inner := item_type(kind):
            if not isinstance(node.content, list):
                remedy = f"; write [{show(node.content)}]" if isinstance(node.content, str) and node.content else ""
                return self._invalid(node.place, key, f"must be a list, not {node.describe()}{remedy}")
            items = [self.value(inner, item, join(key, str(index))) for index, item in enumerate(node.content)]
            return _INVALID if any(item is _INVALID for item in items) else tuple(items)
        try:
            return read_scalar(kind, node)
        except ConfigError as error:
            return self._invalid(node.place, key, f"{error}{otherwise}")

    def _invalid(self, place: Place, key: str, message: str) -> Any:
        self.problems.add(place, message, key)
        return _INVALID

    def add_unknown(self, place: Place, key: str, siblings: Iterable[str]) -> None:
        """Notes a key that does not exist, with the key that was probably meant, here or in another section."""
        remedy, meant = unknown_key(self.root_class, key, siblings)
        self.meant.update(meant)
        self.problems.add(place, f"unknown key '{show(key)}'; {remedy}")

    def add_missing(self, without_weights: tuple[Place, str] | None = None) -> None:
        """Notes the required keys that are missing; a misspelled one has its line already.

        If `inherit` has found no weights, its message replaces those for all missing settings of the model.
        """
        missing = {key: place for key, place in self.missing.items() if key not in self.meant}
        if without_weights is not None:
            others = {key: place for key, place in missing.items() if not key.startswith("model.")}
            if len(others) < len(missing):
                self.problems.add(*without_weights, "init_from")
            missing = others
        for key, place in missing.items():
            self.problems.add(place, "required, but missing", key)
