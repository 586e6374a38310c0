"""Strongest training step of a Llama that we can write in torch: few large matmuls, everything else fused by torch.compile,
torch's fastest attention kernel for the shapes, and logits in chunks, each with its gradients at once."""

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from llamajax.config.model import ModelConfig
from scripts.bench.case import HEAD_CHUNK, IGNORE
from scripts.bench.torch_attention import Batch, Form, compiled

Tensors = list[torch.Tensor]
PER_LAYER = 6


class Ideal:
    """Weights in bfloat16, with the computation of losses and gradients."""

    def __init__(self, model: ModelConfig, hf: Any, form: Form, remat: str, device: torch.device) -> None:
        """Takes the weights of transformers' own model `hf` and concatenates weights with the same input."""
        self.weights: Tensors = []
        """Embedding, final norm; of every layer norm, qkv, output, norm, gate and up, down; the head, unless it is tied."""
        self.parts: list[dict[str, int]] = []
        """For each parameter, the Hugging Face names of its parts, in order, and their rows."""
        self._model, self._form, self._remat = model, form, remat
        self._names = {id(weight): name for name, weight in hf.named_parameters()}
        for module in (hf.model.embed_tokens, hf.model.norm):
            self._add(device, module)
        for layer in hf.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self._add(device, layer.input_layernorm)
            self._add(device, attention.q_proj, attention.k_proj, attention.v_proj)
            self._add(device, attention.o_proj)
            self._add(device, layer.post_attention_layernorm)
            self._add(device, mlp.gate_proj, mlp.up_proj)
            self._add(device, mlp.down_proj)
        if not model.tie_embeddings:
            self._add(device, hf.lm_head)
        self._inverse_frequencies = hf.model.rotary_emb.inv_freq.to(device)
        self._rope_tables = compiled(self._make_rope_tables)
        self._attention = compiled(self._attention_part, fullgraph=True)
        self._mlp = compiled(self._mlp_part, fullgraph=True)
        self._layer = compiled(self._whole_layer, fullgraph=True)
        self._last_norm = compiled(lambda x, added, scale: self._norm(x + added, scale))

    def _add(self, device: torch.device, *modules: Any) -> None:
        with torch.no_grad():
            self.weights.append(torch.cat([module.weight for module in modules]).to(device).requires_grad_())
        self.parts.append({self._names[id(module.weight)]: len(module.weight) for module in modules})

    def loss_and_grads(self, batch: Batch) -> tuple[torch.Tensor, Tensors]:
        """Returns the losses of a micro-batch, summed in fp32, and their gradients."""
        embedding, final_norm, *rest = self.weights
        layers, head = (rest, embedding) if self._model.tie_embeddings else (rest[:-1], rest[-1])
        cos, sin = self._rope_tables(batch["positions"])
        prepared = self._form.prepare(batch)
        x = functional.embedding(batch["tokens"], embedding)
        added = torch.zeros_like(x)
        for at in range(0, len(layers), PER_LAYER):
            x, added = self._run_layer(x, added, layers[at : at + PER_LAYER], cos, sin, prepared)
        hidden = self._last_norm(x, added, final_norm)
        loss, d_hidden, d_head = chunked_loss(hidden.detach(), head.detach(), batch["targets"])
        grads = list(torch.autograd.grad(hidden, [embedding, final_norm, *layers], d_hidden))
        if self._model.tie_embeddings:
            grads[0] = grads[0] + d_head
            return loss, grads
        return loss, [*grads, d_head]

    def _run_layer(self, x: torch.Tensor, added: torch.Tensor, weights: Tensors, *rows: Any) -> Any:
        if self._remat == "none":
            return self._layer(x, added, weights, *rows)
        if self._remat == "full":
            return checkpoint(self._layer, x, added, weights, *rows, use_reentrant=False)
        x, added = self._attention(x, added, weights[:3], *rows)
        return checkpoint(self._mlp, x, added, weights[3:], use_reentrant=False)

    def _whole_layer(self, x: torch.Tensor, added: torch.Tensor, weights: Tensors, *rows: Any) -> Any:
        return self._mlp_part(*self._attention_part(x, added, weights[:3], *rows), weights[3:])

    def _attention_part(
        self, x: torch.Tensor, added: torch.Tensor, weights: Tensors, cos: torch.Tensor, sin: torch.Tensor, prepared: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream, and what is to be added to it: the next part does so while it norms it."""
        scale, qkv, output = weights
        N, K, H = self._model.num_heads, self._model.num_kv_heads, self._model.head_dim
        x = x + added
        projected = functional.linear(self._norm(x, scale), qkv).unflatten(-1, (N + 2 * K, H))
        q, k, v = projected.split([N, K, K], dim=2)
        q, k = (_turn(part, cos, sin) for part in (q, k))
        return x, functional.linear(self._form.attend(q, k, v, prepared).flatten(2), output)

    def _mlp_part(self, x: torch.Tensor, added: torch.Tensor, weights: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        scale, gate_up, down = weights
        x = x + added
        gate, up = functional.linear(self._norm(x, scale), gate_up).chunk(2, dim=-1)
        return x, functional.linear(functional.silu(gate) * up, down)

    def _norm(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._model.norm_eps) * scale).to(x.dtype)

    def _make_rope_tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[:, :, None].float() * self._inverse_frequencies)[:, :, None]
        return angles.cos(), angles.sin()


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def chunked_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the summed loss, fp32, and its gradients for `hidden` [B, T, D] and `head` [V, D]; logits come in chunks."""
    rows, counted = hidden.flatten(0, 1), targets.flatten()
    d_rows = torch.empty_like(rows)
    loss, d_head = torch.zeros((), device=rows.device), None
    for x, target, d_x in zip(*(whole.split(HEAD_CHUNK) for whole in (rows, counted, d_rows)), strict=True):
        own, d_logits = _loss_of_logits(x @ head.T, target)
        torch.mm(d_logits, head, out=d_x)
        own_head = d_logits.T @ x
        if len(rows) > HEAD_CHUNK:
            own_head = own_head.float()
        d_head = own_head if d_head is None else d_head.add_(own_head)
        loss = loss + own
    assert d_head is not None
    return loss, d_rows.view_as(hidden), d_head.to(head.dtype)


@compiled
def _loss_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = logits.float()
    lse, counted = torch.logsumexp(wide, dim=-1, keepdim=True), (targets != IGNORE)[:, None]
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    picked = torch.where(is_target, wide, 0.0).sum(-1, keepdim=True)
    d_logits = torch.where(counted, torch.exp(wide - lse) - is_target.float(), 0.0)
    return torch.where(counted, lse - picked, 0.0).sum(), d_logits.to(logits.dtype)
