"""Converts the text of one value to a number, a truth value or text, or refuses it; nothing is guessed."""

import difflib
import math
import re
import typing
from typing import Any, Literal

import yaml

from llamajax.config.yaml_text import Node
from llamajax.errors import ConfigError, show

_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_WHOLE = r"(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)"
_INTEGER = re.compile(rf"[-+]?{_WHOLE}")
_NUMBER = re.compile(rf"[-+]?({_WHOLE}(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_YAML_1_1 = yaml.resolver.Resolver()


def read_scalar(kind: Any, node: Node) -> Any:
    """Returns the value of type `kind`, which is bool, int, float, str or a Literal of texts.

    Raises:
        ConfigError: the value has another type; the message is the rule alone.
    """
    choices = typing.get_args(kind)
    rule = f"must be {_TYPE_NAMES.get(kind) or 'one of ' + ', '.join(choices)}"
    text = node.content
    if not isinstance(text, str) or node.is_null():
        raise ConfigError(f"{rule}, not {node.describe()}")
    if typing.get_origin(kind) is Literal:
        if text not in choices:
            close = difflib.get_close_matches(text.lower(), choices, n=1)
            raise ConfigError(f"{rule}, not {node.describe()}" + (f"; did you mean {close[0]}?" if close else ""))
        return text
    if kind is str:
        if node.style == "plain" and (reading := other_reading(text)):
            raise ConfigError(f'{rule}, but YAML reads {show(text)} as {reading}; write "{show(text)}"')
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{rule}, but {show(text)} contains an invalid character")
        return text
    if node.style == "quoted" and (_NUMBER.fullmatch(text) or text in ("true", "false")):
        raise ConfigError(f"{rule}, but quotes make {show(text)} text; remove them")
    if kind is bool and text not in ("true", "false"):
        raise ConfigError(f"{rule}, not {show(text)}")
    return text == "true" if kind is bool else _integer(rule, text) if kind is int else _number(rule, text)


def _integer(rule: str, text: str) -> int:
    if _INTEGER.fullmatch(text):
        # int() is quadratic and refuses thousands of digits.
        if len(text) > 30 or abs(int(text)) >= 2**63:
            raise ConfigError(f"{rule} below 2**63, not {show(text)}")
        return int(text)
    remedy = ""
    if re.fullmatch(r"[-+]?0[0-9]{1,18}", text):
        remedy = f"; a leading zero means octal to some, write {int(text)}"
    elif _NUMBER.fullmatch(text) and abs(number := float(text)) < 2**63 and number == int(number):
        remedy = f"; write {int(number)}"
    raise ConfigError(f"{rule}, not {show(text)}{remedy}")


def _number(rule: str, text: str) -> float:
    if not _NUMBER.fullmatch(text) or math.isinf(number := float(text)):
        raise ConfigError(f"{rule} (finite, such as 0.1 or 3e-4), not {show(text)}")
    return number


def other_reading(text: str) -> str | None:
    """Returns the type, such as `float`, that some YAML reader gives plain text; None: all readers see text."""
    tag = _YAML_1_1.resolve(yaml.ScalarNode, text, (True, False)).rpartition(":")[2]
    if tag == "str":
        return "float" if _NUMBER.fullmatch(text) else None
    return tag
