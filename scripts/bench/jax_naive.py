"""Llama in plain jax, as one would write it first: a dict of weights by Hugging Face name, a loop over layers, XLA's
attention, all logits at once, optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from llamajax.config.model import ModelConfig
from llamajax.config.run import Config
from llamajax.model.rope import inverse_frequencies
from llamajax.step.optim import make_optimizer
from scripts.bench.case import IGNORE

Weights = dict[str, jax.Array]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps) * scale).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array, model: ModelConfig) -> jax.Array:
    angles = positions[..., None, None] * inverse_frequencies(model)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def layer(weights: Weights, x: jax.Array, batch: dict[str, jax.Array], model: ModelConfig, packed: bool) -> jax.Array:
    B, T, _ = x.shape

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ weights[f"{name}.weight"].astype(x.dtype).T

    h = rms_norm(x, weights["input_layernorm.weight"], model.norm_eps)
    q = linear(h, "self_attn.q_proj").reshape(B, T, model.num_heads, model.head_dim)
    k = linear(h, "self_attn.k_proj").reshape(B, T, model.num_kv_heads, model.head_dim)
    v = linear(h, "self_attn.v_proj").reshape(B, T, model.num_kv_heads, model.head_dim)
    q, k = rotate(q, batch["positions"], model), rotate(k, batch["positions"], model)
    mask = None
    if packed:
        mask = (batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None, :])[:, None]
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")
    x = x + linear(out.reshape(B, T, -1), "self_attn.o_proj")
    h = rms_norm(x, weights["post_attention_layernorm.weight"], model.norm_eps)
    return x + linear(jax.nn.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj"), "mlp.down_proj")


def make(config: Config, *, packed: bool) -> tuple[Any, Any]:
    """Returns the step (weights, optimizer state, batch) -> (weights, optimizer state, loss), and the optimizer's `init`.

    Each field of the batch is [micro-batches, B, T].
    """
    model = config.model
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.optimizer.grad_clip_norm or 0.0),
        make_optimizer(config.optimizer, config.train.num_steps),
    )

    def loss_sum(weights: Weights, batch: dict[str, jax.Array]) -> jax.Array:
        run = jax.checkpoint(layer, static_argnums=(3, 4)) if model.remat == "full" else layer
        x = weights["model.embed_tokens.weight"].astype(jnp.bfloat16)[batch["tokens"]]
        for number in range(model.num_layers):
            prefix = f"model.layers.{number}."
            own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
            x = run(own, x, batch, model, packed)
        x = rms_norm(x, weights["model.norm.weight"], model.norm_eps)
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        logits = (x @ head.astype(x.dtype).T).astype(jnp.float32)
        counted = batch["targets"] != IGNORE
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counted, batch["targets"], 0))
        return jnp.sum(losses * counted)

    def train_step(weights: Weights, opt_state: Any, batch: dict[str, jax.Array]) -> tuple[Weights, Any, jax.Array]:
        num_targets = jnp.sum(batch["targets"] != IGNORE)
        loss, grads = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
        for number in range(len(batch["tokens"])):
            micro_batch = {name: x[number] for name, x in batch.items()}
            own, own_grads = jax.value_and_grad(loss_sum)(weights, micro_batch)
            loss, grads = loss + own, jax.tree.map(jnp.add, grads, own_grads)
        grads = jax.tree.map(lambda grad: grad / num_targets, grads)
        updates, opt_state = optimizer.update(grads, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss / num_targets  # pyright: ignore[reportReturnType] (to optax any tree)

    return train_step, optimizer.init
