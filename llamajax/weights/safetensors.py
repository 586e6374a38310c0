"""Reads and writes safetensors files piece by piece, so that memory never holds more than a piece.

The `safetensors` library maps whole files into memory and writes only tensors that are complete in memory. The format is an
8-byte little-endian length, a JSON header of that length (name -> dtype, shape, data_offsets) and the bytes of the tensors,
row-major and without gaps (https://github.com/huggingface/safetensors#format).
"""

import errno
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llamajax.errors import ConfigError, show

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Larger writes took five to ten times the processor time on a virtual machine (LOG.md), perhaps because of huge pages.
_WRITE_BYTES = 64 << 10
_EQUAL_BYTES = 64 << 20
"""Bytes compared at a time."""


@dataclass(frozen=True)
class Stored:
    """Location of a tensor."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    """Offset in the file at which the tensor begins, in bytes."""
    scales: "Scales | None" = None
    """Scales of eight-bit values; None if the stored values are not scaled."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Reads rows `start` to `stop` of the leading dimension; scaled values become float32.

        Raises:
            ConfigError: the file has become shorter.
        """
        row = math.prod(self.shape[1:])
        shape = (len(range(*slice(start, stop).indices(self.shape[0]))), *self.shape[1:])
        values = np.fromfile(self.file, self.dtype, math.prod(shape), offset=self.offset + start * row * self.dtype.itemsize)
        if values.size != math.prod(shape):
            raise ConfigError(f"{self.file}: became shorter while it was read; stop what writes it and try again")
        values = values.reshape(shape)
        return values if self.scales is None else values.astype(np.float32) * self.scales.read(start, shape)

    def equals(self, other: "Stored") -> bool:
        """Returns whether both have the same shape, type and values."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        rows = max(1, _EQUAL_BYTES // (self.nbytes // self.shape[0]))
        starts = range(0, self.shape[0], rows)
        return all(np.array_equal(self.read(at, at + rows), other.read(at, at + rows)) for at in starts)


@dataclass(frozen=True)
class Scales:
    """Scales of a matrix: one factor for each block of values."""

    stored: Stored
    """The scales, with a row for each row of blocks."""
    block: tuple[int, int]
    """Rows and columns of a block; the last blocks are smaller if the size does not divide the matrix."""

    def read(self, start: int, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the scale of every entry in rows of this `shape`, from row `start` on."""
        rows, columns = (np.arange(at, at + size) // of for at, size, of in zip((start, 0), shape, self.block, strict=True))
        return self.stored.read().astype(np.float32)[rows][:, columns]


def stored_tensors(path: Path, header: Mapping[str, Any], data_start: int, size: int) -> dict[str, Stored]:
    """Returns the tensors described by the header of a file; they must fill bytes `data_start` to `size` exactly.

    Raises:
        ConfigError: header or file is damaged, or has a type that Llamas are not stored in.
    """
    tensors = {name: _entry(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"}
    end = data_start
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != end:
            raise ConfigError(f"{path}: {show(name)} does not begin where the tensor before it ends; download it again")
        end += stored.nbytes
    if end != size:
        raise ConfigError(f"{path}: has {size} bytes, but its header describes {end}; download it again")
    return tensors


def _entry(path: Path, name: str, entry: Any, data_start: int) -> Stored:
    """Returns a tensor of a header after checking the entry by itself."""

    def is_size(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**48

    match entry:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [begin, end]} if all(
            map(is_size, [*shape, begin, end])
        ):
            if code not in DTYPES:
                known = ", ".join(DTYPES)
                raise ConfigError(f"{path}: {show(name)} is stored as {show(code)}, not one of {known}; convert it to one")
            stored = Stored(path, DTYPES[code], tuple(shape), data_start + begin)
            if end - begin == stored.nbytes:
                return stored
    raise ConfigError(f"{path}: the header's entry of {show(name)} is damaged; download it again")


def write_at(descriptor: int, values: np.ndarray, offset: int) -> None:
    """Writes the bytes of an array to an open file, from byte `offset` on.

    Raises:
        OSError: the disk is full, or broken.
    """
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for at in range(0, len(data), _WRITE_BYTES):
        piece = data[at : at + _WRITE_BYTES]
        if os.pwrite(descriptor, piece, offset + at) < len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Writer:
    """Writes model files; tensors may come in any order and in pieces. A context manager."""

    def __init__(
        self,
        directory: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: np.dtype[Any],
        max_shard_bytes: float = math.inf,
        single: str = SINGLE,
    ) -> None:
        """Lays out one file, `single`, or shards of at most `max_shard_bytes` (or one larger tensor) with an index."""
        shards: list[dict[str, tuple[int, ...]]] = [{}]
        room = max_shard_bytes
        for name, shape in shapes.items():
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > room and shards[-1]:
                shards.append({})
                room = max_shard_bytes
            shards[-1][name] = shape
            room -= nbytes
        n = len(shards)
        names = [single] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
        self._files = {}
        self._places: dict[str, Stored] = {}
        for name, shard in zip(names, shards, strict=True):
            self._add_file(directory / name, shard, dtype)
        self.nbytes = sum(stored.nbytes for stored in self._places.values())
        self.largest_nbytes = max(stored.nbytes for stored in self._places.values())
        if n > 1:
            total = sum(math.prod(shape) for shape in shapes.values())
            weight_map = {name: stored.file.name for name, stored in self._places.items()}
            index = {"metadata": {"total_size": self.nbytes, "total_parameters": total}, "weight_map": weight_map}
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _add_file(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that the tensors are aligned
        self._places |= stored_tensors(path, header, 8 + len(text), 8 + len(text) + end)
        file = self._files[path] = path.open("xb")
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        file.flush()

    def write(self, name: str, values: np.ndarray, start: int = 0) -> None:
        """Writes rows of a tensor, in the files' type, starting at row `start` of its leading dimension; from any thread."""
        place = self._places[name]
        assert values.shape[1:] == place.shape[1:]
        assert values.dtype == place.dtype
        offset = place.offset + start * math.prod(place.shape[1:]) * place.dtype.itemsize
        write_at(self._files[place.file].fileno(), values, offset)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in self._files.values():
            if kind is None:
                os.fsync(file.fileno())
            file.close()
