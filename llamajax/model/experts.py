"""Experts in place of a layer's MLP (arXiv:1701.06538, 2101.03961): every token is processed by the few that it chooses.

Devices along `PEERS` hold different experts, and each has tokens of its own, so tokens travel: a device packs its tokens
into blocks, sends each peer its block, multiplies the tokens that came by its experts' matrices, and sends the results back.
With `latent_dim` (BigMac, arXiv:2502.16927) tokens are narrowed before they travel and widened when they are back.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.adapters import Projection
from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import AXES, ParallelConfig, num_parts
from llamajax.estimates.experts import block_slots
from llamajax.kernels.grouped import experts_on_rows
from llamajax.model.adapters import Seeds
from llamajax.model.layers import MLP, Auxiliary, normal, output_first, residual_std
from llamajax.model.router import Choices, choose, kept_choices
from llamajax.parallel import dispatch
from llamajax.parallel.dispatch import PEERS, Block, Route
from llamajax.parallel.float8 import Factor, differentiable, rejoined, specs
from llamajax.parallel.matmul import tokenwise_matmul
from llamajax.parallel.sharding import as_tuple, axes_in
from llamajax.parallel.stages import STAGE, is_staged
from llamajax.parallel.tensor import shared_axes
from llamajax.parallel.time_slots import in_time_slots
from llamajax.parallel.zero import weight

STATISTICS = ("load", "dropped", "late", "score")
"""Sums over tokens for each expert: choices, those that were dropped, those that took a further round, and scores."""
_ALL = P(AXES)
"""Spec of arrays that have a part for every device."""


class Experts(nnx.Module):
    """The experts of a layer, their router, and the expert that all tokens share."""

    MATRICES: ClassVar[Mapping[str, Sequence[Projection]]] = {}
    """Matrices that take adapters, see `MLP.MATRICES`: none."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        own, D, dtype = config.experts, config.embed_dim, config.param_dtype
        E, F, width = own.num_experts, own.mlp_dim or config.mlp_dim, own.latent_dim or D
        router_key, in_key, down_key, descend_key, ascend_key, shared_key, gate_key = jax.random.split(key, 7)
        std, residual = config.init_std, residual_std(config)
        self.config = own
        table = partial(weight, dtype=dtype, stored=("embed", None), compute=(None, None))
        self.router = table((D, E), init=normal(router_key, std), arrange=_as_stored)
        bias = partial(weight, (E,), jnp.float32, stored=(None,), compute=None, init=jnp.zeros)
        self.bias = bias() if own.bias_update_rate is not None else None
        stored, compute = _stored(E), ("experts", None, None)
        shape, init = (E, width, own.num_gates, F), normal(in_key, std)
        self.w_gate_up = weight(shape, dtype, stored=(*stored, None, None), compute=(*compute, None), init=init)
        init = normal(down_key, std if own.latent_dim else residual)
        self.w_down = weight((E, F, width), dtype, stored=(*stored, None), compute=compute, init=init)
        self.descend = table((D, width), init=normal(descend_key, std)) if own.latent_dim else None
        self.ascend = table((D, width), init=output_first(normal(ascend_key, residual))) if own.latent_dim else None
        shared = dataclasses.replace(config, mlp_dim=own.shared_mlp_dim or 1, mlp_bias=False)
        self.shared = MLP(shared, shared_key) if own.shared_mlp_dim else None
        self.shared_gate = table((D, 1), init=normal(gate_key, std)) if own.shared_gate else None
        # Only in weights prepared for a step: zeros [S, E], whose gradients are `STATISTICS`.
        self.statistics: nnx.Param | None = nnx.data(None)

    @property
    def auxiliary(self) -> Mapping[str, float]:
        """See `MLP.auxiliary`."""
        weights = {"balance_loss": self.config.balance_loss, "router_z_loss": self.config.z_loss}
        return {name: value for name, value in weights.items() if value}

    def __call__(
        self,
        x: Float[Array, "B T D"],
        parallel: ParallelConfig,
        *,
        gates_in_stack: bool = False,
        is_saved: bool = True,
        seeds: Seeds | None = None,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Returns the addition to the residual stream, in x's dtype, and the auxiliary values; arguments as for `MLP`."""
        ((_, y, auxiliary),) = self.in_parts(lambda x: (x, None), [x], parallel)
        return y, auxiliary

    def in_parts(
        self, enter: Callable[[Any], tuple[Float[Array, "B T D"], Any]], parts: Sequence[Any], parallel: ParallelConfig
    ) -> list[tuple[Any, Float[Array, "B T D"], Auxiliary]]:
        """Runs parts of the batch, in time slots: while the tokens of one part travel, others are computed with.

        Args:
            enter: function from a part to its normed residual stream and other values; it takes a slot with the router.
            parts: the parts, each with some rows.
            parallel: the forms in which devices share the work.

        Returns:
            For each part: its other values, the addition to its residual stream, and its auxiliary values.
        """

        def leave_for(part: Any, _: None) -> tuple[jax.Array, Any]:
            x, others = enter(part)
            way = _Way.of(self, x, parallel)
            blocks, tokens, routed = way.pack(x)
            return blocks, (way, x, others, tokens, routed)

        def travel(blocks: jax.Array, staying: Any) -> tuple[jax.Array, Any]:
            return staying[0].exchange(blocks), staying

        def multiply(blocks: jax.Array, staying: Any) -> tuple[jax.Array, Any]:
            return staying[0].multiply(checkpoint_name(blocks, "dispatched")), staying

        def come_back(blocks: jax.Array, staying: Any) -> tuple[Any, Any]:
            way, x, _, tokens, _ = staying
            shared = None if self.shared is None else self._of_shared(self.shared, x, parallel)
            return (way.collect(way.exchange(blocks), tokens), shared), staying

        stages = leave_for, travel, multiply, come_back
        states = in_time_slots(stages, [(part, None) for part in parts], held=2)
        results, ways = zip(*states, strict=True)
        sums = _Way.finish([way for way, *_ in ways], [y for y, _ in results], [tokens for *_, tokens, _ in ways])
        sums = [y if shared is None else y + shared for y, (_, shared) in zip(sums, results, strict=True)]
        auxiliary = self._auxiliary([routed for *_, routed in ways])
        return [(others, y, own) for (_, _, others, *_), y, own in zip(ways, sums, auxiliary, strict=True)]

    def _of_shared(self, shared: MLP, x: Float[Array, "B T D"], parallel: ParallelConfig) -> Float[Array, "B T D"]:
        with jax.named_scope("shared"):
            y, _ = shared(x, parallel)
            return y if self.shared_gate is None else y * jax.nn.sigmoid(tokenwise_matmul(x, self.shared_gate[...]))

    def _auxiliary(self, parts: Sequence[dict[str, jax.Array]]) -> list[Auxiliary]:
        """Returns the auxiliary values of parts from what `_Way.pack` tells of them. Shares of choices are those of all
        parts."""
        values: list[Auxiliary] = [{} for _ in parts]
        if self.config.z_loss:
            for own, routed in zip(values, parts, strict=True):
                own["router_z_loss"] = routed["z"]
        if self.config.balance_loss:
            of_tokens = [(routed["experts"], routed["scores"]) for routed in parts]
            for own, value in zip(values, _balance(of_tokens, self.config), strict=True):
                own["balance_loss"] = value
        return values


def _balance(parts: Sequence[tuple[jax.Array, jax.Array]], config: ExpertsConfig) -> list[Float32[Array, "B T"]]:
    """Returns the balance loss of the tokens of all parts, from their choices [B, T, k] and scores [B, T, E]."""
    batch, seq, _ = jax.typeof(parts[0][0]).sharding.spec.partitions
    of_row, over = config.balance_over == "row", as_tuple(seq)
    over = over if of_row else (*(axis for axis in as_tuple(batch) if axis != STAGE), *over)

    @partial(jax.shard_map, in_specs=P(batch, seq, None), out_specs=P(batch, seq))
    def on_device(parts: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        dims = (1,) if of_row else (0, 1)
        counts = [jnp.sum(dispatch.hits(experts, config.num_experts), dims, keepdims=True) for experts, _ in parts]
        counts = counts if of_row else [sum(counts[1:], counts[0])] * len(parts)
        counts = jax.lax.psum(counts, over) if over else counts
        shares = [count / jnp.sum(count, axis=-1, keepdims=True).astype(jnp.float32) for count in counts]
        return [config.num_experts * jnp.sum(own * scores, axis=-1) for own, (_, scores) in zip(shares, parts, strict=True)]

    return on_device(list(parts))


def _stored(num_experts: int) -> tuple[str, str | None]:
    """Returns the first two dims of experts' matrices as stored: whole experts where the devices divide them, so that
    gathered parts lie one after the other."""
    parts = num_parts("expert_shards", jax.sharding.get_abstract_mesh().shape)
    return ("expert_shards", None) if num_experts % parts == 0 else ("experts", "expert_embed")


def _as_stored(own: jax.Array, dtype: DTypeLike) -> jax.Array:
    return own


class _Tokens(NamedTuple):
    """A device's tokens and choices."""

    x: Float[Array, "n I"]
    weights: Float32[Array, "n k"]
    experts: Int32[Array, "n k"]
    route: Route


@dataclass(frozen=True)
class _Way:
    """The way of tokens through the experts, in steps between which only arrays with a part for every device pass."""

    experts: Experts
    parallel: ParallelConfig
    lies: P
    """Spec of the residual stream."""
    shape: tuple[int, ...]
    """Shape of a device's part of it."""
    block: Block
    is_complete: bool
    """Whether one round is enough whatever the router chooses."""
    is_staged: bool
    """Whether weights have a first dim with a layer for every stage of a pipeline."""

    @staticmethod
    def of(experts: Experts, x: Float[Array, "B T D"], parallel: ParallelConfig) -> "_Way":
        config, lies = experts.config, jax.typeof(x).sharding.spec
        parts = [_size(as_tuple(entry)) for entry in lies.partitions]
        b, t, D = (dim // count for dim, count in zip(x.shape, parts, strict=True))
        peers, n = _size(PEERS), math.ceil(b * t / _size(_copies(lies)))
        own = config.num_experts // peers
        most = n * min(config.top_k, own)
        slots = block_slots(n, config.top_k, peers, own, parallel.expert_slots)
        block = Block.of(slots, own, config.latent_dim or D, x.dtype)
        staged = is_staged(jax.typeof(experts.router[...]).sharding.spec)
        return _Way(experts, parallel, lies, (b, t, D), block, block.slots == most, staged)

    @property
    def config(self) -> ExpertsConfig:
        return self.experts.config

    def pack(self, x: Float[Array, "B T D"]) -> tuple[jax.Array, _Tokens, dict[str, jax.Array]]:
        """Returns the blocks for all peers, the tokens, and what `Experts._auxiliary` needs. No token travels yet."""
        weights = self._for_tokens("router", "bias", "descend", "statistics")
        out_specs = (_ALL, _ALL, P(*self.lies.partitions[:2]))

        @partial(jax.shard_map, in_specs=(self.lies, _specs(weights)), out_specs=out_specs)
        def on_device(x: jax.Array, weights: dict[str, jax.Array]) -> Any:
            own, flat = self._varying(weights), x.reshape(-1, x.shape[-1])
            with jax.named_scope("router"):
                logits = jnp.dot(flat.astype(jnp.float32), own["router"].astype(jnp.float32), precision="highest")
                choices = choose(logits, own.get("bias"), self.config)
                chosen = self._kept(choices.experts)
            if "descend" in own:
                with jax.named_scope("descend"):
                    flat = flat @ own["descend"]
            flat, kept = self._own_part(flat), self._own_part(chosen, fill=self.config.num_experts)
            route = dispatch.route(kept, self.config.num_experts, self.block)
            chosen_weights = choices.weights
            if "statistics" in own:
                statistics = self._statistics(choices, chosen, kept, route)
                chosen_weights = _with_gradient(chosen_weights, own["statistics"], statistics)
            chosen_weights = self._own_part(chosen_weights)
            blocks = dispatch.pack(flat, chosen_weights, route, self.block)
            return blocks, _Tokens(flat, chosen_weights, kept, route), self._routed(choices)

        return on_device(x, weights)

    def exchange(self, blocks: jax.Array) -> jax.Array:
        """Returns the blocks that the peers sent."""
        with jax.named_scope("exchange"):
            return jax.shard_map(dispatch.exchange, in_specs=_ALL, out_specs=_ALL)(blocks)

    def multiply(self, blocks: jax.Array) -> jax.Array:
        """Returns the results for the tokens in blocks that came, at their places in these blocks."""
        weights = self._of_experts()

        @partial(jax.shard_map, in_specs=(_ALL, _specs(weights)), out_specs=_ALL)
        def on_device(blocks: jax.Array, weights: dict[str, Any]) -> jax.Array:
            return self._multiply(blocks, **self._varying(weights, AXES))

        return on_device(blocks, weights)

    def collect(self, blocks: jax.Array, tokens: _Tokens) -> jax.Array:
        """Returns each device's sums over the experts of its tokens, once the results are back."""

        @partial(jax.shard_map, in_specs=(_ALL, _ALL), out_specs=_ALL)
        def on_device(blocks: jax.Array, tokens: _Tokens) -> jax.Array:
            return dispatch.collect(blocks, tokens.route, self.block)

        return on_device(blocks, tokens)

    @staticmethod
    def finish(ways: Sequence["_Way"], sums: Sequence[jax.Array], tokens: Sequence[_Tokens]) -> list[Float[Array, "B T D"]]:
        """Returns the additions to the residual streams of all parts: sums with those of further rounds added."""
        first = ways[0]
        of_experts, of_tokens = first._of_experts(), first._for_tokens("ascend")

        @partial(jax.shard_map, in_specs=(_ALL, _ALL, _specs(of_experts), _specs(of_tokens)), out_specs=first.lies)
        def on_device(sums: list[jax.Array], tokens: list[_Tokens], of_experts: Any, of_tokens: Any) -> list[jax.Array]:
            if not all(way.is_complete for way in ways):
                late = [way._late(own) for way, own in zip(ways, tokens, strict=True)]
                late = first._further_rounds(tokens, jnp.concatenate(late), first._varying(of_experts, AXES))
                ends = list(itertools.accumulate(map(len, sums)))[:-1]
                sums = [own + more for own, more in zip(sums, jnp.split(late, ends), strict=True)]
            sums = [way._whole(own) for way, own in zip(ways, sums, strict=True)]
            if "ascend" in of_tokens:
                with jax.named_scope("ascend"):
                    ascend = first._varying(of_tokens)["ascend"]
                    sums = [own @ ascend.T for own in sums]
            return [own.reshape(way.shape) for way, own in zip(ways, sums, strict=True)]

        return on_device(list(sums), list(tokens), of_experts, of_tokens)

    # What follows runs on one device.

    def _multiply(self, blocks: jax.Array, w_gate_up: Factor, w_down: Factor) -> jax.Array:
        with jax.named_scope("multiply"):
            came: Any = dispatch.unpack(blocks, self.block)
            rows, weights, counts = came
            groups = dispatch.by_expert(counts, self.block)
            return experts_on_rows(rows, weights, groups, w_gate_up, w_down, self.config.kernel)

    def _late(self, tokens: _Tokens) -> Int32[Array, "n k"]:
        """Returns the choices that had no slot; others are `num_experts`."""
        return jnp.where(tokens.route.rows < _size(PEERS) * self.block.rows, self.config.num_experts, tokens.experts)

    def _further_rounds(
        self, tokens: Sequence[_Tokens], late: Int32[Array, "N k"], weights: dict[str, Any]
    ) -> Float[Array, "N I"]:
        """Returns the results for the tokens of all parts, one part after the other, of late choices."""
        split = [differentiable(weights[name]) for name in ("w_gate_up", "w_down")]
        factors, stand_ins = tuple(factor for factor, _ in split), [stand_in for _, stand_in in split]
        arrays = [own.x for own in tokens], [own.weights for own in tokens], stand_ins
        with jax.named_scope("further_rounds"):
            rounds = dispatch.num_rounds(late, self.config.num_experts, self.block)
            return _in_rounds(self, rounds, late, factors, arrays)

    def _round(self, number: jax.Array, chosen: jax.Array, factors: tuple[Factor, ...], arrays: Any) -> jax.Array:
        # Parts are joined in a round that is needed, and not before.
        number, (x, weights, stand_ins) = jax.lax.optimization_barrier((number, arrays))
        x, weights = jnp.concatenate(x), jnp.concatenate(weights)
        route = dispatch.route(chosen, self.config.num_experts, self.block, number)
        blocks = dispatch.exchange(dispatch.pack(x, weights, route, self.block))
        back = dispatch.exchange(self._multiply(blocks, *map(rejoined, factors, stand_ins)))
        return dispatch.collect(back, route, self.block)

    def _kept(self, chosen: Int32[Array, "n k"]) -> Int32[Array, "n k"]:
        """Returns the choices; those beyond an expert's capacity are `num_experts`."""
        if not self.config.capacity_factor:
            return chosen
        b, t, _ = self.shape
        axes = as_tuple(self.lies[1])
        rows = chosen.reshape(b, t, -1)
        if axes:
            rows = jax.lax.all_gather(rows, axes, axis=1, tiled=True)
        rows = kept_choices(rows, self.config, self.parallel.sequence)
        start = jax.lax.axis_index(axes) * t if axes else 0
        return jax.lax.dynamic_slice_in_dim(rows, start, t, axis=1).reshape(chosen.shape)

    def _routed(self, choices: Choices) -> dict[str, jax.Array]:
        """Returns what the auxiliary values need of the choices."""
        b, t, _ = self.shape
        values = {}
        if self.config.balance_loss:
            values = {"experts": choices.experts.reshape(b, t, -1), "scores": choices.scores.reshape(b, t, -1)}
        if self.config.z_loss:
            values["z"] = jnp.square(jax.nn.logsumexp(choices.logits, axis=-1)).reshape(b, t)
        return values

    def _statistics(self, choices: Choices, chosen: jax.Array, kept: jax.Array, route: Route) -> Float32[Array, "S E"]:
        E = self.config.num_experts
        load, taken = (jnp.sum(dispatch.hits(experts, E), axis=0) for experts in (choices.experts, chosen))
        late = jnp.sum(dispatch.hits(kept, E), axis=0) - route.counts.reshape(-1)
        late = jax.lax.psum(late, _copies(self.lies)) if _copies(self.lies) else late
        return jnp.stack([load, load - taken, late, jnp.sum(jax.lax.stop_gradient(choices.scores), axis=0)]).astype(
            jnp.float32
        )

    def _own_part(self, x: Array, fill: int = 0) -> Array:
        """Returns the device's part of what other devices have too, filled up with `fill`; all of what it alone has."""
        axes = _copies(self.lies)
        if (parts := _size(axes)) > 1:
            x = jnp.pad(x, ((0, -x.shape[0] % parts), (0, 0)), constant_values=fill)
            length = x.shape[0] // parts
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * length, length)
        return _pcast(x, AXES)

    def _whole(self, x: Float[Array, "n I"]) -> Float[Array, "N I"]:
        """Reverts `_own_part`."""
        if not (axes := _copies(self.lies)):
            return x
        if (parts := _size(axes)) > 1:
            whole = jnp.zeros((parts, *x.shape), x.dtype)
            x = jax.lax.dynamic_update_index_in_dim(_pcast(whole, AXES), x, jax.lax.axis_index(axes), 0)
            x = x.reshape(-1, x.shape[-1])[: self.shape[0] * self.shape[1]]
        return jax.lax.psum(x, axes)

    def _for_tokens(self, *names: str) -> dict[str, jax.Array]:
        """Returns weights that every device applies to its tokens. Devices that share matmuls have different tokens here, so
        gradients are summed over them too."""
        present = {name: getattr(self.experts, name) for name in names}
        arrays = {name: own[...] for name, own in present.items() if own is not None}
        if jax.sharding.get_abstract_mesh().size == 1:
            return arrays

        def laid_out(w: jax.Array) -> jax.Array:
            lies = jax.typeof(w).sharding.spec
            reduced = lies.reduced.union(shared_axes(self.lies)) & axes_in(self.lies.partitions)
            return jax.reshard(w, P(*lies.partitions, reduced=reduced))

        return {name: laid_out(w) for name, w in arrays.items()}

    def _of_experts(self) -> dict[str, Any]:
        return {"w_gate_up": self.experts.w_gate_up[...], "w_down": self.experts.w_down[...]}

    def _varying(self, weights: dict[str, Any], axes: Iterable[str] | None = None) -> dict[str, Any]:
        """Returns weights of this device's stage, as different on all devices along `axes`, by default the tokens' axes."""
        over = axes_in(self.lies.partitions) if axes is None else axes
        own = jax.tree.map(lambda w: w[0], weights) if self.is_staged else weights
        return jax.tree.map(lambda w: _pcast(w, over), own)


def _copies(lies: P) -> tuple[str, ...]:
    """Returns the axes whose devices have the same tokens of a residual stream."""
    return tuple(axis for axis in AXES if axis not in axes_in(lies.partitions))


def _size(axes: Iterable[str]) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[axis] for axis in axes)


def _specs(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: specs(w) for name, w in weights.items()}


def _pcast(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Returns `x` as different on all devices along `axes`. Each kind of axes takes a cast of its own."""
    kind = jax.typeof(x).manual_axis_type
    for some in (kind.reduced, frozenset(axes) - kind.varying - kind.reduced):
        if own := tuple(axis for axis in AXES if axis in some):
            x = jax.lax.pcast(x, own, to="varying")
    return x


@jax.custom_vjp
def _with_gradient(x: jax.Array, zeros: jax.Array, gradient: jax.Array) -> jax.Array:
    """Returns `x`; the gradient of `zeros` is `gradient`, if `x` has one. In a pipeline, a stage without a micro-batch runs
    a backward pass of zeros."""
    return x


def _with_gradient_back(gradient: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    return d, jnp.where(jnp.any(d != 0), gradient, 0), None


_with_gradient.defvjp(lambda x, _, gradient: (x, gradient), _with_gradient_back)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_rounds(way: _Way, rounds: jax.Array, chosen: jax.Array, factors: tuple[Factor, ...], arrays: Any) -> jax.Array:
    """Returns the sum of so many rounds. Their number is known to the devices alone, so the backward pass, whose loop is of
    the same length, computes them again."""

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, total = carry
        return number + 1, total + way._round(number, chosen, factors, arrays)

    x, *_ = arrays
    carry = jnp.zeros_like(rounds), jnp.zeros_like(jnp.concatenate(x))
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, step, carry)[1]


def _in_rounds_back(way: _Way, kept: Any, d: jax.Array) -> Any:
    rounds, chosen, factors, arrays = kept

    def step(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        number, totals = carry
        _, pull_back = jax.vjp(partial(way._round, number, chosen, factors), arrays)
        return number + 1, jax.tree.map(jnp.add, totals, pull_back(d)[0])

    carry = jnp.zeros_like(rounds), jax.tree.map(jnp.zeros_like, arrays)
    return None, None, None, jax.lax.while_loop(lambda carry: carry[0] < rounds, step, carry)[1]


_in_rounds.defvjp(lambda way, *args: (_in_rounds(way, *args), args), _in_rounds_back)
