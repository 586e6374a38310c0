"""The entry point of attention: applies the mask, the form of split rows and the kernel that computes the scores."""

import jax
from jax.ad_checkpoint import checkpoint_name

from llamajax.config.model import AttentionKernel
from llamajax.config.parallel import SequenceForm, num_parts
from llamajax.kernels import cached, cudnn, pallas, plain, ring, tokamax_kernel, ulysses
from llamajax.kernels.cached import Past
from llamajax.kernels.choice import Kernel, Site, choose, compute_capability, is_on_gpu
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
    """Returns softmax(scale * q k^T) v over the keys that a query may see, with scores and softmax in fp32.

    Args:
        q: queries.
        k: keys of the same tokens.
        v: values of the same tokens.
        mask: which keys a query sees.
        scale: factor of the scores.
        past: keys and values of each row's earlier tokens; then T is not split, and the mask has no segments.
        kernel: kernel that computes attention, see `llamajax.kernels.choice`. Attention to a past always uses its own form.
        sequence: form of attention to split rows; `auto` means `gather`. For `ring`, tokens are in the order of
            `llamajax.parallel.sequence.laid_out`.
        with_lse: whether to return the log-sum-exp of the scores, which combines attention to parts of the keys.

    Returns:
        The weighted means of the values, with q's dtype and sharding; and, on request, the log-sum-exp, sharded as q's first
        dims. Backward residuals carry the checkpoint name `attention` (for cuDNN, match `cudnn.is_kernel`).

    Raises:
        ConfigError: the requested kernel cannot compute this attention.
    """
    if past is not None:
        return cached.attend(q, k, v, past, mask.window, scale, with_lse=with_lse)
    chosen, is_gpu, is_split = _choice(kernel, q, mask, sequence, with_lse=with_lse), is_on_gpu(), _splits_rows()
    if sequence == "ring" and is_split:
        out, lse = ring.attend(q, k, v, mask, scale, kernel=chosen, interpret=not is_gpu)
    elif sequence == "ulysses" and is_split:
        out, lse = ulysses.attend(q, k, v, mask, scale, kernel=chosen, interpret=not is_gpu, with_lse=with_lse)
    elif chosen == "pallas" or chosen == "triton":
        out, lse = pallas.attend(q, k, v, mask, scale, interpret=not is_gpu, language=chosen)
    elif chosen == "cudnn":
        out, lse = cudnn.attend(q, k, v, mask.window, scale), None
    elif chosen == "tokamax":
        out, lse = tokamax_kernel.attend(q, k, v, mask, scale), None
    else:
        out, lse = plain.attend(q, k, v, mask, scale, with_lse=with_lse)
        out = checkpoint_name(out, "attention")
    return out, lse if with_lse else None


def with_sight(
    mask: Mask, q: jax.ShapeDtypeStruct, *, kernel: AttentionKernel = "auto", sequence: SequenceForm = "gather"
) -> Mask:
    """Returns the mask with the data that the kernel derives from it, computed once for all layers; `q` has the shape of the
    queries, see `attend`."""
    chosen = _choice(kernel, q, mask, sequence)
    if chosen == "tokamax":
        return tokamax_kernel.see(mask)
    if chosen not in ("pallas", "triton") or (sequence == "ring" and _splits_rows()):
        return mask
    return pallas.see(mask, q.shape[1], q.shape[-1], sequence)


def _choice(
    kernel: AttentionKernel, q: jax.Array | jax.ShapeDtypeStruct, mask: Mask, form: SequenceForm, *, with_lse: bool = False
) -> Kernel:
    closes_documents, capability = mask.segment_ids is not None, compute_capability()
    site = Site(is_on_gpu(), str(q.dtype), q.shape[-1], closes_documents, form, _splits_rows(), with_lse, capability)
    return choose(kernel, site)[0]


def _splits_rows() -> bool:
    return num_parts("seq", jax.sharding.get_abstract_mesh().shape) > 1
