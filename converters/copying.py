"""Copies weights to Hugging Face tensors piece by piece, in two threads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from converters.blocks import THREADS, StoredArray, boxes, open_array
from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError
from llamajax.weights import names
from llamajax.weights.names import Box
from llamajax.weights.safetensors import Stored

PIECE_BYTES = 16 << 20
"""Threads copy pieces of arrays up to this size or a quarter of the largest tensor; each thread needs less than four times
that. Larger pieces are copied one at a time, tensor by tensor. Memory stays below twice the largest tensor and a little."""

Put = Callable[[str, np.ndarray, int], None]
"""Takes the name of a tensor, some of its rows, and the number of the first one; from any thread."""


def copy_array(step_dir: Path, array: str, put: Put, piece_bytes: int, config: ModelConfig) -> None:
    """Puts the tensors that make up one of our arrays in a checkpoint of a model, by their common names."""
    stored, tensors = open_array(step_dir, array), names.tensors_of(array, config)
    small: list[tuple[Box, Sequence[names.Tensor]]] = []
    for box in _boxes(stored, names.split_dims(array, config)):
        if stored.nbytes(box) <= piece_bytes:
            small.append((box, tensors))
        else:
            for tensor in tensors:
                _copy_piece(array, stored, box, [tensor], put, config)
    _in_threads(lambda piece: _copy_piece(array, stored, piece[0], piece[1], put, config), small)


def copy_tensor(name: str, stored: Stored, put: Put, rows: slice = slice(None)) -> None:
    """Puts a tensor of a file, or some rows of it."""
    first, stop, _ = rows.indices(stored.shape[0])
    step = max(1, PIECE_BYTES * stored.shape[0] // stored.nbytes)
    _in_threads(lambda at: put(name, stored.read(at, min(at + step, stop)), at - first), range(first, stop, step))


def _in_threads(copy: Callable[[Any], None], pieces: Iterable[Any]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        copies = [pool.submit(copy, piece) for piece in pieces]
        try:
            for each in copies:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _boxes(stored: StoredArray, split_dims: Sequence[int]) -> Iterator[Box]:
    """Yields the parts of an array to copy at a time: stored blocks along `split_dims`, whole in other dims."""
    shape = [stored.block_shape[dim] if dim in (0, *split_dims) else size for dim, size in enumerate(stored.shape)]
    return boxes(stored.shape, tuple(shape))


def _copy_piece(
    array: str, stored: StoredArray, box: Box, tensors: Sequence[names.Tensor], put: Put, config: ModelConfig
) -> None:
    leading = names.num_leading(array, config)
    of_block, shape = box[leading:], stored.shape[leading:]
    block = stored.read(box) if len(tensors) > 1 else None
    for tensor in tensors:
        if block is None:
            part = stored.read((*box[:leading], *names.part_index(tensor, shape, of_block)))
        else:
            part = block[(slice(None),) * leading + tensor.part]
        first_row = names.first_row(tensor, shape, of_block)
        for index in np.ndindex(part.shape[:leading]):
            at = [number + dim.start for number, dim in zip(index, box, strict=False)]
            put(names.name_of(tensor, array, at, config), names.to_hf(tensor, part[index]), first_row)


def rounded(values: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """Returns values of a tensor in another type.

    Raises:
        ConfigError: one is too large for float16.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if dtype == np.float16 and not np.isfinite(narrow).all():
        largest = float(np.max(np.abs(values.astype(np.float32))))
        raise ConfigError(
            f"--dtype float16: {name} has a weight {largest:.3g}, above float16's maximum 65504; choose bfloat16 or float32"
        )
    return narrow
