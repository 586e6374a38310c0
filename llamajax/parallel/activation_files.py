"""Files on a local NVMe disk for saved values that wait between their two passes (SSDTrain, arXiv:2408.10013).

Each local device has a file without a name: a killed process leaves nothing, and the disk has its space back. Two threads
per device write and read it, each in the order of the calls. A value that is requested while it is still in memory comes
from there: nothing is read, and a write that has not begun never happens.
"""

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from llamajax import disk
from llamajax.errors import DiskError
from llamajax.parallel.block_file import BlockFile
from llamajax.units import format_bytes

Job = Callable[[], None]
Device = Any
"""A `jax.Device`, which type checkers take for a variable."""


@dataclass(eq=False)
class Value:
    """An array, in memory or in files; the result of `ActivationFiles.store`."""

    like: jax.ShapeDtypeStruct
    pieces: "list[_Piece]"
    """Its part on each local device."""
    array: jax.Array | None
    """The array; None once it is written."""
    known: Callable[[], jax.Array | None]
    """Returns the array if somebody still holds it."""
    users: int = 0
    """Number of times that it was stored and not yet taken."""
    unwritten: int = 0
    is_cancelled: bool = False
    """Whether what is not yet written need not be."""
    read: dict[int, jax.Array] = field(default_factory=dict)
    """Parts that were read, by their index in `pieces`."""
    is_requested: bool = False
    result: jax.Array | None = None
    """The array once it is back."""

    def held(self) -> jax.Array | None:
        """Returns the array if it is in memory although it may be written."""
        array = self.known()
        return None if array is None or array.is_deleted() else array


@dataclass(eq=False)
class _Shared:
    """State that all threads of a process share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    """Lock of all values, notified when one of them is written or read."""
    failure: tuple[str, BaseException] | None = None
    is_closed: bool = False
    bytes_written: int = 0
    bytes_read: int = 0

    def fail(self, doing: str, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or (doing, error)
            self.changed.notify_all()


class _Lane:
    """A device's file and its threads."""

    def __init__(self, folder: Path, device: Device) -> None:
        self.device, self.file = device, BlockFile(folder)
        self.writes, self.reads = queue.SimpleQueue[Job | None](), queue.SimpleQueue[Job | None]()
        self.threads = [
            threading.Thread(target=_serve, args=(jobs, file), name=f"nvme-{name}-{device.id}", daemon=True)
            for name, jobs, file in (("write", self.writes, self.file.file), ("read", self.reads, self.file.read_file))
        ]
        for thread in self.threads:
            thread.start()


@dataclass(eq=False)
class _Piece:
    """A part of a value in a device's file."""

    lane: _Lane
    shape: tuple[int, ...]
    num_bytes: int
    offset: int


class ActivationFiles:
    """Stores arrays on the disk and brings them back.

    One thread calls. A failure of the disk or of a thread surfaces at the next call.
    """

    def __init__(
        self,
        folder: str,
        devices: Sequence[Device],
        *,
        capacity: float | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Opens one file per device.

        Args:
            folder: folder on the disk, made if it is missing.
            devices: local devices of the arrays to come.
            capacity: bytes that the files may take together; None: the free space of the disk.
            note: takes a line about a file system that copies through the page cache.

        Raises:
            DiskError: the folder cannot be made or written to.
        """
        self._folder, self._shared = Path(folder).expanduser(), _Shared()
        self._lanes = dict[Device, _Lane]()
        self._known = dict[Any, Value]()
        self._stop = weakref.finalize(self, _stop, self._shared, self._lanes)
        self.forwarded = 0
        """Number of values that came from memory."""
        try:
            disk.make_folder(self._folder, 0o700)
            for device in devices:
                self._lanes[device] = _Lane(self._folder, device)
            about = os.statvfs(self._folder)
        except OSError as error:
            self.close()
            raise DiskError(
                f"offload.tiers.nvme_dir: {self._folder}: no file can be opened there: {error.strerror}; name a folder on a"
                " local disk that this process may write to"
            ) from error
        self._capacity = about.f_bavail * about.f_frsize if capacity is None else capacity
        if not all(lane.file.is_direct for lane in self._lanes.values()):
            note(f"{self._folder} has no direct I/O: saved values pass through the page cache, which takes host memory")

    @property
    def bytes_written(self) -> int:
        """Returns the bytes of values written so far."""
        return self._shared.bytes_written

    @property
    def bytes_read(self) -> int:
        """Returns the bytes of values read so far."""
        return self._shared.bytes_read

    @property
    def threads(self) -> list[threading.Thread]:
        """Returns the threads that write and read."""
        return [thread for lane in self._lanes.values() for thread in lane.threads]

    def store(self, arrays: Sequence[jax.Array]) -> list[Value]:
        """Starts to write arrays; the caller drops them. An array that is already there, as this object or, once it is
        computed, as another one with the same buffers, is written once.

        Returns:
            A value for each array, to be given to `load` and `take` once.

        Raises:
            DiskError: the files would take more than they may, or the disk failed.
        """
        self._check()
        self._known = {
            key: value for key, value in self._known.items() if value.held() is not None and not value.is_requested
        }
        values = [self._stored(array) for array in arrays]
        for value in values:
            value.users += 1
        return values

    def load(self, values: Sequence[Value]) -> None:
        """Requests values: those in memory are kept there, all others are read.

        Raises:
            DiskError: the disk failed.
        """
        self._check()
        for value in values:
            with self._shared.changed:
                if value.is_requested:
                    continue
                value.is_requested = True
                value.result = value.array if value.array is not None else value.held()
                if value.result is not None:
                    value.is_cancelled = True
                    self.forwarded += 1
                    continue
            for index, piece in enumerate(value.pieces):
                piece.lane.reads.put(partial(_read, self._shared, value, index))

    def take(self, values: Sequence[Value]) -> list[jax.Array]:
        """Waits for requested values and returns them; their space is free again.

        Raises:
            DiskError: the disk failed.
        """
        arrays = list[jax.Array]()
        for value in values:
            with self._shared.changed:
                self._shared.changed.wait_for(lambda value=value: value.result is not None or self._shared.failure)
                if value.result is None:
                    break
                arrays.append(value.result)
                value.users -= 1
                if not value.users:
                    value.array, value.result, value.known, value.is_cancelled = None, None, _gone, True
                    for piece in value.pieces:
                        piece.lane.file.space.give_back(piece.offset, piece.num_bytes)
        if len(arrays) < len(values):
            self._check()
        return arrays

    def settle(self, values: Sequence[Value]) -> None:
        """Waits until values are written, or need not be: memory then holds none of them.

        Raises:
            DiskError: the disk failed.
        """

        def is_settled() -> bool:
            return self._shared.failure is not None or all(not own.unwritten or own.is_cancelled for own in values)

        with self._shared.changed:
            self._shared.changed.wait_for(is_settled)
        self._check()

    def close(self) -> None:
        """Ends the threads, after the system call that each is in, and closes the files."""
        self._stop()
        for thread in self.threads:
            thread.join()

    def _stored(self, array: jax.Array) -> Value:
        keys = list(_keys(array))
        if (known := next((self._known[key] for key in keys if key in self._known), None)) is not None:
            return known
        pieces, shards = list[_Piece](), array.addressable_shards
        for shard in shards:
            lane, num_bytes = self._lanes[shard.device], shard.data.nbytes
            pieces.append(_Piece(lane, shard.data.shape, num_bytes, lane.file.space.take(num_bytes)))
        if (total := sum(lane.file.space.end for lane in self._lanes.values())) > self._capacity:
            raise DiskError(
                f"offload.tiers.nvme_dir: saved values take {format_bytes(total)} in {self._folder}, more than"
                f" {format_bytes(self._capacity)}, its free space or this process's part of offload.tiers.nvme_bytes; free"
                " or allow more, or name fewer values in offload.activations"
            )
        like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        value = Value(like, pieces, array, weakref.ref(array), unwritten=len(pieces))
        self._known |= dict.fromkeys(keys, value)
        for index, piece in enumerate(pieces):
            piece.lane.writes.put(partial(_write, self._shared, value, index))
        return value

    def _check(self) -> None:
        if (failure := self._shared.failure) is None:
            return
        doing, error = failure
        if not isinstance(error, OSError):
            raise error
        full = "free space there" if error.errno in disk.FULL else "check the disk"
        raise DiskError(
            f"offload.tiers.nvme_dir: {self._folder}: {doing} saved values failed: {error.strerror}; {full}, or remove this"
        ) from error


_SHARED: "weakref.WeakValueDictionary[Any, ActivationFiles]" = weakref.WeakValueDictionary()


def shared_files(
    folder: str, devices: Sequence[Device], capacity: float | None, note: Callable[[str], None]
) -> ActivationFiles:
    """Returns the files that all steps of this process share; arguments and errors as of `ActivationFiles`."""
    key = folder, tuple(devices), capacity
    if (files := _SHARED.get(key)) is None:
        files = _SHARED[key] = ActivationFiles(folder, devices, capacity=capacity, note=note)
    return files


def _keys(array: Any) -> Iterator[Any]:
    """Yields what tells an array from others while it exists. The place of its buffers does only when it is computed: jax
    waits for it with Python's lock held, which other threads may need for that computation to end."""
    yield id(array)
    if array.is_ready():
        buffers = tuple((shard.device, shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards)
        yield array.shape, array.dtype, buffers


def _gone() -> None:
    return None


def _serve(jobs: "queue.SimpleQueue[Job | None]", file: int) -> None:
    """Runs jobs until there is None; the thread of a file."""
    try:
        while (job := jobs.get()) is not None:
            job()
            del job  # with its value, which would otherwise stay while this thread waits
    finally:
        os.close(file)


def _stop(shared: _Shared, lanes: dict[Device, _Lane]) -> None:
    shared.is_closed = True
    for lane in lanes.values():
        lane.writes.put(None)
        lane.reads.put(None)


def _write(shared: _Shared, value: Value, index: int) -> None:
    """Writes a part of a value, once it is computed; the job of a writer."""
    piece, array = value.pieces[index], value.array
    try:
        if array is None or value.is_cancelled or shared.is_closed or shared.failure is not None:
            return
        data = np.ascontiguousarray(array.addressable_shards[index].data).reshape(-1).view(np.uint8)
        if value.is_cancelled:
            return
        piece.lane.file.write(data, piece.offset)
    except Exception as error:
        shared.fail("writing", error)
        return
    with shared.changed:
        shared.bytes_written += piece.num_bytes
        value.unwritten -= 1
        if not value.unwritten:
            value.array = None
        shared.changed.notify_all()


def _read(shared: _Shared, value: Value, index: int) -> None:
    """Reads a part of a value; the job of a reader."""
    piece, like = value.pieces[index], value.like
    if shared.is_closed or shared.failure is not None:
        return
    try:
        data = piece.lane.file.read(piece.num_bytes, piece.offset)
        lies = jax.sharding.SingleDeviceSharding(piece.lane.device, memory_kind=like.sharding.memory_kind)
        part = jax.device_put(data.view(like.dtype).reshape(piece.shape), lies)
        with shared.changed:
            shared.bytes_read += piece.num_bytes
            value.read[index] = part
            if len(value.read) == len(value.pieces):
                parts = [value.read[place] for place in range(len(value.pieces))]
                value.result = jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)
                value.read.clear()
            shared.changed.notify_all()
    except Exception as error:
        shared.fail("reading", error)
