"""A layer of the decoder, its parts, and the forms in which a stack of layers runs them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from llamajax.config.model import SAVED_BY_REMAT, ModelConfig, Remat
from llamajax.config.offload import ON_CARD, OffloadConfig
from llamajax.config.parallel import PLAIN, ParallelConfig
from llamajax.kernels import cudnn
from llamajax.kernels.attention import Past
from llamajax.model.adapters import Seeds, seeds_like
from llamajax.model.attention import Attention, KeyValue, Rows
from llamajax.model.experts import Experts
from llamajax.model.layers import MLP, Auxiliary, RMSNorm
from llamajax.parallel.saved_values import Names, Policy
from llamajax.parallel.stack import Part
from llamajax.parallel.stages import num_stages
from llamajax.parallel.tensor import is_shared
from llamajax.parallel.time_slots import joined_rows, split_rows
from llamajax.parallel.token_share import by_share

_DEAR = jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.save_any_names_but_these(), cudnn.is_kernel)
"""Remat policy: save named values and the residuals of fused attention kernels."""


def policy_of(saved: tuple[str, ...] | None) -> Policy | None:
    """Returns a remat policy that saves these names, see `saved_names`. cuDNN's kernel exposes none and is matched
    separately."""
    if not saved:
        return saved if saved is None else jax.checkpoint_policies.nothing_saveable
    named = jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_from_both_policies(named, cudnn.is_kernel) if "attention" in saved else named


class Activations(NamedTuple):
    """Activations that a layer, or a part of one, passes to the next: in a stack of layers, everything with a gradient
    besides the weights."""

    residual: Float[Array, "B T D"]
    auxiliary: Auxiliary
    """Auxiliary values summed over the previous layers, with every requested name; empty where none is requested."""

    def plus(self, out: Float[Array, "B T D"], own: Auxiliary) -> "Activations":
        """Returns the activations with the contribution of a part added."""
        totals = {name: total + own[name] if name in own else total for name, total in self.auxiliary.items()}
        return Activations(self.residual + out, totals)


def first_activations(x: Float[Array, "B T D"], auxiliary: Iterable[str]) -> Activations:
    """Returns the input of the first layer: the tokens' embeddings, and zeros for the auxiliary values of these names."""
    lies = jax.P(*jax.typeof(x).sharding.spec[:2])
    return Activations(x, {name: jnp.zeros(x.shape[:2], jnp.float32, out_sharding=lies) for name in auxiliary})


class Layer(nnx.Module):
    """One decoder layer: attention, then MLP, each normed before and added to the residual stream."""

    def __init__(self, config: ModelConfig, key: jax.Array, *, has_experts: bool = False):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = RMSNorm(config.embed_dim, config)
        self.attention = Attention(config, attention_key)
        self.mlp_norm = RMSNorm(config.embed_dim, config)
        self.mlp = Experts(config, mlp_key) if has_experts else MLP(config, mlp_key)

    def __call__(
        self,
        x: Activations,
        rows: Rows,
        past: Past | None = None,
        *,
        parallel: ParallelConfig = PLAIN,
        gates_in_stack: bool = False,
    ) -> tuple[Activations, KeyValue]:
        """Returns the activations after the layer, and the tokens' keys and values. `rows` and `past` as for `Attention`,
        `gates_in_stack` as for `MLP`."""
        of_attention, of_mlp = self.by_parts()
        x, key_value = _attention_part(of_attention, x, rows, parallel, past)
        return _mlp_part(of_mlp, x, parallel, rows.seeds, gates_in_stack=gates_in_stack), key_value

    @property
    def auxiliary(self) -> Mapping[str, float]:
        """Weight in the loss of each value of `Auxiliary` that its parts return, by name."""
        return self.mlp.auxiliary

    def by_parts(self) -> tuple[tuple[RMSNorm, Attention], tuple[RMSNorm, MLP | Experts]]:
        """Returns the weights of `_attention_part` and of `_mlp_part`."""
        return (self.attention_norm, self.attention), (self.mlp_norm, self.mlp)

    def with_parts(self, parts: Any) -> "Layer":
        """Returns a copy with other weights, in the form of `by_parts`."""
        changed = jax.tree.map(lambda weight: weight, self)
        (changed.attention_norm, changed.attention), (changed.mlp_norm, changed.mlp) = parts
        return changed


def _attention_part(
    weights: tuple[RMSNorm, Attention],
    x: Activations,
    rows: Rows,
    parallel: ParallelConfig,
    past: Past | None = None,
    *,
    saved_share: float = 1.0,
) -> tuple[Activations, KeyValue]:
    norm, attention = weights
    forms = {"sequence": parallel.sequence, "tensor": parallel.tensor, "saved_share": saved_share}
    with jax.named_scope("attention"):
        out, key_value = attention(norm(x.residual), rows, past, **forms)
        residual, auxiliary = x.plus(out, {})
        return Activations(checkpoint_name(residual, "residual"), auxiliary), key_value


def _mlp_part(
    weights: tuple[RMSNorm, MLP | Experts],
    x: Activations,
    parallel: ParallelConfig,
    seeds: Seeds | None,
    *,
    gates_in_stack: bool,
    saved_share: float = 1.0,
) -> Activations:
    norm, mlp = weights

    def run(tokens: tuple[jax.Array, Seeds | None], is_saved: bool) -> tuple[jax.Array, Auxiliary]:
        residual, seeds = tokens
        return mlp(norm(residual), parallel, gates_in_stack=gates_in_stack, is_saved=is_saved, seeds=seeds)

    with jax.named_scope("mlp"):
        return x.plus(*by_share(run, (x.residual, seeds_like(x.residual, seeds)), saved_share))


def _in_time_slots(
    of_attention: tuple[RMSNorm, Attention],
    of_experts: tuple[RMSNorm, Experts],
    x: Activations,
    rows: Rows,
    parallel: ParallelConfig,
) -> Activations:
    """Runs `_attention_part` and `_mlp_part` with parts of each device's rows that take turns."""
    norm, experts = of_experts

    def enter(part: tuple[Activations, Rows]) -> tuple[jax.Array, Activations]:
        (residual, auxiliary), rows = part
        # What barriers hold is saved behind them, or their other values would be computed again for it.
        x = Activations(checkpoint_name(residual, "input"), auxiliary)
        x, _ = _attention_part(of_attention, x, rows, parallel)
        return norm(x.residual), x

    with jax.named_scope("mlp"):
        parts = split_rows((x, rows), parallel.expert_parts or 1)
        return joined_rows([x.plus(y, own) for x, y, own in experts.in_parts(enter, parts, parallel)])


def saved_names(remat: Remat, x: Float[Array, "B T D"]) -> tuple[str, ...] | None:
    """Returns the checkpoint names of the values of a layer that the forward pass saves for the backward pass; None: it
    saves everything. `x` is a residual stream."""
    if remat == "full" and is_shared(x):
        return ("residual",)  # a part of the tokens; recomputing it would scatter the attention's output again
    return SAVED_BY_REMAT[remat]


class StackForms(TypedDict):
    """Arguments of `run_prefetching` and of `llamajax.parallel.stack.Stack.of` that forms and remat decide."""

    parts: Sequence[Part]
    whole: Part | None
    dtype: DTypeLike
    saved: Policy | None
    made_first: Policy
    names: Sequence[Names]
    offloaded: Collection[str]


def stack_forms(
    parallel: ParallelConfig, remat: Remat, x: Float[Array, "B T D"], offload: OffloadConfig = ON_CARD, unit: int = 1
) -> StackForms:
    """Returns the parts of a layer, what it saves, and what of it waits in host memory, for residual streams like x.

    Where the layers repeat a `unit` of several, these are the parts of all its layers, and each takes a tuple with the rows
    for every layer of the unit.
    """
    saved, share = saved_names(remat, x), offload.saved_share
    is_stacked = (parallel.stack != "unrolled" or num_stages() > 1) and "gate_up" not in offload.names
    gates_in_stack = "gate_up" in (saved or ()) and is_stacked
    in_turns = (parallel.expert_parts or 1) > 1
    if in_turns and saved:
        saved = (*saved, "input")

    def attend(weights: tuple[RMSNorm, Attention], x: Activations, rows: Rows) -> Activations:
        return _attention_part(weights, x, rows, parallel, saved_share=share)[0]

    def transform(weights: tuple[RMSNorm, MLP | Experts], x: Activations, rows: Rows) -> Activations:
        return _mlp_part(weights, x, parallel, rows.seeds, gates_in_stack=gates_in_stack, saved_share=share)

    def whole(weights: tuple[Any, ...], x: Activations, rows: Any) -> Activations:
        for place in range(unit):
            of_attention, of_mlp = weights[2 * place : 2 * place + 2]
            own = rows if unit == 1 else rows[place]
            if isinstance(of_mlp[1], Experts):
                x = _in_time_slots(of_attention, of_mlp, x, own, parallel)
            else:
                x = transform(of_mlp, attend(of_attention, x, own), own)
        return x

    def placed(part: Part, place: int) -> Part:
        return part if unit == 1 else lambda weights, x, rows: part(weights, x, rows[place])

    return {
        "parts": [placed(part, place) for place in range(unit) for part in (attend, transform)],
        "whole": whole if in_turns else None,
        "dtype": x.dtype,
        "saved": policy_of(saved),
        "made_first": _DEAR,
        "names": (Names("input", "attention"), Names("residual", "gate_up")) * unit,
        "offloaded": offload.names,
    }
