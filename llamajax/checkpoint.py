"""Checkpoints: the whole state of a run in one atomic, verified directory per step.

Layout, below the run directory::

    .lock                      held by the one process that writes the run
    checkpoints/1000/          a committed step
        state/                 every array of the state, an Orbax PyTree checkpoint under the names in arrays.json
        arrays.json            name -> dtype and shape of every array
        meta.json              what the caller wants to know again: resolved config, data position, versions, mesh
        files/                 copies of the caller's files: the tokenizer
        manifest.json          size and SHA-256 of all of the above (llamajax.manifest)
    checkpoints/1000.saving/   a step being written, or what a killed process left of one
    checkpoints/1000.deleting/ a step being deleted, or what a killed process left of one
    checkpoints/1000.damaged/  a step that did not match its manifest and was set aside

A step appears by one rename, after its manifest and all it lists are on the disk, and disappears by one rename, so
a process killed at any moment leaves only whole steps and left-overs that the next writer removes.

Arrays are stored in Orbax's OCDBT format: a dozen files per process whatever the number of parameters. They are not
compressed: trained weights hardly shrink (7%), and without it saving and restoring are two to three times faster.
"""

import fcntl
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Generic, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from llamajax import manifest
from llamajax.config import CheckpointConfig
from llamajax.errors import CheckpointError

State = TypeVar("State")

# Seconds that the processes of a run wait for each other to finish hashing one checkpoint.
_HASHING_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Restored(Generic[State]):
    """A verified checkpoint, read."""

    step: int
    """Optimizer step after which it was saved."""
    state: State
    """The arrays, in the structure, types and shardings that were asked for."""
    meta: dict[str, Any]
    """What was given to `save`."""
    files: Path
    """Directory with the copies of the files given to `save`; a running writer may delete it in time."""


class Checkpointer:
    """Saves and restores the one run in `run_dir`; use it as a context manager. Never two at once on a run.

    With several processes, every process makes one and calls the same methods in the same order.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig) -> None:
        """Takes the run's lock, which lasts until `close` or the end of the process, and removes left-overs.

        Raises:
            CheckpointError: another process writes this run, or `run_dir` cannot be written.
        """
        self._config = config
        self._directory = run_dir / "checkpoints"
        self._lock: IO[str] | None = None
        problem = None
        if jax.process_index() == 0:
            try:
                self._lock = _lock(run_dir)
                for left_over in (*self._directory.glob("*.saving"), *self._directory.glob("*.deleting")):
                    shutil.rmtree(left_over)
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{run_dir} cannot be written: {_reason(error)}; choose another run_dir"
        problem, self._newest = _gather((problem, max(_steps(self._directory), default=None)))[0]
        if problem is not None:
            self._release()
            raise CheckpointError(problem)
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._num_saves = 0
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

    def save(self, step: int, state: Any, meta: dict[str, Any], files: Sequence[Path] = ()) -> None:
        """Starts saving `step`; returns when the arrays have left the devices (when committed, if not `async_save`).

        Args:
            step: optimizer steps done; above every step saved or restored before.
            state: pytree of jax arrays; typed PRNG keys too. It may be donated as soon as this returns.
            meta: a dictionary that JSON can hold.
            files: files to copy beside it.

        Raises:
            CheckpointError: the previous save failed, or this one cannot begin.
        """
        self.wait()
        if self._newest is not None and step <= self._newest:
            raise CheckpointError(
                f"{self._directory}: step {step} cannot be saved after step {self._newest}; restore from there"
                " or choose another run_dir"
            )
        arrays = _named(state)
        about = {name: {"dtype": str(array.dtype), "shape": array.shape} for name, array in arrays.items()}
        stored = {name: jax.random.key_data(array) if _is_key(array) else array for name, array in arrays.items()}
        texts = {"meta.json": json.dumps(meta, indent=1), "arrays.json": json.dumps(about, indent=1)}
        try:
            self._orbax.save(self._saving(step) / "state", args=ocp.args.PyTreeSave(stored))
        except (OSError, ValueError) as error:
            raise CheckpointError(self._failure_line(f"step {step} cannot be saved", error)) from error
        self._num_saves += 1
        self._thread = threading.Thread(target=self._commit, args=(step, texts, files), name=f"commit-{step}")
        self._thread.start()
        if not self._config.async_save:
            self.wait()

    def restore(self, abstract_state: State) -> Restored[State] | None:
        """The newest good step, on the shardings of `abstract_state`; None if the run has no committed step.

        Newer steps that are damaged are named on stderr and set aside.

        Args:
            abstract_state: the pytree to restore, of `jax.ShapeDtypeStruct`; see `concretise`.

        Raises:
            CheckpointError: no step is good, or its arrays differ in name, dtype or shape from `abstract_state`.
        """
        self.wait()
        step, damaged = _newest_good(self._directory)
        if step is None:
            if damaged:
                raise CheckpointError(_none_good(self._directory, damaged))
            return None
        for bad in damaged:
            if jax.process_index() == 0:
                aside = self._directory / f"{bad}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self._directory / str(bad)).rename(aside)
            _say(f"{_damage_line(self._directory, bad, damaged[bad])}; moved to {bad}.damaged, going on from step {step}")
        self._newest = step
        return _read(self._directory / str(step), abstract_state, partial=False)

    def wait(self) -> None:
        """Returns when the save in progress, if any, is committed.

        Raises:
            CheckpointError: it failed; the steps committed before are intact.
        """
        if self._thread is None:
            return
        failure = self._join()
        # Process 0 commits, so its outcome is everyone's; another process that could not write its part ends the run.
        if failure is not None and jax.process_index() > 0:
            raise failure
        message, self._newest = _gather((failure and str(failure), self._newest))[0]
        if message is not None:
            raise failure or CheckpointError(message)

    def close(self) -> None:
        """Waits for the save in progress and gives the lock back; a second call does nothing.

        Raises:
            CheckpointError: the save failed.
        """
        try:
            self.wait()
        finally:
            self._release()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The other processes may be elsewhere by now, so nothing here waits for them.
        failure = self._join()
        if failure is not None:
            print(failure, file=sys.stderr, flush=True)
        self._release()

    def _commit(self, step: int, texts: dict[str, str], files: Sequence[Path]) -> None:
        """In its own thread, on every process: turns `<step>.saving` into `<step>`, then deletes old steps."""
        saving = self._saving(step)
        doing = f"step {step} cannot be saved"
        try:
            self._orbax.wait_until_finished()
            records = self._hash_arrays(saving)
            if jax.process_index() > 0:
                return
            for name, text in texts.items():
                (saving / name).write_text(text)
            (saving / "files").mkdir()
            for file in files:
                shutil.copyfile(file, saving / "files" / file.name)
            records |= manifest.digest(saving, set(manifest.list_files(saving)) - records.keys())
            manifest.write(saving, records)
            saving.rename(self._directory / str(step))
            manifest.sync(self._directory)
            self._newest = step
            doing = "old steps cannot be deleted"
            self._delete_old()
        except (OSError, ValueError, TimeoutError, jax.errors.JaxRuntimeError) as error:
            self._failure = CheckpointError(self._failure_line(doing, error))
            self._failure.__cause__ = error
        except Exception as error:
            self._failure = error
        if self._failure is not None and jax.process_index() == 0:
            shutil.rmtree(saving, ignore_errors=True)
