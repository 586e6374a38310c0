"""Next-token cross-entropy with an optional z-loss, without ever holding the logits of all tokens at once.

The head and the loss are one function with its own derivative: it computes the logits of a chunk of tokens, turns them into
their loss and the gradients of the hidden states and of the head, and drops them. The backward pass only scales these
gradients, so the logits are computed once, and the head needs three matmuls per chunk instead of four.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.model import Remat
from llamajax.config.offload import ON_CARD, OffloadConfig
from llamajax.config.parallel import PLAIN, ParallelConfig, axes_of
from llamajax.model import Llama
from llamajax.parallel.arrays import after
from llamajax.parallel.sequence import laid_out
from llamajax.parallel.sharding import as_tuple
from llamajax.parallel.tensor import shared_axes
from llamajax.parallel.vocabulary import row_ids, split_softmax, sum_tokens
from llamajax.parallel.zero import PreparedWeights, gathered
from llamajax.step.batch import IGNORE

MAX_CHUNK_LOGITS = 2**28
"""Limit of the logits that a device holds at once: 1 GiB of fp32, which is still over 2,000 tokens of Llama 3's vocabulary
of 128,256 per matmul, enough to keep a GPU busy."""


class LossSums(NamedTuple):
    """Sums over the counted tokens of a batch, or over its answers, the same on every device."""

    loss: jax.Array
    """fp32 []: cross-entropy plus z-loss, to differentiate; or see `llamajax.step.preferences`."""
    cross_entropy: jax.Array
    """fp32 []: cross-entropy alone, in nats; for reports, without a gradient."""
    num_counted: jax.Array
    """int32 []: number of counted tokens, or of pairs of answers."""


def loss_fn(
    weights: PreparedWeights[Llama],
    batch: Mapping[str, jax.Array],
    *,
    z_loss_weight: float,
    parallel: ParallelConfig = PLAIN,
    remat: Remat = "none",
    offload: OffloadConfig = ON_CARD,
) -> tuple[jax.Array, tuple[LossSums, dict[str, jax.Array]]]:
    """Returns the batch's summed loss, to differentiate and to divide by a token count; and for reports all its sums, and
    the sums of the layers' auxiliary values, float32 scalars over the same tokens.

    Args:
        weights: the Llama, prepared or as stored.
        batch: `tokens`, `targets`, `segment_ids` and `positions`, each int32 [B, T]; a target of `IGNORE` is not counted.
            `seeds`, uint32 [B, T], where adapters drop inputs.
        z_loss_weight: weight of the squared log-partition function, which keeps logits small (PaLM, arXiv:2204.02311).
        parallel: the forms in which devices share the work.
        remat: see `Llama.hidden`.
        offload: see `Llama.hidden`.
    """
    hidden, auxiliary, head = states_and_head(weights, batch, parallel=parallel, remat=remat, offload=offload)
    targets = laid_out(batch["targets"], parallel.sequence)  # in the order of the hidden states; a sum has no order
    with jax.named_scope("loss"):
        return losses(weights.trained, hidden, auxiliary, head, targets, z_loss_weight)


def states_and_head(
    weights: PreparedWeights[Llama],
    batch: Mapping[str, jax.Array],
    *,
    parallel: ParallelConfig,
    remat: Remat = "none",
    offload: OffloadConfig = ON_CARD,
) -> tuple[Float[Array, "B T D"], dict[str, Float32[Array, "B T"]], nnx.Param]:
    """Returns the last states and auxiliary values of `Llama.hidden`, and the head's copy for compute; arguments as for
    `loss_fn`."""
    weights = _with_ends_apart(weights)
    rows = (batch["tokens"], batch["segment_ids"], batch["positions"])
    forms: Any = {"parallel": parallel, "remat": remat, "offload": offload, "seeds": batch.get("seeds")}
    hidden, auxiliary = weights.trained.hidden(*rows, copies=weights.copies, **forms)
    with jax.named_scope("loss"):
        output = weights.part(Llama.output_weight)
        hidden, trained = _back_at_once(hidden, output.trained)
        return hidden, auxiliary, gathered(trained, hidden.dtype, output.copies)


def losses(
    model: Llama,
    hidden: Float[Array, "B T D"],
    auxiliary: dict[str, Float32[Array, "A S"]],
    head: nnx.Param,
    targets: Int32[Array, "B T"],
    z_loss_weight: float,
    *,
    auxiliary_targets: Int32[Array, "A S"] | None = None,
) -> tuple[jax.Array, tuple[LossSums, dict[str, jax.Array]]]:
    """Returns the results of `loss_fn` from the model's last states.

    Args:
        model: its configuration and the weights of its auxiliary values count.
        hidden: normed states, and `auxiliary` values, see `Llama.hidden`.
        auxiliary: see `hidden`.
        head: the head's copy for compute.
        targets: in the order of the states.
        z_loss_weight: see `loss_fn`.
        auxiliary_targets: targets of the tokens of `auxiliary`, where these are others.
    """
    counted = targets if auxiliary_targets is None else auxiliary_targets
    sums = token_losses(hidden, head[...], targets, z_loss_weight, model.config.vocab_size)
    totals = {name: _counted(values, counted) for name, values in auxiliary.items()}
    loss = sum((weight * totals[name] for name, weight in model.auxiliary.items() if weight), sums.loss)
    return loss, (sums, totals)


def _counted(values: Float32[Array, "B T"], targets: Int32[Array, "B T"]) -> Float32[Array, ""]:
    """Returns the sum of the values over counted tokens, on every device."""
    targets = jax.reshard(targets, jax.typeof(values).sharding.spec)
    return jnp.sum(jnp.where(targets != IGNORE, values, 0.0))


@jax.custom_vjp
def _back_at_once(hidden: jax.Array, head: nnx.Param) -> tuple[jax.Array, nnx.Param]:
    """Identity that releases its gradients only when both are ready. Otherwise the head's gradient, which is whole until it
    is scattered, would wait for its scatter throughout the backward pass of all layers."""
    return hidden, head


_back_at_once.defvjp(lambda *both: (both, None), lambda _, gradients: jax.lax.optimization_barrier(gradients))


def _with_ends_apart(weights: PreparedWeights[Llama]) -> PreparedWeights[Llama]:
    """Returns the weights with the embedding gathered before the head, and its gradient reduced after the head's. XLA would
    otherwise merge the two collectives into one, which waits for the later one and hides behind nothing."""
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
    """Returns the summed losses of all counted tokens; only `.loss` has a gradient.

    Args:
        hidden: hidden states in the compute dtype, sharded as the tokens of `look_up`.
        head: the head's copy for compute, in the same dtype; its gradient stays unreduced where the copy was reduced.
        targets: in [0, V) or `IGNORE`, sharded ("batch", "seq"), or as the stages of a pipeline share tokens.
        z_loss_weight: weight of the squared log-partition function.
        vocab_size: V; rows of the head from V on are padding.
    """
    return sums_and_gradients(hidden, head, targets, z_loss_weight, vocab_size)[0]  # the compiler drops the rest


Gradients = tuple[Float[Array, "B T D"], Float[Array, "R D"]]
"""Gradients of hidden and head, in their dtype."""


def sums_and_gradients(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    z_loss_weight: float,
    vocab_size: int,
    token_weights: Float32[Array, "B T"] | None = None,
) -> tuple[LossSums, Gradients]:
    """Returns `token_losses` and the gradients of its `.loss`, of each token times its weight if there are weights."""
    hidden_spec, head_spec, target_spec = (jax.typeof(x).sharding.spec for x in (hidden, head, targets))
    weights = () if token_weights is None else (token_weights,)
    left_open = head_spec.reduced
    on_device = partial(
        _on_device,
        hidden_spec=hidden_spec,
        token_axes=tuple(axis for entry in target_spec for axis in as_tuple(entry)),
        left_open=left_open,
        z_loss_weight=z_loss_weight,
        vocab_size=vocab_size,
    )
    return jax.shard_map(
        on_device,
        in_specs=(hidden_spec, head_spec, target_spec, *(target_spec for _ in weights)),
        out_specs=(P(), (hidden_spec, P(*head_spec.partitions, unreduced=left_open))),
    )(hidden, head, targets, *weights)


def _scale_gradients(
    z_loss_weight: float, vocab_size: int, gradients: Gradients, cotangents: LossSums
) -> tuple[jax.Array, jax.Array, None]:
    d_hidden, d_head = gradients
    scale = cotangents.loss
    head_scale = jax.reshard(scale, P(reduced=jax.typeof(d_head).sharding.spec.unreduced))
    return (scale * d_hidden).astype(d_hidden.dtype), (head_scale * d_head).astype(d_head.dtype), None


token_losses = jax.custom_vjp(_token_losses, nondiff_argnums=(3, 4))
token_losses.defvjp(sums_and_gradients, _scale_gradients)


def _on_device(
    hidden: Float[Array, "b t_own D"],
    head: Float[Array, "r D"],
    targets: Int32[Array, "b t"],
    token_weights: Float32[Array, "b t"] | None = None,
    *,
    hidden_spec: P,
    token_axes: tuple[str, ...],
    left_open: frozenset[str],
    z_loss_weight: float,
    vocab_size: int,
) -> tuple[LossSums, Gradients]:
    """Computes one device's part of `sums_and_gradients`; the gradient of the head is not summed over the axes
    `left_open`."""
    vocab_ids = row_ids(head, vocab_size)
    if axes := shared_axes(hidden_spec):
        hidden = jax.lax.all_gather(hidden, axes, axis=1, tiled=True)

    def add_chunk(d_head: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[LossSums, jax.Array]]:
        x, target, *weight = chunk  # [n, D], [n], perhaps [n]
        with jax.named_scope("logits"):
            counted = target != IGNORE
            logits = chunk_logits(x, head)
            (exps, exp_sum, largest, target_logit), is_target = split_softmax(logits, vocab_ids, target)
            lse = jnp.log(exp_sum) + largest
            cross_entropy = jnp.sum(jnp.where(counted, lse - target_logit, 0.0))
            z_loss = jnp.sum(jnp.where(counted, z_loss_weight * jnp.square(lse), 0.0))
            sums = LossSums(cross_entropy + z_loss, cross_entropy, jnp.sum(counted, dtype=jnp.int32))
            d_logits = exps * ((1 + 2 * z_loss_weight * lse) / exp_sum)[:, None] - is_target
            for own in weight:
                d_logits *= own[:, None]
            d_logits = jnp.where(counted[:, None], d_logits, 0.0).astype(x.dtype)
        with jax.named_scope("d_hidden"):
            d_x = jnp.einsum("nv,vD->nD", d_logits, head)
        with jax.named_scope("d_head"):
            d_head += jnp.einsum("nv,nD->vD", d_logits, x, preferred_element_type=jnp.float32)
        return d_head, (sums, d_x)

    # Every device adds up its own tokens' gradients in fp32 over all chunks.
    zero = jax.lax.pcast(jnp.zeros((), jnp.float32), token_axes + axes_of("vocab"), to="varying")
    d_head = jnp.broadcast_to(after(zero, hidden), head.shape)
    weights = () if token_weights is None else (token_weights,)
    d_head, (chunk_sums, d_x) = jax.lax.scan(add_chunk, d_head, chunks(hidden, targets, *weights, vocab_size=head.shape[0]))
    sums = LossSums(*(jax.lax.psum(jnp.sum(chunk_sum, axis=0), token_axes) for chunk_sum in chunk_sums))
    d_hidden = sum_tokens(d_x.reshape(-1, hidden.shape[-1])[: targets.size].reshape(hidden.shape), hidden_spec)
    d_head = jax.lax.psum(d_head.astype(head.dtype), tuple(axis for axis in token_axes if axis not in left_open))
    return sums, (d_hidden, jax.lax.pcast(d_head, tuple(left_open), to="unreduced"))


def chunk_logits(x: Float[Array, "n D"], head: Float[Array, "r D"]) -> Float32[Array, "n r"]:
    """Returns the logits of a chunk of states for a device's rows of the head.

    They are rounded to the compute dtype, like their gradients: in fp32, reading them would take as long as computing them.
    The barrier keeps XLA from removing the rounding.
    """
    return jax.lax.optimization_barrier(jnp.einsum("nD,vD->nv", x, head)).astype(jnp.float32)


def chunks(hidden: jax.Array, targets: jax.Array, *weights: jax.Array, vocab_size: int) -> tuple[jax.Array, ...]:
    """Splits [b, t, D] and [b, t] into the fewest equal chunks [c, n, D] and [c, n] with n * vocab_size in bounds.

    Tokens that pad the last chunk are not counted.
    """
    num_chunks = math.ceil(targets.size * vocab_size / MAX_CHUNK_LOGITS)
    size = math.ceil(targets.size / num_chunks)
    fill = num_chunks * size - targets.size
    hidden = jnp.pad(hidden.reshape(targets.size, -1), ((0, fill), (0, 0)))
    targets = jnp.pad(targets.reshape(-1), (0, fill), constant_values=IGNORE)
    padded = (jnp.pad(weight.reshape(-1), (0, fill)).reshape(num_chunks, size) for weight in weights)
    return hidden.reshape(num_chunks, size, -1), targets.reshape(num_chunks, size), *padded
