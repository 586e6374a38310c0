"""The local tier: the newest states on a fast disk of each host, saved more often than the run's checkpoints.

Every process keeps the state of its own devices independently: nothing is shared, and no process waits for another. The
layout below `checkpoint.local_dir`, accessible to its user alone::

    tiny-5d41402abc4b2a76/     a run: its name, and a hash of its path and of the identity of its checkpoints
        3/1240/                the part of step 1240 from process 3
            0.bin, 1.bin ...   the bytes of a part of an array; each part once, however many devices hold it
            parts.json         the parts of each array, its dtype and shape, and the start of the run that saved it
            meta.json, files/  as in a checkpoint
            manifest.json      as in a checkpoint (llamajax.checkpoint.manifest)
        3/1240.saving/         a step being written; see llamajax.checkpoint.retention

A step counts when every process has its part of it, complete, from the same start, with exactly the parts that its devices
need now, and when the run has not rolled back behind the step since.
"""

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from llamajax.checkpoint import manifest, retention
from llamajax.checkpoint.array_writer import reason
from llamajax.checkpoint.read import Found, State, is_key, read_object
from llamajax.checkpoint.steps import steps_in
from llamajax.data.rows.position import PassedOver, is_left_behind
from llamajax.disk import make_folder, sync, write_atomically
from llamajax.errors import CheckpointError
from llamajax.parallel.arrays import named_arrays
from llamajax.processes.peers import everyones

_KEPT = 3  # a host that is one step behind the others, and is writing the next one, still has a step that all have
_THREADS = min(8, os.cpu_count() or 1)

Slices = tuple[tuple[int, int], ...]
"""A part of an array: start and end along each dimension."""


def identity_of(checkpoints: Path) -> str:
    """Returns the identity of the run, different for every run that has been in this directory.

    Raises:
        OSError: the identity cannot be read, or stored beside the run's checkpoints.
    """
    path = checkpoints / ".identity"
    if not path.exists():
        write_atomically(path, secrets.token_hex(16).encode())
    return path.read_text()


class LocalTier:
    """Saves and restores the state on this process's devices. All processes create one, and restore together."""

    def __init__(self, directory: Path, start: str, tell: Callable[[str], object]) -> None:
        """Creates the tier without changing the disk.

        Args:
            directory: directory of the run on this host.
            start: identifies this start of the run; the same in all its processes.
            tell: takes a line when a step cannot be saved, when a save delays the run, and when saving works again.
        """
        self._run_directory, self._start, self._tell = directory, start, tell
        self._directory = directory / str(jax.process_index())
        self._thread: threading.Thread | None = None
        self._num_failures = self._num_passed = 0

    def save(self, step: int, state: Any, meta: dict[str, Any], files: Mapping[str, bytes]) -> None:
        """Starts saving; returns when the arrays have left the devices, so that `state` may be donated.

        A failed save is reported and delays later ones: 1, 3, 7, ... steps are then skipped. It is never an error, and other
        processes are not notified.
        """
        began = time.monotonic()
        self.wait()
        if (waited := time.monotonic() - began) > 1:
            self._tell(f"step {step}: waited {waited:.1f} s for the previous local checkpoint; raise checkpoint.local_every")
        if self._num_failures and self._num_passed < 2**self._num_failures - 1:
            self._num_passed += 1
            return
        arrays = named_arrays(state)
        parts = {name: _parts_here(array) for name, array in arrays.items()}
        for of_array in parts.values():
            for part in of_array.values():
                part.copy_to_host_async()
        # Copies that jax does not manage: on a CPU, device memory and host memory are the same.
        on_host = {(name, at): np.array(part) for name, of_array in parts.items() for at, part in of_array.items()}
        about = {
            name: {"dtype": str(array.dtype), "shape": array.shape, "parts": list(parts[name])}
            for name, array in arrays.items()
        }
        small = {"parts.json": json.dumps({"start": self._start, "arrays": about}).encode()}
        small |= {"meta.json": json.dumps(meta, indent=1).encode()}
        small |= {f"files/{name}": content for name, content in files.items()}
        self._thread = threading.Thread(target=self._write, args=(step, list(on_host.values()), small), name=f"local-{step}")
        self._thread.start()

    def _write(self, step: int, parts: list[np.ndarray], small: Mapping[str, bytes]) -> None:
        """Writes the step as a whole or not at all, in a separate thread; then deletes older steps."""
        saving = self._directory / f"{step}.saving"
        try:
            make_folder(self._directory, 0o700)
            retention.remove_unfinished(self._directory)
            num_bytes = sum(part.nbytes for part in parts)
            if shutil.disk_usage(self._directory).free < num_bytes:  # keeps fewer old steps rather than no new one
                retention.delete(self._directory, self._steps()[: 1 - _KEPT], self._tell)
            if (free := shutil.disk_usage(self._directory).free) < num_bytes:
                raise OSError(f"it takes {num_bytes:,} bytes, but only {free:,} are free")
            (saving / "files").mkdir(parents=True)
            content: dict[str, bytes | memoryview] = {
                f"{i}.bin": part.reshape(-1).view(np.uint8).data for i, part in enumerate(parts)
            }
            content |= small
            with ThreadPoolExecutor(_THREADS) as pool:
                written = pool.map(lambda name: manifest.write_file(saving / name, content[name]), content)
                manifest.write(saving, dict(zip(content, written, strict=True)))
            if (self._directory / str(step)).exists():
                retention.delete(self._directory, [step], self._tell)
            saving.rename(self._directory / str(step))
            sync(self._directory)
            retention.delete(self._directory, steps_in(self._directory)[:-_KEPT], self._tell)
        except Exception as error:
            shutil.rmtree(saving, ignore_errors=True)
            self._num_failures, self._num_passed = self._num_failures + 1, 0
            later = "it will be tried again" if isinstance(error, OSError) else f"{type(error).__name__}; it is tried again"
            self._tell(f"{self._directory}: step {step} cannot be saved: {reason(error)}; {later}, and the run continues")
        else:
            if self._num_failures:
                self._tell(f"{self._directory}: step {step} is saved; {self._num_failures} before it could not be")
            self._num_failures = 0

    def newest(
        self, abstract_state: Any, *, above: int, before: int | None, passed_over: Sequence[PassedOver]
    ) -> tuple[int | None, str]:
        """Returns the newest step for which every process has the parts that its devices need. All call this together.

        Args:
            above: only steps above this one count.
            before: only steps below this one count; None: all.
            passed_over: rows that the run has skipped. A host that was not part of the run meanwhile, or had a failing disk,
                may have steps from before a rollback.

        Returns:
            The step, or None; and the reason why a newer one was rejected, empty if there is none.
        """
        here = everyones([step for step in self._steps() if step > above and (before is None or step < before)])
        why = ""
        for step in sorted({step for steps in here for step in steps}, reverse=True):
            found: list[tuple[str | None, str]] = [
                tuple(about) for about in everyones(self._examine(step, abstract_state, passed_over))
            ]
            problems = [f"process {rank} {problem}" for rank, (_, problem) in enumerate(found) if problem]
            if not problems and len({start for start, _ in found}) > 1:
                problems = ["its parts are from different starts"]
            if not problems:
                return step, why
            why = why or f"local step {step} is not whole: {problems[0]}"
        return None, why

    def find(self, step: int, abstract_state: State) -> Found[State]:
        """Returns a step that `newest` has found."""
        directory = self._directory / str(step)
        return Found(
            step=step,
            meta=read_object(directory, "meta.json"),
            files=directory / "files",
            read_state=lambda: self._read(directory, abstract_state),
        )

    def _read(self, directory: Path, abstract_state: State) -> State:
        about = read_object(directory, "parts.json")["arrays"]
        places = [(name, _slices_of(part)) for name in about for part in about[name]["parts"]]
        files = {place: f"{number}.bin" for number, place in enumerate(places)}
        leaves = []
        for name, leaf in named_arrays(abstract_state).items():
            stored = _stored(leaf)
            on_host: dict[Slices, np.ndarray] = {}
            on_devices = []
            for device, at in _places(stored).items():
                if at not in on_host:
                    shape = [end - start for start, end in at]
                    on_host[at] = np.fromfile(directory / files[name, at], stored.dtype).reshape(shape)
                memory = SingleDeviceSharding(device, memory_kind=stored.sharding.memory_kind)
                on_devices.append(jax.device_put(on_host[at], memory, may_alias=False))
            array = jax.make_array_from_single_device_arrays(stored.shape, stored.sharding, on_devices)
            leaves.append(jax.random.wrap_key_data(array, dtype=leaf.dtype) if is_key(leaf) else array)
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def drop_above(self, step: int) -> None:
        """Deletes the steps that the run has not reached yet, or has rolled back behind."""
        if not (newer := [found for found in self._steps() if found > step]):
            return
        self.wait()
        try:
            retention.delete(self._directory, newer, self._tell)
        except OSError as error:
            self._tell(f"{self._directory}: {reason(error)}; steps after {step} there are ignored")

    def clear(self, *, up_to: int) -> None:
        """Deletes all steps unless one is newer than step `up_to`, the newest of the run's checkpoints."""
        self.wait()
        if any(step > up_to for step in self._steps()):
            return
        shutil.rmtree(self._directory, ignore_errors=True)
        try:
            self._run_directory.rmdir()
        except OSError:  # other processes of this host still use it
            return

    def wait(self) -> None:
        """Returns when the step being written, if any, is on the disk or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _steps(self) -> list[int]:
        """Returns the steps here; none if the disk fails, even permanently: other hosts may still have theirs."""
        try:
            return steps_in(self._directory)
        except OSError:
            return []

    def _examine(self, step: int, abstract_state: Any, passed_over: Sequence[PassedOver]) -> tuple[str | None, str]:
        """Returns the start in which the step was saved, and why this process cannot use it; empty if it can."""
        directory = self._directory / str(step)
        if step not in self._steps():
            return None, "has no part of it"
        try:
            if found := manifest.problems(directory, manifest.read(directory)):
                return None, f"has a damaged part: {found[0]}"
            saved = read_object(directory, "parts.json")
            meta = read_object(directory, "meta.json")
        except (CheckpointError, OSError) as error:
            return None, f"has a damaged part: {error}"
        if passed_over and is_left_behind(step, len(meta["data"].get("passed_over", ())), passed_over):
            return None, "has it from before a rollback"
        wanted = named_arrays(abstract_state)
        for name, leaf in wanted.items():
            about = saved["arrays"].get(name)
            if about is None or (about["dtype"], tuple(about["shape"])) != (str(leaf.dtype), leaf.shape):
                return None, f"has a different {name}"
            if not set(_places(_stored(leaf)).values()) <= {_slices_of(part) for part in about["parts"]}:
                return None, f"has other parts of {name} than its devices need"
        return saved["start"], "" if wanted.keys() == saved["arrays"].keys() else "has other arrays"


def _stored(leaf: jax.ShapeDtypeStruct) -> Any:
    """Returns the leaf in its stored form: typed PRNG keys become their key data."""
    return jax.eval_shape(jax.random.key_data, leaf).update(sharding=leaf.sharding) if is_key(leaf) else leaf


def _parts_here(array: jax.Array) -> dict[Slices, jax.Array]:
    """Returns the parts of the array on this process's devices, each part once."""
    array = jax.random.key_data(array) if is_key(array) else array
    return {_slices(shard.index, array.shape): shard.data for shard in array.addressable_shards}


def _places(array: Any) -> dict[Any, Slices]:
    """Returns the part that each of this process's devices must hold."""
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    return {device: _slices(index, array.shape) for device, index in indices.items()}


def _slices(index: tuple[slice, ...], shape: tuple[int, ...]) -> Slices:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _slices_of(part: list[list[int]]) -> Slices:
    """Converts a part from JSON, which has no tuples."""
    return tuple((start, end) for start, end in part)
