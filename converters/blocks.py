"""Reads and writes checkpoint arrays block by block, so that memory never holds a whole stacked array."""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from llamajax.weights.names import Box
from llamajax.weights.safetensors import write_at

BLOCK_BYTES = 16 << 20
THREADS = 2
"""Blocks processed at a time. Copying and transposing keep about two cores busy; more threads need more memory."""


def block_shape(shape: tuple[int, ...], dtype: np.dtype[Any], split_dims: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of blocks of `BLOCK_BYTES`, cut along the first of `split_dims`, and as far as needed the next."""
    block = list(shape)
    for dim in split_dims:
        row_bytes = math.prod(block) // block[dim] * dtype.itemsize
        block[dim] = math.ceil(shape[dim] / math.ceil(shape[dim] / max(1, BLOCK_BYTES // row_bytes)))
    return tuple(block)


def boxes(shape: tuple[int, ...], block_shape: tuple[int, ...]) -> Iterator[Box]:
    """Yields the position of each block of an array, in order."""
    ranges = (
        [slice(at, min(at + step, size)) for at in range(0, size, step)]
        for size, step in zip(shape, block_shape, strict=True)
    )
    return itertools.product(*ranges)


@dataclass(frozen=True)
class BlockArray:
    """Array computed block by block while it is saved; `llamajax.checkpoint.write` treats it as an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block_shape: tuple[int, ...]
    """Shape of a block. The last block of a dim is smaller if the block size does not divide the dim."""
    make: Callable[[Box], np.ndarray]
    """Returns the block at a position."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _BlockHandler(ocp.type_handlers.NumpyHandler):
    """Saves `BlockArray`s the way Orbax saves numpy arrays without OCDBT: as zarr arrays with one file per block.

    This class writes the files itself: tensorstore writes and syncs each file in one piece, which is five times slower.
    """

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        return [CommitFutureAwaitingContractedSignals(self._write(values, infos), name="blocks")]

    async def _write(self, values: Sequence[BlockArray], infos: Sequence[Any]) -> None:
        for array, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            assert not info.is_ocdbt_checkpoint
            spec = ocp.type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=False,
                global_shape=array.shape,
                local_shape=array.block_shape,
                dtype=array.dtype,
                process_index=0,
            )
            await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
            await asyncio.to_thread(_write_blocks, array, Path(spec["kvstore"]["path"]))


def _write_blocks(array: BlockArray, directory: Path) -> None:
    def write(box: Box) -> None:
        block = array.make(box)
        if block.shape != array.block_shape:  # last block of a dim; zarr stores every block in full
            block = np.pad(block, [(0, full - size) for full, size in zip(array.block_shape, block.shape, strict=True)])
        place = (dim.start // size for dim, size in zip(box, array.block_shape, strict=True))
        with (directory / ".".join(map(str, place))).open("xb") as file:
            write_at(file.fileno(), block, 0)

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(write, boxes(array.shape, array.block_shape)):  # reraises errors of the writes
            pass


_absl = logging.getLogger("absl")
_absl.disabled = True  # Orbax would warn that this handler, which inherits from the numpy one, now also reads numpy arrays
ocp.type_handlers.register_type_handler(BlockArray, _BlockHandler(), override=True)
_absl.disabled = False
_absl.addFilter(lambda record: "Skipping merge of OCDBT" not in record.getMessage())  # without OCDBT, nothing needs merging


@dataclass(frozen=True)
class StoredArray:
    """Array of a committed checkpoint, read in parts."""

    _store: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._store.shape)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of the stored blocks. Reading block by block reads every byte once."""
        return tuple(self._store.chunk_layout.read_chunk.shape)

    def nbytes(self, box: Box) -> int:
        """Returns the size of a part of the array, in bytes."""
        return math.prod(dim.stop - dim.start for dim in box) * self._store.dtype.numpy_dtype.itemsize

    def read(self, index: tuple[slice | int, ...]) -> np.ndarray:
        """Returns a part of the array."""
        return self._store[index].read().result()


def open_array(step_dir: Path, name: str) -> StoredArray:
    """Opens an array of the committed checkpoint in `step_dir`, stored in few files (OCDBT) or in one file per block."""
    state = step_dir.absolute() / "state"
    if (state / "manifest.ocdbt").is_file():
        kvstore = {"driver": "ocdbt", "base": f"file://{state}", "path": f"{name}/"}
    else:
        kvstore = {"driver": "file", "path": f"{state / name}/"}
    # No cache: every block is read once.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}, "file_io_mode": {"mode": "memmap"}})
    return StoredArray(ts.open({"driver": "zarr", "kvstore": kvstore}, read=True, context=context).result())
