"""Checkpoints: the whole state of a run in one atomic, verified directory per step.

Layout, below the run directory::

    .lock                      held by the one process that writes the run
    checkpoints/1000/          a committed step
        state/                 every array of the state, an Orbax PyTree checkpoint under the names in arrays.json
        arrays.json            name -> dtype and shape of every array
        meta.json              what the caller wants to know again: resolved config, data position, versions, mesh
        files/                 what the caller wants to keep: the tokenizer's files
        manifest.json          size and SHA-256 of all of the above (llamajax.manifest)
    checkpoints/1000.saving/   a step being written, or what a killed process left of one
    checkpoints/1000.deleting/ a step being deleted, or what a killed process left of one
    checkpoints/1000.damaged/  a step that did not match its manifest and was set aside

A step appears by one rename, after its manifest and all it lists are on the disk, and disappears by one rename, so
a process killed at any moment leaves only whole steps and left-overs that the next writer removes.

Arrays are stored in Orbax's OCDBT format: about twenty files per process whatever the number of parameters. They are
not compressed: weights hardly shrink (7%), and without it saving and restoring are two to three times faster.
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any

import jax
import orbax.checkpoint as ocp

from llamajax import manifest, meeting, processes
from llamajax.config import CheckpointConfig
from llamajax.errors import CheckpointError, EnvironmentMismatchError
from llamajax.processes import everyones
from llamajax.restore import (
    Restored,
    State,
    concretise,
    damage_line,
    is_key,
    latest_step,
    named_arrays,
    newest_good,
    none_good_line,
    read_meta,
    read_step,
    restore,
    say,
    steps_in,
)
from llamajax.units import format_bytes

__all__ = ["Checkpointer", "Restored", "concretise", "latest_step", "read_meta", "restore"]

# Arrays of more have their layers stored one by one.
_MANY_BYTES = 16 << 20

# Seconds after which the processes of a run stop waiting for each other to write a checkpoint, and to hash it.
_TIMEOUT_S = 3600

# Seconds in which what one process writes must be seen by the others.
_SEEN_S = 5


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname + record.getMessage())


# A failed write makes Orbax raise one error, which we raise as one line, and log a traceback for every array.
logging.getLogger("absl").addFilter(_is_news)
logging.getLogger("asyncio").addFilter(_is_news)


class Checkpointer:
    """Saves and restores the one run in `run_dir`; use it as a context manager. Never two at once on a run.

    With several processes, every process makes one and calls the same methods in the same order.
    """

    def __init__(self, run_dir: Path, config: CheckpointConfig, *, use_ocdbt: bool = True) -> None:
        """Takes the run's lock, which lasts until `close` or the end of the process, and removes left-overs.

        Without `use_ocdbt` every chunk of an array becomes a file, which converters write faster; both are read alike.

        Raises:
            CheckpointError: another process writes this run, or `run_dir` cannot be written.
            EnvironmentMismatchError: the processes do not all see the same `run_dir`.
        """
        self._config = config
        self._directory = run_dir.absolute() / "checkpoints"
        self._lock: IO[str] | None = None
        problem = None
        if jax.process_index() == 0:
            try:
                self._lock = _lock(run_dir)
                for left_over in self._directory.glob("*.saving"):
                    shutil.rmtree(left_over)
                for left_over in self._directory.glob("*.seen"):
                    left_over.unlink()
                self._finish_deleting()
                self._directory.mkdir(exist_ok=True)
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{run_dir} cannot be written: {_reason(error)}; choose another run_dir"
        problem, self._newest = everyones((problem, max(steps_in(self._directory), default=None)))[0]
        if problem is not None:
            if self._lock is not None:
                self._lock.close()
            raise CheckpointError(problem)
        self._check_seen_by_all()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=use_ocdbt)
        self._orbax = ocp.AsyncCheckpointer(handler, timeout_secs=_TIMEOUT_S)

    def save(self, step: int, state: Any, meta: dict[str, Any], files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Starts saving `step`; returns when the arrays have left the devices (when committed, if not `async_save`).

        Args:
            step: optimizer steps done; above every step saved or restored before.
            state: pytree of jax arrays; typed PRNG keys too. It may be donated as soon as this returns.
            meta: a dictionary that JSON can hold.
            files: name and content of small files to keep beside it.

        Raises:
            CheckpointError: the previous save failed, or this one cannot begin.
        """
        began = time.monotonic()
        self.wait()
        if (waited := time.monotonic() - began) > 1:
            say(f"step {step}: waited {waited:.1f} s for the previous checkpoint; raise checkpoint.save_every")
        if self._newest is not None and step <= self._newest:
            raise CheckpointError(
                f"{self._directory}: step {step} cannot be saved after step {self._newest}; restore from there"
                " or choose another run_dir"
            )
        arrays = named_arrays(state)
        about = {name: {"dtype": str(array.dtype), "shape": array.shape} for name, array in arrays.items()}
        stored = {name: jax.random.key_data(array) if is_key(array) else array for name, array in arrays.items()}
        texts = {"meta.json": json.dumps(meta, indent=1), "arrays.json": json.dumps(about, indent=1)}
        failing = f"step {step} cannot be saved"
        try:
            needed, disk = sum(array.nbytes for array in stored.values()), shutil.disk_usage(self._directory.parent)
            if disk.free < needed and disk.total:
                reason = f"it takes {format_bytes(needed)}, but only {format_bytes(disk.free)} are free"
                raise CheckpointError(self._failure_line(failing, reason))
            chunks = {name: _save_args(name, array.nbytes) for name, array in stored.items()}
            self._orbax.save(self._saving(step) / "state", args=ocp.args.PyTreeSave(stored, save_args=chunks))
        except OSError as error:
            raise CheckpointError(self._failure_line(f"step {step} cannot be saved", _reason(error))) from error
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
        step, damaged = newest_good(self._directory)
        if step is None:
            if damaged:
                raise CheckpointError(none_good_line(self._directory, damaged))
            return None
        for bad in damaged:
            if jax.process_index() == 0:
                aside = self._directory / f"{bad}.damaged"
                shutil.rmtree(aside, ignore_errors=True)
                (self._directory / str(bad)).rename(aside)
            say(f"{damage_line(self._directory, bad, damaged[bad])}; moved to {bad}.damaged, going on from step {step}")
        self._newest = step
        return read_step(self._directory / str(step), abstract_state, partial=False)

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
        message, self._newest = everyones((failure and str(failure), self._newest))[0]
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

    def _check_seen_by_all(self) -> None:
        """Raises `EnvironmentMismatchError` unless every process sees what process 0 does in its directory."""
        if jax.process_count() == 1:
            return
        token = self._directory / f"{secrets.token_hex(8)}.seen"
        if jax.process_index() == 0:
            token.touch()
        name, steps, first = everyones((token.name, steps_in(self._directory), str(self._directory)))[0]
        deadline = time.monotonic() + _SEEN_S
        while not (seen := (self._directory / name).exists() and steps_in(self._directory) == steps):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        others = everyones(None if seen else f"{self._directory} ({meeting.who_am_i()})")
        if jax.process_index() == 0:
            token.unlink()
        for rank, other in enumerate(others):
            if other is not None:
                if self._lock is not None:
                    self._lock.close()
                raise EnvironmentMismatchError(
                    f"run_dir: process {rank} sees something else in {other} than process 0 in {first}; put it on"
                    " a file system that all share, and give its absolute path"
                )

    def _commit(self, step: int, texts: dict[str, str], files: Mapping[str, bytes]) -> None:
        """In its own thread, on every process: turns `<step>.saving` into `<step>`, then deletes old steps."""
        saving = self._saving(step)
        try:
            self._orbax.wait_until_finished()
            records = self._hash_arrays(saving)
            if jax.process_index() == 0:
                with processes.uninterrupted():  # all have done their part, so the step is good whatever becomes of them
                    self._finish(step, texts, files, records)
                self._delete_old()
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            self._failure = CheckpointError(self._failure_line(f"step {step} cannot be saved", _reason(error)))
        except Exception as error:
            self._failure = error
        if self._failure is not None and jax.process_index() == 0:
            shutil.rmtree(saving, ignore_errors=True)

    def _finish(
        self, step: int, texts: dict[str, str], files: Mapping[str, bytes], records: dict[str, manifest.Record]
    ) -> None:
        """On process 0: adds what is not arrays, then makes `<step>.saving` the step."""
        saving = self._saving(step)
        for name, text in texts.items():
            (saving / name).write_text(text)
        (saving / "files").mkdir()
        for name, content in files.items():
            (saving / "files" / name).write_bytes(content)
        records |= manifest.digest(saving, set(manifest.list_files(saving)) - records.keys())
        manifest.write(saving, records)
        saving.rename(self._directory / str(step))
        manifest.sync(self._directory)
        self._newest = step

    def _hash_arrays(self, saving: Path) -> dict[str, manifest.Record]:
        """The records of the arrays' files; every process hashes a share, process 0 returns them all."""
        paths = [path for path in manifest.list_files(saving) if path.startswith("state/")]
        records = manifest.digest(saving, paths[jax.process_index() :: jax.process_count()])
        if jax.process_count() > 1:
            (saving / f"hashes.{jax.process_index()}.json").write_text(json.dumps(records))
            # Not a collective of the devices: those belong to the training step, which runs meanwhile.
            barrier = ocp.multihost.get_barrier_sync_fn()
            barrier(key=f"llamajax:{saving}", timeout_ms=1000 * _TIMEOUT_S)
            if jax.process_index() == 0:
                for share in saving.glob("hashes.*.json"):
                    records |= json.loads(share.read_text())
                    share.unlink()
        return records

    def _delete_old(self) -> None:
        for step in steps_in(self._directory)[: -self._config.keep_last]:
            if self._config.keep_every is None or step % self._config.keep_every:
                (self._directory / str(step)).rename(self._directory / f"{step}.deleting")
        self._finish_deleting()

    def _finish_deleting(self) -> None:
        """Removes what is renamed to be deleted. What cannot be removed costs space, not the run."""
        for doomed in self._directory.glob("*.deleting"):
            try:
                shutil.rmtree(doomed)
            except OSError as error:
                say(f"{doomed} cannot be deleted: {_reason(error)}; the next checkpoint tries again")

    def _saving(self, step: int) -> Path:
        return self._directory / f"{step}.saving"

    def _failure_line(self, failing: str, reason: str) -> str:
        newest = "there is no checkpoint yet" if self._newest is None else f"step {self._newest} is the newest checkpoint"
        return f"{self._directory}: {failing}: {reason}; see to the disk and run the same command again; {newest}"

    def _join(self) -> Exception | None:
        """Ends the thread of the save in progress, if any; returns its failure, once."""
        if self._thread is not None:
            self._thread.join()
        failure, self._thread, self._failure = self._failure, None, None
        return failure

    def _release(self) -> None:
        self._orbax.close()
        if self._lock is not None:
            self._lock.close()


def _save_args(name: str, nbytes: int) -> ocp.SaveArgs:
    """Layers one by one where they are no small matter: who reads a model, to export it, needs never hold all of them."""
    return ocp.SaveArgs(shard_axes=(0,) if ".layers." in name and nbytes > _MANY_BYTES else ())


def _lock(run_dir: Path) -> IO[str]:
    """The open, locked lock file of `run_dir`; the lock ends when it is closed, also by the end of the process."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = (run_dir / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise CheckpointError(f"{run_dir} is being written by {holder}; stop that, or choose another run_dir") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            lock.close()
            raise
        say(f"{run_dir}: this file system has no locks; see to it that nothing else writes this run")
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _reason(error: Exception) -> str:
    """An error of the file system or of Orbax in a few words."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code:
        return os.strerror(int(code[1]))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return (str(error) or type(error).__name__).splitlines()[0][:200]
