"""Token dispatcher of a layer with experts: the router's choices, the all-to-alls, and the products between them.

A device packs its tokens into blocks, sends each peer its block, multiplies the tokens that it receives by its experts'
matrices, and sends the results back. Tokens that a block has no slot for take further rounds.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.experts import ExpertsConfig
from llamajax.config.parallel import AXES, ParallelConfig
from llamajax.estimates.experts import block_slots
from llamajax.kernels.grouped import experts_on_rows
from llamajax.model.router import Choices, choose, kept_choices
from llamajax.parallel import dispatch
from llamajax.parallel.dispatch import PEERS, Block, Filled, Route
from llamajax.parallel.float8 import Factor, differentiable, rejoined, specs
from llamajax.parallel.sharding import as_tuple, axes_in
from llamajax.parallel.stages import is_staged
from llamajax.parallel.tensor import shared_axes

Weights = Mapping[str, Factor]
"""Weights of `llamajax.model.experts.Experts`, by name; those that the model lacks are absent."""
_ALL = P(AXES)
"""Spec of arrays that have a part for every device."""


class Tokens(NamedTuple):
    """A device's tokens and choices."""

    x: Float[Array, "n I"]
    weights: Float32[Array, "n k"]
    experts: Int32[Array, "n k"]
    route: Route
    filled: Filled | None
    """Rows that travel, where others do not."""


@dataclass(frozen=True)
class TokenDispatcher:
    """Brings the tokens of one part of a batch to their experts and back, in steps between which only arrays with a part
    for every device pass. `weights` of the steps are those of `Experts`, as the stack of layers gathers them."""

    config: ExpertsConfig
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
    def of(config: ExpertsConfig, weights: Weights, x: Float[Array, "B T D"], parallel: ParallelConfig) -> "TokenDispatcher":
        """Returns the dispatcher of residual streams like x."""
        lies = jax.typeof(x).sharding.spec
        parts = [_size(as_tuple(entry)) for entry in lies.partitions]
        b, t, D = (dim // count for dim, count in zip(x.shape, parts, strict=True))
        peers, n = _size(PEERS), math.ceil(b * t / _size(_copies(lies)))
        own = config.num_experts // peers
        most = n * min(config.top_k, own)
        slots = block_slots(n, config.top_k, peers, own, parallel.expert_slots)
        block = Block.of(slots, own, config.latent_dim or D, x.dtype)
        staged = is_staged(jax.typeof(weights["router"]).sharding.spec)
        return TokenDispatcher(config, parallel, lies, (b, t, D), block, block.slots == most, staged)

    def pack(self, x: Float[Array, "B T D"], weights: Weights) -> tuple[jax.Array, Tokens, dict[str, jax.Array]]:
        """Returns the blocks for all peers, the tokens, and the choices and scores that auxiliary values need. No token
        travels yet."""
        weights = self._for_tokens(weights, "router", "bias", "descend", "statistics")
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
            return blocks, Tokens(flat, chosen_weights, kept, route, self._filled(route)), self._routed(choices)

        return on_device(x, weights)

    def exchange(self, blocks: jax.Array, tokens: Tokens) -> jax.Array:
        """Returns the blocks that the peers sent."""
        with jax.named_scope("exchange"):
            return jax.shard_map(dispatch.exchange, in_specs=_ALL, out_specs=_ALL)(blocks, tokens.filled)

    def exchange_back(self, blocks: jax.Array, tokens: Tokens) -> jax.Array:
        """Returns the results of this device's tokens."""
        return self.exchange(blocks, tokens if tokens.filled is None else tokens._replace(filled=tokens.filled.back))

    def multiply(self, blocks: jax.Array, weights: Weights) -> jax.Array:
        """Returns the results for the tokens in blocks that came, at their places in these blocks."""
        weights = _of_experts(weights)

        @partial(jax.shard_map, in_specs=(_ALL, _specs(weights)), out_specs=_ALL)
        def on_device(blocks: jax.Array, weights: dict[str, Any]) -> jax.Array:
            return self._multiply(blocks, **self._varying(weights, AXES))

        return on_device(blocks, weights)

    def collect(self, blocks: jax.Array, tokens: Tokens) -> jax.Array:
        """Returns each device's sums over the experts of its tokens, once the results are back."""

        @partial(jax.shard_map, in_specs=(_ALL, _ALL), out_specs=_ALL)
        def on_device(blocks: jax.Array, tokens: Tokens) -> jax.Array:
            return dispatch.collect(blocks, tokens.route, self.block)

        return on_device(blocks, tokens)

    @staticmethod
    def finish(
        parts: Sequence["TokenDispatcher"], sums: Sequence[jax.Array], tokens: Sequence[Tokens], weights: Weights
    ) -> list[Float[Array, "B T D"]]:
        """Returns the additions to the residual streams of all parts: sums with those of further rounds added."""
        first = parts[0]
        of_experts, of_tokens = _of_experts(weights), first._for_tokens(weights, "ascend")

        @partial(jax.shard_map, in_specs=(_ALL, _ALL, _specs(of_experts), _specs(of_tokens)), out_specs=first.lies)
        def on_device(sums: list[jax.Array], tokens: list[Tokens], of_experts: Any, of_tokens: Any) -> list[jax.Array]:
            if not all(part.is_complete for part in parts):
                late = [part._late(own) for part, own in zip(parts, tokens, strict=True)]
                late = first._further_rounds(tokens, jnp.concatenate(late), first._varying(of_experts, AXES))
                ends = list(itertools.accumulate(map(len, sums)))[:-1]
                sums = [own + more for own, more in zip(sums, jnp.split(late, ends), strict=True)]
            sums = [part._whole(own) for part, own in zip(parts, sums, strict=True)]
            if "ascend" in of_tokens:
                with jax.named_scope("ascend"):
                    ascend = first._varying(of_tokens)["ascend"]
                    sums = [checkpoint_name(own, "expert_output") @ ascend.T for own in sums]
            return [own.reshape(part.shape) for part, own in zip(parts, sums, strict=True)]

        return on_device(list(sums), list(tokens), of_experts, of_tokens)

    # What follows runs on one device.

    def _multiply(self, blocks: jax.Array, w_gate_up: Factor, w_down: Factor) -> jax.Array:
        with jax.named_scope("multiply"):
            came: Any = dispatch.unpack(blocks, self.block)
            rows, weights, counts = came
            groups = dispatch.by_expert(counts, self.block)
            return experts_on_rows(rows, weights, groups, w_gate_up, w_down, self.config.kernel)

    def _late(self, tokens: Tokens) -> Int32[Array, "n k"]:
        """Returns the choices that had no slot; others are `num_experts`."""
        return jnp.where(tokens.route.rows < _size(PEERS) * self.block.rows, self.config.num_experts, tokens.experts)

    def _further_rounds(
        self, tokens: Sequence[Tokens], late: Int32[Array, "N k"], weights: dict[str, Any]
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
        filled = self._filled(route)
        blocks = dispatch.exchange(dispatch.pack(x, weights, route, self.block), filled)
        y = self._multiply(blocks, *map(rejoined, factors, stand_ins))
        return dispatch.collect(dispatch.exchange(y, filled and filled.back), route, self.block)

    def _filled(self, route: Route) -> Filled | None:
        if self.parallel.expert_exchange != "ragged" or _size(PEERS) == 1:
            return None
        return jax.tree.map(lambda rows: checkpoint_name(rows, "dispatched"), dispatch.filled(route, self.block))

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

    def _for_tokens(self, weights: Weights, *names: str) -> dict[str, Any]:
        """Returns weights that every device applies to its tokens. Devices that share matmuls have different tokens here, so
        gradients are summed over them too."""
        arrays: dict[str, Any] = {name: weights[name] for name in names if name in weights}
        if jax.sharding.get_abstract_mesh().size == 1:
            return arrays

        def laid_out(w: jax.Array) -> jax.Array:
            lies = jax.typeof(w).sharding.spec
            reduced = lies.reduced.union(shared_axes(self.lies)) & axes_in(self.lies.partitions)
            return jax.reshard(w, P(*lies.partitions, reduced=reduced))

        return {name: laid_out(w) for name, w in arrays.items()}

    def _varying(self, weights: dict[str, Any], axes: Iterable[str] | None = None) -> dict[str, Any]:
        """Returns weights of this device's stage, as different on all devices along `axes`, by default the tokens' axes."""
        over = axes_in(self.lies.partitions) if axes is None else axes
        own = jax.tree.map(lambda w: w[0], weights) if self.is_staged else weights
        return jax.tree.map(lambda w: _pcast(w, over), own)


def _of_experts(weights: Weights) -> dict[str, Any]:
    return {name: weights[name] for name in ("w_gate_up", "w_down")}


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
    """Returns `x`; the gradient of `zeros` is `gradient`, whatever that of `x` is."""
    return x


_with_gradient.defvjp(lambda x, _, gradient: (x, gradient), lambda gradient, d: (d, gradient, None))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_rounds(
    dispatcher: TokenDispatcher, rounds: jax.Array, chosen: jax.Array, factors: tuple[Factor, ...], arrays: Any
) -> jax.Array:
    """Returns the sum of so many rounds. Their number is known to the devices alone, so the backward pass, whose loop is of
    the same length, computes them again."""

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, total = carry
        return number + 1, total + dispatcher._round(number, chosen, factors, arrays)

    x, *_ = arrays
    carry = jnp.zeros_like(rounds), jnp.zeros_like(jnp.concatenate(x))
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, step, carry)[1]


def _in_rounds_back(dispatcher: TokenDispatcher, kept: Any, d: jax.Array) -> Any:
    rounds, chosen, factors, arrays = kept

    def step(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        number, totals = carry
        _, pull_back = jax.vjp(partial(dispatcher._round, number, chosen, factors), arrays)
        return number + 1, jax.tree.map(jnp.add, totals, pull_back(d)[0])

    carry = jnp.zeros_like(rounds), jax.tree.map(jnp.zeros_like, arrays)
    return None, None, None, jax.lax.while_loop(lambda carry: carry[0] < rounds, step, carry)[1]


_in_rounds.defvjp(lambda dispatcher, *args: (_in_rounds(dispatcher, *args), args), _in_rounds_back)
