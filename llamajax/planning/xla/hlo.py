"""Reads the text of a compiled XLA module: computations, and their instructions in the order they run.

The text is what `compiled.as_text()` gives (XLA's HLO, scheduled: `is_scheduled=true`). Only what a cost model needs
is interpreted; every other attribute stays available as text.
"""

import functools
import itertools
import json
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "f4e2m1fn": 4, "s8": 8, "u8": 8, "f8e3m4": 8, "f8e4m3": 8,
    "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "s16": 16,
    "u16": 16, "f16": 16, "bf16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64,
    "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
_HOST_MEMORY = "S(5)"

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"([a-z][a-z0-9\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_BRACKET_OR_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|[\[\](){},]')
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}
_COMPARISONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "NE": operator.ne,
    "EQ": operator.eq,
}
_MAX_TRIPS = 100_000
"""Of a loop that is counted by running its counter."""
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True, slots=True)
class Array:
    """The type of one array."""

    dtype: str
    """XLA's name: `bf16`, `f32`, `s32`, `pred` ..."""
    dims: tuple[int, ...]
    layout: str
    """Dims from minor to major, tiling and memory space, as written: `1,0`, `1,0:S(5)`."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return -(-self.num_elements * _BITS[self.dtype] // 8)

    @property
    def on_host(self) -> bool:
        """Whether it lies in pinned host memory."""
        return _HOST_MEMORY in self.layout


Shape = Array | tuple["Shape", ...]
"""The type of a value: an array, or a tuple of such types."""


def arrays(shape: Shape) -> Iterator[Array]:
    """The arrays of a shape, nested tuples flattened."""
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
    """What follows the operands, by name, as written."""

    def called(self, *attributes: str) -> tuple[str, ...]:
        """The computations named by any of these attributes, in this order: `calls`, `body`, `to_apply` ..."""
        return tuple(name for attribute in attributes for name in _OPERAND.findall(self.attributes.get(attribute, "")))

    def dims(self, attribute: str) -> tuple[int, ...]:
        """The integers of an attribute like `lhs_contracting_dims={1,2}`; empty if there is none."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.attributes.get(attribute, "")))

    @property
    def backend_config(self) -> dict[str, Any]:
        text = self.attributes.get("backend_config", "{}")
        if text.startswith('"'):
            text = json.loads(text) or "{}"
        return json.loads(text)

    @property
    def op_name(self) -> str:
        """Where it comes from in the program: `jit(train_step)/while/body/attention/dot_general`."""
        return self._metadata("op_name")

    @property
    def scheduling_name(self) -> str:
        """Its name when XLA scheduled the module; passes after that rename or clone some instructions."""
        return self._metadata("scheduling_name") or self.name

    @property
    def trip_count(self) -> int | None:
        """Iterations of a `while`; None if they cannot be known before it runs."""
        count = self.backend_config.get("known_trip_count", {}).get("n") or self.attributes.get("trip_count")
        return int(count) if count else None

    @property
    def is_sync(self) -> bool:
        """Whether a `-start` is run by XLA as if it were synchronous."""
        return bool(self.backend_config.get("collective_backend_config", {}).get("is_sync", False))

    def replica_groups(self, num_devices: int) -> np.ndarray:
        """Devices that communicate with each other, int [groups, devices per group].

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
    """By name, in the order they run if the computation is scheduled."""
    root: Instruction

    def shape(self, name: str) -> Shape:
        return self.instructions[name].shape

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        return [self.shape(name) for name in instruction.operands]

    @property
    def parameters(self) -> list[Instruction]:
        """In the order of the caller's operands."""
        found = [instruction for instruction in self.instructions.values() if instruction.opcode == "parameter"]
        return sorted(found, key=lambda parameter: int(parameter.attributes["parameter_number"]))


@dataclass(frozen=True, slots=True)
class Module:
    """A whole program for one device of many."""

    name: str
    num_devices: int
    computations: dict[str, Computation]
    entry: Computation


def parse(text: str) -> Module:
    """The module that XLA printed as `text`.

    Raises:
        ValueError: a line is not HLO as this reader knows it; the message has its number.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule "):
        raise ValueError("line 1: not the text of an HLO module, which starts with HloModule")
    header = _split(lines[0].removeprefix("HloModule "))
    attributes = dict(part.split("=", 1) for part in header[1:])
    computations: dict[str, Computation] = {}
    entry = current = None
    is_entry = False
    root: Instruction | None = None
    instructions: dict[str, Instruction] = {}
    for number, line in enumerate(lines[1:], start=2):
        if current is None:
            # Between computations stand tables of source locations, which nothing here needs.
            start = _COMPUTATION.match(line) if line.endswith("{") else None
            if start:
                current, is_entry, root, instructions = start[2], bool(start[1]), None, {}
        elif line.startswith("}"):
            assert root is not None, f"line {number}: computation {current} has no ROOT"
            computations[current] = Computation(current, instructions, root)
            entry = computations[current] if is_entry else entry
            current = None
        else:
            start = _INSTRUCTION.match(line)
            if not start:
                raise ValueError(f"line {number}: not an HLO instruction: {line.strip()[:80]}")
            instruction = _instruction(start[2], line[start.end() :], number)
            instructions[instruction.name] = instruction
            if start[1]:
                root = instruction
    if entry is None:
        raise ValueError("the HLO module has no ENTRY computation")
    for computation in computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "while" and instruction.trip_count is None:
                count = _count_trips(instruction, computation, computations)
                instruction.attributes.update({} if count is None else {"trip_count": str(count)})
    num_devices = int(attributes.get("num_partitions", "1")) * int(attributes.get("replica_count", "1"))
    return Module(header[0], num_devices, computations, entry)


def _instruction(name: str, text: str, number: int) -> Instruction:
    """`text` is what follows `name = `."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, end + 1)
    if end <= 0 or not opcode:
        raise ValueError(f"line {number}: not an HLO instruction: {text.strip()[:80]}")
    close = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : close]
    attributes = dict(part.split("=", 1) for part in _split(text[close + 1 :]) if "=" in part)
    if opcode[1] == "parameter":
        attributes["parameter_number"] = inside
    if opcode[1] == "constant":
        attributes["value"] = inside
    operands = () if opcode[1] == "constant" else tuple(_OPERAND.findall(inside))
    return Instruction(name, opcode[1], _shape(text[:end]), operands, attributes)


Known = dict[tuple[str, int | None], int | None]
"""Integers by the number of a parameter, and their place in it if it is a tuple."""


def _count_trips(loop: Instruction, computation: Computation, computations: dict[str, Computation]) -> int | None:
    """Runs a `while` with nothing but its counter: XLA writes no count where it has rearranged the loop."""
    index = int(loop.backend_config.get("known_induction_variable", {}).get("tuple_index", -1))
    carried = computation.instructions[loop.operands[0]]
    body, condition = (computations[loop.called(name)[0]] for name in ("body", "condition"))
    if index < 0 or carried.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    counter = _scalar(carried.operands[index], computation, computations, {})
    for trips in range(_MAX_TRIPS):
        carry: Known = {("0", index): counter}
        goes_on = _scalar(condition.root.name, condition, computations, carry)
        if counter is None or not goes_on:
            return None if counter is None or goes_on is None else trips
        counter = _scalar(body.root.operands[index], body, computations, carry)
    return None


def _scalar(name: str, computation: Computation, computations: dict[str, Computation], known: Known) -> int | None:
    """The integer that an instruction makes of constants and of what is known; None: it cannot be told."""
    instruction = computation.instructions[name]
    if instruction.opcode == "parameter":
        return known.get((instruction.attributes["parameter_number"], None))
    if instruction.opcode == "get-tuple-element":
        source = computation.instructions[instruction.operands[0]]
        place = int(instruction.attributes["index"])
        return known.get((source.attributes["parameter_number"], place)) if source.opcode == "parameter" else None
    if instruction.opcode == "constant":
        return int(instruction.attributes["value"]) if instruction.attributes["value"].lstrip("-").isdecimal() else None
    if instruction.opcode not in (*_ARITHMETIC, "compare", "copy", "fusion", "call"):
        return None
    values = [_scalar(operand, computation, computations, known) for operand in instruction.operands]
    if instruction.opcode in ("fusion", "call"):
        inside = computations[instruction.called("calls", "to_apply")[0]]
        arguments: Known = {(str(number), None): value for number, value in enumerate(values)}
        return _scalar(inside.root.name, inside, computations, arguments)
    if None in values:
        return None
    if instruction.opcode == "copy":
        return values[0]
    compute = (
        _COMPARISONS[instruction.attributes["direction"]]
        if instruction.opcode == "compare"
        else _ARITHMETIC[instruction.opcode]
    )
    return int(compute(*values))


@functools.lru_cache(maxsize=100_000)
def _shape(text: str) -> Shape:
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return tuple(_shape(part) for part in _split(text[1:-1]))
    found = _ARRAY.match(text)
    if not found or found[1] not in _BITS:
        raise ValueError(f"unknown HLO shape {text!r}")
    dims = tuple(int(dim.lstrip("<=")) for dim in found[2].split(",") if dim)
    return Array(found[1], dims, found[3] or "")


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`."""
    depth = 0
    for token in _BRACKET_OR_QUOTED.finditer(text, opening):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
            if depth == 0:
                return token.start()
    raise ValueError(f"unbalanced brackets: {text[:80]}")


def _split(text: str) -> list[str]:
    """The parts between commas that no bracket or quote encloses."""
    parts, start, depth = [], 0, 0
    for token in _BRACKET_OR_QUOTED.finditer(text):
        if token[0] in "([{":
            depth += 1
        elif token[0] in ")]}":
            depth -= 1
        elif token[0] == "," and depth == 0:
            parts.append(text[start : token.start()])
            start = token.end()
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


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
    """`[4,2]<=[2,4]T(1,0)`: counts the devices in a [2,4] grid, transposes it, reads it as [4,2]."""
    found = re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text)
    if not found:
        raise ValueError(f"unknown notation of devices: {text[:80]}")
    dims, grid, permutation = ([int(number) for number in re.findall(r"\d+", part or "")] for part in found.groups())
    devices = np.arange(math.prod(dims)).reshape(grid or dims)
    return devices.transpose(permutation or range(devices.ndim)).reshape(dims)


def _mesh_groups(text: str) -> np.ndarray:
    """`mesh['data'=2,'fsdp'=8] {'fsdp'}`: devices in a grid, grouped along the named axes.

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
        pieces.index(piece) for name, outer, size in parts for piece in pieces if _is_within(piece, name, outer, size)
    ]
    rest = [dim for dim in range(len(dims)) if dim not in grouped]
    devices = _device_ids(found[2], math.prod(dims)).reshape(dims)
    return devices.transpose(rest + grouped).reshape(-1, math.prod(dims[dim] for dim in grouped))


def _is_within(piece: tuple[str, int], name: str, outer: int, size: int) -> bool:
    return piece[0] == name and outer <= piece[1] < outer * size


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if text is None:
        return np.arange(count)
    if text.startswith("["):
        return _iota(text).reshape(-1)
    return np.array([int(device) for device in re.findall(r"\d+", text)])
