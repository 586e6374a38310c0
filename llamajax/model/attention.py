"""Grouped-query self-attention (arXiv:2305.13245): causal, and restricted to one document of a packed row.

The configuration selects the variations of other families: a sliding window (Mistral, arXiv:2310.06825), biases of queries,
keys and values (Qwen2, arXiv:2407.10671) and of the output (Llama with `attention_bias`), and norms of queries and keys
(Qwen3, arXiv:2505.09388), or of those of all heads at once (OLMoE, arXiv:2409.02060).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

from llamajax.config.adapters import AdaptersConfig, Projection
from llamajax.config.model import AttentionKernel, ModelConfig
from llamajax.config.parallel import SequenceForm, TensorForm, axes_of, num_parts
from llamajax.kernels.attention import Keys, Mask, Past, Queries, attend
from llamajax.model.adapters import Adapter, Seeds, seeds_like, with_columns, with_rows
from llamajax.model.layers import RMSNorm, normal, output_first, residual_std, with_bias
from llamajax.model.rope import RopeTable, apply_rope, score_factor
from llamajax.parallel.matmul import gathered_matmul, scattered_matmul
from llamajax.parallel.sharding import as_tuple, spec
from llamajax.parallel.stages import is_staged, merge, split
from llamajax.parallel.token_share import by_share
from llamajax.parallel.zero import Dims, weight

Arrange = Callable[[jax.Array, DTypeLike], jax.Array]
KeyValue = tuple[Keys, Keys]
"""Keys, rotated by their positions, and values of some tokens."""


class Rows(NamedTuple):
    """Data about the batch's rows that every layer's attention needs; computed once, before the layers."""

    cos: RopeTable
    sin: RopeTable
    mask: Mask
    """Which keys a token sees."""
    seeds: Seeds | None = None


class HeadsNorm(nnx.Module):
    """RMSNorm of all heads' queries, or of all heads' keys, as one vector; its scale is [K, G, H] or [K, 1, H]."""

    def __init__(self, shape: tuple[int, int, int], config: ModelConfig, stored: Dims, arrange: Arrange):
        self.eps = config.norm_eps
        self.arrange = arrange
        self.scale = weight(shape, config.param_dtype, stored=stored, compute=None, init=jnp.ones)

    def __call__(self, x: Float[Array, "B T J M H"]) -> Float[Array, "B T J M H"]:
        """Returns the normed values in x's dtype; computed in fp32. Copies of a head leave the mean as it is."""
        wide, scale = x.astype(jnp.float32), self.scale[...]
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=(-3, -2, -1), keepdims=True) + self.eps)
        if is_staged(jax.typeof(scale).sharding.spec):
            return merge(split(wide) * self.arrange(scale, jnp.float32)[:, None, None]).astype(x.dtype)
        return (wide * self.arrange(scale[None], jnp.float32)[None]).astype(x.dtype)


class Attention(nnx.Module):
    """Fused q/k/v projection, rotary positions, attention, output projection.

    `wqkv` is [D, K, G + 2, H]: for each of the K kv heads its G query heads, then its key, then its value. Splitting kv
    heads over devices therefore keeps a group together. `wo` is [D, K, G, H]. Query head n is k * G + g. `qkv_bias` is [K, G
    + 2, H], in the order of `wqkv`; `output_bias` is [D].

    Where more devices split the kv heads than there are kv heads, the weights are stored whole, and compute uses one kv head
    per device: a copy of one of the K heads, with its share of that head's query heads.
    """

    MATRICES: ClassVar[Mapping[str, Sequence[Projection]]] = {"wqkv": ("q", "k", "v"), "wo": ("o",)}
    """Projections that each matrix joins, see `columns_of`."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        D, K, H, dtype = config.embed_dim, config.num_kv_heads, config.head_dim, config.param_dtype
        G = config.num_heads // K
        qkv_key, o_key = jax.random.split(key)
        is_split = K % _num_parts() == 0
        heads = ("kv_heads" if is_split else None, None, "head_dim")
        stored, compute = ("embed" if is_split else "embed_tensor", *heads), (None, "kv_heads", None, "head_dim")
        init = normal(qkv_key, config.init_std)
        self.wqkv = weight((D, K, G + 2, H), dtype, stored=stored, compute=compute, init=init, arrange=_split_qkv)
        init = output_first(normal(o_key, residual_std(config)))
        self.wo = weight((D, K, G, H), dtype, stored=stored, compute=compute, init=init, arrange=_split_queries)
        bias = weight((K, G + 2, H), dtype, stored=heads, compute=None, init=jnp.zeros) if config.qkv_bias else None
        self.qkv_bias = bias
        self.output_bias = weight((D,), dtype, stored=(None,), compute=None, init=jnp.zeros) if config.output_bias else None
        across = config.qk_norm_across_heads
        q_norm = HeadsNorm((K, G, H), config, heads, _split_queries) if across else None
        k_norm = HeadsNorm((K, 1, H), config, heads, _repeat_heads) if across else None
        self.q_norm = RMSNorm(H, config) if config.qk_norm else q_norm
        self.k_norm = RMSNorm(H, config) if config.qk_norm else k_norm
        self.q_adapter: Adapter | None = nnx.data(None)
        self.k_adapter: Adapter | None = nnx.data(None)
        self.v_adapter: Adapter | None = nnx.data(None)
        self.o_adapter: Adapter | None = nnx.data(None)
        self.scale = score_factor(config) / math.sqrt(H)
        self.kernel: AttentionKernel = config.attention_kernel

    @staticmethod
    def adapters(model: ModelConfig, config: AdaptersConfig, dtype: DTypeLike, key: jax.Array) -> dict[Projection, Adapter]:
        """Draws adapters of its projections; those that `config` does not name are left out."""
        D, K, H = model.embed_dim, model.num_kv_heads, model.head_dim
        heads = ("kv_heads" if K % _num_parts() == 0 else None, None, "head_dim")
        compute, queries, keys = ("kv_heads", None, "head_dim"), (D, K, model.num_heads // K, H), (D, K, 1, H)
        kinds: dict[Projection, Any] = {
            "q": {"shape": queries, "is_row": False, "arrange": _split_queries},
            "k": {"shape": keys, "is_row": False, "arrange": _repeat_heads},
            "v": {"shape": keys, "is_row": False, "arrange": _repeat_heads},
            "o": {"shape": queries, "is_row": True, "arrange": _split_queries},
        }
        return {
            name: Adapter(config, dtype=dtype, key=own_key, stored=heads, compute=compute, **kind)
            for (name, kind), own_key in zip(kinds.items(), jax.random.split(key, len(kinds)), strict=True)
            if name in config.targets
        }

    def __call__(
        self,
        x: Float[Array, "B T D"],
        rows: Rows,
        past: Past | None = None,
        *,
        sequence: SequenceForm = "gather",
        tensor: TensorForm = "collective",
        saved_share: float = 1.0,
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """Returns the addition to the residual stream, in x's dtype; and the keys and values of these tokens.

        With `past`, the newest tokens of each row see the cached tokens before them, and no segments. `sequence` is the
        form of attention to split rows; `tensor` is the form of matmuls that devices share. `saved_share` is the share of
        the tokens whose projections have the checkpoint name `qkv`.
        """
        q, k, v = self._project(x, rows, tensor, saved_share)
        with jax.named_scope("attend"):
            out, _ = attend(q, k, v, rows.mask, self.scale, past=past, kernel=self.kernel, sequence=sequence)
        with jax.named_scope("output_projection"):
            residual, wo = jax.typeof(x).sharding.spec, self.wo[...]
            y = scattered_matmul(out, wo, residual, tensor, frozen=self.wo.frozen)
            return with_bias(with_rows(y, out, wo, self.o_adapter, rows.seeds), self.output_bias), (k, v)

    def _project(
        self, x: Float[Array, "B T D"], rows: Rows, tensor: TensorForm, saved_share: float
    ) -> tuple[Queries, Keys, Keys]:
        """Returns queries, keys and values; queries and keys are rotated by their positions."""
        with jax.named_scope("qkv"):

            def project(tokens: tuple[jax.Array, Seeds | None], is_saved: bool) -> jax.Array:
                x, seeds = tokens
                wqkv, adapters = self.wqkv[...], (self.q_adapter, self.k_adapter, self.v_adapter)
                qkv = gathered_matmul(x, wqkv, tensor, frozen=self.wqkv.frozen)
                qkv = with_columns(qkv, x, wqkv, adapters, seeds)
                if self.qkv_bias is not None:
                    bias = self.qkv_bias[...]
                    of_stages = is_staged(jax.typeof(bias).sharding.spec)
                    split = _split_qkv(bias if of_stages else bias[None], jnp.float32)
                    qkv = with_bias(qkv, split if of_stages else split[0])
                return checkpoint_name(qkv, "qkv") if is_saved else qkv

            qkv = by_share(project, (x, seeds_like(x, rows.seeds)), saved_share)
            q, k, v = qkv[:, :, :, :-2], qkv[:, :, :, -2:-1], qkv[:, :, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, rows.cos, rows.sin), apply_rope(k, rows.cos, rows.sin)[:, :, :, 0], v


def _num_parts() -> int:
    return num_parts("kv_heads", jax.sharding.get_abstract_mesh().shape)


def _split_qkv(w: Num[Array, "E K C H"], dtype: DTypeLike) -> Num[Array, "E J M H"]:
    """Splits `wqkv`, or an array of it quantized, into the J kv heads that compute uses, in `dtype`. Heads are copied in w's
    own dtype, in which the copies' gradients add up."""
    E, K, C, H = w.shape
    if (J := max(K, _num_parts())) == K:
        return w.astype(dtype)
    lies = jax.typeof(w).sharding.spec
    queries = jax.lax.reshape(w[:, :, :-2], (E, J, K * (C - 2) // J, H), out_sharding=lies)
    shared = jnp.repeat(w[:, :, -2:], J // K, axis=1, out_sharding=lies)
    return _split_heads(jnp.concatenate([queries, shared], axis=2).astype(dtype))


def _split_queries(w: Num[Array, "E K G H"], dtype: DTypeLike) -> Num[Array, "E J M H"]:
    """Splits `wo` into the J kv heads that compute uses, like `_split_qkv`."""
    E, K, G, H = w.shape
    if (J := max(K, _num_parts())) == K:
        return w.astype(dtype)
    queries = jax.lax.reshape(w, (E, J, K * G // J, H), out_sharding=jax.typeof(w).sharding.spec)
    return _split_heads(queries.astype(dtype))


def _repeat_heads(w: Num[Array, "E K 1 H"], dtype: DTypeLike) -> Num[Array, "E J 1 H"]:
    """Copies keys or values for the J kv heads that compute uses, like `_split_qkv`."""
    K = w.shape[1]
    if (J := max(K, _num_parts())) == K:
        return w.astype(dtype)
    return _split_heads(jnp.repeat(w, J // K, axis=1, out_sharding=jax.typeof(w).sharding.spec).astype(dtype))


def _split_heads(w: Num[Array, "E J M H"]) -> Num[Array, "E J M H"]:
    """Reshards by heads: each device sends every other device the rows that it stores of that device's head, in one
    all-to-all."""
    rows = tuple(axis for axis in as_tuple(jax.typeof(w).sharding.spec[0]) if axis not in axes_of("kv_heads"))
    return jax.reshard(w, jax.P(rows or None, *spec("kv_heads", None, "head_dim")))
