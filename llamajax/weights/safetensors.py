"""Reading and writing safetensors files piece by piece, so that no more than a piece is ever in memory.

The `safetensors` library maps whole files into memory and writes only what is whole in memory. The format is an 8-byte
little-endian length, a JSON header of that length (name -> dtype, shape, data_offsets) and the tensors' bytes, row-major
and without gaps (https://github.com/huggingface/safetensors#format).
"""

import errno
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llamajax.errors import ConfigError, show

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
CODES = {dtype: code for code, dtype in DTYPES.items()}

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_MAX_JSON_BYTES = 4_000_000  # thirty times what the largest Llama needs
# Larger writes took five to ten times the processor time on a virtual machine (LOG.md), perhaps for huge pages.
_WRITE_BYTES = 64 << 10

_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


@dataclass(frozen=True)
class Stored:
    """Where a tensor is."""

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    """Byte of the file where it begins."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start` to `stop` of its leading dim.

        Raises:
            ConfigError: the file has become shorter.
        """
        row = math.prod(self.shape[1:])
        shape = (len(range(*slice(start, stop).indices(self.shape[0]))), *self.shape[1:])
        values = np.fromfile(self.file, self.dtype, math.prod(shape), offset=self.offset + start * row * self.dtype.itemsize)
        if values.size != math.prod(shape):
            raise ConfigError(f"{self.file}: became shorter while it was read; see that nothing writes it and try again")
        return values.reshape(shape)


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """A JSON object; `path` is for messages.

    Raises:
        ConfigError: it is no JSON object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{show(next(name for name in names if names.count(name) > 1))} is there twice")
        return found

    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is no JSON number")

    try:
        body = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else show(str(error))
        raise ConfigError(f"{path}: is not valid JSON: {reason}; download the file again") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: must hold a JSON object; download the file again")
    return body


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: the file is missing, cannot be read, is too large or holds something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the directory of a complete Hugging Face model") from error
    if len(data) > _MAX_JSON_BYTES:
        raise ConfigError(f"{path}: is larger than {_MAX_JSON_BYTES // 10**6} MB; download the file again")
    return parse_json(path, data)


def open_model(directory: Path) -> dict[str, Stored]:
    """Every tensor of a model directory, in one file or in shards with an index; headers are read and checked.

    Raises:
        ConfigError: there are no safetensors, or a file is damaged, or files and index do not agree.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file() and index.is_file():
        raise ConfigError(f"{directory}: has both {SINGLE} and {INDEX}; remove the one that does not belong")
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        pickles = [name for name in names if Path(name).suffix in _PICKLES]
        if pickles:
            raise ConfigError(
                f"{directory / show(pickles[0])}: pickles can run code and are not read; convert the model where you trust"
                " it: transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
            )
        raise ConfigError(f"{directory}: has neither {SINGLE} nor {INDEX}; give the directory of a Hugging Face model")
    return _read_shards(directory, index)


def _read_shards(directory: Path, index: Path) -> dict[str, Stored]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map: must map tensor names to file names; download the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", file):
            raise ConfigError(
                f"{index}: weight_map: {show(name)}: must name a .safetensors file of this directory,"
                f" not {show(str(file))}; correct it"
            )
    tensors: dict[str, Stored] = {}
    for file in sorted(set(weight_map.values())):
        for name, stored in read_header(directory / file).items():
            if name in tensors:
                raise ConfigError(f"{stored.file}: {show(name)} is also in {tensors[name].file.name}; remove one of them")
            if weight_map.get(name) != file:
                raise ConfigError(f"{stored.file}: {show(name)} is not there according to {INDEX}; download both again")
            tensors[name] = stored
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise ConfigError(
            f"{directory / weight_map[missing[0]]}: {show(missing[0])} of {INDEX} is missing; download it again"
        )
    return tensors


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, whose bytes must fill it exactly.

    Raises:
        ConfigError: the file is missing, damaged, truncated, or holds a type that no Llama is stored in.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_JSON_BYTES, size - 8):
                raise ConfigError(f"{path}: is truncated or no safetensors file; download it again")
            header = parse_json(path, file.read(length))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; download the file") from error
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if stored.offset != end:
            raise ConfigError(f"{path}: {show(name)} does not begin where the tensor before it ends; download it again")
        end += stored.nbytes
    if end != size:
        raise ConfigError(f"{path}: has {size} bytes, but its header describes {end}; download it again")
    return tensors


def _entry(path: Path, name: str, entry: Any, data_start: int) -> Stored:
    """A tensor of a header, checked as far as it can be alone."""

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
    """Writes an array's bytes to an open file, from byte `offset` on.

    Raises:
        OSError: the disk is full, or broken.
    """
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    for at in range(0, len(data), _WRITE_BYTES):
        piece = data[at : at + _WRITE_BYTES]
        if os.pwrite(descriptor, piece, offset + at) < len(piece):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Writer:
    """Model files whose tensors are written in any order and in pieces; use as a context manager."""

    def __init__(
        self, directory: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any], max_shard_bytes: int
    ) -> None:
        """Lays out one file, or shards of at most `max_shard_bytes` (of one tensor, if it is larger) with an index."""
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
        names = [SINGLE] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]
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
        for name, shape in shapes.items():
            self._places[name] = Stored(path, dtype, shape, 8 + len(text) + header[name]["data_offsets"][0])
        file = self._files[path] = path.open("xb")
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        file.flush()

    def write(self, name: str, values: np.ndarray, start: int = 0) -> None:
        """Writes rows of a tensor, of the files' type, from row `start` of its leading dim on; in any thread."""
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
