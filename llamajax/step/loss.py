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
from jax import P
from jaxtyping import Array, Float, Int32

from llamajax.config.parallel import PLAIN, ParallelConfig, axes_of
from llamajax.model import Llama
from llamajax.parallel.sequence import laid_out
from llamajax.parallel.sharding import spec
from llamajax.parallel.tensor import shared_axes
from llamajax.parallel.vocabulary import scattered_rows, split_softmax, sum_tokens, whole_rows
from llamajax.step.batch import IGNORE

MAX_CHUNK_LOGITS = 2**28
"""Logits alive on a device at once: 1 GiB of fp32, and still over 2,000 tokens of Llama 3's vocabulary of 128,256 per
matmul, which is enough to keep a GPU busy."""


class LossSums(NamedTuple):
    """Sums over the counted tokens of a batch, the same on every device."""

    loss: jax.Array
    """fp32 []: cross-entropy plus z-loss; the one to differentiate."""
    cross_entropy: jax.Array
    """fp32 []: cross-entropy alone, nats; for reports, without a gradient."""
    num_tokens: jax.Array
    """int32 []: tokens counted."""


def loss_fn(
    model: Llama, batch: Mapping[str, jax.Array], *, z_loss_weight: float, parallel: ParallelConfig = PLAIN
) -> tuple[jax.Array, LossSums]:
    """The batch's summed loss, to differentiate and divide by a token count, and all its sums.

    Args:
        model: the Llama.
        batch: `tokens`, `targets`, `segment_ids` and `positions`, each int32 [B, T]; a target of `IGNORE` is not counted.
        z_loss_weight: weight of the squared log-partition function, which keeps logits small (PaLM, arXiv:2204.02311).
        parallel: the forms in which devices share the work.
    """
    hidden = model.hidden(batch["tokens"], batch["segment_ids"], batch["positions"], parallel=parallel)
    targets = laid_out(batch["targets"], parallel.sequence)  # as the hidden states are; a sum has no order
    with jax.named_scope("loss"):
        sums = token_losses(hidden, model.output_weight()[...], targets, z_loss_weight)
    return sums.loss, sums


def _token_losses(
    hidden: Float[Array, "B T D"], weight: Float[Array, "V D"], targets: Int32[Array, "B T"], z_loss_weight: float
) -> LossSums:
    """The losses of all counted tokens, summed; only `.loss` has a gradient.

    Args:
        hidden: in the compute dtype, sharded as `look_up` lays tokens out.
        weight: the head in the parameter dtype, as it is stored.
        targets: in [0, V) or `IGNORE`, sharded ("batch", "seq").
        z_loss_weight: weight of the squared log-partition function.
    """
    return _sums_and_gradients(hidden, weight, targets, z_loss_weight)[0]  # the compiler drops the rest


Gradients = tuple[Float[Array, "B T D"], Float[Array, "V E"]]
"""For hidden and weight, in their dtypes and shardings; E is the part of D that a device stores, or all of it."""


def _sums_and_gradients(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, z_loss_weight: float
) -> tuple[LossSums, Gradients]:
    """`token_losses`, and the gradients of its `.loss`."""
    hidden_spec, table = jax.typeof(hidden).sharding.spec, jax.typeof(weight)
    return jax.shard_map(
        partial(_on_device, hidden_spec=hidden_spec, table=table, z_loss_weight=z_loss_weight),
        in_specs=(hidden_spec, table.sharding.spec, spec("batch", "seq")),
        out_specs=(P(), (hidden_spec, table.sharding.spec)),
    )(hidden, weight, targets)


def _scale_gradients(z_loss_weight: float, gradients: Gradients, cotangents: LossSums) -> tuple[jax.Array, jax.Array, None]:
    d_hidden, d_weight = gradients
    scale = cotangents.loss
    return (scale * d_hidden).astype(d_hidden.dtype), (scale * d_weight).astype(d_weight.dtype), None


token_losses = jax.custom_vjp(_token_losses, nondiff_argnums=(3,))
token_losses.defvjp(_sums_and_gradients, _scale_gradients)


def _on_device(
    hidden: Float[Array, "b t_own D"],
    weight: Float[Array, "v E"],
    targets: Int32[Array, "b t"],
    *,
    hidden_spec: P,
    table: jax.ShapeDtypeStruct,
    z_loss_weight: float,
) -> tuple[LossSums, Gradients]:
    """One device's part of `_sums_and_gradients`."""
    token_axes = axes_of("batch") + axes_of("seq")
    head, vocab_ids = whole_rows(weight, table, hidden.dtype)
    if axes := shared_axes(hidden_spec):
        hidden = jax.lax.all_gather(hidden, axes, axis=1, tiled=True)

    def add_chunk(d_head: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[LossSums, jax.Array]]:
        x, target = chunk  # [n, D], [n]
        with jax.named_scope("logits"):
            counted = target != IGNORE
            logits = jnp.einsum("nD,vD->nv", x, head, preferred_element_type=jnp.float32)
            (exps, exp_sum, largest, target_logit), is_target = split_softmax(logits, vocab_ids, target)
            lse = jnp.log(exp_sum) + largest
            cross_entropy = jnp.sum(jnp.where(counted, lse - target_logit, 0.0))
            z_loss = jnp.sum(jnp.where(counted, z_loss_weight * jnp.square(lse), 0.0))
            sums = LossSums(cross_entropy + z_loss, cross_entropy, jnp.sum(counted, dtype=jnp.int32))
            d_logits = exps * ((1 + 2 * z_loss_weight * lse) / exp_sum)[:, None] - is_target
            d_logits = jnp.where(counted[:, None], d_logits, 0.0).astype(x.dtype)
        with jax.named_scope("d_hidden"):
            d_x = jnp.einsum("nv,vD->nD", d_logits, head)
        with jax.named_scope("d_head"):
            d_head += jnp.einsum("nv,nD->vD", d_logits, x, preferred_element_type=jnp.float32)
        return d_head, (sums, d_x)

    # Every device adds up its own tokens' gradients in fp32 over all chunks; the devices meet once, after the loop.
    d_head = jax.lax.pcast(jnp.zeros(head.shape, jnp.float32), token_axes + axes_of("vocab"), to="varying")
    d_head, (chunk_sums, d_x) = jax.lax.scan(add_chunk, d_head, _chunks(hidden, targets, vocab_size=head.shape[0]))
    sums = LossSums(*(jax.lax.psum(jnp.sum(chunk_sum, axis=0), token_axes) for chunk_sum in chunk_sums))
    d_hidden = sum_tokens(d_x.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape), hidden_spec)
    d_weight = scattered_rows(d_head.astype(hidden.dtype), table)
    d_weight = jax.lax.psum(d_weight, tuple(axis for axis in token_axes if axis not in axes_of("embed")))
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
