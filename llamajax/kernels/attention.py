"""The one door to attention: what a query sees, and which kernel computes it."""

from llamajax.config.model import AttentionKernel
from llamajax.errors import ConfigError
from llamajax.kernels import cached, cudnn, plain
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
        with_lse: whether to give the log-sum-exp of the scores, by which attention to parts of the keys is put together.

    Returns:
        The mean values, of q's dtype and sharding; and the log-sum-exp where it is asked for, sharded as q's first dims.

    Raises:
        ConfigError: cuDNN was asked for and cannot.
    """
    if past is not None:
        return cached.attend(q, k, v, past, mask.window, scale, with_lse=with_lse)
    if kernel != "plain":
        reason = cudnn.obstacle(q, mask, with_lse=with_lse)
        if reason is None:
            return cudnn.attend(q, k, v, mask.window, scale), None
        if kernel == "cudnn":
            raise ConfigError(f"model.attention_kernel: cudnn cannot be used: {reason}; or set auto")
    return plain.attend(q, k, v, mask, scale, with_lse=with_lse)
