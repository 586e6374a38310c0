"""The rules that settings obey: a bound is part of its field's type, a rule between settings belongs to their section."""

import functools
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from llamajax.errors import ConfigError


@dataclass(frozen=True)
class Bound:
    """Says in the type of a field which values it takes."""

    holds: Callable[[Any], bool]
    """Whether a value that is not None is one of them."""
    rule: str
    """What is told of another, behind its key and itself."""


PositiveInt = Annotated[int, Bound(lambda value: value > 0, "must be positive")]
PositiveFloat = Annotated[float, Bound(lambda value: value > 0, "must be positive")]
PositiveIntOrUnset = Annotated[int | None, Bound(lambda value: value > 0, "must be positive or unset")]
PositiveFloatOrUnset = Annotated[float | None, Bound(lambda value: value > 0, "must be positive or unset")]
NonNegativeInt = Annotated[int, Bound(lambda value: value >= 0, "must not be negative")]
NonNegativeFloat = Annotated[float, Bound(lambda value: value >= 0, "must not be negative")]
AboveOne = Annotated[int, Bound(lambda value: value > 1, "must be above 1")]
Share = Annotated[float, Bound(lambda value: 0 <= value <= 1, "must be between 0 and 1")]
ShareBelowOne = Annotated[float, Bound(lambda value: 0 <= value < 1, "must be at least 0 and below 1")]
Seed = Annotated[int, Bound(lambda value: 0 <= value < 2**32, "must be at least 0 and below 2**32")]


@functools.cache
def _bounds(section: type) -> tuple[tuple[str, tuple[Bound, ...]], ...]:
    """The bounds of every field, as its type or its type when it is set says them."""
    kinds = typing.get_type_hints(section, include_extras=True)
    return tuple(
        (name, tuple(bound for part in (kind, *typing.get_args(kind)) for bound in getattr(part, "__metadata__", ())))
        for name, kind in kinds.items()
    )


def out_of_bounds(section: Any) -> Iterator[str]:
    """One `key: rule` line for every field of a dataclass that breaks a bound of its type, the first that it breaks."""
    for name, bounds in _bounds(type(section)):
        value = getattr(section, name)
        broken = next((bound.rule for bound in bounds if value is not None and not bound.holds(value)), None)
        if broken:
            yield f"{name}: {value} {broken}"


class Section:
    """Base of the sections: dataclasses that cannot be built when a bound or a rule is broken."""

    def broken_rules(self) -> Iterator[str]:
        """One `key: rule; remedy` line for every rule between settings that does not hold; bounds may not hold either."""
        yield from ()

    def problems(self) -> list[str]:
        """What is wrong, bounds first: one `key: rule; remedy` line each."""
        return [*out_of_bounds(self), *self.broken_rules()]

    def __post_init__(self) -> None:
        """Raises `ConfigError` with all problems."""
        if problems := self.problems():
            raise ConfigError("\n".join(problems))
