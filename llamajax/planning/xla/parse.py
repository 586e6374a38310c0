"""Reads a module from the text of `compiled.as_text()` (XLA's HLO, scheduled: `is_scheduled=true`)."""

import functools
import operator
import re

from llamajax.planning.xla.hlo import DTYPE_BITS, Array, Computation, Instruction, Module, Shape

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"([a-z][a-z0-9\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_BRACKET_OR_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|[\[\](){},]')
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub}
_COMPARISONS = {
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "NE": operator.ne, "EQ": operator.eq,
}  # fmt: skip
_MAX_TRIPS = 100_000
"""Limit of iterations of a loop that is counted by running its counter."""
_COMMENT = re.compile(r"/\*.*?\*/")


def parse(text: str) -> Module:
    """Returns the module that XLA printed as `text`.

    Raises:
        ValueError: a line is not in the HLO syntax that this reader supports; the message has its number.
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
            # Between computations are tables of source locations, which are not needed here.
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
    """Parses an instruction; `text` is the line after `name = `."""
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
"""Known integers by the number of a parameter, and their index in it if it is a tuple."""


def _count_trips(loop: Instruction, computation: Computation, computations: dict[str, Computation]) -> int | None:
    """Counts the iterations of a `while` by running only its counter: XLA writes no count where it has rearranged the
    loop."""
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
    """Returns the integer that an instruction computes from constants and known values; None: it is unknown."""
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
    if instruction.opcode == "compare":
        return int(_COMPARISONS[instruction.attributes["direction"]](*values))
    return int(_ARITHMETIC[instruction.opcode](*values))


@functools.lru_cache(maxsize=100_000)
def _shape(text: str) -> Shape:
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return tuple(_shape(part) for part in _split(text[1:-1]))
    found = _ARRAY.match(text)
    if not found or found[1] not in DTYPE_BITS:
        raise ValueError(f"unknown HLO shape {text!r}")
    dims = tuple(int(dim.lstrip("<=")) for dim in found[2].split(",") if dim)
    return Array(found[1], dims, found[3] or "")


def _closing(text: str, opening: int) -> int:
    """Returns the index of the bracket that closes the one at `opening`."""
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
    """Returns the parts between commas that no bracket or quote encloses."""
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
