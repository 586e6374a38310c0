"""XLA's buffer assignment of a compiled program: its allocations, and the arrays that are alive at the fullest moment.

Read from the `HloProto` that XLA writes beside the scheduled module. Only the fields used here are decoded, directly from
the wire format: field numbers never change, while the generated Python classes are not part of jaxlib.
"""

from dataclasses import dataclass
from typing import Any

_DTYPES = {
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16", 11: "f32",
    12: "f64", 16: "bf16", 19: "f8e5m2", 20: "f8e4m3fn",
}  # fmt: skip
"""XLA's PrimitiveType by number; others print as `typeN`."""
_HOST_MEMORY = 5  # xla::Layout::kHostMemorySpace
_FREE, _SHARE = 1, 2  # HeapSimulatorTrace.Event.Kind; 0 is ALLOC

Fields = dict[int, list[Any]]
"""Fields of a message: the values of each field number, int for varints and bytes for everything else."""


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One array that the program keeps in memory."""

    instruction: str
    """HLO instruction that creates it."""
    opcode: str
    """Opcode of the instruction; for an asynchronous wrapper, opcode of the wrapped instruction."""
    op_name: str
    """Origin: the path of jax's scopes and primitives, or the argument's path. An instruction that XLA itself added has the
    name of its user; empty if that has none either."""
    dtype: str
    """Dtype as in HLO, such as bf16; empty for bundles of pointers."""
    shape: tuple[int, ...]
    size: int
    """Size in bytes."""


@dataclass(frozen=True, kw_only=True)
class BufferAssignment:
    """Memory of one device while the program runs."""

    arguments: tuple[Buffer, ...]
    """Arrays held all the time; results take the place of donated ones."""
    other_bytes: int
    """Bytes of results that replace no argument, and of constants."""
    arena_bytes: int
    """Size of the one block that all temporary arrays share."""
    host_bytes: int
    """Bytes of arrays kept in the host's memory."""
    peak: tuple[Buffer, ...]
    """Temporary arrays alive at the fullest moment."""

    @property
    def argument_bytes(self) -> int:
        return sum(buffer.size for buffer in self.arguments)

    @property
    def gap_bytes(self) -> int:
        """Returns the bytes of the arena that are unused between the arrays at its fullest moment."""
        return self.arena_bytes - sum(buffer.size for buffer in self.peak)


def read_buffer_assignment(hlo_proto: bytes) -> BufferAssignment:
    """Decodes a serialized `xla.HloProto` with a module and its buffer assignment."""
    message = decode(hlo_proto)
    module, assignment = _Module(message[1][0]), decode(message[3][0])
    logical = {_first(buffer, 1): buffer for buffer in map(decode, assignment[1])}
    allocations = [fields for fields in map(decode, assignment[3]) if not _first(fields, 3)]  # without thread-local ones
    device = [fields for fields in allocations if _first(fields, 8) != _HOST_MEMORY]
    arguments = [fields for fields in device if _first(fields, 5)]

    # Arrays that share an allocation have a trace of its occupants over time; the arena is the largest such allocation.
    arena, trace = 0, {}
    for fields in map(decode, assignment.get(4, [])):
        buffer = _first(decode(fields[1][0]), 2)
        size = max((_first(allocation, 2) for allocation in device if buffer in _assigned(allocation)), default=0)
        arena, trace = max((arena, trace), (size, fields), key=lambda candidate: candidate[0])
    peak = _peak(trace, {number: _first(buffer, 2) for number, buffer in logical.items()})
    return BufferAssignment(
        arguments=tuple(
            next(b for b in (module.buffer(logical[n]) for n in _assigned(a)) if b.opcode == "parameter") for a in arguments
        ),
        other_bytes=sum(_first(a, 2) for a in device) - sum(_first(a, 2) for a in arguments) - arena,
        arena_bytes=arena,
        host_bytes=sum(_first(a, 2) for a in allocations if _first(a, 8) == _HOST_MEMORY),
        peak=tuple(module.buffer(logical[number]) for number in peak),
    )


def _assigned(allocation: Fields) -> list[int]:
    """Returns the logical buffers in a `BufferAllocationProto`."""
    return [_first(decode(assigned), 1) for assigned in allocation.get(9, [])]


def _peak(trace: Fields, sizes: dict[int, int]) -> list[int]:
    """Returns the logical buffers that take up space at the fullest moment of a `HeapSimulatorTrace`.

    Buffers that share the place of an earlier one count once, as that one, until all of them are freed.
    """
    sharers: dict[int, set[int]] = {}  # the buffer that took a place: all buffers that are in it now
    owner: dict[int, int] = {}
    size = largest = 0
    peak: list[int] = []
    for event in map(decode, trace.get(1, [])):
        kind, buffer = _first(event, 1), _first(event, 2)
        if kind == _FREE:
            place = owner[buffer]
            sharers[place].discard(buffer)
            if not sharers[place]:
                del sharers[place]
                size -= sizes[place]
            continue
        place = owner[buffer] = owner[_first(event, 5)] if kind == _SHARE else buffer
        if place not in sharers:
            sharers[place] = set()
            size += sizes[place]
        sharers[place].add(buffer)
        if size > largest:
            largest, peak = size, list(sharers)
    return peak


class _Module:
    """The instructions of an `HloModuleProto` by id, each an `HloInstructionProto`."""

    def __init__(self, module: bytes):
        self._instructions: dict[int, Fields] = {}
        self._roots: dict[int, int] = {}
        self._users: dict[int, list[Fields]] = {}
        for computation in map(decode, decode(module)[3]):
            self._roots[_first(computation, 5)] = _first(computation, 6)
            for instruction in map(decode, computation[2]):
                self._instructions[_first(instruction, 35)] = instruction
                for operand in _varints(instruction.get(36, [])):
                    self._users.setdefault(operand, []).append(instruction)

    def buffer(self, logical: Fields) -> Buffer:
        """Returns the buffer of a `LogicalBufferProto`."""
        position = decode(logical[3][0])
        instruction = self._instructions[_first(position, 4)]
        shape = decode(instruction[3][0])
        for index in _varints(position.get(3, [])):
            shape = decode(shape[4][index])
        opcode = instruction[2][0].decode()
        if opcode.startswith("async-") and 38 in instruction:
            opcode = self._instructions[self._roots[_varints(instruction[38])[0]]][2][0].decode()
        element_type = _first(shape, 2)
        return Buffer(
            instruction=instruction[1][0].decode(),
            opcode=opcode,
            op_name=self._op_name(instruction),
            dtype="" if element_type == 13 else _DTYPES.get(element_type, f"type{element_type}"),
            shape=tuple(_varints(shape.get(3, []))),
            size=_first(logical, 2),
        )

    def _op_name(self, instruction: Fields) -> str:
        """Returns the first name with a path among the instruction, its users, their users and so on."""
        front, seen = [instruction], set()
        while front:
            for candidate in front:
                name = decode(candidate[7][0]).get(2, [b""])[0].decode() if 7 in candidate else ""
                if "/" in name or (name and candidate[2][0] == b"parameter"):
                    return name
            seen |= {_first(candidate, 35) for candidate in front}
            users = {_first(u, 35): u for c in front for u in self._users.get(_first(c, 35), [])}
            front = [user for number, user in users.items() if number not in seen]
        return ""


def decode(message: bytes) -> Fields:
    """Decodes the fields of a serialized protocol buffer; for other bytes it returns nonsense, or raises KeyError or
    IndexError."""
    fields: Fields = {}
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        if tag & 7 == 0:
            value, position = _varint(message, position)
        else:
            length, position = _varint(message, position) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], position)
            value, position = message[position : position + length], position + length
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


def _varints(values: list[Any]) -> list[int]:
    """Returns the values of a repeated integer field, packed or not."""
    numbers = []
    for value in values:
        position = 0
        while not isinstance(value, int) and position < len(value):
            number, position = _varint(value, position)
            numbers.append(number)
        if isinstance(value, int):
            numbers.append(value)
    return numbers


def _first(fields: Fields, number: int) -> int:
    """Returns the value of an integer field; zero where it is missing, because zeros are not written."""
    return fields[number][0] if number in fields else 0
