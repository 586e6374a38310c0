"""Reward functions of the user: read from a Python file, which runs as part of llamajax, and called as TRL calls them.

    def correct(completions, answer, **others):
        return [float(text.strip() == right) for text, right in zip(completions, answer)]

    REWARDS = [correct]                    # or {correct: 1.0, short: 0.2}, with weights

A function takes any of `prompts`, `completions`, `completion_ids` and the fields of the records, by name, as lists with an
entry per completion; it returns as many numbers, or None for a completion that it says nothing about. A prompt of messages
and its completion are lists of messages, other ones are texts. A function may be `async`. The lists are its own to change.
"""

import asyncio
import copy
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from llamajax.errors import ConfigError, DataError, UserError, show

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""A function of the user; see the module."""
_REMEDY = "end the file with REWARDS = [FUNCTION], or {FUNCTION: WEIGHT}"


class Scored(NamedTuple):
    """Completions of one call of the reward functions, an entry each."""

    prompts: list[Any]
    """The prompts, as texts or messages."""
    completions: list[Any]
    """The completions, as texts or messages."""
    completion_ids: list[list[int]]
    """Their tokens, the end token included."""
    records: list[Mapping[str, Any]]
    """The records with the prompts."""


@dataclass(frozen=True)
class Rewards:
    """Reward functions and their weights."""

    functions: Mapping[RewardFunction, float]
    source: str
    """Where they are from, for messages."""

    @property
    def names(self) -> list[str]:
        """Names of the functions, in order."""
        return [_name(function) for function in self.functions]

    @property
    def described(self) -> str:
        """The functions and their weights in a few words."""
        weights = zip(self.names, self.functions.values(), strict=True)
        return ", ".join(name if weight == 1 else f"{weight:g} x {name}" for name, weight in weights)

    def of(self, scored: Scored) -> Float32[np.ndarray, "N F"]:
        """Returns the reward of each completion by each function; NaN where the function returns None.

        Raises:
            DataError: a function fails, or returns something else.
        """
        return np.stack([self._of(function, scored) for function in self.functions], axis=1)

    def total(self, of_functions: Float32[np.ndarray, "N F"]) -> Float32[np.ndarray, "N"]:
        """Returns the weighted sum of the functions' rewards, without those that return None."""
        weights = np.array(list(self.functions.values()), np.float32)
        return np.nan_to_num(of_functions * weights).sum(axis=1, dtype=np.float32)

    def _of(self, function: RewardFunction, scored: Scored) -> Float32[np.ndarray, "N"]:
        wanted, scored = len(scored.completions), copy.deepcopy(scored)
        given: dict[str, list[Any]] = {name: values for name, values in scored._asdict().items() if name != "records"}
        for column in dict.fromkeys(key for record in scored.records for key in record):
            given.setdefault(column, [record.get(column) for record in scored.records])
        parameters, where = inspect.signature(function).parameters.values(), f"{self.source}: {_name(function)}"
        for parameter in parameters:
            is_asked = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_asked and parameter.default is parameter.empty and parameter.name not in given:
                raise DataError(
                    f"{where}: asks for {parameter.name!r}, which no record has; records have"
                    f" {', '.join(sorted(given))}: rename the parameter, or give it a default"
                )
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
            given = {parameter.name: given[parameter.name] for parameter in parameters if parameter.name in given}
        try:
            found = function(**given)
            found = _awaited(found) if inspect.isawaitable(found) else found
        except (Exception, SystemExit) as error:  # a function that calls `exit` would end the run without a word
            raise DataError(f"{_place(error, self.source)}: {_name(function)} failed: {_told(error)}; correct it") from error
        if not isinstance(found, Sequence | np.ndarray):
            raise DataError(f"{where}: returned {show(repr(found))}, which is no list; return a list of numbers")
        if len(found) != wanted:
            raise DataError(f"{where}: returned {len(found)} rewards for {wanted} completions; return one for each")
        for value in found:
            if value is not None and not (_is_number(value) and math.isfinite(value)):
                raise DataError(f"{where}: returned {show(repr(value))}, which is no finite number; return numbers, or None")
        return np.array([math.nan if value is None else float(value) for value in found], np.float32)


def load_rewards(path: Path) -> Rewards:
    """Runs a Python file and returns the reward functions in its `REWARDS`.

    Raises:
        ConfigError: it cannot be read, fails, or has no reward functions.
    """
    where = f"--rewards {path}"
    if not path.is_file():
        raise ConfigError(f"{where}: there is no such file; name a Python file with reward functions")
    spec = importlib.util.spec_from_file_location("llamajax_rewards", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{where}: is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as for any import: dataclasses and pickle look there
    sys.path.insert(0, str(path.resolve().parent))  # the file may import its neighbours, as a script may
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{_place(error, str(path))}: {_told(error)}; correct the file") from error
    finally:
        sys.path.pop(0)
    return rewards_of(getattr(module, "REWARDS", None), str(path))


def rewards_of(given: Any, source: str = "rewards") -> Rewards:
    """Returns reward functions, given as one, as several, or as a mapping to weights.

    Raises:
        ConfigError: they are no functions, or two have one name.
    """
    functions: Any = {given: 1.0} if callable(given) else given
    if isinstance(functions, Sequence) and not isinstance(functions, str):
        functions = dict.fromkeys(functions, 1.0)
    if not isinstance(functions, Mapping) or not functions or not all(map(callable, functions)):
        raise ConfigError(f"{source}: REWARDS must be functions, not {show(repr(given))}; {_REMEDY}")
    if wrong := [weight for weight in functions.values() if not (_is_number(weight) and math.isfinite(weight))]:
        raise ConfigError(f"{source}: the weight {show(repr(wrong[0]))} in REWARDS is no number; {_REMEDY}")
    rewards = Rewards({function: float(weight) for function, weight in functions.items()}, source)
    if double := next((name for name in rewards.names if rewards.names.count(name) > 1), None):
        raise ConfigError(f"{source}: two functions in REWARDS are called {double}; rename one")
    return rewards


def _awaited(result: Awaitable[Any]) -> Any:
    """Returns the result of an `async` function, in a thread of its own: in a notebook, this one has a running loop."""

    async def wait() -> Any:
        return await result

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, wait()).result()


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _place(error: BaseException, source: str) -> str:
    """Returns file and line of the user's code where an error occurred."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == Path(source).resolve()]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"{source}:{error.lineno}"
    return f"{source}:{own[-1].lineno}" if own else source


def _told(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    return show(" ".join([f"{type(error).__name__}:", *str(error).split()]))
