"""The kernels of `llamajax.kernels.pallas_kernels` in Triton's own language (extra `triton`), for a jax without a Triton
lowering of Pallas. Import it only where these kernels are requested.

The package `triton` makes the first form of a kernel (TTIR) without a GPU; XLA does the rest, through the custom call that
Pallas uses. With TRITON_INTERPRET=1 in the environment before its first import, `triton` interprets and compiles nothing.
"""

import functools
import math
import threading
from typing import Any, NamedTuple, no_type_check

import jax
import numpy as np
import triton  # pyright: ignore[reportMissingImports]  # an extra, as are all below
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax.extend.backend import get_default_device
from jaxtyping import Array, Int32
from triton._C.libtriton import ir  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
from triton.compiler import ASTSource, make_backend  # pyright: ignore[reportMissingImports]
from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

from llamajax.kernels.task import Task
from llamajax.kernels.tiles import Sight

_TARGET = "__gpu$xla.gpu.triton"
"""XLA's own custom-call target, which Pallas' Triton lowering uses too."""
_LEAST_WIDTH = 16
"""Least width of a head in a matrix product."""
_ALIGNED = 16
"""Bytes to which XLA aligns every array; Triton then loads as many at once."""
_THREADS_PER_WARP = 32
_LEAST_CAPABILITY = (8, 0)
"""Least compute capability of GPUs with bfloat16."""
_LOG2_E = tl.constexpr(math.log2(math.e))
_LOWEST = tl.constexpr(-1e30)
"""Lower than every score, yet finite: the difference of two such values is a number."""


def launch(
    task: Task,
    tiles: Int32[Array, "b n 5"],
    sight: Sight,
    arrays: tuple[jax.Array, ...],
    results: list[jax.ShapeDtypeStruct],
    *,
    interpret: bool,
) -> Any:
    """See `llamajax.kernels.pallas_kernels.launch`."""
    documents = () if sight.documents is None else tuple(sight.documents)
    operands = tiles, sight.offset, *documents, *arrays
    dtypes = tuple(np.dtype(x.dtype).name for x in (*operands, *results))
    form = _Form(task, dtypes, rows_differ=tiles.shape[0] > 1, has_documents=bool(documents), is_interpreted=interpret)
    if interpret:
        return jax.pure_callback(functools.partial(_interpret, form, results), results, *operands)
    x, y, z = task.grid
    with jax.named_scope(task.name):
        return jax.ffi.ffi_call(_TARGET, results)(
            *operands,
            name=task.name, ir=_ttir(form, _capability()), debug=False,
            num_warps=np.int32(task.build.warps), num_stages=np.int32(task.build.stages),
            grid_x=np.int32(x), grid_y=np.int32(y), grid_z=np.int32(z),
        )  # fmt: skip


class _Form(NamedTuple):
    """All constants of a compiled kernel."""

    task: Task
    dtypes: tuple[str, ...]
    """Dtypes of its arrays, read and written."""
    rows_differ: bool
    has_documents: bool
    is_interpreted: bool

    @property
    def kernel(self) -> Any:
        return _KERNELS[self.task.name]

    @property
    def constants(self) -> dict[str, Any]:
        """Values of the kernel's constant arguments by name."""
        task = self.task
        constants = {
            "M": task.size.queries, "N": task.size.keys, "T": task.num_queries, "S": task.num_keys,
            "K": task.num_kv_heads, "G": task.group, "PARTS": task.parts, "H": task.head_dim,
            "WIDTH": max(_LEAST_WIDTH, triton.next_power_of_2(task.head_dim)), "SCALE": task.scale, "WINDOW": task.window,
            "ROWS_DIFFER": self.rows_differ, "WIDEN": self.is_interpreted,
        } | ({} if self.has_documents else {"q_ids": None, "k_ids": None})  # fmt: skip
        return {name: value for name, value in constants.items() if name in self.kernel.arg_names}

    @property
    def pointers(self) -> dict[str, str]:
        """Types of the kernel's array arguments by name."""
        types = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32"}
        names = [name for name in self.kernel.arg_names if name not in self.constants]
        return {name: types[dtype] for name, dtype in zip(names, self.dtypes, strict=True)}


def _capability() -> tuple[int, ...]:
    """Returns the compute capability of the target GPUs; see `llamajax.planning.xla.compile.compile_for`."""
    told = getattr(get_default_device(), "compute_capability", None)
    return tuple(int(number) for number in told.split(".")) if told else _LEAST_CAPABILITY


@functools.cache
def _ttir(form: _Form, capability: tuple[int, ...]) -> str:
    # `triton.compile` would continue to machine code, which is XLA's part, and write files to the user's home.
    names, pointers = form.kernel.arg_names, form.pointers
    signature = {name: pointers.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", _ALIGNED]] for name in pointers}
    source: Any = ASTSource(form.kernel, signature, form.constants, aligned)
    backend: Any = make_backend(GPUTarget("cuda", 10 * capability[0] + capability[1], _THREADS_PER_WARP))
    options = backend.parse_options({"num_warps": form.task.build.warps, "num_stages": form.task.build.stages})
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    generators, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    made = source.make_ir(backend.target, options, generators, modules, context)
    backend.add_stages(stages, options, source.language)
    return stages["ttir"](made, {}).str_nodebug()


_ONE_AT_A_TIME = threading.Lock()
"""Lock: Triton has one interpreter for all threads."""


def _interpret(form: _Form, results: list[jax.ShapeDtypeStruct], *operands: jax.typing.ArrayLike) -> list[np.ndarray]:
    """Runs one program after another, on the host."""
    found = [np.zeros(result.shape, result.dtype) for result in results]
    arrays = [*(np.ascontiguousarray(x) for x in operands), *found]

    def pointer(array: np.ndarray, type_name: str) -> Any:
        of: Any = tl.str_to_ty(type_name, None)
        return tl.tensor(interpreter.TensorHandle(np.array([array.ctypes.data], np.uint64), of), of)

    pointers = {name: pointer(array, of) for array, (name, of) in zip(arrays, form.pointers.items(), strict=True)}
    with _ONE_AT_A_TIME:
        form.kernel.run(grid=form.task.grid, warmup=False, **pointers, **form.constants)
    return found


@triton.jit
@no_type_check
def attention_forward(
    tiles, offset, q_ids, k_ids, q, k, v, out, lse,
    M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    WIDTH: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, ROWS_DIFFER: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes attention of one head's tile of queries, and the log-sum-exp."""
    head, row, table = tl.program_id(0), tl.program_id(2), _table(tiles, ROWS_DIFFER)
    q_first = tl.load(table + 4) * M
    own_q = _heads(q, row, q_first, head, M, T, K * G, H, WIDTH)
    weighted = tl.full((M, WIDTH), 0.0, tl.float32)
    largest, total = tl.full((M,), _LOWEST, tl.float32), tl.full((M,), 0.0, tl.float32)
    for part in tl.static_range(3):
        for tile in range(tl.load(table + part), tl.load(table + part + 1)):
            k_first = tile * N
            own_k = _heads(k, row, k_first, head // G, N, S, K, H, WIDTH)
            scores = _dot(own_q, tl.trans(own_k), WIDEN) * (SCALE * _LOG2_E)
            if part != 1:
                seen = _visible(offset, q_ids, k_ids, row, q_first, k_first, M, N, T, S, WINDOW, False)
                scores = tl.where(seen, scores, float("-inf"))
            larger = tl.maximum(largest, tl.max(scores, 1))
            shrunk, exps = tl.exp2(largest - larger), tl.exp2(scores - larger[:, None])
            own_v = _heads(v, row, k_first, head // G, N, S, K, H, WIDTH)
            weighted = weighted * shrunk[:, None] + _dot(exps.to(own_q.dtype), own_v, WIDEN)
            total = total * shrunk + tl.sum(exps, 1)
            largest = larger
    sees_any = total > 0
    mean = weighted / tl.where(sees_any, total, 1.0)[:, None]
    _store_heads(out, mean, row, q_first, head, M, T, K * G, H, WIDTH)
    log = (largest + tl.log2(tl.where(sees_any, total, 1.0))) / _LOG2_E
    _store_numbers(lse, tl.where(sees_any, log, float("-inf")), row, q_first, head, M, T, K * G)


@triton.jit
@no_type_check
def attention_backward_queries(
    tiles, offset, q_ids, k_ids, q, k, v, d_out, lse, d_scores, d_q,
    M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    WIDTH: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, ROWS_DIFFER: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one head's tile of queries."""
    head, row, table = tl.program_id(0), tl.program_id(2), _table(tiles, ROWS_DIFFER)
    q_first = tl.load(table + 4) * M
    own_q = _heads(q, row, q_first, head, M, T, K * G, H, WIDTH)
    own_d_out = _heads(d_out, row, q_first, head, M, T, K * G, H, WIDTH)
    own_lse = _numbers(lse, row, q_first, head, M, T, K * G) * _LOG2_E
    own_d_scores = _numbers(d_scores, row, q_first, head, M, T, K * G)
    total = tl.full((M, WIDTH), 0.0, tl.float32)
    for part in tl.static_range(3):
        for tile in range(tl.load(table + part), tl.load(table + part + 1)):
            k_first = tile * N
            own_k = _heads(k, row, k_first, head // G, N, S, K, H, WIDTH)
            weights = tl.exp2(_dot(own_q, tl.trans(own_k), WIDEN) * (SCALE * _LOG2_E) - own_lse[:, None])
            if part != 1:
                seen = _visible(offset, q_ids, k_ids, row, q_first, k_first, M, N, T, S, WINDOW, False)
                weights = tl.where(seen, weights, 0.0)
            own_v = _heads(v, row, k_first, head // G, N, S, K, H, WIDTH)
            d_weights = _dot(own_d_out, tl.trans(own_v), WIDEN) + own_d_scores[:, None]
            total += _dot((weights * d_weights).to(own_q.dtype), own_k, WIDEN)
    _store_heads(d_q, total * SCALE, row, q_first, head, M, T, K * G, H, WIDTH)


@triton.jit
@no_type_check
def attention_backward_keys(
    tiles, offset, q_ids, k_ids, q, k, v, d_out, lse, d_scores, d_k, d_v,
    M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, S: tl.constexpr, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    WIDTH: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, ROWS_DIFFER: tl.constexpr, WIDEN: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one kv head's tile of keys and values, from this part's query heads of the group."""
    share, row, table = tl.program_id(0), tl.program_id(2), _table(tiles, ROWS_DIFFER)
    k_first = tl.load(table + 4) * N
    own_k = _heads(k, row, k_first, share // PARTS, N, S, K, H, WIDTH)
    own_v = _heads(v, row, k_first, share // PARTS, N, S, K, H, WIDTH)
    sum_k, sum_v = tl.full((N, WIDTH), 0.0, tl.float32), tl.full((N, WIDTH), 0.0, tl.float32)
    for member in range(G // PARTS):
        head = share * (G // PARTS) + member
        for part in tl.static_range(3):
            for tile in range(tl.load(table + part), tl.load(table + part + 1)):
                q_first = tile * M
                own_q = _heads(q, row, q_first, head, M, T, K * G, H, WIDTH)
                own_d_out = _heads(d_out, row, q_first, head, M, T, K * G, H, WIDTH)
                # Keys first, so that no computed tile is transposed.
                scores = _dot(own_k, tl.trans(own_q), WIDEN) * (SCALE * _LOG2_E)
                own_lse = _numbers(lse, row, q_first, head, M, T, K * G) * _LOG2_E
                weights = tl.exp2(scores - own_lse[None, :])
                if part != 1:
                    seen = _visible(offset, q_ids, k_ids, row, q_first, k_first, M, N, T, S, WINDOW, True)
                    weights = tl.where(seen, weights, 0.0)
                own_d_scores = _numbers(d_scores, row, q_first, head, M, T, K * G)
                d_weights = _dot(own_v, tl.trans(own_d_out), WIDEN) + own_d_scores[None, :]
                sum_k += _dot((weights * d_weights).to(own_k.dtype), own_q, WIDEN)
                sum_v += _dot(weights.to(own_k.dtype), own_d_out, WIDEN)
    _store_heads(d_k, sum_k * SCALE, row, k_first, share, N, S, K * PARTS, H, WIDTH)
    _store_heads(d_v, sum_v, row, k_first, share, N, S, K * PARTS, H, WIDTH)


_KERNELS: dict[str, Any] = {
    kernel.__name__: kernel for kernel in (attention_forward, attention_backward_queries, attention_backward_keys)
}


@triton.jit
@no_type_check
def _table(tiles, ROWS_DIFFER: tl.constexpr):
    """Returns the address of the program's five numbers, see `llamajax.kernels.tiles.Tiles`."""
    place = tl.program_id(1)
    if ROWS_DIFFER:
        place += tl.program_id(2) * tl.num_programs(1)
    return tiles + 5 * place


@triton.jit
@no_type_check
def _start(array, row, first, head, LENGTH: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr):
    """Returns the address of a token's head. 32 bits cannot address the numbers of all rows, nor of one row of a million
    tokens."""
    if LENGTH * HEADS * H >= 2**31:
        first = first.to(tl.int64)
    return array + row.to(tl.int64) * (LENGTH * HEADS * H) + (first * HEADS + head) * H


@triton.jit
@no_type_check
def _heads(array, row, first, head, SIZE: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Loads one head of SIZE tokens, from token `first`, of `array` [rows, LENGTH, HEADS, H]; zeros outside the array."""
    token, number = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    at = _start(array, row, first, head, LENGTH, HEADS, H) + (token[:, None] * (HEADS * H) + number[None, :])
    if LENGTH % SIZE != 0 or WIDTH != H:
        values = tl.load(at, mask=(first + token < LENGTH)[:, None] & (number < H)[None, :], other=0.0)
    else:
        values = tl.load(at)
    return values


@triton.jit
@no_type_check
def _store_heads(array, values, row, first, head, SIZE: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr,
                 H: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Stores one head of SIZE tokens, see `_heads`."""
    token, number = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    at = _start(array, row, first, head, LENGTH, HEADS, H) + (token[:, None] * (HEADS * H) + number[None, :])
    values = values.to(array.dtype.element_ty)
    if LENGTH % SIZE != 0 or WIDTH != H:
        tl.store(at, values, mask=(first + token < LENGTH)[:, None] & (number < H)[None, :])
    else:
        tl.store(at, values)


@triton.jit
@no_type_check
def _numbers(array, row, first, head, SIZE: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr):
    """Loads one head of SIZE numbers, from token `first`, of `array` [rows, HEADS, LENGTH]; zeros outside the array."""
    token = tl.arange(0, SIZE)
    at = array + row.to(tl.int64) * (HEADS * LENGTH) + (head * LENGTH + first + token)
    return tl.load(at, mask=first + token < LENGTH, other=0) if LENGTH % SIZE != 0 else tl.load(at)


@triton.jit
@no_type_check
def _store_numbers(array, values, row, first, head, SIZE: tl.constexpr, LENGTH: tl.constexpr, HEADS: tl.constexpr):
    token = tl.arange(0, SIZE)
    at = array + row.to(tl.int64) * (HEADS * LENGTH) + (head * LENGTH + first + token)
    if LENGTH % SIZE != 0:
        tl.store(at, values, mask=first + token < LENGTH)
    else:
        tl.store(at, values)


@triton.jit
@no_type_check
def _visible(offset, q_ids, k_ids, row, q_first, k_first, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, S: tl.constexpr,
             WINDOW: tl.constexpr, BY_KEY: tl.constexpr):  # fmt: skip
    """Returns which scores [queries, keys] of two tiles are seen; [keys, queries] where BY_KEY."""
    QUERY: tl.constexpr = 0 if BY_KEY else 1
    KEY: tl.constexpr = 1 if BY_KEY else 0
    query = tl.expand_dims(q_first + tl.arange(0, M), QUERY)
    key = tl.expand_dims(k_first + tl.arange(0, N), KEY)
    distance = query + tl.load(offset) - key
    visible = distance >= 0
    if WINDOW is not None:
        visible = visible & (distance < WINDOW)
    if S % N != 0:
        visible = visible & (key < S)
    if q_ids is not None:
        of_query = tl.expand_dims(_numbers(q_ids, row, q_first, 0, M, T, 1), QUERY)
        of_key = tl.expand_dims(_numbers(k_ids, row, k_first, 0, N, S, 1), KEY)
        visible = visible & (of_query == of_key)
    return visible


@triton.jit
@no_type_check
def _dot(x, y, WIDEN: tl.constexpr):
    """Multiplies with sums in fp32; fp32 operands are not rounded. Triton's interpreter cannot multiply bfloat16."""
    if WIDEN:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision="ieee")
