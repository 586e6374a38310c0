"""Rows to the devices: batches as global arrays, prepared ahead in the background."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import jax
import numpy as np

from llamajax.config.run import Config
from llamajax.data.dataset import Dataset
from llamajax.data.packing import Row, fill_row
from llamajax.step.batch import FIELDS, Batch, batch_sharding, check_ids, micro_batch_size


class Loader:
    """Gives `(step, batch)` for `start_step`, `start_step + 1` and so on, without end.

    Row i of micro-batch a of step s is the dataset's row `s * global_batch_size + a * (global_batch_size /
    grad_accum_steps) + i`, whatever the mesh. A thread prepares `data.prefetch_steps` batches ahead; what goes wrong in
    it is raised by `next`. Use it as a context manager, or call `close`.
    """

    def __init__(self, dataset: Dataset, config: Config, start_step: int) -> None:
        self.wait_s = 0.0
        """Seconds that the last `next` had to wait for its batch."""
        self._dataset = dataset
        self._global_batch_size = config.train.global_batch_size
        self._shape = (config.train.grad_accum_steps, micro_batch_size(config), config.data.seq_len)
        self._sharding, self._vocab_size = batch_sharding(), config.model.vocab_size
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._next_step = start_step
        self._ahead: deque[tuple[int, Future[Batch]]] = deque()
        for _ in range(config.data.prefetch_steps):
            self._start_next()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Batch]:
        step, future = self._ahead.popleft()
        self._start_next()
        started = time.monotonic()
        batch = future.result()
        self.wait_s = time.monotonic() - started
        return step, batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread, after the batch it is working on."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _start_next(self) -> None:
        step = self._next_step
        self._ahead.append((step, self._thread.submit(self._load, step)))
        self._next_step += 1

    def _load(self, step: int) -> Batch:
        first = step * self._global_batch_size

        def row(a: int, i: int) -> Row:
            return self._dataset.train_row(first + a * self._shape[1] + i)

        return _make_batch(row, self._shape, self._sharding, self._vocab_size)


def held_out_batches(dataset: Dataset, config: Config) -> Iterator[Batch]:
    """The held-out rows in batches of one micro-batch [1, B, T], the same every time, `train.eval_batches` at most.

    The last batch is filled up with rows that have no targets. There is none if nothing is held out.
    """
    rows, seq_len = dataset.held_out_rows, config.data.seq_len
    size, sharding = micro_batch_size(config), batch_sharding()
    for first in range(0, min(len(rows), config.train.eval_batches * size), size):

        def row(_: int, i: int, first: int = first) -> Row:
            return rows[first + i] if first + i < len(rows) else fill_row([], seq_len)

        yield _make_batch(row, (1, size, seq_len), sharding, config.model.vocab_size)


def _make_batch(
    row: Callable[[int, int], Row], shape: tuple[int, int, int], sharding: jax.NamedSharding, vocab_size: int
) -> Batch:
    """The batch whose row i of micro-batch a is `row(a, i)`; only rows that this process's devices hold are asked for.

    Raises:
        DataError: a row has ids that the model has no embedding for.
    """
    wanted: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None
        wanted.update(range(*index[1].indices(shape[1])))
    # Arrays of the whole batch, of which only the wanted rows are ever touched, and so ever take memory.
    local = {name: np.empty(shape, np.int32) for name in FIELDS}
    for a in range(shape[0]):
        for i in sorted(wanted):
            for name, values in row(a, i).items():
                local[name][a, i] = values
            for name in ("tokens", "targets"):
                check_ids(local[name][a, i], vocab_size, "data.cache_dir", "its files are damaged; remove it")
    return {name: jax.make_array_from_callback(shape, sharding, values.__getitem__) for name, values in local.items()}
