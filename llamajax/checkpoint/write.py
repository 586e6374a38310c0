"""Checkpoints: the whole state of a run in one atomic, verified directory per step.

The layout below the run directory::

    .lock, .owner              identify the one process that writes the run (llamajax.checkpoint.run_lock)
    checkpoints/1000/          a committed step
        state/                 every array of the state, an Orbax PyTree checkpoint under the names in arrays.json
        arrays.json            name -> dtype and shape of every array
        meta.json              the caller's metadata: resolved config, data position, versions, mesh
        files/                 the caller's files: the tokenizer
        manifest.json          size and SHA-256 of all of the above (llamajax.checkpoint.manifest)
    checkpoints/1000.*.7.saving/  a step being written (the seventh of a process), or its remains after a kill
    checkpoints/1000.*.deleting/ a step being deleted, or its remains after a kill
    checkpoints/1000.damaged/  a step that did not match its manifest and was set aside
    checkpoints/.identity      distinguishes the run from others in the same place (llamajax.checkpoint.local_tier)

A step appears by one rename, after its manifest and all listed files are on the disk, and disappears by one rename. A
process killed at any moment leaves only complete steps and remains that the next writer removes.
"""

import contextlib
import json
import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from llamajax.checkpoint import commit, retention
from llamajax.checkpoint.array_writer import ArrayWriter, reason
from llamajax.checkpoint.local_tier import LocalTier, identity_of
from llamajax.checkpoint.newest import find_newest
from llamajax.checkpoint.read import Found, Restored, State, is_key
from llamajax.checkpoint.run_lock import RunLock, check_seen_by_all
from llamajax.checkpoint.steps import steps_in
from llamajax.config.training import CheckpointConfig
from llamajax.data.rows.position import PassedOver
from llamajax.disk import make_folder, may_pass, read_again, sync
from llamajax.errors import CheckpointError, SaveError, UserError
from llamajax.parallel.arrays import named_arrays
from llamajax.processes.peers import everyones, of_first
from llamajax.watch.console import say, say_own

# Time in seconds after which the processes of a run stop waiting for each other to write a checkpoint, and to hash it.
_TIMEOUT_S = 3600

_LAST_PAUSES_S = (1, 2, 4)  # before retries of the last save of a run; SIGTERM leaves 30 s on most machines
_FAILED_S = 1.0  # for the save in progress when a process has failed: other processes wait for its message


class Checkpointer:
    """Saves and restores the one run in `run_dir`; a context manager. A run never has two at once.

    With several processes, every process creates one and calls the same methods in the same order. A save succeeds or fails
    for all of them: each learns the outcome of the others' parts.
    """

    def __init__(
        self,
        run_dir: Path,
        config: CheckpointConfig,
        *,
        on_failure: Callable[[str], object] | None = None,
        around_commit: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        use_ocdbt: bool = True,
    ) -> None:
        """Takes the run's lock, which lasts until `close` or the end of the process, and removes remains of earlier
        processes.

        Args:
            run_dir: directory of the run.
            config: when to save, and what to keep.
            on_failure: takes a line as soon as a save has failed, from any thread; None: `wait` is the first to report it.
            around_commit: context that another thread enters while a save continues in the background.
            use_ocdbt: without it every chunk of an array becomes a file, which converters write faster; both are read alike.

        Raises:
            CheckpointError: another process writes this run, or `run_dir` cannot be written.
            SaveError: `run_dir` cannot be written now, because the disk is full or fails.
            EnvironmentMismatchError: the processes do not all see the same `run_dir`.
        """
        self._config = config
        self._directory = run_dir.absolute() / "checkpoints"
        self._on_failure, self._around_commit = on_failure, around_commit
        self._arrays = ArrayWriter(use_ocdbt=use_ocdbt)
        self._lock: RunLock | None = None
        problem = token = local_name = None
        is_passing = False
        if jax.process_index() == 0:
            try:
                self._lock = RunLock(run_dir)
                token = self._lock.token[:16]
                if self._directory.is_symlink() and not self._directory.exists():
                    problem = f"{self._directory} is a link to {self._directory.readlink()}, which is missing; mount it or"
                    raise CheckpointError(f"{problem} remove the link")
                retention.remove_unfinished(self._directory)
                for left_over in self._directory.glob("*.seen"):
                    left_over.unlink()
                retention.finish_deleting(self._directory, say)
                make_folder(self._directory)
                if config.local_dir is not None:
                    local_name = config.local_name(self._directory.parent, identity_of(self._directory))
            except CheckpointError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{run_dir} cannot be written: {reason(error)}; check the disk, or choose another run_dir"
                is_passing = may_pass(error)
        about = (problem, is_passing, max(steps_in(self._directory), default=None), token, local_name)
        problem, is_passing, self._newest, self._token, local_name = of_first(about)
        try:
            if problem is not None:
                raise SaveError(problem) if is_passing else CheckpointError(problem)
            check_seen_by_all(self._directory)
        except UserError:
            self._release()
            raise
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None  # of the newest save: a `SaveError` or a defect in llamajax
        self._look_at, self._patience = math.inf, 1  # step of the next check by `retry_due`, and steps between checks
        self._num_saves = 0
        self._local: LocalTier | None = None
        if config.local_dir is not None:
            self._local = LocalTier(Path(config.local_dir).expanduser().absolute() / local_name, self._token, say_own)

    @property
    def newest(self) -> int | None:
        """The newest committed step, or None. The same in every process after `wait`."""
        return self._newest

    def save(self, step: int, state: Any, meta: dict[str, Any], files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Starts saving `step`; returns when the arrays have left the devices (when committed, without `async_save`).

        A failure of this save or the one before raises nothing here: see `retry_due` and `wait`.

        Args:
            step: number of finished optimizer steps; above every step saved or restored before.
            state: pytree of jax arrays, which may include typed PRNG keys. It may be donated as soon as this returns.
            meta: a dictionary that can be written as JSON.
            files: name and content of small files to store with the step.

        Raises:
            CheckpointError: `step` is not above the newest one.
        """
        began = time.monotonic()
        self._join()
        if self._lock is not None:
            self._lock.check(anew=False)
        if (waited := time.monotonic() - began) > 1:
            say(f"step {step}: waited {waited:.1f} s for the previous checkpoint; raise checkpoint.save_every")
        if self._newest is not None and step <= self._newest:
            raise CheckpointError(
                f"{self._directory}: step {step} cannot be saved after step {self._newest}; restore from there"
                " or choose another run_dir"
            )
        self._patience = 1 if self._failure is None else 2 * self._patience
        self._look_at, self._failure = step + self._patience, None
        self._num_saves += 1
        # Attempts never share a directory: writes of a failed one that are still in flight end up in its own.
        saving = self._directory / f"{step}.{self._token}.{self._num_saves}.saving"
        num_bytes = sum(array.nbytes for array in jax.tree.leaves(state))
        with self._failing(step, saving):
            began = time.monotonic()
            self._together(lambda: self._make_room(saving, num_bytes), first_only=True)
            if (waited := time.monotonic() - began) > 1:
                say(f"step {step}: waited {waited:.1f} s for the disk of {self._directory}, which is slow")
            arrays = named_arrays(state)
            about = {name: {"dtype": str(array.dtype), "shape": array.shape} for name, array in arrays.items()}
            stored = {name: jax.random.key_data(array) if is_key(array) else array for name, array in arrays.items()}
            small = {"meta.json": json.dumps(meta, indent=1).encode(), "arrays.json": json.dumps(about, indent=1).encode()}
            small |= {f"files/{name}": content for name, content in files.items()}
            writing = self._arrays.begin(saving / "state", stored)
            thread = threading.Thread(target=self._commit, args=(step, saving, writing, small), name=f"commit-{step}")
            thread.start()
            self._thread = thread
        if self._thread is None or not self._config.async_save:  # if this process failed, the others' threads wait for it
            self._join()

    def save_locally(self, step: int, state: Any, meta: dict[str, Any], files: Mapping[str, bytes]) -> None:
        """Starts saving `step` on the disk of this host, independently of `save`; same arguments. Raises no error."""
        assert self._local is not None
        self._local.save(step, state, meta, files)

    def retry_due(self, step: int) -> bool:
        """Returns whether a save has failed and it is time to save the current state, after `step`, in its place.

        Every process calls this after every step. Checks are 1, 2, 4, ... steps apart, and further the longer saves take or
        fail, so that repeated saves do not keep the run from training.
        """
        if self._lock is not None:
            self._lock.check(anew=False)
        if step < self._look_at:
            return False
        if any(everyones(self._thread is not None and self._thread.is_alive())):
            self._patience *= 2
            self._look_at = step + self._patience
            return False
        self._join()
        self._look_at = math.inf
        return self._failure is not None

    def finish(self, save_again: Callable[[], object]) -> None:
        """Returns when the last save is committed. Retries a failed one for some seconds, in which a disk may regain space.

        Args:
            save_again: calls `save` with the last state.

        Raises:
            SaveError: all attempts failed; the steps committed before are intact.
        """
        for pause_s in _LAST_PAUSES_S:
            with contextlib.suppress(SaveError):
                self.wait()
                return
            time.sleep(pause_s)
            if pause_s == _LAST_PAUSES_S[-1]:
                self._on_failure = None  # `wait` reports the last attempt
            save_again()
        self.wait()

    def restore(
        self, abstract_state: State, *, before: int | None = None, passed_over: Sequence[PassedOver] = ()
    ) -> Restored[State] | None:
        """Reads the newest good step into the shardings of `abstract_state`; see `find`."""
        found = self.find(abstract_state, before=before, passed_over=passed_over)
        return None if found is None else found.read()

    def find(
        self, abstract_state: State, *, before: int | None = None, passed_over: Sequence[PassedOver] = ()
    ) -> Found[State] | None:
        """Returns the newest good step without reading its arrays, or None. See `find_newest`.

        Args:
            abstract_state: the pytree to restore, with leaves of `jax.ShapeDtypeStruct` that name devices, as from
                `concretise`.
            before: only steps below this one count; None: all. See `drop` for the others.
            passed_over: rows that the run has skipped; local steps from before the rollback do not count.

        Raises:
            CheckpointError: no step is good, or its arrays differ in name, dtype or shape from `abstract_state`.
            OSError: the disk fails.
        """
        self.wait()
        found, self._newest = find_newest(self._directory, self._local, abstract_state, before, passed_over)
        return found

    def check(self) -> None:
        """Verifies that the run still belongs to this process, before anything other than a save changes it.

        Raises:
            CheckpointError: another process has taken over the run.
            OSError: this cannot be determined.
        """
        if self._lock is not None:
            read_again(self._lock.check)

    def go_on_from(self, step: int) -> None:
        """Deletes later steps saved on this host, after `check`: the run computes them again, perhaps differently."""
        self.check()
        if self._local is not None:
            self._local.drop_above(step)

    def drop(self, steps: Sequence[int]) -> None:
        """Deletes committed steps that the run has rolled back behind; the same in every process.

        Raises:
            CheckpointError: another process has taken over the run; nothing is deleted.
            OSError: the steps cannot be deleted.
        """
        if jax.process_index() == 0 and steps:
            self.check()
            retention.delete(self._directory, steps, say)
            sync(self._directory)
        self._newest = of_first(max(steps_in(self._directory), default=None))

    def wait(self) -> None:
        """Returns when the save in progress, if any, is committed.

        Raises:
            SaveError: the newest save failed; the steps committed before are intact.
        """
        self._await_thread()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits for the save in progress and releases the lock; a second call does nothing.

        Raises:
            SaveError: the newest save failed.
        """
        try:
            self.wait()
            if self._local is not None and self._newest is not None:
                self._local.clear(up_to=self._newest)
        finally:
            self._release()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
            return
        if not self._await_thread(None if jax.process_count() == 1 else _FAILED_S):
            return  # the thread and the lock end with the process
        was_told = isinstance(self._failure, SaveError) and self._on_failure is not None
        if self._failure is not None and not was_told:
            say(str(self._failure))
        self._release()

    def _make_room(self, saving: Path, num_bytes: int) -> None:
        assert self._lock is not None
        self._lock.check()
        commit.make_room(saving, num_bytes)

    def _commit(self, step: int, saving: Path, writing: Sequence[Any], small: Mapping[str, bytes]) -> None:
        """Turns the directory `saving` into `<step>`, then deletes old steps; runs in its own thread on every process."""
        with self._around_commit(), self._failing(step, saving):
            self._together(lambda: [part.result(_TIMEOUT_S) for part in writing])
            self._together(lambda: self._arrays.finalize(saving / "state"), first_only=True)
            self._together(lambda: commit.hash_share(saving))
            self._together(lambda: self._finish(step, saving, small), first_only=True)
            self._newest = step

    def _finish(self, step: int, saving: Path, small: Mapping[str, bytes]) -> None:
        """Turns the directory `saving` into the step and deletes old ones, on process 0."""
        assert self._lock is not None
        commit.make_step(saving, self._directory / str(step), small, self._lock.check)
        try:
            retention.delete_old(self._directory, self._config, say)
        except OSError as error:  # costs space, not the step
            say(f"{self._directory}: older steps cannot be deleted: {reason(error)}; the next checkpoint tries again")

    def _together(self, work: Callable[[], object], *, first_only: bool = False) -> None:
        """Runs one part of a save in every process, or in the first only.

        Raises:
            OSError: it failed in a process; the same error in all. A process with a defect in llamajax raises that error
                unchanged.
        """
        problem = defect = None
        try:
            if not first_only or jax.process_index() == 0:
                work()
        except Exception as error:
            problem = reason(error)
            if isinstance(error, UserError) or not isinstance(error, OSError | ValueError | jax.errors.JaxRuntimeError):
                defect = error
        problems = everyones(problem, about="save")
        if defect is not None:
            raise defect
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise OSError(problem if len(problems) == 1 else f"process {rank}: {problem}")

    @contextlib.contextmanager
    def _failing(self, step: int, saving: Path) -> Iterator[None]:
        """Stores the error of a save for those that ask for it later."""
        try:
            yield
        except Exception as error:
            if jax.process_index() == 0:
                shutil.rmtree(saving, ignore_errors=True)
            if not isinstance(error, OSError):
                self._failure = error
                return
            newest = (
                "there is no checkpoint yet" if self._newest is None else f"step {self._newest} is the newest checkpoint"
            )
            failing = f"{self._directory}: step {step} cannot be saved: {error}"
            self._failure = SaveError(f"{failing}; check the disk and run the same command again; {newest}")
            if self._on_failure is not None:
                self._on_failure(f"{failing}; it will be tried again; {newest}")

    def _await_thread(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread of the save in progress, if any; returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        return True

    def _join(self) -> None:
        """Waits as `wait` does, but raises nothing if the save could not be written."""
        self._await_thread()
        if not isinstance(self._failure, SaveError):
            self.wait()

    def _release(self) -> None:
        self._arrays.close()
        if self._lock is not None:
            self._lock.release()
