"""Where the text of a record is: under a key of its own, or under `a.b`, the key b of what the key a holds."""

from collections.abc import Mapping, Sequence

import pyarrow


class NoSuchKeyError(ValueError):
    """A record, or a table, has no such key; it says which part is missing, and what is there instead."""


def value_at(record: Mapping[str, object], key: str) -> object:
    """The value of the key in a JSON object; one of the whole name goes before one inside others.

    Raises:
        NoSuchKeyError: there is none.
    """
    if key in record:
        return record[key]
    value: object = record
    names = key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(value, dict | Mapping):
            kind = "null" if value is None else type(value).__name__
            raise NoSuchKeyError(_no_holder(names, depth, f"{kind} and no JSON object"))
        if name not in value:
            raise NoSuchKeyError(_missing(names, depth, list(value)))
        value = value[name]
    return value


def column_at(schema: pyarrow.Schema, key: str) -> tuple[tuple[str, ...], pyarrow.DataType]:
    """The names of the column and of the fields inside it that lead to the key, and what is there.

    Raises:
        NoSuchKeyError: there is none, or two of a name.
    """
    names = [key] if key in schema.names else key.split(".")
    fields = list(schema)
    kind: pyarrow.DataType = pyarrow.struct([])
    for depth, name in enumerate(names):
        if depth and not pyarrow.types.is_struct(kind):
            raise NoSuchKeyError(_no_holder(names, depth, f"{kind} and no struct"))
        if depth:
            fields = list(kind)
        of_name = [field for field in fields if field.name == name]
        if not of_name:
            raise NoSuchKeyError(_missing(names, depth, [field.name for field in fields]))
        if len(of_name) > 1:
            raise NoSuchKeyError(f"has {len(of_name)} columns of the name {name!r}")
        kind = of_name[0].type
    return tuple(names), kind


def _missing(names: Sequence[str], depth: int, there: Sequence[str]) -> str:
    known = ", ".join(repr(name) for name in there[:8]) or "nothing"
    where = f" in {'.'.join(names[:depth])!r}" if depth else f" of {'.'.join(names)!r}" if len(names) > 1 else ""
    return f"has no {names[depth]!r}{where}, only {known}"


def _no_holder(names: Sequence[str], depth: int, instead: str) -> str:
    return f"has no {names[depth]!r} in {'.'.join(names[:depth])!r}, which is {instead}"
