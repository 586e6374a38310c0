"""Next-token cross-entropy with an optional z-loss, never holding the logits of all tokens at once.

The head and the loss are one function with its own derivative: the logits of a chunk of tokens are made, turned into
their loss and into the gradients of the hidden states and of the head, and dropped. The backward pass then only has to
scale what is there, so the logits are computed once and the head takes three matmuls per chunk, not four.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from llamajax.model import Llama
from llamajax.sharding import TABLE, spec

IGNORE = -1
"""Target of a token that is not counted: padding, or the last token of a document."""

MAX_CHUNK_LOGITS = 2**28
"""Logits alive on a device at once: 1 GiB of fp32, and still over 2,000 tokens of Llama 3's vocabulary of 128,256 per
matmul, which is enough to keep a GPU busy."""


class LossSums(NamedTuple):
    """Sums over the counted tokens of a batch."""

    loss: jax.Array
    """fp32 []: cross-entropy plus z-loss; the one to differentiate."""
    cross_entropy: jax.Array
    """fp32 []: cross-entropy alone, nats; for reports, without a gradient."""
    count: jax.Array
    """int32 []: tokens counted."""


def loss_fn(model: Llama, batch: Mapping[str, jax.Array], *, z_loss_weight: float) -> tuple[jax.Array, LossSums]:
    """The batch's summed loss, to differentiate and divide by a token count, and all its sums.

    Args:
        model: the Llama.
        batch: `tokens`, `targets`, `segment_ids` and `positions`, each int32 [B, T]; a target of `IGNORE` is not counted.
        z_loss_weight: weight of the squared log-partition function, which keeps logits small (PaLM, arXiv:2204.02311).
    """
    hidden = model.hidden(batch["tokens"], batch["segment_ids"], batch["positions"])
    targets = jax.reshard(batch["targets"], spec("batch", "seq"))
    with jax.named_scope("loss"):
        sums = token_losses(hidden, model.output_weight(), targets, z_loss_weight)
    return sums.loss, sums


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_losses(hidden: jax.Array, weight: jax.Array, targets: jax.Array, z_loss_weight: float) -> LossSums:
    """The loss of every counted token, summed; only `.loss` has a gradient.

    Args:
        hidden: [B, T, D] in the compute dtype, sharded ("batch", "seq", None).
        weight: [V, D] head in the parameter dtype, sharded ("vocab", "embed").
        targets: int32 [B, T], in [0, V) or `IGNORE`, sharded ("batch", "seq").
        z_loss_weight: weight of the squared log-partition function.
    """
    return _sums_and_gradients(hidden, weight, targets, z_loss_weight, with_gradients=False)[0]


def _forward(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, z_loss_weight: float
) -> tuple[LossSums, tuple[jax.Array, jax.Array]]:
    return _sums_and_gradients(hidden, weight, targets, z_loss_weight, with_gradients=True)


def _backward(
    z_loss_weight: float, gradients: tuple[jax.Array, jax.Array], cotangents: LossSums
) -> tuple[jax.Array, jax.Array, None]:
    d_hidden, d_weight = gradients
    return (
        (cotangents.loss * d_hidden).astype(d_hidden.dtype),
        (cotangents.loss * d_weight).astype(d_weight.dtype),
        None,
    )


token_losses.defvjp(_forward, _backward)


def _sums_and_gradients(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, z_loss_weight: float, *, with_gradients: bool
):
    """Runs `_on_device` on every device's tokens and vocabulary rows."""
    gradient_specs = (spec("batch", "seq", None), spec("vocab", "embed")) if with_gradients else None
    return jax.shard_map(
        partial(_on_device, z_loss_weight=z_loss_weight, with_gradients=with_gradients),
        in_specs=(spec("batch", "seq", None), spec("vocab", "embed"), spec("batch", "seq")),
        out_specs=(LossSums(jax.P(), jax.P(), jax.P()), gradient_specs),
    )(hidden, weight, targets)


def _on_device(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, *, z_loss_weight: float, with_gradients: bool
) -> tuple[LossSums, tuple[jax.Array, jax.Array] | None]:
    """One device's part of `token_losses`: hidden [b, t, D], weight [v, d], targets [b, t]; gradients shaped alike."""
    token_axes = TABLE.batch + TABLE.seq
    full_weight = jax.lax.all_gather(weight.astype(hidden.dtype), TABLE.embed, axis=1, tiled=True)  # [v, D]
    vocab_ids = jax.lax.axis_index(TABLE.vocab) * weight.shape[0] + jnp.arange(weight.shape[0])

    def add_chunk(d_weight: jax.Array | None, chunk: tuple[jax.Array, jax.Array]):
        x, target = chunk  # [n, D], [n]
        counted = target != IGNORE
        logits = jnp.einsum("nD,vD->nv", x, full_weight, preferred_element_type=jnp.float32)
        is_target = target[:, None] == vocab_ids[None, :]
        largest = jax.lax.pmax(jnp.max(logits, axis=-1), TABLE.vocab)
        exps = jnp.exp(logits - largest[:, None])
        exp_sum, target_logit = jax.lax.psum(
            (jnp.sum(exps, axis=-1), jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)), TABLE.vocab
        )
        lse = jnp.log(exp_sum) + largest
        cross_entropy = jnp.sum(jnp.where(counted, lse - target_logit, 0.0))
        z_loss = jnp.sum(jnp.where(counted, z_loss_weight * jnp.square(lse), 0.0))
        sums = LossSums(cross_entropy + z_loss, cross_entropy, jnp.sum(counted, dtype=jnp.int32))
        if d_weight is None:
            return None, (sums, None)
        d_logits = exps * ((1 + 2 * z_loss_weight * lse) / exp_sum)[:, None] - is_target
        d_logits = jnp.where(counted[:, None], d_logits, 0.0).astype(x.dtype)
        d_x = jax.lax.psum(jnp.einsum("nv,vD->nD", d_logits, full_weight), TABLE.vocab)
        d_weight += jnp.einsum("nv,nD->vD", d_logits, x, preferred_element_type=jnp.float32)
        return d_weight, (sums, d_x)

    chunks = _chunks(hidden, targets, vocab_size=weight.shape[0])
    d_weight = None
    if with_gradients:
        # Every device sums its own tokens over all chunks; they meet once, after the loop.
        d_weight = jax.lax.pcast(jnp.zeros(full_weight.shape, jnp.float32), (*token_axes, *TABLE.vocab), to="varying")
    d_weight, (sums, d_x) = jax.lax.scan(add_chunk, d_weight, chunks)
    sums = jax.lax.psum(jax.tree.map(partial(jnp.sum, axis=0), sums), token_axes)
    if d_weight is None:
        return sums, None
    d_hidden = d_x.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape)
    d_weight = jax.lax.psum_scatter(d_weight.astype(hidden.dtype), TABLE.embed, scatter_dimension=1, tiled=True)
    d_weight = jax.lax.psum(d_weight, tuple(axis for axis in token_axes if axis not in TABLE.embed))
    return sums, (d_hidden, d_weight.astype(weight.dtype))


def _chunks(hidden: jax.Array, targets: jax.Array, *, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """[b, t, D] and [b, t] as the fewest equal chunks [c, n, D] and [c, n] that keep n * vocab_size in bounds.

    Tokens that fill the last chunk up are not counted.
    """
    num_chunks = math.ceil(targets.size * vocab_size / MAX_CHUNK_LOGITS)
    size = math.ceil(targets.size / num_chunks)
    fill = num_chunks * size - targets.size
    hidden = jnp.pad(hidden.reshape(targets.size, -1), ((0, fill), (0, 0)))
    targets = jnp.pad(targets.reshape(-1), (0, fill), constant_values=IGNORE)
    return hidden.reshape(num_chunks, size, -1), targets.reshape(num_chunks, size)
