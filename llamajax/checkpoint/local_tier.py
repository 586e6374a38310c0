"""The local tier: newest states on a fast disk of each host, saved more often than the run's checkpoints.

Every process keeps what lies on its own devices, by itself: nothing is shared, and nobody waits for another. Layout, below
`checkpoint.local_dir`, for its user alone::

    tiny-5d41402abc4b2a76/     a run: its name, and a hash of its path and of what its checkpoints call themselves
        3/1240/                what process 3 has of step 1240
            0.bin, 1.bin ...   the bytes of a part of an array; each part once, whatever the number of devices that hold it
            parts.json         which parts of which arrays, dtype and shape of each, and which start of the run saved it
            meta.json, files/  as in a checkpoint
            manifest.json      as in a checkpoint (llamajax.checkpoint.manifest)
        3/1240.saving/         a step being written; see llamajax.checkpoint.retention

A step counts when every process has its part of it, whole, from the same start, and exactly what its devices need now;
not when the run has gone back behind it since.
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

from llamajax.checkpoint import manifest, retention
from llamajax.checkpoint.array_writer import reason
from llamajax.checkpoint.read import Found, State, is_key, read_object
from llamajax.checkpoint.steps import steps_in
from llamajax.data.rows.position import PassedOver, is_left_behind
from llamajax.disk import make_folder, sync, write_atomically
from llamajax.errors import CheckpointError
from llamajax.parallel.arrays import named_arrays
from llamajax.processes.peers import everyones

_KEPT = 3  # a host that is one step behind the others, and writes the next one, still has one that all have
_THREADS = min(8, os.cpu_count() or 1)

Slices = tuple[tuple[int, int], ...]
"""A part of an array: start and end along each of its dims."""


def identity_of(checkpoints: Path) -> str:
    """What tells the run from all that have been in its place.

    Raises:
        OSError: it cannot be read or kept beside the run's checkpoints.
    """
    path = checkpoints / ".identity"
    if not path.exists():
        write_atomically(path, secrets.token_hex(16).encode())
    return path.read_text()


class LocalTier:
    """Saves and restores what lies on this process's devices. All processes make one, and restore together."""

    def __init__(self, directory: Path, start: str, tell: Callable[[str], object]) -> None:
        """Changes nothing on the disk yet.

        Args:
            directory: the run's, on this host.
            start: tells this start of the run from all others, alike in its processes.
            tell: takes a line when a step cannot be saved or others wait for it, and when saving works again.
        """
        self._run_directory, self._start, self._tell = directory, start, tell
        self._directory = directory / str(jax.process_index())
        self._thread: threading.Thread | None = None
        self._num_failures = self._num_passed = 0

    def save(self, step: int, state: Any, meta: dict[str, Any], files: Mapping[str, bytes]) -> None:
        """Starts saving; returns when the arrays have left the devices, so that `state` may be donated.

        A step that cannot be saved is told, and costs later ones a pause: 1, 3, 7, ... of them are passed over. It is never
        an error, and other processes do not hear of it.
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
        # Copies, of which jax knows nothing: on a CPU an array and its host's memory are one.
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
        """In its own thread: the step, whole or not at all; then older ones go."""
        saving = self._directory / f"{step}.saving"
        try:
            make_folder(self._directory, 0o700)
            retention.remove_unfinished(self._directory)
            num_bytes = sum(part.nbytes for part in parts)
            if shutil.disk_usage(self._directory).free < num_bytes:  # for as many: rather fewer than none that is new
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
            self._tell(f"{self._directory}: step {step} cannot be saved: {reason(error)}; {later}, and the run goes on")
        else:
            if self._num_failures:
                self._tell(f"{self._directory}: step {step} is saved; {self._num_failures} before it could not be")
            self._num_failures = 0

    def newest(
        self, abstract_state: Any, *, above: int, before: int | None, passed_over: Sequence[PassedOver]
    ) -> tuple[int | None, str]:
        """The newest step of which every process has what its devices need; all call this together.

        Args:
            abstract_state: the state to restore, with devices.
            above: only steps above this one are looked at.
            before: only steps below this one are; None: all.
            passed_over: what the run has passed over. A host that was elsewhere meanwhile, or whose disk failed, may have
                steps that the run has gone back behind.

        Returns:
            The step, None if there is none; and why a newer one is passed over, empty if there is none.
        """
        here = everyones([step for step in self._steps() if step > above and (before is None or step < before)])
        why = ""
        for step in sorted({step for steps in here for step in steps}, reverse=True):
            found: list[tuple[str | None, str]] = [
                tuple(about) for about in everyones(self._examine(step, abstract_state, passed_over))
            ]
            problems = [f"process {rank} {problem}" for rank, (_, problem) in enumerate(found) if problem]
            if not problems and len({start for start, _ in found}) > 1:
                problems = ["its parts are of different starts"]
            if not problems:
                return step, why
            why = why or f"local step {step} is not whole: {problems[0]}"
        return None, why

    def find(self, step: int, abstract_state: State) -> Found[State]:
        """A step that `newest` has found."""
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
                on_devices.append(jax.device_put(on_host[at], device, may_alias=False))
            array = jax.make_array_from_single_device_arrays(stored.shape, stored.sharding, on_devices)
            leaves.append(jax.random.wrap_key_data(array, dtype=leaf.dtype) if is_key(leaf) else array)
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def drop_above(self, step: int) -> None:
        """Deletes the steps that the run has not come to, or has gone back behind."""
        if not (newer := [found for found in self._steps() if found > step]):
            return
        self.wait()
        try:
            retention.delete(self._directory, newer, self._tell)
        except OSError as error:
            self._tell(f"{self._directory}: {reason(error)}; what is newer than step {step} there is not believed")

    def clear(self, *, up_to: int) -> None:
        """Deletes all, if nothing is newer there than step `up_to`, which the run's checkpoints have."""
        self.wait()
        if any(step > up_to for step in self._steps()):
            return
        shutil.rmtree(self._directory, ignore_errors=True)
        try:
            self._run_directory.rmdir()
        except OSError:  # other processes of this host are not done
            return

    def wait(self) -> None:
        """Returns when the step being written, if any, is on the disk or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _steps(self) -> list[int]:
        """None where the disk fails, be it for good: this host then has nothing, and others need not."""
        try:
            return steps_in(self._directory)
        except OSError:
            return []

    def _examine(self, step: int, abstract_state: Any, passed_over: Sequence[PassedOver]) -> tuple[str | None, str]:
        """The start in which the step was saved, and why this process cannot use it; empty if it can."""
        directory = self._directory / str(step)
        if step not in self._steps():
            return None, "has nothing of it"
        try:
            if found := manifest.problems(directory, manifest.read(directory)):
                return None, f"has a damaged part: {found[0]}"
            saved = read_object(directory, "parts.json")
            meta = read_object(directory, "meta.json")
        except (CheckpointError, OSError) as error:
            return None, f"has a damaged part: {error}"
        if passed_over and is_left_behind(step, len(meta["data"].get("passed_over", ())), passed_over):
            return None, "has it from before the run went back"
        wanted = named_arrays(abstract_state)
        for name, leaf in wanted.items():
            about = saved["arrays"].get(name)
            if about is None or (about["dtype"], tuple(about["shape"])) != (str(leaf.dtype), leaf.shape):
                return None, f"has another {name}"
            if not set(_places(_stored(leaf)).values()) <= {_slices_of(part) for part in about["parts"]}:
                return None, f"has other parts of {name} than its devices need"
        return saved["start"], "" if wanted.keys() == saved["arrays"].keys() else "has other arrays"


def _stored(leaf: jax.ShapeDtypeStruct) -> Any:
    """As the leaf is kept: typed PRNG keys as their data."""
    return jax.eval_shape(jax.random.key_data, leaf).update(sharding=leaf.sharding) if is_key(leaf) else leaf


def _parts_here(array: jax.Array) -> dict[Slices, jax.Array]:
    """What this process's devices hold of the array, each part once."""
    array = jax.random.key_data(array) if is_key(array) else array
    return {_slices(shard.index, array.shape): shard.data for shard in array.addressable_shards}


def _places(array: Any) -> dict[Any, Slices]:
    """Which part each of this process's devices is to hold."""
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    return {device: _slices(index, array.shape) for device, index in indices.items()}


def _slices(index: tuple[slice, ...], shape: tuple[int, ...]) -> Slices:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _slices_of(part: list[list[int]]) -> Slices:
    """From JSON, which knows no tuples."""
    return tuple((start, end) for start, end in part)
