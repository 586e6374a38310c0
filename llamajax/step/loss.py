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
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.model import Remat
from llamajax.config.parallel import PLAIN, ParallelConfig, axes_of
from llamajax.model import Llama
from llamajax.parallel.arrays import after
from llamajax.parallel.sequence import laid_out
from llamajax.parallel.sharding import spec
from llamajax.parallel.tensor import shared_axes
from llamajax.parallel.vocabulary import row_ids, split_softmax, sum_tokens
from llamajax.parallel.zero import PreparedWeights, gathered
from llamajax.step.batch import IGNORE

MAX_CHUNK_LOGITS = 2**28
"""Logits alive on a device at once: 1 GiB of fp32, and still over 2,000 tokens of Llama 3's vocabulary of 128,256 per
matmul, which is enough to keep a GPU busy."""


class LossSums(NamedTuple):
    """Sums over the counted tokens of a batch, the same on every device."""

    loss: jax.Array
    """fp32 []: cross-entropy plus z-loss, to differentiate."""
    cross_entropy: jax.Array
    """fp32 []: cross-entropy alone, nats; for reports, without a gradient."""
    num_tokens: jax.Array
    """int32 []: tokens counted."""


def loss_fn(
    weights: PreparedWeights[Llama],
    batch: Mapping[str, jax.Array],
    *,
    z_loss_weight: float,
    parallel: ParallelConfig = PLAIN,
    remat: Remat = "none",
) -> tuple[jax.Array, tuple[LossSums, dict[str, jax.Array]]]:
    """The batch's summed loss, to differentiate and divide by a token count; and what to report: all its sums, and those of
    the layers' auxiliary values, float32 scalars over the same tokens.

    Args:
        weights: the Llama, prepared or as it is stored.
        batch: `tokens`, `targets`, `segment_ids` and `positions`, each int32 [B, T]; a target of `IGNORE` is not counted.
        z_loss_weight: weight of the squared log-partition function, which keeps logits small (PaLM, arXiv:2204.02311).
        parallel: the forms in which devices share the work.
        remat: see `Llama.hidden`.
    """
    weights = _with_ends_apart(weights)
    model, rows = weights.trained, (batch["tokens"], batch["segment_ids"], batch["positions"])
    hidden, auxiliary = model.hidden(*rows, parallel=parallel, remat=remat, copies=weights.copies)
    targets = laid_out(batch["targets"], parallel.sequence)  # as the hidden states are; a sum has no order
    with jax.named_scope("loss"):
        output = weights.part(Llama.output_weight)
        hidden, trained = _back_at_once(hidden, output.trained)
        head = gathered(trained, hidden.dtype, output.copies)[...]
        sums = token_losses(hidden, head, targets, z_loss_weight, model.config.vocab_size)
        auxiliary = {name: _counted(values, targets) for name, values in auxiliary.items()}
        loss = sum((weight * auxiliary[name] for name, weight in model.layers.auxiliary.items() if weight), sums.loss)
    return loss, (sums, auxiliary)


def _counted(values: Float32[Array, "B T"], targets: Int32[Array, "B T"]) -> Float32[Array, ""]:
    """Their sum over counted tokens, on every device."""
    targets = jax.reshard(targets, jax.typeof(values).sharding.spec)
    return jnp.sum(jnp.where(targets != IGNORE, values, 0.0))


@jax.custom_vjp
def _back_at_once(hidden: jax.Array, head: nnx.Param) -> tuple[jax.Array, nnx.Param]:
    """The same, none of whose gradients is used before both are there: else that of the head, which is whole until it is
    scattered, would wait for that beside the backward pass of all layers."""
    return hidden, head


_back_at_once.defvjp(lambda *both: (both, None), lambda _, gradients: jax.lax.optimization_barrier(gradients))


def _with_ends_apart(weights: PreparedWeights[Llama]) -> PreparedWeights[Llama]:
    """The same, with the embedding gathered before the head and its gradient reduced behind that of the head: XLA would make
    one collective of the two, which then waits for the later one and hides behind nothing."""
    model, embedding = jax.tree.map(lambda weight: weight, weights.trained), weights.part(lambda model: model.embedding)
    model.embedding = gathered(embedding.trained, model.config.compute_dtype, embedding.copies)
    if model.head is not None:
        model.embedding, model.head = jax.lax.optimization_barrier((model.embedding, model.head))
    return PreparedWeights(model, weights.copies)


def _token_losses(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "R D"],
    targets: Int32[Array, "B T"],
    z_loss_weight: float,
    vocab_size: int,
) -> LossSums:
    """The losses of all counted tokens, summed; only `.loss` has a gradient.

    Args:
        hidden: in the compute dtype, sharded as `look_up` lays tokens out.
        head: its copy for compute, in the same dtype, whose gradient is left to be summed where the copy was reduced.
        targets: in [0, V) or `IGNORE`, sharded ("batch", "seq").
        z_loss_weight: weight of the squared log-partition function.
        vocab_size: V; rows of the head behind it are none.
    """
    return _sums_and_gradients(hidden, head, targets, z_loss_weight, vocab_size)[0]  # the compiler drops the rest


Gradients = tuple[Float[Array, "B T D"], Float[Array, "R D"]]
"""For hidden and head, in their dtype."""


def _sums_and_gradients(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, z_loss_weight: float, vocab_size: int
) -> tuple[LossSums, Gradients]:
    """`token_losses`, and the gradients of its `.loss`."""
    hidden_spec, head_spec = jax.typeof(hidden).sharding.spec, jax.typeof(head).sharding.spec
    left_open = head_spec.reduced
    on_device = partial(
        _on_device, hidden_spec=hidden_spec, left_open=left_open, z_loss_weight=z_loss_weight, vocab_size=vocab_size
    )
    return jax.shard_map(
        on_device,
        in_specs=(hidden_spec, head_spec, spec("batch", "seq")),
        out_specs=(P(), (hidden_spec, P(*head_spec.partitions, unreduced=left_open))),
    )(hidden, head, targets)


def _scale_gradients(
    z_loss_weight: float, vocab_size: int, gradients: Gradients, cotangents: LossSums
) -> tuple[jax.Array, jax.Array, None]:
    d_hidden, d_head = gradients
    scale = cotangents.loss
    head_scale = jax.reshard(scale, P(reduced=jax.typeof(d_head).sharding.spec.unreduced))
    return (scale * d_hidden).astype(d_hidden.dtype), (head_scale * d_head).astype(d_head.dtype), None


token_losses = jax.custom_vjp(_token_losses, nondiff_argnums=(3, 4))
token_losses.defvjp(_sums_and_gradients, _scale_gradients)


def _on_device(
    hidden: Float[Array, "b t_own D"],
    head: Float[Array, "r D"],
    targets: Int32[Array, "b t"],
    *,
    hidden_spec: P,
    left_open: frozenset[str],
    z_loss_weight: float,
    vocab_size: int,
) -> tuple[LossSums, Gradients]:
    """One device's part of `_sums_and_gradients`; the gradient of the head is not summed over the axes `left_open`."""
    token_axes, vocab_ids = axes_of("batch") + axes_of("seq"), row_ids(head, vocab_size)
    if axes := shared_axes(hidden_spec):
        hidden = jax.lax.all_gather(hidden, axes, axis=1, tiled=True)

    def add_chunk(d_head: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[LossSums, jax.Array]]:
        x, target = chunk  # [n, D], [n]
        with jax.named_scope("logits"):
            counted = target != IGNORE
            # Rounded to the compute dtype, as their gradients are: as fp32 they would take as long to read as to make. The
            # barrier keeps XLA from leaving the rounding out.
            rounded = jax.lax.optimization_barrier(jnp.einsum("nD,vD->nv", x, head))
            logits = rounded.astype(jnp.float32)
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

    # Every device adds up its own tokens' gradients in fp32 over all chunks.
    zero = jax.lax.pcast(jnp.zeros((), jnp.float32), token_axes + axes_of("vocab"), to="varying")
    d_head = jnp.broadcast_to(after(zero, hidden), head.shape)
    d_head, (chunk_sums, d_x) = jax.lax.scan(add_chunk, d_head, _chunks(hidden, targets, vocab_size=head.shape[0]))
    sums = LossSums(*(jax.lax.psum(jnp.sum(chunk_sum, axis=0), token_axes) for chunk_sum in chunk_sums))
    d_hidden = sum_tokens(d_x.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape), hidden_spec)
    d_head = jax.lax.psum(d_head.astype(head.dtype), tuple(axis for axis in token_axes if axis not in left_open))
    return sums, (d_hidden, jax.lax.pcast(d_head, tuple(left_open), to="unreduced"))


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
