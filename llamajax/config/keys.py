"""Settings by dotted key: every one there is, the one that was meant, and new values put at several."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llamajax.errors import ConfigError


def item_type(kind: Any) -> Any:
    """The type of a tuple's items; None for other types."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def join(above: str, name: str) -> str:
    """The key of `name` in the section `above`, which is empty at the top."""
    return f"{above}.{name}" if above else name


def keys(section: Any, above: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Every dotted key with its section and field, sections before their own keys; `0` stands for a list's items."""
    for field in dataclasses.fields(section):
        key = join(above, field.name)
        yield key, section, field
        if dataclasses.is_dataclass(field.type):
            yield from keys(field.type, key)
        elif dataclasses.is_dataclass(inner := item_type(field.type)):
            yield from keys(inner, f"{key}.0")


def unknown_key(root: Any, key: str, siblings: Iterable[str]) -> tuple[str, list[str]]:
    """What is told of a key that settings of class `root` do not have, and the keys that it may be a misspelling of, here
    or in another section."""
    above, _, name = key.rpartition(".")
    namesakes: dict[str, list[str]] = {}
    for other, _, _ in keys(root):
        namesakes.setdefault(other.rpartition(".")[2], []).append(other)
    if name.lower() in namesakes:
        meant = namesakes[name.lower()]
    elif close := difflib.get_close_matches(name.lower(), siblings, n=1):
        meant = [join(above, close[0])]
    elif close := difflib.get_close_matches(name.lower(), namesakes, n=1):
        meant = namesakes[close[0]]
    else:
        return f"{above or 'a configuration'} has {', '.join(siblings)}", []
    return "did you mean " + " or ".join(f"'{other}'" for other in meant) + "?", meant


def with_values(part: Any, changes: Mapping[str, Any], root: type, above: str = "") -> Any:
    """What is at the key `above` of settings of class `root`, a section or a list, with values put at keys below it.

    Raises:
        ConfigError: there is no such key, or a section with its new values breaks a rule: `key: rule; remedy` lines.
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
