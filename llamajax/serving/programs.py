"""The programs of an engine: read a part of some prompts, decode one token in every slot, copy a slot.

A slot is a row of the cache. It keeps the tokens of a finished sequence, which later ones with the same beginning need not
read again. Arrays of the host may come on every device; the programs split them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float32, Int32

from llamajax.generation.sampling import Choices, RowSampling, choose_by_row, token_logprobs
from llamajax.model import Llama
from llamajax.model.kv_cache import Cached, KVCache, copy_rows
from llamajax.parallel.sharding import spec

SCORED_AT_ONCE = 64
"""Number of tokens per row of which the logits exist at once when a prompt is scored."""


class State(NamedTuple):
    """Contents of the slots on the devices; every program replaces it. The host knows how long each slot is."""

    keys: Cached
    values: Cached
    tokens: Int32[Array, "B"]
    """The newest token of each slot, which the cache does not contain yet; on every device."""

    @staticmethod
    def empty(model: Llama, num_slots: int, max_seq_len: int) -> "State":
        """Returns slots without tokens, each with room for `max_seq_len`."""
        cache = KVCache.empty(model.config, num_slots, max_seq_len)
        return State(cache.keys, cache.values, jnp.zeros(num_slots, jnp.int32, out_sharding=P(None)))


class Part(NamedTuple):
    """Next tokens of some prompts: R rows, of which each device that has slots of its own has as many."""

    tokens: Int32[Array, "R T"]
    counts: Int32[Array, "R"]
    """Number of tokens of each row; 0 for an unused one."""
    slots: Int32[Array, "R"]
    """Slot of each row, one of the device's own."""
    is_last: Bool[Array, "R"]
    """Whether the prompt ends here, so that its first new token is chosen."""
    targets: Int32[Array, "R T"]
    """The token after each token, to be scored; 0 where there is none."""


@partial(jax.jit, static_argnames="vocab_size", donate_argnames="state")
def read(
    model: Llama,
    state: State,
    lengths: Int32[Array, "B"],
    part: Part,
    sampling: RowSampling,
    effort: Int32[Array, ""],
    with_top: Bool[Array, ""],
    with_scores: Bool[Array, ""],
    *,
    vocab_size: int,
) -> tuple[State, Choices, tuple[jax.Array, ...]]:
    """Reads the next tokens of some prompts.

    Args:
        model: the weights.
        state: the slots; donated.
        lengths: number of tokens that each slot has read.
        part: the tokens.
        sampling: how each row chooses its first token, [R].
        effort: see `choose_by_row`.
        with_top: see `choose_by_row`.
        with_scores: whether the targets are scored.
        vocab_size: exclusive upper limit of ids that are chosen.

    Returns:
        The slots; the first new token of each row; the log probabilities of the targets and those of the likeliest tokens,
        [R, T], [R, T, N] and [R, T, N], zeros unless asked for.
    """
    lengths, counts, slots, sampling = jax.reshard((lengths, part.counts, part.slots, sampling), spec("batch"))
    tokens, targets = jax.reshard((part.tokens, part.targets), spec("batch", None))
    cache = KVCache(state.keys, state.values, lengths)
    states, cache = model.extend(tokens, cache, counts, slots)
    is_end = jnp.arange(tokens.shape[1])[None, :] == counts[:, None] - 1
    logits = model.read_out(jnp.sum(jnp.where(is_end[:, :, None], states, 0), axis=1))[:, :vocab_size]
    chosen = choose_by_row(logits, cache.lengths_of(slots), sampling, effort, with_top)
    newest = state.tokens.at[jnp.where(part.is_last, part.slots, len(state.tokens))].set(chosen.tokens, mode="drop")

    score = partial(_score, model, states, targets, vocab_size)
    zeros = jax.tree.map(lambda x: partial(jnp.zeros, x.shape, x.dtype, out_sharding=P(None)), jax.eval_shape(score))
    scores = jax.lax.cond(with_scores, score, lambda: jax.tree.map(lambda make: make(), zeros))
    return State(cache.keys, cache.values, newest), chosen, scores


def _score(
    model: Llama, states: jax.Array, targets: jax.Array, vocab_size: int
) -> tuple[Float32[Array, "R T"], Int32[Array, "R T N"], Float32[Array, "R T N"]]:
    """Returns the log probabilities of the targets and of the likeliest tokens, a few tokens of each row at a time."""
    T = targets.shape[1]
    size = next(size for size in range(min(T, SCORED_AT_ONCE), 0, -1) if T % size == 0)
    by_row, by_token = spec("batch", None), spec("batch", None, None)

    @partial(jax.shard_map, in_specs=(by_token, by_row), out_specs=(by_row, by_token, by_token))
    def of_logits(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vmap(lambda logits, targets: token_logprobs(logits, targets, jnp.bool_(True)))(logits, targets)

    def of_some(start: jax.Array) -> tuple[jax.Array, ...]:
        some, their = (jax.lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (states, targets))
        return jax.reshard(of_logits(model.read_out(some)[..., :vocab_size], their), P(None))

    def join(x: jax.Array) -> jax.Array:  # [parts, R, size, ...]
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], T, *x.shape[3:])

    logprobs, top_tokens, top_logprobs = jax.tree.map(join, jax.lax.map(of_some, jnp.arange(0, T, size)))
    return logprobs, top_tokens, top_logprobs


@partial(jax.jit, static_argnames="vocab_size", donate_argnames="state")
def decode(
    model: Llama,
    state: State,
    lengths: Int32[Array, "B"],
    sampling: RowSampling,
    effort: Int32[Array, ""],
    with_top: Bool[Array, ""],
    *,
    vocab_size: int,
) -> tuple[State, Choices]:
    """Reads the newest token of every slot and chooses the next one; arguments as for `read`.

    A slot that is not in use is written too, where it is not read before it is written again.
    """
    lengths, sampling = jax.reshard((lengths, sampling), spec("batch"))
    cache = KVCache(state.keys, state.values, lengths)
    logits, cache = model.decode(state.tokens, cache)
    chosen = choose_by_row(logits[:, :vocab_size], cache.lengths, sampling, effort, with_top)
    return State(cache.keys, cache.values, chosen.tokens), chosen


@partial(jax.jit, donate_argnames="state")
def copy(state: State, sources: Int32[Array, "P"], targets: Int32[Array, "P"]) -> State:
    """Copies the tokens of one slot to another on each device that has slots of its own; see `copy_rows`."""
    sources, targets = jax.reshard((sources, targets), spec("batch"))
    lengths = jnp.zeros(state.tokens.shape, jnp.int32, out_sharding=spec("batch"))  # the host's are copied by the host
    cache = copy_rows(KVCache(state.keys, state.values, lengths), sources, targets)
    return State(cache.keys, cache.values, state.tokens)
