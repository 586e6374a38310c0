"""A compiled XLA module: computations, and their instructions in the order in which they run; `parse.py` reads it from text.

Only the attributes that a cost model needs are interpreted; every other attribute stays available as text.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

DTYPE_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s8": 8, "u8": 8, "f8e3m4": 8, "f8e4m3": 8,
    "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "s16": 16,
    "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64,
    "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
_HOST_MEMORY = "S(5)"

_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, slots=True)
class Array:
    """The type of one array."""

    dtype: str
    """XLA's name of the dtype: `bf16`, `f32`, `s32`, `pred` ..."""
    dims: tuple[int, ...]
    layout: str
    """Dims from minor to major, tiling and memory space, as written: `1,0`, `1,0:S(5)`."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return -(-self.num_elements * DTYPE_BITS[self.dtype] // 8)

    @property
    def on_host(self) -> bool:
        """Returns whether it is in pinned host memory."""
        return _HOST_MEMORY in self.layout


Shape = Array | tuple["Shape", ...]
"""Type of a value: an array, or a tuple of such types."""


def arrays(shape: Shape) -> Iterator[Array]:
    """Yields the arrays of a shape, nested tuples flattened."""
    if isinstance(shape, Array):
        yield shape
    else:
        for part in shape:
            yield from arrays(part)


def num_bytes(shape: Shape) -> int:
    return sum(array.num_bytes for array in arrays(shape))


def num_elements(shape: Shape) -> int:
    return sum(array.num_elements for array in arrays(shape))


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    attributes: dict[str, str]
    """Attributes after the operands, by name, as written."""

    def called(self, *attributes: str) -> tuple[str, ...]:
        """Returns the computations named by any of these attributes, in this order: `calls`, `body`, `to_apply` ..."""
        return tuple(name for attribute in attributes for name in _OPERAND.findall(self.attributes.get(attribute, "")))

    def dims(self, attribute: str) -> tuple[int, ...]:
        """Returns the integers of an attribute like `lhs_contracting_dims={1,2}`; empty if there is none."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.attributes.get(attribute, "")))

    @property
    def backend_config(self) -> dict[str, Any]:
        text = self.attributes.get("backend_config", "{}")
        if text.startswith('"'):
            text = json.loads(text) or "{}"
        return json.loads(text)

    @property
    def op_name(self) -> str:
        """Returns the instruction's origin in the program, such as `jit(train_step)/while/body/attention/dot_general`."""
        return self._metadata("op_name")

    @property
    def scheduling_name(self) -> str:
        """Returns the instruction's name when XLA scheduled the module; later passes rename or clone some instructions."""
        return self._metadata("scheduling_name") or self.name

    @property
    def trip_count(self) -> int | None:
        """Returns the number of iterations of a `while`; None if it cannot be known before it runs."""
        count = self.backend_config.get("known_trip_count", {}).get("n") or self.attributes.get("trip_count")
        return int(count) if count else None

    @property
    def is_sync(self) -> bool:
        """Returns whether XLA runs a `-start` as if it were synchronous."""
        return bool(self.backend_config.get("collective_backend_config", {}).get("is_sync", False))

    def replica_groups(self, num_devices: int) -> np.ndarray:
        """Returns the devices that communicate with each other, int [groups, devices per group].

        Raises:
            ValueError: the notation is unknown.
        """
        text = self.attributes.get("replica_groups", "{}")
        if "device_ids" in self.attributes:  # the tail of `mesh[...], device_ids=(...) {...}`
            text += f", device_ids={self.attributes['device_ids']}"
        return _replica_groups(text, num_devices)

    def _metadata(self, key: str) -> str:
        found = re.search(rf'\b{key}="((?:\\.|[^"\\])*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class Computation:
    """A function of the module."""

    name: str
    instructions: dict[str, Instruction]
    """Instructions by name, in the order in which they run if the computation is scheduled."""
    root: Instruction

    def shape(self, name: str) -> Shape:
        return self.instructions[name].shape

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        return [self.shape(name) for name in instruction.operands]

    @property
    def parameters(self) -> list[Instruction]:
        """Returns the parameters in the order of the caller's operands."""
        found = [instruction for instruction in self.instructions.values() if instruction.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.attributes["parameter_number"]))


@dataclass(frozen=True, slots=True)
class Module:
    """A whole program for one device of many."""

    name: str
    num_devices: int
    computations: dict[str, Computation]
    entry: Computation


@functools.lru_cache(maxsize=1000)
def _replica_groups(text: str, num_devices: int) -> np.ndarray:
    if text == "{}":
        return np.arange(num_devices)[None, :]
    if text.startswith("{"):
        return np.array([[int(device) for device in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)])
    if text.startswith("["):
        return _iota(text)
    if text.startswith("mesh["):
        return _mesh_groups(text)
    raise ValueError(f"unknown notation of replica groups: {text[:80]}")


def _iota(text: str) -> np.ndarray:
    """Parses `[4,2]<=[2,4]T(1,0)`: numbers the devices in a [2,4] grid, transposes it, reads it as [4,2]."""
    found = re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text)
    if not found:
        raise ValueError(f"unknown notation of devices: {text[:80]}")
    dims, grid, permutation = ([int(number) for number in re.findall(r"\d+", part or "")] for part in found.groups())
    devices = np.arange(math.prod(dims)).reshape(grid or dims)
    return devices.transpose(permutation or range(devices.ndim)).reshape(dims)


def _mesh_groups(text: str) -> np.ndarray:
    """Parses `mesh['data'=2,'fsdp'=8] {'fsdp'}`: devices in a grid, grouped along the named axes.

    A member may be a part of an axis: `'fsdp':(2)4` is the four-fold middle of `fsdp` inside of its outer two.
    """
    found = re.fullmatch(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text)
    if not found:
        raise ValueError(f"unknown notation of replica groups: {text[:80]}")
    sizes = {name: int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", found[1])}
    parts = [
        (name, int(outer or 1), int(size or sizes[name]))
        for name, outer, size in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?(?:,|$)", found[3])
    ]
    # Every axis is cut wherever one of its parts begins or ends; each piece is a dim of the grid.
    pieces: list[tuple[str, int]] = []
    dims: list[int] = []
    for name, size in sizes.items():
        ends = {end for part, outer, inner in parts if part == name for end in (outer, outer * inner)}
        cuts = sorted({1, size} | ends)
        pieces += [(name, cut) for cut in cuts[:-1]]
        dims += [high // low for low, high in itertools.pairwise(cuts)]
    grouped = [
        dim
        for part, outer, size in parts
        for dim, (name, cut) in enumerate(pieces)
        if name == part and outer <= cut < outer * size
    ]
    rest = [dim for dim in range(len(dims)) if dim not in grouped]
    devices = _device_ids(found[2], math.prod(dims)).reshape(dims)
    return devices.transpose(rest + grouped).reshape(-1, math.prod(dims[dim] for dim in grouped))


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if text is None:
        return np.arange(count)
    if text.startswith("["):
        return _iota(text).reshape(-1)
    return np.array([int(device) for device in re.findall(r"\d+", text)])
