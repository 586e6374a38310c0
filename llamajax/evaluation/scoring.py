"""Scores given texts under a model: the log probability of chosen tokens of each row.

Only sums over a row leave the devices, and only the logits of a few tokens exist at once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Bool, Float, Float32, Int32

from llamajax.model import Llama
from llamajax.parallel.sharding import spec
from llamajax.parallel.vocabulary import row_ids, split_softmax
from llamajax.parallel.zero import gathered
from llamajax.step.batch import IGNORE
from llamajax.step.loss import MAX_CHUNK_LOGITS

SHORTEST_ROW = 32
"""Minimum length of rows, in tokens."""


def row_length(num_tokens: int, multiple: int) -> int:
    """Returns the length to which a row of `num_tokens` is padded: a power of two, or one and a half times one, rounded up
    to a multiple. At most a third is padding before this rounding."""
    length = SHORTEST_ROW
    while length < num_tokens:
        length = length * 3 // 2 if length & (length - 1) == 0 else length * 4 // 3
    return -(-length // multiple) * multiple


@jax.jit
def score(
    model: Llama, tokens: Int32[Array, "B T"], targets: Int32[Array, "B T"]
) -> tuple[Float32[Array, "B"], Bool[Array, "B"]]:
    """Returns how likely the targets of each row are, and whether each of them is the likeliest token at its position.

    Args:
        model: the model.
        tokens: rows of one text each, from its start, padded on the right with any token.
        targets: the token after each token, or `IGNORE`.

    Returns:
        Sum of the targets' log probabilities, and whether all targets are the likeliest; both on every device.
    """
    hidden, _ = model.hidden(tokens)
    hidden = jax.reshard(hidden, spec("batch", "seq", None))
    head = gathered(model.output_weight(), hidden.dtype)[...]
    targets = jax.reshard(targets, spec("batch", "seq"))
    token_spec = spec("batch", "seq")
    logprobs, greedy = jax.shard_map(
        partial(_score_on_device, vocab_size=model.config.vocab_size),
        in_specs=(spec("batch", "seq", None), jax.typeof(head).sharding.spec, token_spec),
        out_specs=(token_spec, token_spec),
    )(hidden, head, targets)
    counted = targets != IGNORE
    sums = jnp.sum(jnp.where(counted, logprobs, 0.0), axis=1), jnp.all(~counted | greedy, axis=1)
    return jax.reshard(sums, P(None))


def _score_on_device(
    hidden: Float[Array, "b t D"], head: Float[Array, "v D"], targets: Int32[Array, "b t"], *, vocab_size: int
) -> tuple[Float32[Array, "b t"], Bool[Array, "b t"]]:
    """Computes one device's part of `score`."""
    vocab_ids = row_ids(head, vocab_size)

    def score_token(token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, target = token  # [D], []
        logits = jnp.einsum("D,vD->v", x, head, preferred_element_type=jnp.float32)
        softmax, _ = split_softmax(logits, vocab_ids, target)
        return softmax.target - softmax.largest - jnp.log(softmax.total), softmax.target == softmax.largest

    tokens = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    chunk = max(1, MAX_CHUNK_LOGITS // head.shape[0])
    logprobs, greedy = jax.lax.map(score_token, tokens, batch_size=min(chunk, targets.size))
    return logprobs.reshape(targets.shape), greedy.reshape(targets.shape)
