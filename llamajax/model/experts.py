"""Experts in place of a layer's MLP (arXiv:1701.06538, 2101.03961): every token is processed by the few that it chooses.

Devices along `PEERS` hold different experts, and each has tokens of its own, so tokens travel (`TokenDispatcher`).
With `latent_dim` (BigMac, arXiv:2502.16927) tokens are narrowed before they travel and widened when they are back.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from llamajax.config.adapters import Projection
from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import ParallelConfig, num_parts
from llamajax.model.adapters import Seeds
from llamajax.model.layers import MLP, Auxiliary, normal, output_first, residual_std
from llamajax.model.token_dispatcher import TokenDispatcher
from llamajax.parallel import dispatch
from llamajax.parallel.matmul import tokenwise_matmul
from llamajax.parallel.sharding import as_tuple
from llamajax.parallel.stages import STAGE
from llamajax.parallel.time_slots import in_time_slots
from llamajax.parallel.zero import weight

STATISTICS = ("load", "dropped", "late", "score")
"""Sums over tokens for each expert: choices, those that were dropped, those that took a further round, and scores."""


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

        names = "router", "bias", "descend", "ascend", "statistics", "w_gate_up", "w_down"
        present = {name: getattr(self, name) for name in names}
        weights = {name: own[...] for name, own in present.items() if own is not None}

        def leave_for(part: Any, _: None) -> tuple[jax.Array, Any]:
            x, others = enter(part)
            dispatcher = TokenDispatcher.of(self.config, weights, x, parallel)
            blocks, tokens, routed = dispatcher.pack(x, weights)
            return blocks, (dispatcher, x, others, tokens, routed)

        def travel(blocks: jax.Array, staying: Any) -> tuple[jax.Array, Any]:
            dispatcher, _, _, tokens, _ = staying
            return dispatcher.exchange(blocks, tokens), staying

        def multiply(blocks: jax.Array, staying: Any) -> tuple[jax.Array, Any]:
            return staying[0].multiply(checkpoint_name(blocks, "dispatched"), weights), staying

        def come_back(blocks: jax.Array, staying: Any) -> tuple[Any, Any]:
            dispatcher, x, _, tokens, _ = staying
            shared = None if self.shared is None else self._of_shared(self.shared, x, parallel)
            return (dispatcher.collect(dispatcher.exchange_back(blocks, tokens), tokens), shared), staying

        stages = leave_for, travel, multiply, come_back
        states = in_time_slots(stages, [(part, None) for part in parts], held=2)
        results, ways = zip(*states, strict=True)
        dispatchers, tokens = [dispatcher for dispatcher, *_ in ways], [tokens for *_, tokens, _ in ways]
        sums = TokenDispatcher.finish(dispatchers, [y for y, _ in results], tokens, weights)
        sums = [y if shared is None else y + shared for y, (_, shared) in zip(sums, results, strict=True)]
        auxiliary = self._auxiliary([routed for *_, routed in ways])
        return [(others, y, own) for (_, _, others, *_), y, own in zip(ways, sums, auxiliary, strict=True)]

    def _of_shared(self, shared: MLP, x: Float[Array, "B T D"], parallel: ParallelConfig) -> Float[Array, "B T D"]:
        with jax.named_scope("shared"):
            y, _ = shared(x, parallel)
            return y if self.shared_gate is None else y * jax.nn.sigmoid(tokenwise_matmul(x, self.shared_gate[...]))

    def _auxiliary(self, parts: Sequence[dict[str, jax.Array]]) -> list[Auxiliary]:
        """Returns the auxiliary values of parts from the results of `TokenDispatcher.pack`. Shares of choices are those of
        all parts."""
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
