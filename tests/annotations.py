"""Checks the shapes and dtypes that the array rooms declare; pyproject.toml names the rooms to jaxtyping's pytest plugin.

Only these: all other types are pyright's matter, and where it takes a NumPy scalar for a number, a checker would not.
"""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, checked at each call: a letter of a shape means one size within a call.

    Constructors are left alone: jax makes its pytrees also of what is no array, such as shapes and partition specs.
    """
    hints = {name: hint if _has_shape(hint) else Any for name, hint in function.__annotations__.items()}
    if function.__name__ == "__init__" or not any(map(_has_shape, hints.values())):
        return function
    function.__annotations__ = hints
    return beartype(function)


def _has_shape(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_has_shape, get_args(hint)))
