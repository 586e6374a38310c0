"""The seam between what is to be made of documents and the processes that make it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

MapTasks = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]
"""Calls a function with every task and gives the results in order, as `map` does; perhaps in other processes."""
