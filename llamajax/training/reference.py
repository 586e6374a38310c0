"""Log-probabilities of a run's answers by the weights that it starts from, computed once and kept in its directory.

A row of the data has a number: training rows come first, source after source, then the held-out rows in their order. Each
takes a record of float32 in `log_probs.f32`, which is sparse, and its check in `checks.u32`: 0 until the record is there.
The folder's name says what they depend on.
"""

import dataclasses
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from llamajax import disk
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.data.progress import gets_on
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.loader import make_batch
from llamajax.data.rows.packing import Row, fill_row
from llamajax.data.rows.position import PassedOver, next_row, rows_read
from llamajax.data.rows.preferences import with_fields
from llamajax.errors import CheckpointError
from llamajax.model import Llama
from llamajax.processes import peers
from llamajax.step.batch import OTHER, Batch, batch_sharding, fields
from llamajax.step.preferences import reference_log_probs
from llamajax.watch import console

FOLDER = "reference"
KEPT_EVERY_S = 60.0
"""Seconds of work that a killed process loses."""
_NAMES = ("reference", OTHER + "reference")


class Reference:
    """The log-probabilities of rows, in files of a run's directory that this process maps into memory."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        """Opens the files; process 0 creates them if they are missing. All processes call this together.

        Args:
            config: the run.
            dataset: its data.
        """
        self.names, seq_len = [name for name in _NAMES if name in fields(config)], config.data.seq_len
        key = cache.key_of(dataset.fingerprint, config.model.compute_dtype, config.model.matmul_dtype, self.names)
        self.folder = Path(config.run_dir).expanduser() / FOLDER / key
        values, checks = self.folder / "log_probs.f32", self.folder / "checks.u32"
        num_rows, width = dataset.num_train_rows + len(dataset.held_out_rows), len(self.names) * seq_len
        if peers.rank() == 0:
            disk.make_folder(self.folder)
            for path, size in ((values, num_rows * width * 4), (checks, num_rows * 4)):
                with path.open("ab") as file:
                    file.truncate(size)
        peers.everyones("reference")
        self._width, self._values, self._path_of_checks = width, values, checks
        self._checks = np.fromfile(checks, np.uint32)

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Returns the rows that are not there, in order."""
        wanted = np.unique(np.fromiter(numbers, np.int64))
        return wanted[self._checks[wanted] == 0].tolist()

    def write(self, number: int, values: Float32[np.ndarray, "W"]) -> None:
        """Writes a row; `sync` makes it count."""
        with self._values.open("r+b") as file:
            file.seek(number * values.nbytes)
            file.write(values.tobytes())
        self._checks[number] = _check(values)

    def sync(self) -> None:
        """Makes all processes know the rows that process 0 has written; they call this together."""
        if peers.rank() == 0:
            disk.sync(self._values)
            disk.write_atomically(self._path_of_checks, self._checks.tobytes())
        peers.everyones("reference")
        self._checks = np.fromfile(self._path_of_checks, np.uint32)

    def of_row(self, number: int) -> dict[str, Float32[np.ndarray, "T"]]:
        """Returns the log-probabilities of a row's targets, by the name of their field of a batch.

        Raises:
            CheckpointError: the files are damaged.
        """
        values = np.fromfile(self._values, np.float32, self._width, offset=4 * number * self._width)
        if self._checks[number] != _check(values):
            raise CheckpointError(
                f"{self.folder}: row {number} is damaged; remove this folder, and the run makes it again from init_from"
            )
        return dict(zip(self.names, np.split(values, len(self.names)), strict=True))


def _check(values: np.ndarray) -> int:
    return zlib.crc32(values.tobytes()) or 1


def with_reference(
    config: Config, dataset: Dataset, passed_over: Sequence[PassedOver], num_eval_rows: int, load: Callable[[], Llama]
) -> Dataset:
    """Returns the data with the reference's log-probabilities; those that are missing are computed first. All processes call
    this together.

    Args:
        config: the run.
        dataset: its data.
        passed_over: rows that the run skips.
        num_eval_rows: number of held-out rows in an evaluation.
        load: returns the weights that the run starts from.

    Raises:
        DiskError: the disk fails or is full.
    """
    reference, train = Reference(config, dataset), config.train
    end = next_row(train.num_steps, rows_read(config), passed_over)
    held_out = range(dataset.num_train_rows, dataset.num_train_rows + min(num_eval_rows, len(dataset.held_out_rows)))
    missing = reference.missing([*map(dataset.number_of, range(end)), *held_out])
    if missing:
        rows, model = train.micro_batch_size, load()
        console.log(f"reference  computing the log-probabilities of {len(missing):,} rows with the weights of the start")
        kept = time.monotonic()
        batches = [missing[first : first + rows] for first in range(0, len(missing), rows)]
        for numbers in console.track(batches, len(batches), "reference  batch"):
            found = reference_log_probs(config, model, _batch(config, dataset, numbers))
            values = np.concatenate([np.asarray(found[name]) for name in reference.names], axis=1)
            gets_on()
            if peers.rank() == 0:
                for number, of_row in zip(numbers, values[: len(numbers)], strict=True):
                    reference.write(number, of_row)
            if peers.of_first(time.monotonic() - kept > KEPT_EVERY_S):
                reference.sync()
                kept = time.monotonic()
        reference.sync()
    return dataclasses.replace(dataset, reference=reference.of_row)


def _batch(config: Config, dataset: Dataset, numbers: Sequence[int]) -> Batch:
    """Returns a batch of these rows, filled up with empty ones."""
    seq_len, known = config.data.seq_len, {name: of for name, of in fields(config).items() if name not in _NAMES}

    empty = with_fields(fill_row([], seq_len), config.objective.kind)

    def row(_: int, index: int) -> Row:
        return dataset.numbered_row(numbers[index]) if index < len(numbers) else empty

    shape = (1, config.train.micro_batch_size, seq_len)
    return make_batch(row, shape, batch_sharding(), config.model.vocab_size, known)
