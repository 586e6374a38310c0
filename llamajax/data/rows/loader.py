"""Loads rows onto the devices: batches as global arrays; training batches are prepared ahead in the background."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax
import numpy as np
from numpy.typing import DTypeLike

from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.packing import Row, fill_row
from llamajax.data.rows.position import PassedOver, next_row, rows_read
from llamajax.data.rows.preferences import with_fields
from llamajax.step.batch import FIELDS, Batch, batch_sharding, check_ids, fields

_INTEGERS: Mapping[str, DTypeLike] = dict.fromkeys(FIELDS, np.int32)


class Loader:
    """Yields `(step, batch)` for `start_step`, `start_step + 1` and so on, without end.

    Row i of micro-batch a of step s is the dataset's row `next_row(s) + a * (global_batch_size / grad_accum_steps) + i` on
    any mesh, with `next_row` of `llamajax.data.rows.position` and the rows of the step's stage. A thread prepares
    `data.prefetch_steps` batches ahead, also beyond the end of a stage; `next` raises its errors. Use the loader as a
    context manager, or call `close`.
    """

    def __init__(self, dataset: Dataset, config: Config, start_step: int, passed_over: Sequence[PassedOver] = ()) -> None:
        self.wait_s = 0.0
        """Seconds that the last `next` waited for its batch."""
        later = range(1, 1 + len(config.data.stages))
        self._datasets = [dataset, *(dataset.of_stage(number) for number in later)]
        self._config, self._passed_over = config, passed_over
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

    def take(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Returns the batch of the step after `step` finished steps, which must be the next one, and no metrics of it."""
        loaded, batch = next(self)
        assert loaded == step
        return batch, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread after the batch that it is working on."""
        self._thread.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _start_next(self) -> None:
        step = self._next_step
        self._ahead.append((step, self._thread.submit(self._load, step)))
        self._next_step += 1

    def _load(self, step: int) -> Batch:
        train, data, rows = self._config.train, self._config.data, self._config.train.micro_batch_size
        first, number = next_row(step, rows_read(self._config), self._passed_over), data.stage_at(step)
        dataset, accumulated = self._datasets[number], train.batch_size_at(step) // rows
        shape = (accumulated, rows, data.all_stages[number].seq_len)

        def row(a: int, i: int) -> Row:
            return dataset.train_row(first + a * rows + i)

        return make_batch(row, shape, self._sharding, self._vocab_size, fields(self._config))


def held_out_batches(dataset: Dataset, config: Config, num_rows: int) -> Iterator[Batch]:
    """Yields the first `num_rows` held-out rows, or all of them, in batches of one micro-batch [1, B, T]; on the stages of a
    pipeline, of as many as a training step has, or as the rows fill.

    The last batch is filled up with rows without targets. Nothing is yielded if nothing is held out.
    """
    rows, seq_len = dataset.held_out_rows, config.data.seq_len
    size, sharding = config.train.micro_batch_size, batch_sharding()
    num_rows = min(len(rows), num_rows)
    has_stages = sharding.mesh.shape["pipeline"] > 1
    empty = with_fields(fill_row([], seq_len), config.objective.kind)
    together = min(config.train.grad_accum_steps, math.ceil(num_rows / size)) if has_stages else 1
    for first in range(0, num_rows, together * size):

        def row(a: int, i: int, first: int = first) -> Row:
            number = first + a * size + i
            return dataset.held_out_row(number) if number < num_rows else empty

        yield make_batch(row, (together, size, seq_len), sharding, config.model.vocab_size, fields(config))


def make_batch(
    row: Callable[[int, int], Row],
    shape: tuple[int, int, int],
    sharding: jax.NamedSharding,
    vocab_size: int,
    names: Mapping[str, DTypeLike] = _INTEGERS,
) -> Batch:
    """Returns the batch with `row(a, i)` as row i of micro-batch a; reads only the rows on this process's devices.

    Args:
        row: returns the fields of a row; one that it lacks is 0.
        shape: micro-batches, rows, and tokens per row.
        sharding: sharding of the arrays.
        vocab_size: size of the model's table.
        names: fields of the batch and their types.

    Raises:
        DataError: a row has ids outside the model's vocabulary.
    """
    wanted: set[int] = set()
    for index in sharding.addressable_devices_indices_map(shape).values():
        assert index is not None
        wanted.update(range(*index[1].indices(shape[1])))
    # Arrays of the whole batch. Only the wanted rows are ever touched, so only these take memory.
    local = {name: np.zeros(shape, dtype) for name, dtype in names.items()}
    for a in range(shape[0]):
        for i in sorted(wanted):
            for name, values in row(a, i).items():
                local[name][a, i] = values
            for name in names:
                if name.endswith(("tokens", "targets")):
                    check_ids(local[name][a, i], vocab_size, "data.cache_dir", "its files are damaged; remove it")
    return {name: jax.make_array_from_callback(shape, sharding, values.__getitem__) for name, values in local.items()}
