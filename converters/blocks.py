"""Checkpoint arrays in blocks of rows, so that no stacked array is ever whole in memory."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class BlockArray:
    """An array that is made block by block while it is saved; `llamajax.checkpoint` takes it for an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    make: Callable[[int, int], np.ndarray]
    """The rows from the first number to the second of the leading dim."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def rows_per_block(self) -> int:
        """As many as 64 MiB hold, but at least one."""
        return min(self.shape[0], max(1, _BLOCK_BYTES * self.shape[0] // self.nbytes))


class _BlockHandler(ocp.type_handlers.NumpyHandler):
    """Saves `BlockArray`s as Orbax saves numpy arrays, each block as one chunk, one after the other."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        return [CommitFutureAwaitingContractedSignals(self._write(values, infos), name="blocks")]

    async def _write(self, values: Sequence[BlockArray], infos: Sequence[Any]) -> None:
        for array, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            rows = array.rows_per_block
            spec = ocp.type_handlers.get_json_tspec_write(
                info,
                use_ocdbt=info.is_ocdbt_checkpoint,
                global_shape=array.shape,
                local_shape=(rows, *array.shape[1:]),
                dtype=array.dtype,
                process_index=0,
            )
            store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
            for start in range(0, array.shape[0], rows):
                stop = min(start + rows, array.shape[0])
                await store[start:stop].write(array.make(start, stop), can_reference_source_data_indefinitely=True)


_absl = logging.getLogger("absl")
_absl.disabled = True  # Orbax would warn that numpy arrays, too, are now read by this handler, which inherits how
ocp.type_handlers.register_type_handler(BlockArray, _BlockHandler(), override=True)
_absl.disabled = False


@dataclass(frozen=True)
class StoredArray:
    """An array of a committed checkpoint, read block by block."""

    _store: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._store.shape)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, rows), in order and as they were saved: every chunk is read once."""
        rows = self._store.chunk_layout.read_chunk.shape[0]
        for start in range(0, self.shape[0], rows):
            yield start, self._store[start : min(start + rows, self.shape[0])].read().result()


def open_array(step_dir: Path, name: str) -> StoredArray:
    """An array of the committed checkpoint in `step_dir`."""
    kvstore = {"driver": "ocdbt", "base": f"file://{step_dir.absolute() / 'state'}", "path": f"{name}/"}
    # No cache: every block is read once.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    return StoredArray(ts.open({"driver": "zarr", "kvstore": kvstore}, read=True, context=context).result())
