"""The time that one instruction takes on one GPU: a roofline from its shapes.

A kernel takes its launch plus the longer of two times: its floating-point work on the tensor cores, and the transfer of its
bytes between chip and memory. Nothing is measured; the few constants belong to a GPU type, never to a model.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from llamajax.estimates.machine import Machine
from llamajax.kernels.choice import Kernel
from llamajax.kernels.pallas import sizes
from llamajax.kernels.tiles import num_tiles
from llamajax.planning.cost import experts
from llamajax.planning.cost.attention import Grid, Scores, busy_share
from llamajax.planning.xla.hlo import Array, Computation, Instruction, Module, Shape, arrays, num_bytes, num_elements

KernelKind = Literal["matmul", "experts", "attention", "memory", "copy"]
"""Main work of a kernel: matrix products, products with experts' matrices, fused attention, moving device memory, moving
data between host and device."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One execution of one instruction."""

    kind: KernelKind
    seconds: float
    flops: int = 0
    """Floating-point operations of matrix products, two per multiply-add. Other operations are not counted."""
    num_bytes: int = 0
    """Bytes read from and written to device memory; for a copy, bytes to or from the host."""


FREE = Cost("memory", 0.0)

_FREE_OPCODES = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "optimization-barrier", "add-dependency", "domain", "bitcast-convert",
}  # fmt: skip
_SAME_SIZE_OPCODES = {
    "abs", "add", "and", "atan2", "bitcast", "bitcast-convert", "cbrt", "ceil", "clamp", "compare", "complex", "convert",
    "copy", "cosine", "count-leading-zeros", "divide", "erf", "exponential", "exponential-minus-one", "floor",
    "imag", "is-finite", "log", "log-plus-one", "logistic", "map", "maximum", "minimum", "multiply", "negate", "not", "or",
    "popcnt", "power", "real", "reduce-precision", "remainder", "reshape", "reverse", "round-nearest-afz",
    "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign",
    "sine", "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "transpose", "xor",
}  # fmt: skip
_SCALED_OPCODES = {"reduce", "concatenate", "pad", "reduce-window"}
_UNDERSTOOD = _SAME_SIZE_OPCODES | _SCALED_OPCODES | _FREE_OPCODES | {
    "dot", "sort", "iota", "rng", "rng-bit-generator", "rng-get-and-update-state", "broadcast", "slice", "dynamic-slice",
    "gather", "dynamic-update-slice", "scatter", "fusion",
}  # fmt: skip
_GEMM_TARGETS = ("__cublas$", "__cudnn$gemm")
_CUDNN = "__cudnn$fmha"
_TRITON = "__gpu$xla.gpu.triton"
_TTIR = "tt.func"  # in the text that Triton itself generates for a kernel; Pallas generates bytecode
_MOSAIC = "mosaic_gpu"
_KERNEL_NAME = re.compile(r'\bname = "(\w+)"')
_PEAK_SHARE = {"f64": 1 / 16, "f32": 1 / 2, "s8": 2.0, "u8": 2.0}
"""Tensor-core rates relative to bfloat16's; f32 runs as TF32, XLA's default. Eight-bit types double the rate."""

# cuBLAS's usual output tiles, rows x columns, and the share of the best tile's rate that each reaches: the smaller the tile,
# the more operand bytes per product. Source: NVIDIA, "Matrix Multiplication Background User's Guide", tile sizes.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))
_SPLITS = (1, 2, 4, 8, 16)
_TILE_START = 128
"""Contracted elements that correspond to the cost of filling and draining a tile's pipeline."""


class CostModel:
    """Costs of the instructions of one module on one machine; records the instructions that it does not support."""

    def __init__(self, module: Module, machine: Machine, scores: Scores | None = None, loads: experts.Loads | None = None):
        """Costs `module` on `machine`; `scores` are the computed scores of attention, where its kernels skip unseen tiles,
        and `loads` those of experts."""
        self.module = module
        self.scores = scores
        self.loads = loads
        self.machine = machine
        self.not_understood: Counter[str] = Counter()
        """Instructions with a guessed cost, by opcode and call target."""

    def cost(self, instruction: Instruction, computation: Computation) -> Cost:
        """Returns the cost of any instruction except collectives and control flow."""
        if instruction.opcode in _FREE_OPCODES:
            return FREE
        operands = computation.operand_shapes(instruction)
        if instruction.opcode == "custom-call":
            return self._custom_call(instruction, operands)
        if instruction.opcode in ("copy", "copy-start") and _crosses_to_host(instruction, operands):
            return self._host_copy(num_bytes(operands[0]))
        if instruction.opcode in ("fusion", "fusion-start"):
            body = self.module.computations[instruction.called("calls")[0]]
            return self._fusion(body)
        if instruction.opcode == "copy-start":
            return self._kernel([], 2 * num_bytes(operands[0]))
        return self._single(instruction, computation, operands)

    def _fusion(self, body: Computation) -> Cost:
        needed = zip(body.parameters, self._needed(body), strict=True)
        read = [(parameter.shape, _bytes_of_elements(parameter.shape, elements)) for parameter, elements in needed]
        written = self._written(body)
        over_the_bus = sum(
            size for shape, size in [*read, (body.root.shape, written)] if any(a.on_host for a in arrays(shape))
        )
        if over_the_bus:
            return self._host_copy(over_the_bus)
        return self._kernel(self._dots(body), sum(size for _, size in read) + written)

    def _single(self, instruction: Instruction, computation: Computation, operands: list[Shape]) -> Cost:
        self._note(instruction.opcode)
        if instruction.opcode == "dot":
            return self._kernel([_dot(instruction, operands)], sum(map(num_bytes, operands)) + num_bytes(instruction.shape))
        shares = self._shares(instruction, computation, num_elements(instruction.shape), in_place=True)
        read = sum(_bytes_of_elements(shape, share) for shape, share in zip(operands, shares, strict=True))
        return self._kernel([], read + _written_bytes(instruction, computation))

    def _custom_call(self, instruction: Instruction, operands: list[Shape]) -> Cost:
        target = _target(instruction)
        if target == "AllocateBuffer":
            return FREE
        size = sum(map(num_bytes, operands)) + num_bytes(instruction.shape)
        if target.startswith(_CUDNN):
            return self._cudnn_attention(instruction, operands, size)
        if target.startswith(_MOSAIC):
            return self._tokamax_attention(instruction, operands, size)
        kernel = _own_kernel(instruction)
        if kernel.startswith("attention"):
            return self._pallas_attention(kernel, instruction, operands, size)
        if kernel in experts.KERNELS:
            return self._grouped(kernel, instruction, operands)
        if kernel == "swiglu_gradient":
            return self._kernel([], size)
        if not target.startswith(_GEMM_TARGETS):
            self.not_understood[f"custom-call {target}"] += 1
            return self._kernel([], size)
        return self._kernel([_gemm_call(instruction, operands)], size)

    def _kernel(self, dots: list["Dot"], size: int) -> Cost:
        calibration, work = self.machine.calibration, sum(dot_seconds(dot, self.machine) for dot in dots)
        start = calibration.kernel_s + (calibration.matmul_start_s if dots else 0.0)
        seconds = start + max(work, self._memory_seconds(size))
        return Cost("matmul" if dots else "memory", seconds, sum(dot.flops for dot in dots), size)

    def _host_copy(self, size: int) -> Cost:
        return Cost("copy", self.machine.calibration.kernel_s + size / self.machine.host_link, num_bytes=size)

    def _memory_seconds(self, size: int) -> float:
        return size / (self.machine.gpu.memory_bandwidth * self.machine.calibration.memory_efficiency)

    def _cudnn_attention(self, instruction: Instruction, operands: list[Shape], size: int) -> Cost:
        """Returns the cost of cuDNN's fused attention: two matrix products forward, five backward, over the visible scores:
        half of the square under a causal mask, and with a sliding window as in `estimates.formulas.flops_per_token`."""
        config = instruction.backend_config["cudnn_fmha_backend_config"]
        batch, heads, queries, keys = (int(dim) for dim in config["intermediate_tensor_shape"]["dimensions"])
        backward = "Backward" in _target(instruction)
        pairs = queries * keys
        if "CAUSAL" in config.get("mask_type", ""):
            window = min(int(config.get("sliding_window_length", 0)) or keys, keys)
            pairs = queries * window - window**2 // 2
        head_dim = _array(operands[0]).dims[-1]
        flops = (5 if backward else 2) * 2 * batch * heads * pairs * head_dim
        return self._attention(flops, self.machine.calibration.attention(head_dim)[backward], size)

    def _pallas_attention(self, kernel: str, instruction: Instruction, operands: list[Shape], size: int) -> Cost:
        """Returns the cost of a kernel of `llamajax.kernels.pallas`, in either language: its products over the visible tiles
        of scores; some cores wait for the last programs."""
        assert self.scores is not None
        calibration = self.machine.calibration
        products, per_query, efficiency = {
            "attention_forward": (2, self.scores.by_queries, calibration.pallas_efficiency),
            "attention_backward_queries": (3, self.scores.by_queries, calibration.pallas_backward_efficiency),
            "attention_backward_keys": (4, self.scores.by_keys, calibration.pallas_backward_efficiency),
        }[kernel]
        queries, keys, *_ = (array for array in map(_array, operands) if len(array.dims) == 4)
        (_, t, _, H), s = queries.dims, keys.dims[1]
        rows, length, heads, _ = next(iter(arrays(instruction.shape))).dims
        own = sizes(t, s, H)
        tile, mean, most = own.for_queries.queries, per_query, s
        if kernel == "attention_backward_keys":
            tile, mean, most = own.for_keys.keys, per_query * t / s, t
        efficiency *= busy_share(Grid(heads, num_tiles(length, tile), rows), mean, most, self.machine.gpu.cores)
        return self._attention(round(products * 2 * queries.num_elements * per_query), efficiency, size)

    def _tokamax_attention(self, instruction: Instruction, operands: list[Shape], size: int) -> Cost:
        """Returns the cost of a kernel of tokamax. They have no names, but different results: forward the output and two
        numbers per query, backward the gradient of the queries, or the gradients of keys and values."""
        assert self.scores is not None
        calibration = self.machine.calibration
        products, per_query, efficiency = {
            3: (2, self.scores.by_queries, calibration.tokamax_efficiency),
            1: (3, self.scores.by_keys, calibration.tokamax_backward_efficiency),
            2: (4, self.scores.by_keys, calibration.tokamax_backward_efficiency),
        }[len(list(arrays(instruction.shape)))]
        return self._attention(round(products * 2 * _array(operands[0]).num_elements * per_query), efficiency, size)

    def _attention(self, flops: int, efficiency: float, size: int) -> Cost:
        work = flops / (self.machine.gpu.peak_flops * efficiency)
        return Cost("attention", self.machine.calibration.kernel_s + max(work, self._memory_seconds(size)), flops, size)

    def _grouped(self, kernel: str, instruction: Instruction, operands: list[Shape]) -> Cost:
        """Returns the cost of a kernel of `experts.KERNELS`. It has places for more rows than come: time is that of the rows
        on the busiest device, and FLOPs are counted for those of the mean device."""
        assert self.loads is not None
        mean, busiest = self.loads.of(is_further=experts.FURTHER_ROUNDS in instruction.op_name)
        given, results = list(map(_array, operands)), list(arrays(instruction.shape))
        last = max(number for number, array in enumerate(given) if array.dtype == "s32")
        order, x, other, *more = given[last:]  # of rows [R, K], and matrices [E, K, N] or the result's gradients
        matrices, by_row = (results[0], [x, other]) if kernel == "grouped_weights" else (other, [x, *more, *results])
        K, N, places = x.dims[1], matrices.num_elements // matrices.dims[0] // x.dims[1], order.num_elements
        rows = busiest * places
        size = num_bytes(matrices) + round(rows * sum(num_bytes(array) / array.dims[0] for array in by_row))
        work = experts.grouped_seconds(kernel, 2 * K * N, rows, matrices.dims[0], self.machine)
        seconds = self.machine.calibration.kernel_s + max(work, self._memory_seconds(size))
        return Cost("experts", seconds, round(mean * places * 2 * K * N), size)

    def _dots(self, body: Computation) -> list["Dot"]:
        """Returns every matrix product inside a fusion, nested fusions included."""
        dots = []
        for instruction in body.instructions.values():
            if instruction.opcode == "dot":
                dots.append(_dot(instruction, body.operand_shapes(instruction)))
            elif instruction.opcode == "fusion":
                dots += self._dots(self.module.computations[instruction.called("calls")[0]])
            elif instruction.opcode == "custom-call" and _target(instruction).startswith(_GEMM_TARGETS):
                dots.append(_gemm_call(instruction, body.operand_shapes(instruction)))
            else:
                self._note(instruction.opcode)
        return dots

    def _note(self, opcode: str) -> None:
        if opcode not in _UNDERSTOOD:
            self.not_understood[opcode] += 1

    def _needed(self, body: Computation, of_root: int | None = None) -> list[int]:
        """Returns the elements of each parameter that a fusion reads to compute `of_root` elements of its result (default:
        all).

        If only a slice of a parameter is used, only that slice counts: scans pass whole stacks of layers to fusions.
        """
        needed = dict.fromkeys(body.instructions, 0)
        needed[body.root.name] = num_elements(body.root.shape) if of_root is None else of_root
        written_in_place = {update.name for update in _updates(body)}
        for instruction in reversed(body.instructions.values()):
            elements = min(needed[instruction.name], num_elements(instruction.shape))
            needed[instruction.name] = elements
            if elements:
                shares = self._shares(instruction, body, elements, in_place=instruction.name in written_in_place)
                for operand, share in zip(instruction.operands, shares, strict=True):
                    needed[operand] += share
        return [needed[parameter.name] for parameter in body.parameters]

    def _shares(self, instruction: Instruction, body: Computation, elements: int, *, in_place: bool) -> list[int]:
        """Returns the elements of each operand that `elements` elements of the result depend on."""
        operands = body.operand_shapes(instruction)
        sizes = [num_elements(shape) for shape in operands]
        match instruction.opcode:
            case "slice" | "dynamic-slice":
                return [elements] + [1] * (len(sizes) - 1)
            case "gather":
                return [elements, sizes[1]]
            case "dynamic-update-slice":
                return [0 if in_place else max(elements - sizes[1], 0), sizes[1]] + [1] * (len(sizes) - 2)
            case "scatter":
                targets = (len(sizes) - 1) // 2
                kept = 0 if in_place else elements
                # The target of an addition is read as well as written.
                return [kept + sizes[targets + 1 + i] for i in range(targets)] + sizes[targets:]
            case "fusion":
                return self._needed(self.module.computations[instruction.called("calls")[0]], elements)
            case opcode if opcode in _SCALED_OPCODES:
                share = elements / max(num_elements(instruction.shape), 1)
                return [math.ceil(size * share) for size in sizes]
            case opcode if opcode in _SAME_SIZE_OPCODES or opcode in ("broadcast", "get-tuple-element"):
                return [min(elements, size) for size in sizes]
            case _:
                return sizes

    def _written(self, body: Computation) -> int:
        in_place = {update.name: update for update in _updates(body)}
        return sum(
            _written_bytes(in_place[result.name], body) if result.name in in_place else num_bytes(result.shape)
            for result in _results(body)
        )


def compiled_attention(module: Module) -> Kernel:
    """Returns the kernel that computes attention in a compiled step."""
    calls = [i for c in module.computations.values() for i in c.instructions.values() if i.opcode == "custom-call"]
    if any(_target(call).startswith(_CUDNN) for call in calls):
        return "cudnn"
    if any(_target(call).startswith(_MOSAIC) for call in calls):
        return "tokamax"
    own = [call for call in calls if _own_kernel(call).startswith("attention")]
    is_text = any(_TTIR in call.attributes["backend_config"] for call in own)
    return ("triton" if is_text else "pallas") if own else "plain"


def _own_kernel(call: Instruction) -> str:
    """Returns the name of a kernel of `llamajax.kernels`; empty for other calls."""
    found = _KERNEL_NAME.search(call.attributes["backend_config"]) if _target(call) == _TRITON else None
    return found[1] if found else ""


def _results(body: Computation) -> Iterable[Instruction]:
    """Returns the results of a fusion, behind bitcasts."""
    results = [body.instructions[name] for name in body.root.operands] if body.root.opcode == "tuple" else [body.root]
    return [_behind_bitcasts(result, body) for result in results]


def _updates(body: Computation) -> list[Instruction]:
    """Returns results that overwrite a part of a parameter, which XLA then does in the parameter's own buffer."""
    return [
        result
        for result in _results(body)
        if result.opcode in ("dynamic-update-slice", "scatter")
        and _behind_bitcasts(body.instructions[result.operands[0]], body).opcode == "parameter"
    ]


def _behind_bitcasts(instruction: Instruction, body: Computation) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = body.instructions[instruction.operands[0]]
    return instruction


def _written_bytes(instruction: Instruction, computation: Computation) -> int:
    """Returns the bytes that an instruction writes, which may overwrite a part of its first operand."""
    if instruction.opcode == "dynamic-update-slice":
        return num_bytes(computation.shape(instruction.operands[1]))
    if instruction.opcode == "scatter":
        return sum(
            num_bytes(computation.shape(name)) for name in instruction.operands[(len(instruction.operands) + 1) // 2 :]
        )
    return num_bytes(instruction.shape)


def _bytes_of_elements(shape: Shape, elements: int) -> int:
    total = num_elements(shape)
    return num_bytes(shape) * elements // total if total else 0


def _crosses_to_host(instruction: Instruction, operands: list[Shape]) -> bool:
    places = {array.on_host for array in (*arrays(instruction.shape), *arrays(operands[0])) if array.num_elements > 1}
    return len(places) > 1


@dataclass(frozen=True, slots=True)
class Dot:
    """`batch` products of [rows, contracted] and [contracted, columns] matrices."""

    batch: int
    rows: int
    columns: int
    contracted: int
    dtype: str
    """Dtype of the operands."""

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.rows * self.columns * self.contracted


def _dot(instruction: Instruction, operands: list[Shape]) -> Dot:
    numbers = [instruction.dims(f"{side}_{what}_dims") for side in ("lhs", "rhs") for what in ("contracting", "batch")]
    return _product(operands, *numbers)


def _gemm_call(instruction: Instruction, operands: list[Shape]) -> Dot:
    config = instruction.backend_config["gemm_backend_config"]["dot_dimension_numbers"]
    keys = [f"{side}_{what}_dimensions" for side in ("lhs", "rhs") for what in ("contracting", "batch")]
    return _product(operands, *(tuple(int(dim) for dim in config.get(key, ())) for key in keys))


def _product(
    operands: list[Shape],
    lhs_contracting: tuple[int, ...],
    lhs_batch: tuple[int, ...],
    rhs_contracting: tuple[int, ...],
    rhs_batch: tuple[int, ...],
) -> Dot:
    lhs, rhs = map(_array, operands[:2])
    contracted = math.prod(lhs.dims[dim] for dim in lhs_contracting)
    batch = math.prod(lhs.dims[dim] for dim in lhs_batch)
    shared = math.prod(rhs.dims[dim] for dim in (*rhs_contracting, *rhs_batch))
    return Dot(batch, lhs.num_elements // (contracted * batch), rhs.num_elements // shared, contracted, lhs.dtype)


def _array(shape: Shape) -> Array:
    assert isinstance(shape, Array), shape
    return shape


def _target(instruction: Instruction) -> str:
    return instruction.attributes.get("custom_call_target", "").strip('"')


def dot_seconds(dot: Dot, machine: Machine) -> float:
    """Returns the time of the best of cuBLAS's tilings: whole waves of output tiles over all cores.

    Every core works on one tile at a time, so the last wave costs as much as a full one; a product with few tiles may be
    split along its contracted dim instead. `matmul_efficiency` is the share that large products sustain. Tiles, waves and
    `matmul_start_s` together match XLA's table of 87 products on an H100 (tests/planning/cost/test_products.py).
    """
    calibration = machine.calibration
    against = 2 * calibration.float8_share if dot.dtype.startswith("f8") else _PEAK_SHARE.get(dot.dtype, 1.0)
    peak = machine.gpu.peak_flops * calibration.matmul_efficiency * against
    best = math.inf
    for rows, columns, share in _TILES:
        tiles = dot.batch * math.ceil(dot.rows / rows) * math.ceil(dot.columns / columns)
        for split in _SPLITS:
            if split > 1 and dot.contracted // split < _TILE_START:
                break
            waves = math.ceil(tiles * split / machine.gpu.cores)
            tile_flops = 2 * rows * columns * (dot.contracted / split + _TILE_START)
            best = min(best, waves * tile_flops * machine.gpu.cores / (peak * share))
    return best
