"""One decoder for Llama 1, 2, 3, 3.1, 3.2 and 3.3 (arXiv:2302.13971, 2307.09288, 2407.21783), Mistral, Qwen2 and Qwen3;
ModelConfig distinguishes them."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.adapters import AdaptersConfig, Projection
from llamajax.config.model import ModelConfig, Remat
from llamajax.config.offload import ON_CARD, OffloadConfig
from llamajax.config.parallel import PLAIN, ParallelConfig, SequenceForm
from llamajax.kernels.attention import Mask, Past, with_sight
from llamajax.model.adapters import Adapter, Seeds, attach, detach
from llamajax.model.attention import Attention, Rows
from llamajax.model.decoder_layer import Activations, Layer, first_activations, policy_of, saved_names, stack_forms
from llamajax.model.kv_cache import KVCache, append, write_prompt
from llamajax.model.layers import MLP, Auxiliary, RMSNorm, normal
from llamajax.model.rope import RopeTable, positions_from_segment_ids, rope_tables
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.sequence import laid_out
from llamajax.parallel.sharding import ONE_DEVICE, spec
from llamajax.parallel.stack import Layers, reshape_layers, run_layers, run_prefetching
from llamajax.parallel.stages import num_stages
from llamajax.parallel.vocabulary import logits, look_up, table
from llamajax.parallel.zero import PreparedWeights, gathered

Tokens = Int32[Array, "B T"]
"""Ids of each row's tokens, ids of their documents, or positions."""

Stacking = Callable[[Callable[[jax.Array], Any]], Callable[[jax.Array], Any]]


class LayerRun(NamedTuple):
    """Consecutive layers of a model that repeat a unit."""

    unit: tuple[Layer, ...]
    """The layers of the unit, each with weights of all its repetitions [U, ...]."""
    first: int
    """Number of the first layer."""

    @property
    def numbers(self) -> Int32[Array, "U"]:
        """Number of the first layer of each repetition."""
        repetitions = jax.tree.leaves(self.unit)[0].shape[0]
        return self.first + len(self.unit) * jnp.arange(repetitions)

    def by_unit(self, of_layers: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what belongs to the layers of each repetition, as often as it takes to repeat; `of_layers` is what belongs
        to all layers of the model, in the order in which they repeat it. For units of one layer, there are no tuples."""
        size, period = len(self.unit), len(of_layers)
        numbers = range(self.first, self.first + size * (period // math.gcd(period, size)), size)
        own = (tuple(of_layers[(number + place) % period] for place in range(size)) for number in numbers)
        return tuple(of_unit[0] if size == 1 else of_unit for of_unit in own)


def _keys_of_layers(key: jax.Array, config: ModelConfig) -> tuple[jax.Array | None, jax.Array]:
    """Returns the keys of `Llama.dense_layers` and of `Llama.layers`."""
    L = config.num_layers
    keys, dense = jax.random.split(key, L), config.dense_layers
    if dense:
        return keys[np.array(dense)], keys[np.setdiff1d(np.arange(L), dense)]
    if L % num_stages() == 0 and num_stages() > 1:
        return None, jax.reshard(keys, spec("layers"))  # then each stage creates its own layers
    return None, keys


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
        dense_keys, keys = _keys_of_layers(layers_key, config)
        # Of a model with experts: the layers without.
        self.dense_layers: Layer | None = nnx.data(None) if dense_keys is None else stack(partial(Layer, config))(dense_keys)
        # In weights prepared for a step with a pipeline: a tuple with the layers in each slot of the stages.
        self.layers = stack(partial(Layer, config, has_experts=config.experts.enabled))(keys)
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
        for number, run in enumerate(self.runs()):
            if parallel.prefetches:
                activations = run_prefetching(
                    prepared.part(lambda model, number=number: _by_parts(model, number)),
                    x=activations,
                    shared=run.by_unit(rows),
                    unrolled=parallel.stack == "unrolled",
                    **stack_forms(parallel, remat, x, offload, len(run.unit)),
                )
            else:
                layers = prepared.part(lambda model, number=number: model.runs()[number].unit)
                activations = _run_one_by_one(layers, run, activations, rows, parallel, remat)
        x, auxiliary = activations
        with jax.named_scope("final_norm"):
            return self.final_norm(x), auxiliary

    @property
    def auxiliary(self) -> Mapping[str, float]:
        """See `Layer.auxiliary`."""
        layers: Any = self.layers
        slots = layers if isinstance(layers, tuple) else (layers,)
        return next((own.auxiliary for own in slots if own.auxiliary), {})

    def runs(self) -> list[LayerRun]:
        """Returns all layers in their order. Layers between two with experts form a unit with the second."""
        experts, dense = self.config.experts, self.dense_layers
        first, step = experts.first_dense_layers, experts.layer_step
        if dense is None:
            return [LayerRun((self.layers,), 0)]
        runs = []
        if first:
            runs.append(LayerRun((jax.tree.map(lambda own: own[:first], dense),), 0))
        between = (jax.tree.map(lambda own, start=first + place: own[start :: step - 1], dense) for place in range(step - 1))
        return [*runs, LayerRun((*between, self.layers), first)]

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

        def run_unit(carry: tuple[jax.Array, jax.Array, jax.Array], unit: tuple[Layer, ...], number: jax.Array, rows: Any):
            x, keys, values = carry
            for place, (layer, own) in enumerate(zip(unit, _of_layers(unit, rows), strict=True)):
                (x, _), (k, v) = layer(Activations(x, {}), own)
                keys, values = write_prompt(keys, number + place, k), write_prompt(values, number + place, v)
            return (x, keys, values), None

        # Carried, not stacked: a carried cache is written in place.
        carry = x, cache.keys, cache.values
        for run in self.runs():
            layers = PreparedWeights(run.unit)
            carry, _ = run_layers(layers, run_unit, carry, run.numbers, run.by_unit(rows), dtype=x.dtype)
        x, keys, values = carry
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

        def run_unit(x: jax.Array, unit: tuple[Layer, ...], number: jax.Array, rows: Any) -> tuple[jax.Array, Any]:
            made = []
            for place, (layer, own) in enumerate(zip(unit, _of_layers(unit, rows), strict=True)):
                keys, values = (own_layer(cached, number + place) for cached in (cache.keys, cache.values))
                (x, _), key_value = layer(Activations(x, {}), own, Past(keys, values, cache.lengths, cache_rows))
                made.append(key_value)
            return x, jax.tree.map(lambda *each: jnp.stack(each), *made)

        own_layer = partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        made = []
        for run in self.runs():
            layers = PreparedWeights(run.unit)
            x, of_run = run_layers(layers, run_unit, x, run.numbers, run.by_unit(rows), dtype=x.dtype)
            made.append(jax.tree.map(lambda own: reshape_layers(2, (own.shape[0] * own.shape[1],), own), of_run))
        k, v = jax.tree.map(lambda *each: jnp.concatenate(each), *made)
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
        dense_keys, keys = _keys_of_layers(key, self.config)
        for layers, own_keys in ((adapted.dense_layers, dense_keys), (adapted.layers, keys)):
            if layers is not None and own_keys is not None:
                attention, mlp = jax.vmap(make)(own_keys)
                attach(layers.attention, Attention.MATRICES, attention)
                attach(layers.mlp, layers.mlp.MATRICES, mlp)
        return adapted

    def without_adapters(self) -> "Llama":
        """Returns the model, prepared or not, that the adapters add to."""
        base = jax.tree.map(lambda weight: weight, self)
        for layer in (base.dense_layers, base.layers, base.whole_first):
            if layer is not None:
                detach(layer.attention, Attention.MATRICES)
                detach(layer.mlp, layer.mlp.MATRICES)
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


def _of_layers(unit: tuple[Layer, ...], rows: Any) -> tuple[Rows, ...]:
    """Returns the rows for each layer of a unit from an entry of `LayerRun.by_unit`."""
    return (rows,) if len(unit) == 1 else rows


def _by_parts(model: Llama, number: int) -> Layers:
    """Returns the weights of all parts of a run's unit, and those of the first unit if gathered earlier."""
    unit = model.runs()[number].unit
    parts = tuple(part for layer in unit for part in layer.by_parts())
    first = model.whole_first if unit[-1] is model.layers else None
    return parts, None if first is None else first.by_parts()


def _run_one_by_one(
    layers: PreparedWeights[tuple[Layer, ...]],
    run: LayerRun,
    x: Activations,
    rows: tuple[Rows, ...],
    parallel: ParallelConfig,
    remat: Remat,
) -> Activations:
    """Returns the activations after the layers of a run, in a plain loop."""
    saved = saved_names(remat, x.residual)
    gates_in_stack = "gate_up" in (saved or ())

    def run_unit(x: Activations, unit: tuple[Layer, ...], _: None, rows: Any) -> tuple[Activations, None]:
        for layer, own in zip(unit, _of_layers(unit, rows), strict=True):
            x = layer(x, own, parallel=parallel, gates_in_stack=gates_in_stack)[0]
        return x, None

    dtype, saved = x.residual.dtype, policy_of(saved)
    return run_layers(layers, run_unit, x, shared=run.by_unit(rows), dtype=dtype, saved=saved)[0]
