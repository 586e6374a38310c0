"""Rows to the devices: batches as global arrays."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.packing import Row, fill_row
from llamajax.step.batch import FIELDS, Batch, batch_sharding, check_ids, micro_batch_size


def held_out_batches(dataset: Dataset, config: Config, num_rows: int) -> Iterator[Batch]:
    """The first `num_rows` held-out rows, or all there are, in batches of one micro-batch [1, B, T].

    The last batch is filled up with rows that have no targets. There is none if nothing is held out.
    """
    rows, seq_len = dataset.held_out_rows, config.data.seq_len
    size, sharding = micro_batch_size(config), batch_sharding()
    num_rows = min(len(rows), num_rows)
    for first in range(0, num_rows, size):

        def row(_: int, i: int, first: int = first) -> Row:
            return rows[first + i] if first + i < num_rows else fill_row([], seq_len)

        yield make_batch(row, (1, size, seq_len), sharding, config.model.vocab_size)


def make_batch(
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
