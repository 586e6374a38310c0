"""Low-rank adapters of a layer's projections (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353).

An adapter belongs to one projection, q, k, v, o, gate, up or down, although the layer multiplies several of them at once. It
adds to the product and leaves the projection's weight alone, so that a small addition is not rounded away.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, UInt32

from llamajax.config.adapters import PROJECTIONS, AdaptersConfig, Projection
from llamajax.config.layer_weights import LAYER_WEIGHTS
from llamajax.config.parallel import num_parts
from llamajax.parallel.arrays import mixed
from llamajax.parallel.float8 import Factor, Float8, values
from llamajax.parallel.matmul import gathered_matmul, scattered_matmul, tokenwise_matmul
from llamajax.parallel.quantized import Quantized, dequantize
from llamajax.parallel.stages import is_staged, merge, split
from llamajax.parallel.zero import Dims, as_frozen, as_quantized, weight, with_value

Tree = TypeVar("Tree")
Seeds = UInt32[Array, "B T"]
"""A number for every token of a step, from which dropout follows; None where nothing is dropped, as in evaluation."""


class Adapter(nnx.Module):
    """Adapter of a projection W [D, *N], which is multiplied from D (a column matrix) or from N (a row matrix): x W becomes
    x W + scale (x a) b.

    The factor with D is [D, r] and the one with N is [r, *N], so their product has W's shape: a and b for a column matrix, b
    and a for a row matrix. `magnitude` (DoRA) has a number for every output: the length of its weights. `number`, with
    dropout, is another one for every layer, and is not trained.
    """

    def __init__(
        self,
        config: AdaptersConfig,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        key: jax.Array,
        *,
        is_row: bool,
        stored: Dims,
        compute: Dims,
        arrange: Callable[[jax.Array, DTypeLike], jax.Array] | None = None,
    ):
        """Draws a, uniformly in ±1/sqrt(inputs), as peft does; b is zero.

        Args:
            config: the adapters.
            shape: shape of W.
            dtype: dtype of the adapter.
            key: key of a.
            is_row: whether W is a row matrix.
            stored: dims of N as stored.
            compute: dims of N for compute.
            arrange: see `weight`, for [r, *N].
        """
        (D, *N), r = shape, config.rank
        parts = num_parts("embed", jax.sharding.get_abstract_mesh().shape)
        drawn, zeros = _uniform(key, 1 / math.sqrt(math.prod(N) if is_row else D)), jnp.zeros
        of_rank = "embed" if r % parts == 0 else None
        with_d = weight((D, r), dtype, stored=("embed", None), compute=(None, None), init=zeros if is_row else drawn)
        with_n = weight(
            (r, *N), dtype, stored=(of_rank, *stored), compute=(None, *compute), init=drawn if is_row else zeros,
            arrange=arrange,
        )  # fmt: skip
        self.a, self.b = (with_n, with_d) if is_row else (with_d, with_n)
        outputs, lie = ((D,), (None,)) if is_row else (tuple(N), stored)
        is_dora = config.kind == "dora"
        self.magnitude = weight(outputs, dtype, stored=lie, compute=None, init=jnp.ones) if is_dora else None
        dropping = config.dropout > 0
        self.number = weight((), jnp.float32, stored=(), compute=None, init=jnp.zeros) if dropping else None
        self.dropout = config.dropout
        self.scale, self.is_row, self.arrange = config.scale, is_row, None if is_row else arrange

    def product(self) -> Float[Array, "D *N"]:
        """Returns scale a b, which has W's shape, of factors as they are stored."""
        with_d, with_n = (self.b, self.a) if self.is_row else (self.a, self.b)
        return self.scale * jnp.tensordot(with_d[...], with_n[...], 1)


def _uniform(key: jax.Array, bound: float) -> Callable[..., jax.Array]:
    def init(shape: tuple[int, ...], dtype: DTypeLike, out_sharding: P) -> jax.Array:
        return jax.reshard(jax.random.uniform(key, shape, dtype, -bound, bound), out_sharding)

    return init


def columns_of(size: int, count: int) -> list[slice]:
    """Returns the places of `count` projections in the dim of this size along which a matrix joins them: the first may be
    wide, the others are one wide."""
    starts = [0, *range(size - count + 1, size), size]
    return [slice(start, end) for start, end in itertools.pairwise(starts)]


def with_columns(
    y: Float[Array, "B T *N"],
    x: Float[Array, "B T D"],
    w: Factor,
    adapters: Sequence[Adapter | None],
    seeds: Seeds | None,
) -> Float[Array, "B T *N"]:
    """Returns x W with what the adapters of its projections add.

    Args:
        y: x W.
        x: residual stream.
        w: gathered W.
        adapters: one for each projection that W joins along its last dim but one, see `columns_of`; None for a projection
            without.
        seeds: see `Seeds`.
    """
    own = [adapter for adapter in adapters if adapter is not None]
    if not own:
        return y
    down = tokenwise_matmul(_dropped(x, own[0], seeds), jnp.concatenate([adapter.a[...] for adapter in own], axis=-1))
    downs, columns = iter(jnp.split(down, len(own), axis=2)), columns_of(y.shape[-2], len(adapters))
    added: list[Any] = [
        jnp.zeros_like(y[..., own_columns, :])
        if adapter is None
        else _amplified(adapter.scale, gathered_matmul(next(downs), adapter.b[...], "collective"))
        for adapter, own_columns in zip(adapters, columns, strict=True)
    ]
    y += jnp.concatenate(added, axis=-2)
    if all(adapter.magnitude is None for adapter in own):
        return y
    whole = _plain(w)
    factors = [_factor(adapter, whole[..., own_columns, :]) for adapter, own_columns in zip(adapters, columns, strict=True)]
    return _times(y, jnp.concatenate(factors, axis=-2))


def with_rows(
    out: Float[Array, "B T D"], y: Float[Array, "B T *N"], w: Factor, adapter: Adapter | None, seeds: Seeds | None
) -> Float[Array, "B T D"]:
    """Returns y W^T with what the adapter adds.

    Args:
        out: y W^T.
        y: input of the product.
        w: gathered W.
        adapter: the projection's, if it has one.
        seeds: see `Seeds`.
    """
    if adapter is None:
        return out
    y = _dropped(y, adapter, seeds)
    down = scattered_matmul(y, adapter.a[...], jax.typeof(out).sharding.spec, "collective")
    added: Any = _amplified(adapter.scale, tokenwise_matmul(down, adapter.b[...], rows=True))
    out += added
    return out if adapter.magnitude is None else _times(out, _factor(adapter, _plain(w)))


def seeds_like(x: Float[Array, "B T D"], seeds: Seeds | None) -> Seeds | None:
    """Returns the seeds of the tokens of a residual stream where these are."""
    return None if seeds is None else jax.reshard(seeds, P(*jax.typeof(x).sharding.spec.partitions[:2]))


def _dropped(x: Float[Array, "B T *N"], adapter: Adapter, seeds: Seeds | None) -> Float[Array, "B T *N"]:
    """Returns x with the adapter's share of its numbers set to zero, and the others scaled up. Which ones depends on token,
    layer and place alone, so the backward pass drops the same, and so does every mesh."""
    if seeds is None or adapter.number is None:
        return x
    lies, number = jax.typeof(x).sharding.spec, adapter.number[...].astype(jnp.uint32)
    own = jax.reshard(seeds, P(*lies.partitions[:2]))
    if is_staged(jax.typeof(number).sharding.spec):
        own = merge(mixed(split(own), number[:, None, None]))
    else:
        own = mixed(own, number)
    place = jnp.uint32(0)
    for dim, size in enumerate(x.shape[2:], start=2):
        index = jax.reshard(jnp.arange(size, dtype=jnp.uint32), P(lies[dim]))
        place = place * jnp.uint32(size) + jnp.expand_dims(index, [other for other in range(x.ndim) if other != dim])
    bits = mixed(jnp.expand_dims(own, range(2, x.ndim)), place)
    return jnp.where(bits >= int(adapter.dropout * 2**32), _amplified(1 / (1 - adapter.dropout), x), 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _amplified(scale: float, x: jax.Array) -> jax.Array:
    """Returns scale x. Otherwise the backward pass would keep the number as an array of every layer."""
    return scale * x


_amplified.defvjp(lambda scale, x: (scale * x, None), lambda scale, _, d_out: (scale * d_out,))


def _plain(w: Factor) -> Float[Array, "..."]:
    """Returns the numbers of a gathered weight, without a gradient."""
    numbers = jax.lax.stop_gradient(values(w))
    numbers = jax.reshard(numbers, P(*jax.typeof(numbers).sharding.spec.partitions))
    if not isinstance(w, Float8):
        return numbers
    return (numbers.astype(jnp.float32) * jnp.expand_dims(w.scale, range(w.scale.ndim, w.ndim))).astype(w.dtype)


def _factor(adapter: Adapter | None, w: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Returns for each output of a projection its trained length over the length of its weights; 1 without an adapter."""
    staged = is_staged(jax.typeof(w).sharding.spec)
    if adapter is None or adapter.magnitude is None:
        return jnp.ones_like(jax.lax.index_in_dim(w, 0, 1 if staged else 0, keepdims=False), dtype=jnp.float32)
    own = _lengths(w, _plain(adapter.a[...]), _plain(adapter.b[...]), scale=adapter.scale, is_row=adapter.is_row)
    magnitude = adapter.magnitude[...]
    if adapter.arrange is not None:
        magnitude = adapter.arrange(magnitude if staged else magnitude[None], jnp.float32)
        magnitude = magnitude if staged else magnitude[0]
    # A stage of a pipeline without a micro-batch reads zeros for saved values: a quotient of them would be NaN.
    return magnitude * (1 / own)


def _lengths(
    w: Float[Array, "..."], a: Float[Array, "..."], b: Float[Array, "..."], *, scale: float, is_row: bool
) -> Float32[Array, "..."]:
    """Returns the length of each output's weights in W + scale a b, without making that matrix; with a first dim for the
    stages of a pipeline where w has one."""
    lies = jax.typeof(w).sharding.spec.partitions
    p = 1 if is_staged(P(*lies)) else 0
    stages = tuple(range(p))
    inputs, of_a = (tuple(range(p + 1, w.ndim)), tuple(range(p + 1, a.ndim))) if is_row else ((p,), (p,))
    b = b if is_row else jnp.moveaxis(b, p, -1)  # from here on, r is last
    kept = P(*(entry for dim, entry in enumerate(lies) if dim not in inputs), None)
    dot = partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    w_times_a = dot(w, a, ((inputs, of_a), (stages, stages)), out_sharding=kept)
    a_times_a = dot(a, a, ((of_a, of_a), (stages, stages)), out_sharding=P(*lies[:p], None, None))
    squares = jnp.sum(jnp.square(w.astype(jnp.float32)), axis=inputs)
    b = b.astype(jnp.float32)
    b_times = jnp.einsum("p...r,prs->p...s" if p else "...r,rs->...s", b, a_times_a)
    return jnp.sqrt(squares + jnp.sum(b * (2 * scale * w_times_a + scale**2 * b_times), axis=-1))


def _times(y: Float[Array, "B T *N"], factor: Float32[Array, "..."]) -> Float[Array, "B T *N"]:
    if is_staged(jax.typeof(factor).sharding.spec):
        return merge(split(y) * factor[:, None, None]).astype(y.dtype)
    return (y * factor[None, None]).astype(y.dtype)


def quantized_layers(config: AdaptersConfig, layers: Tree, *, num_stacked: int) -> Tree:
    """Returns frozen layers, or a matrix of them by its name, in the form of `adapters.base`, in blocks along the inputs."""
    assert config.quantized_form is not None, config.base
    dims = {weight.name: 0 if weight.matmul == "column" else -1 for weight in LAYER_WEIGHTS if weight.matmul}
    return as_quantized(layers, config.quantized_form, dims, double=config.double_quantization, num_stacked=num_stacked)


def attach(part: nnx.Module, matrices: Mapping[str, Sequence[Projection]], adapters: Mapping[Projection, Adapter]) -> None:
    """Sets the adapters of a part of a stack of layers, `q_adapter` and so on; those of DoRA start from the length of the
    weights.

    Args:
        part: attention or MLP, with a leading dim L.
        matrices: projections of each matrix, by its name.
        adapters: by projection, stacked likewise.
    """
    for matrix, names in matrices.items():
        stored = getattr(part, matrix)
        for name, place in zip(names, columns_of(stored.shape[-2], len(names)), strict=True):
            if name not in adapters:
                continue
            adapter = jax.tree.map(lambda weight: weight, adapters[name])
            if adapter.number is not None:
                numbers = len(PROJECTIONS) * jnp.arange(stored.shape[0], dtype=jnp.float32) + PROJECTIONS.index(name)
                lies = jax.typeof(adapter.number[...]).sharding.spec
                adapter.number = as_frozen(with_value(adapter.number, jax.reshard(numbers, lies)))
            if adapter.magnitude is not None:
                w = stored[...]
                w = dequantize(w, jnp.float32) if isinstance(w, Quantized) else w
                w = w if adapter.is_row else w[..., place, :]
                length = jnp.sqrt(jnp.sum(jnp.square(w.astype(jnp.float32)), range(2, w.ndim) if adapter.is_row else 1))
                own = adapter.magnitude
                lies = jax.typeof(own[...]).sharding.spec
                adapter.magnitude = with_value(own, jax.reshard(length.astype(own.dtype), lies))
            setattr(part, f"{name}_adapter", adapter)


def detach(part: nnx.Module, matrices: Mapping[str, Sequence[Projection]]) -> None:
    """Removes all adapters of a part of layers; `matrices` as for `attach`."""
    for name in itertools.chain.from_iterable(matrices.values()):
        setattr(part, f"{name}_adapter", None)
