"""One decoder for Llama 1, 2, 3, 3.1, 3.2 and 3.3 (arXiv:2302.13971, 2307.09288, 2407.21783), Mistral, Qwen2 and Qwen3;
ModelConfig distinguishes them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.adapters import AdaptersConfig, Projection
from llamajax.config.model import SAVED_BY_REMAT, ModelConfig, Remat
from llamajax.config.offload import ON_CARD, OffloadConfig
from llamajax.config.parallel import PLAIN, ParallelConfig, SequenceForm
from llamajax.kernels import cudnn
from llamajax.kernels.attention import Mask, Past, with_sight
from llamajax.model.adapters import Adapter, Seeds, attach, detach, seeds_like
from llamajax.model.attention import Attention, KeyValue, Rows
from llamajax.model.experts import Experts
from llamajax.model.kv_cache import KVCache, append, write_prompt
from llamajax.model.layers import MLP, Auxiliary, RMSNorm, normal
from llamajax.model.rope import RopeTable, positions_from_segment_ids, rope_tables
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.saved_values import Names, Policy
from llamajax.parallel.sequence import laid_out
from llamajax.parallel.sharding import ONE_DEVICE, spec
from llamajax.parallel.stack import Layers, Part, run_layers, run_prefetching
from llamajax.parallel.stages import num_stages
from llamajax.parallel.tensor import is_shared
from llamajax.parallel.token_share import by_share
from llamajax.parallel.vocabulary import logits, look_up, table
from llamajax.parallel.zero import PreparedWeights, gathered

Tokens = Int32[Array, "B T"]
"""Ids of each row's tokens, ids of their documents, or positions."""
_DEAR = jax.checkpoint_policies.save_from_both_policies(jax.checkpoint_policies.save_any_names_but_these(), cudnn.is_kernel)
"""Remat policy: save named values and the residuals of fused attention kernels."""


def _policy(saved: tuple[str, ...] | None) -> Policy | None:
    """Returns a policy that saves these names; cuDNN's kernel exposes none and is matched separately."""
    if not saved:
        return saved if saved is None else jax.checkpoint_policies.nothing_saveable
    named = jax.checkpoint_policies.save_only_these_names(*saved)
    return jax.checkpoint_policies.save_from_both_policies(named, cudnn.is_kernel) if "attention" in saved else named


Stacking = Callable[[Callable[[jax.Array], Any]], Callable[[jax.Array], Any]]


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

    def __init__(self, config: ModelConfig, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm = RMSNorm(config.embed_dim, config)
        self.attention = Attention(config, attention_key)
        self.mlp_norm = RMSNorm(config.embed_dim, config)
        self.mlp = Experts(config, mlp_key) if config.experts.enabled else MLP(config, mlp_key)

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


def saved_names(remat: Remat, x: Float[Array, "B T D"]) -> tuple[str, ...] | None:
    """Returns the checkpoint names of the values of a layer that the forward pass saves for the backward pass; None: it
    saves everything. `x` is a residual stream."""
    if remat == "full" and is_shared(x):
        return ("residual",)  # a part of the tokens; recomputing it would scatter the attention's output again
    return SAVED_BY_REMAT[remat]


class StackForms(TypedDict):
    """Arguments of `run_prefetching` and of `llamajax.parallel.stack.Stack.of` that forms and remat decide."""

    parts: Sequence[Part]
    dtype: DTypeLike
    saved: Policy | None
    made_first: Policy
    names: Sequence[Names]
    offloaded: Collection[str]


def stack_forms(
    parallel: ParallelConfig, remat: Remat, x: Float[Array, "B T D"], offload: OffloadConfig = ON_CARD
) -> StackForms:
    """Returns the parts of a layer, what it saves, and what of it waits in host memory, for residual streams like x."""
    saved, share = saved_names(remat, x), offload.saved_share
    is_stacked = (parallel.stack != "unrolled" or num_stages() > 1) and "gate_up" not in offload.names
    gates_in_stack = "gate_up" in (saved or ()) and is_stacked

    def attend(weights: tuple[RMSNorm, Attention], x: Activations, rows: Rows) -> Activations:
        return _attention_part(weights, x, rows, parallel, saved_share=share)[0]

    def transform(weights: tuple[RMSNorm, MLP | Experts], x: Activations, rows: Rows) -> Activations:
        return _mlp_part(weights, x, parallel, rows.seeds, gates_in_stack=gates_in_stack, saved_share=share)

    return {
        "parts": (attend, transform),
        "dtype": x.dtype,
        "saved": _policy(saved),
        "made_first": _DEAR,
        "names": (Names("input", "attention"), Names("residual", "gate_up")),
        "offloaded": offload.names,
    }


def _keys_of_layers(key: jax.Array, num_layers: int) -> jax.Array:
    keys = jax.random.split(key, num_layers)
    if num_layers % num_stages() == 0 and num_stages() > 1:
        return jax.reshard(keys, spec("layers"))  # then each stage creates its own layers
    return keys


class Llama(nnx.Module):
    """The whole model as a pytree of `nnx.Param`s, each created in its sharding on the current mesh.

    Create it inside jit, so that no device ever holds more than its part: `jax.jit(Llama, static_argnums=0)(config, key)`.
    """

    def __init__(self, config: ModelConfig, key: jax.Array, *, stack: Stacking = jax.vmap):
        """Draws the weights.

        Args:
            config: the network.
            key: key of the weights.
            stack: turns a function from one layer's key to its weights into one from all keys to all weights.
        """
        V, D, dtype = config.vocab_size, config.embed_dim, config.param_dtype
        embedding_key, layers_key, _ = jax.random.split(key, 3)
        self.config = config
        self.embedding = table(V, D, dtype, normal(embedding_key, config.init_std))
        # One Layer whose parameters have a leading dim L, for scan: compile time does not grow with depth.
        keys = _keys_of_layers(layers_key, config.num_layers)
        # In weights prepared for a step with a pipeline: a tuple with the layers in each slot of the stages.
        self.layers = stack(partial(Layer, config))(keys)
        self.whole_first: Layer | None = nnx.data(None)  # the first layer, gathered; only in weights prepared for a step
        self.final_norm = RMSNorm(D, config)
        self.head = self.drawn_head(config, key) if config.has_own_head else None

    def __call__(
        self, tokens: Tokens, segment_ids: Tokens | None = None, positions: Tokens | None = None
    ) -> Float32[Array, "B T V"]:
        """Returns logits, or scores [B, T, 1] by a score head; arguments as for `hidden`."""
        x, _ = self.hidden(tokens, segment_ids, positions)
        with jax.named_scope("head"):
            return self._logits(jax.reshard(x, spec("batch", "seq", None)))

    def hidden(
        self,
        tokens: Tokens,
        segment_ids: Tokens | None = None,
        positions: Tokens | None = None,
        *,
        seeds: Seeds | None = None,
        parallel: ParallelConfig = PLAIN,
        remat: Remat = "none",
        offload: OffloadConfig = ON_CARD,
        copies: "Llama | None" = None,
    ) -> tuple[Float[Array, "B T D"], Auxiliary]:
        """Returns the normed states that the head reads, in `compute_dtype` and in the order of
        `llamajax.parallel.sequence.laid_out`; and the auxiliary values, summed over all layers.

        Args:
            tokens: B must be divisible by the devices that share the batch, T by the sequence axis.
            segment_ids: a token sees only tokens with its own id. 0 is padding. None, or `attend_across_documents`: a row is
                one document.
            positions: positions for the rotary embedding. None: counted from the start of each segment.
            seeds: see `llamajax.model.adapters.Seeds`.
            parallel: the forms in which devices share the work; for a `ring`, T must be divisible by twice its devices.
            remat: values saved for the backward pass. Never `auto`, which `llamajax.step.resolve` resolves.
            offload: those that wait in host memory, for a stack that prefetches. Never `auto` either.
            copies: copies of the weights, see `PreparedWeights`; a weight that is None there has no copy.
        """
        config, sequence = self.config, parallel.sequence
        known = (None, None) if config.attend_across_documents else (segment_ids, positions)
        tables_and_masks = self._tables_and_masks(tokens, *known, sequence=sequence)
        # Compute none of them before this micro-batch's turn.
        tables_and_masks, tokens = jax.lax.optimization_barrier((tables_and_masks, tokens))
        rows = self._by_layer(*tables_and_masks, seeds=None if seeds is None else laid_out(seeds, sequence))
        x = self._embed(laid_out(tokens, sequence), copies)

        prepared, activations = PreparedWeights(self, copies), first_activations(x, self.auxiliary)
        if parallel.prefetches:

            def by_parts(model: Llama) -> Layers:
                return model.layers.by_parts(), None if model.whole_first is None else model.whole_first.by_parts()

            x, auxiliary = run_prefetching(
                prepared.part(by_parts),
                x=activations,
                shared=rows,
                unrolled=parallel.stack == "unrolled",
                **stack_forms(parallel, remat, x, offload),
            )
        else:
            saved = saved_names(remat, x)
            gates_in_stack = "gate_up" in (saved or ())

            def run_layer(x: Activations, layer: Layer, _: None, rows: Rows) -> tuple[Activations, None]:
                return layer(x, rows, parallel=parallel, gates_in_stack=gates_in_stack)[0], None

            layers = prepared.part(lambda model: model.layers)
            (x, auxiliary), _ = run_layers(layers, run_layer, activations, shared=rows, dtype=x.dtype, saved=_policy(saved))
        with jax.named_scope("final_norm"):
            return self.final_norm(x), auxiliary

    @property
    def auxiliary(self) -> Mapping[str, float]:
        """See `Layer.auxiliary`."""
        layers: Any = self.layers
        return (layers[0] if isinstance(layers, tuple) else layers).auxiliary

    def rows(
        self,
        tokens: Tokens,
        segment_ids: Tokens,
        positions: Tokens,
        seeds: Seeds | None,
        *,
        sequence: SequenceForm = "gather",
    ) -> tuple[Rows, ...]:
        """Returns the rows' data for each layer of the repeated round of windows; arguments as for `hidden`."""
        known = (None, None) if self.config.attend_across_documents else (segment_ids, positions)
        tables_and_masks = self._tables_and_masks(tokens, *known, sequence=sequence)
        return self._by_layer(*tables_and_masks, seeds=None if seeds is None else laid_out(seeds, sequence))

    def prefill(self, tokens: Tokens, lengths: Int32[Array, "B"], cache: KVCache) -> tuple[Float32[Array, "B V"], KVCache]:
        """Reads prompts into the cache, from its first slot on; its previous contents are lost.

        Args:
            tokens: one prompt per row from its start, padded on the right with any token. T is at most the cache's slots. B
                must be divisible by the devices that share the batch, T by the sequence axis.
            lengths: number of tokens of each prompt; 0 for an unused row.
            cache: a cache from `KVCache.empty`; donate it, and it is written in place.

        Returns:
            Logits at each row's last token, sharded ("batch", None), and the cache.
        """
        lengths = jax.reshard(lengths, spec("batch"))
        x = self._embed(laid_out(tokens, "gather"))
        rows = self._by_layer(*self._tables_and_masks(tokens, None, None))

        def run_layer(carry: tuple[jax.Array, jax.Array, jax.Array], layer: Layer, index: jax.Array, rows: Rows):
            x, keys, values = carry
            (x, _), (k, v) = layer(Activations(x, {}), rows)
            return (x, write_prompt(keys, index, k), write_prompt(values, index, v)), None

        # Carried, not stacked: a carried cache is written in place.
        carry, numbers = (x, cache.keys, cache.values), jnp.arange(self.config.num_layers)
        (x, keys, values), _ = run_layers(PreparedWeights(self.layers), run_layer, carry, numbers, rows, dtype=x.dtype)
        is_last = jnp.arange(tokens.shape[1])[None, :] == lengths[:, None] - 1
        x = jnp.sum(jnp.where(is_last[:, :, None], x, 0), axis=1, keepdims=True)
        return self._next_token_logits(x), KVCache(keys, values, lengths)

    def decode(self, tokens: Int32[Array, "B"], cache: KVCache) -> tuple[Float32[Array, "B V"], KVCache]:
        """Reads one more token per row, at position `cache.lengths`. A row with full slots cannot keep its token, so its
        later logits are wrong; the other rows are not affected.

        Args:
            tokens: one for each row.
            cache: tokens that the rows have read so far; donate it, and it is written in place.

        Returns:
            Logits of the next tokens, sharded ("batch", None), and the cache, every row one longer.
        """
        states, cache = self.extend(jax.reshard(tokens, spec("batch"))[:, None], cache)
        return self.read_out(states[:, 0]), cache

    def extend(
        self,
        tokens: Int32[Array, "R T"],
        cache: KVCache,
        counts: Int32[Array, "R"] | None = None,
        cache_rows: Int32[Array, "R"] | None = None,
    ) -> tuple[Float[Array, "R T D"], KVCache]:
        """Reads the next tokens of rows of a cache.

        Args:
            tokens: the tokens, the first of each row at position `cache.lengths`; sharded ("batch", None).
            cache: tokens that the rows have read so far; donate it, and it is written in place.
            counts: how many of each row's tokens there are, the others are padding; sharded ("batch"). None: T.
            cache_rows: the row of the cache that each row continues, see `Past.rows`; None: all rows, in order.

        Returns:
            The normed states that `read_out` reads, sharded ("batch", None, None), and the cache.
        """
        positions = cache.lengths_of(cache_rows)[:, None] + jnp.arange(tokens.shape[1])[None, :]
        x = self._embed(tokens)
        masks = {window or 0: Mask(window=window) for window in self.config.windows}
        rows = self._by_layer(*rope_tables(positions, self.config), masks)

        def run_layer(x: jax.Array, layer: Layer, cached: tuple[jax.Array, ...], rows: Rows) -> tuple[jax.Array, KeyValue]:
            past = Past(cached[0], cached[1], cache.lengths, cache_rows)
            (x, _), key_value = layer(Activations(x, {}), rows, past)
            return x, key_value

        layers, cached = PreparedWeights(self.layers), (cache.keys, cache.values)
        x, (k, v) = run_layers(layers, run_layer, x, cached, rows, dtype=x.dtype)
        with jax.named_scope("final_norm"):
            return self.final_norm(x), append(cache, k, v, counts, cache_rows)

    def read_out(self, states: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        """Returns the logits of normed states, sharded ("batch", None, ...)."""
        with jax.named_scope("head"):
            return jax.reshard(self._logits(states), spec("batch", *[None] * (states.ndim - 1)))

    @staticmethod
    def drawn_head(config: ModelConfig, key: jax.Array) -> nnx.Param:
        """Returns the head of its own that `Llama(config, key)` has."""
        _, _, head_key = jax.random.split(key, 3)
        return table(config.head_rows, config.embed_dim, config.param_dtype, normal(head_key, config.init_std))

    def with_adapters(self, config: AdaptersConfig, dtype: DTypeLike, key: jax.Array) -> "Llama":
        """Returns the model with adapters of all layers, which change nothing yet: `b` is zero, and `magnitude` is the
        length of the weights.

        Args:
            config: the adapters.
            dtype: dtype of the adapters.
            key: key of their values.
        """

        def make(key: jax.Array) -> tuple[dict[Projection, Adapter], dict[Projection, Adapter]]:
            of_attention, of_mlp = jax.random.split(key)
            known = self.config, config, dtype
            return Attention.adapters(*known, of_attention), MLP.adapters(*known, of_mlp)

        adapted = jax.tree.map(lambda weight: weight, self)
        attention, mlp = jax.vmap(make)(_keys_of_layers(key, self.config.num_layers))
        attach(adapted.layers.attention, Attention.MATRICES, attention)
        attach(adapted.layers.mlp, MLP.MATRICES, mlp)
        return adapted

    def without_adapters(self) -> "Llama":
        """Returns the model, prepared or not, that the adapters add to."""
        base = jax.tree.map(lambda weight: weight, self)
        for layer in (base.layers, base.whole_first):
            if layer is not None:
                detach(layer.attention, Attention.MATRICES)
                detach(layer.mlp, MLP.MATRICES)
        return base

    def output_weight(self) -> nnx.Param:
        """Returns the head as stored, [V, D] or for scores [1, D], in `param_dtype` and sharded; the embedding table when
        they are tied."""
        return self.embedding if self.head is None else self.head

    @staticmethod
    def shapes(config: ModelConfig, adapters: AdaptersConfig | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape and dtype of every array, by its path in the model; needs no mesh, and touches no device."""

        def make() -> Llama:
            model = Llama(config, jax.random.key(0))
            return model if adapters is None else model.with_adapters(adapters, config.param_dtype, jax.random.key(0))

        with jax.set_mesh(None), jax.sharding.use_abstract_mesh(ONE_DEVICE):
            model = jax.eval_shape(make)
        return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in named_arrays(model).items()}

    def _embed(self, tokens: Tokens, copies: "Llama | None" = None) -> Float[Array, "B T D"]:
        copy = None if copies is None else copies.embedding
        with jax.named_scope("embed"):
            return look_up(gathered(self.embedding, self.config.compute_dtype, copy)[...], tokens)

    def _logits(self, x: Float[Array, "*B D"]) -> Float32[Array, "*B V"]:
        return logits(x, gathered(self.output_weight(), x.dtype)[...], self.config.head_rows)

    def _next_token_logits(self, x: Float[Array, "B 1 D"]) -> Float32[Array, "B V"]:
        """Returns logits of residual streams, sharded ("batch", None)."""
        with jax.named_scope("final_norm"):
            x = self.final_norm(x)[:, 0]
        return self.read_out(x)

    def _tables_and_masks(
        self, tokens: Tokens, segment_ids: Tokens | None, positions: Tokens | None, *, sequence: SequenceForm = "gather"
    ) -> tuple[RopeTable, RopeTable, dict[int, Mask]]:
        """Returns cosines and sines of the positions; and the mask of each window by its size, 0 for none."""
        if positions is None:
            positions = positions_from_segment_ids(jnp.zeros_like(tokens) if segment_ids is None else segment_ids)
        config, (B, T) = self.config, tokens.shape
        cos, sin = rope_tables(laid_out(positions, sequence), config)
        ids = None if segment_ids is None else laid_out(segment_ids, sequence)
        heads = config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim
        q = jax.ShapeDtypeStruct((B, T, *heads), jnp.dtype(config.compute_dtype))
        see = partial(with_sight, q=q, kernel=config.attention_kernel, sequence=sequence)
        return cos, sin, {window or 0: see(Mask(window=window, segment_ids=ids)) for window in config.windows}

    def _by_layer(
        self, cos: RopeTable, sin: RopeTable, masks: dict[int, Mask], seeds: Seeds | None = None
    ) -> tuple[Rows, ...]:
        """Returns the rows' data for each layer of the repeated round of windows."""
        return tuple(Rows(cos, sin, masks[window or 0], seeds) for window in self.config.windows)
