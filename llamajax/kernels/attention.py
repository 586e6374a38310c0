"""The one door to attention: what a query sees, in which form split rows are seen, and which kernel computes it."""

import jax
from jax.ad_checkpoint import checkpoint_name

from llamajax.config.model import AttentionKernel
from llamajax.config.parallel import SequenceForm, num_parts
from llamajax.errors import ConfigError
from llamajax.kernels import cached, cudnn, plain, ring, ulysses
from llamajax.kernels.cached import Past
from llamajax.kernels.plain import Keys, LogSumExp, Mask, Queries


def attend(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Mask,
    scale: float,
    *,
    past: Past | None = None,
    kernel: AttentionKernel = "auto",
    sequence: SequenceForm = "gather",
    with_lse: bool = False,
) -> tuple[Queries, LogSumExp | None]:
    """softmax(scale * q k^T) v over the keys a query may see, scores and softmax in fp32.

    Args:
        q: queries.
        k: keys of the same tokens.
        v: their values.
        mask: which keys a query sees.
        scale: of the scores.
        past: keys and values of each row's tokens before; then T is 1, not split, and the mask has no segments.
        kernel: what computes it; `auto` is cuDNN's where it can, else the plain form. A past has a form of its own.
        sequence: how rows that are split are seen; `auto` is `gather`. For `ring`, tokens lie as
            `llamajax.parallel.sequence.laid_out` lays them.
        with_lse: whether to give the log-sum-exp of the scores, by which attention to parts of the keys is put together.

    Returns:
        The mean values, of q's dtype and sharding, which remat knows as `attention`; and the log-sum-exp where it is asked
        for, sharded as q's first dims.

    Raises:
        ConfigError: cuDNN was asked for and cannot.
    """
    if past is not None:
        return cached.attend(q, k, v, past, mask.window, scale, with_lse=with_lse)
    is_split = num_parts("seq", jax.sharding.get_abstract_mesh().shape) > 1
    reason = cudnn.obstacle(q, mask, sequence=sequence, with_lse=with_lse) if kernel != "plain" else None
    if kernel == "cudnn" and reason is not None:
        raise ConfigError(f"model.attention_kernel: cudnn cannot be used: {reason}; or set auto")
    fused = kernel != "plain" and reason is None
    if sequence == "ring" and is_split:
        out, lse = ring.attend(q, k, v, mask, scale)
        return out, lse if with_lse else None
    if sequence == "ulysses" and is_split:
        out, lse = ulysses.attend(q, k, v, mask, scale, fused=fused, with_lse=with_lse)
    elif fused:
        out, lse = cudnn.attend(q, k, v, mask.window, scale), None
    else:
        out, lse = plain.attend(q, k, v, mask, scale, with_lse=with_lse)
    return checkpoint_name(out, "attention"), lse
