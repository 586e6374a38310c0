"""Settings by dotted key: the list of all keys, suggestions for unknown keys, and new values for several keys."""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llamajax.errors import ConfigError


def item_type(kind: Any) -> Any:
    """Returns the type of a tuple's items, also where a tuple is one of several types; None for other types."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((item for item in map(item_type, typing.get_args(kind)) if item), None)
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def written_kind(union: Any, value: Any) -> Any:
    """Returns the one of several types that a value in a YAML file is written as: a list, a number, or else a text."""
    kinds = [kind for kind in typing.get_args(union) if kind is not types.NoneType]
    if isinstance(value, list):
        return next((kind for kind in kinds if item_type(kind)), kinds[0])
    is_number = isinstance(value, str) and re.match(r"[-+.]?[0-9]", value)
    return next((kind for kind in kinds if (kind in (int, float)) == bool(is_number) and not item_type(kind)), kinds[0])


def join(above: str, name: str) -> str:
    """Returns the key of `name` in the section `above`, which is empty at the top."""
    return f"{above}.{name}" if above else name


def keys(section: Any, above: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Yields every dotted key with its section and field, sections before their own keys; `0` marks the items of a list."""
    for field in dataclasses.fields(section):
        key = join(above, field.name)
        yield key, section, field
        if dataclasses.is_dataclass(field.type):
            yield from keys(field.type, key)
        elif dataclasses.is_dataclass(inner := item_type(field.type)):
            yield from keys(inner, f"{key}.0")


REMOVED = {
    "checkpoint.allow_config_change": "it is now a list of the settings that may change:"
    " checkpoint.allow_changes: [train.num_steps]",
}
"""Keys of earlier versions, each with its remedy. What a run stored is read without them; anywhere else they are refused."""
_REMEDIES = REMOVED | {"base": "a file names its base: write base: FILE at the top of one"}
"""Remedies for keys that people write and that are not settings."""


def general(key: str) -> str:
    """Returns a key with `0` for every number in it, as `keys` writes the items of lists."""
    return re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "0", key)


def without_removed(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Returns nested settings without the keys in `REMOVED`."""
    return {
        name: without_removed(value, join(above, name)) if isinstance(value, dict) else value
        for name, value in tree.items()
        if join(above, name) not in REMOVED
    }


_MOST_TOLD = 24
"""Keys of a section that a remedy tells."""


def unknown_key(root: Any, key: str, siblings: Iterable[str]) -> tuple[str, list[str]]:
    """Returns a remedy for a key that settings of class `root` do not have, and the keys that were probably meant.

    Keys of the same section come first, then those of the same name in other sections, then similar ones. Keys of a list's
    items are proposed only in the section that has the list.
    """
    if key in _REMEDIES:
        return _REMEDIES[key], []
    above, _, name = key.rpartition(".")
    name, siblings = name.lower(), list(siblings)
    namesakes: dict[str, list[str]] = {}
    for other, _, _ in keys(root):
        section, _, last = other.rpartition(".")
        of_list = section.partition(".0")[0]
        if of_list == section or above == of_list.rpartition(".")[0] or f"{above}.".startswith(f"{of_list}."):
            namesakes.setdefault(last, []).append(other)
    alike = [other for other in siblings if other == name or name in other.split("_") or (name and other.startswith(name))]
    if 0 < len(alike) <= 3:
        meant = [join(above, other) for other in alike]
    elif close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.75):
        meant = [join(above, close[0])]
    elif name in namesakes:
        meant = namesakes[name]
    elif close := difflib.get_close_matches(name, siblings, n=1):
        meant = [join(above, close[0])]
    elif close := difflib.get_close_matches(name, namesakes, n=1, cutoff=0.75):
        meant = namesakes[close[0]]
    else:
        more = f", and {len(siblings) - _MOST_TOLD} others" if len(siblings) > _MOST_TOLD else ""
        return f"{above or 'a configuration'} has {', '.join(siblings[:_MOST_TOLD])}{more}", []
    return "did you mean " + " or ".join(f"'{other}'" for other in meant) + "?", meant


def remedy_for(root: Any, key: str) -> str | None:
    """Returns the remedy for a key that settings of class `root` do not have; None: they have it."""
    kind, above = root, ""
    for name in key.split("."):
        if dataclasses.is_dataclass(kind):
            fields = {field.name: field.type for field in dataclasses.fields(kind)}
            if name not in fields:
                return unknown_key(root, join(above, name), fields)[0]
            kind = fields[name]
        elif (kind := item_type(kind)) is None or not name.isdecimal():
            return f"{above} has no such key"
        above = join(above, name)
    return None


def with_values(part: Any, changes: Mapping[str, Any], root: type, above: str = "") -> Any:
    """Returns a section or a list, which has the key `above` in settings of class `root`, with new values at keys below it.

    Raises:
        ConfigError: no such key exists, or a section with its new values breaks a rule: `key: rule; remedy` lines.
    """
    is_section = dataclasses.is_dataclass(part)
    items = part if isinstance(part, tuple) else ()
    held = dict(vars(part)) if is_section else {str(index): item for index, item in enumerate(items)}
    below: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        if name not in held:
            known = f"{above} has {', '.join(held) or 'no keys'}"
            remedy = unknown_key(root, join(above, name), held)[0] if is_section else known
            raise ConfigError(f"unknown key '{join(above, name)}'; {remedy}")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            held[name] = value
    held |= {name: with_values(held[name], several, root, join(above, name)) for name, several in below.items()}
    try:
        return type(part)(**held) if is_section else tuple(held.values())
    except ConfigError as error:
        raise ConfigError("\n".join(join(above, rule) for rule in str(error).splitlines())) from error
