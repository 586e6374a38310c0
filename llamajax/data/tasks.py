"""Interface between work on documents and the processes that do it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

MapTasks = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Calls a function with every task and yields the results in order, as `map` does, possibly in other processes."""
