"""Rules for settings: a bound is part of its field's type, a rule between settings belongs to their section."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from llamajax.errors import ConfigError, without_passwords


@dataclass(frozen=True)
class Bound:
    """Allowed values of a field, as part of its type: None, and those for which `holds` is true; `rule` describes them."""

    holds: Callable[[Any], bool]
    rule: str


PositiveInt = Annotated[int, Bound(lambda value: value > 0, "must be positive")]
PositiveFloat = Annotated[float, Bound(lambda value: value > 0, "must be positive")]
PositiveIntOrUnset = Annotated[int | None, Bound(lambda value: value > 0, "must be positive or unset")]
PositiveFloatOrUnset = Annotated[float | None, Bound(lambda value: value > 0, "must be positive or unset")]
NonNegativeInt = Annotated[int, Bound(lambda value: value >= 0, "must not be negative")]
NonNegativeFloat = Annotated[float, Bound(lambda value: value >= 0, "must not be negative")]
NonNegativeFloatOrUnset = Annotated[float | None, Bound(lambda value: value >= 0, "must not be negative, or unset")]
AboveOne = Annotated[int, Bound(lambda value: value > 1, "must be above 1")]
Share = Annotated[float, Bound(lambda value: 0 <= value <= 1, "must be between 0 and 1")]
PositiveShare = Annotated[float, Bound(lambda value: 0 < value <= 1, "must be above 0 and at most 1")]
ShareBelowOne = Annotated[float, Bound(lambda value: 0 <= value < 1, "must be at least 0 and below 1")]
Seed = Annotated[int, Bound(lambda value: 0 <= value < 2**32, "must be at least 0 and below 2**32")]


@functools.cache
def _bounds(settings: type["Settings"]) -> dict[str, list[Bound]]:
    """Returns the bounds of every field, from its type or from a part of it, as in `PositiveInt | None`."""
    kinds = {field.name: (field.type, *typing.get_args(field.type)) for field in dataclasses.fields(settings)}
    return {name: [bound for kind in some for bound in getattr(kind, "__metadata__", ())] for name, some in kinds.items()}


class Settings:
    """Base class of all settings, which are frozen dataclasses."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def broken_rules(self) -> Iterator[str]:
        """Yields one `key: rule; remedy` line for every broken rule between settings; bounds may be broken too."""
        yield from ()

    def problems(self) -> list[str]:
        """Returns one `key: rule; remedy` line for every setting out of bounds and every broken rule."""
        problems = []
        for name, bounds in _bounds(type(self)).items():
            value = getattr(self, name)
            broken = [bound.rule for bound in bounds if value is not None and not bound.holds(value)]
            problems += [f"{name}: {value} {rule}" for rule in broken[:1]]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            texts = [text for text in (value if isinstance(value, tuple) else [value]) if isinstance(text, str)]
            if any(without_passwords(text) != text for text in texts):
                problems.append(f"{field.name}: holds a password, and settings are kept with every checkpoint; remove it")
        return [*problems, *self.broken_rules()]


class Section(Settings):
    """Settings that cannot be built while they have a problem."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` with all problems."""
        if problems := self.problems():
            raise ConfigError("\n".join(problems))
