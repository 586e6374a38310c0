"""Kinds of programs behind published runs: the bytes that their elementwise kernels move, and their attention.

Bytes are what each kernel reads and writes, counted by hand from the programs' sources: two per number, except where a
kernel widens to float32. Operands and results of products do not count, because products take longer than their bytes.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

Attention = Literal["cudnn", "flash 1", "flash 2", "unfused"]
Kind = Literal["eager PyTorch", "torch.compile", "Megatron, TransformerEngine", "XLA of MaxText", "CUDA of LLM.Q"]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Elementwise kernels of one layer in one direction."""

    residual: float
    """Bytes per token and channel of the residual stream: norms, additions, sums of gradients."""
    rotated: float
    """Bytes per token and channel of queries and keys: RoPE."""
    hidden: float
    """Bytes per token and channel of the MLP."""
    kernels: int
    """Number of kernels."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Way in which one kind of program computes a step."""

    kind: Kind
    attention: Attention
    forward: Pass
    backward: Pass
    logits: float
    """Bytes per token and word of the vocabulary: the loss and its gradient."""
    optimizer: float
    """Bytes per parameter that a GPU updates: its norm's part, moments, weight, bfloat16 copy."""
    joins_products: bool = False
    """Whether queries, keys and values are one product, and gate and up another."""
    rounding: float = 6
    """Bytes per number of a float8 product's operands: read for the maximum (2), read again (2), written rounded both as is
    and transposed (1 and 1)."""


# A LLaMA of one kernel per operation, but norms of one (apex, Triton). Forward: two norms of 4, two additions of 6; RoPE in
# complex float32: widened 6, turned 8, narrowed 6; silu 4 and its product 6. Backward: norms' gradients of 6, additions' 12,
# sums of what q, k, v and gate, up give to their input 18; RoPE again; the product's 12 and silu's 6. Loss: logits widened
# 6, log-softmax 8, its gradient filled 4, computed 12, narrowed 6. AdamW of one kernel per operation on all tensors: moments
# 40, root, division and update 40, norm and clipping 12.
EAGER = Program(
    kind="eager PyTorch",
    attention="flash 2",
    forward=Pass(residual=20, rotated=20, hidden=10, kernels=16),
    backward=Pass(residual=42, rotated=20, hidden=18, kernels=26),
    logits=36,
    optimizer=92,
)
# The same with norms of one kernel per operation: widened 6, squared 8, averaged 4, scaled 8, narrowed 6, weighed 4; some 60
# backward.
EAGER_NORMS = dataclasses.replace(
    EAGER,
    forward=Pass(residual=84, rotated=20, hidden=10, kernels=28),
    backward=Pass(residual=150, rotated=20, hidden=18, kernels=46),
)
# MPT: LayerNorm of one kernel (4; 6 backward, and 4 for its weight and bias), additions (12, and 12 backward), GELU (4, and
# 6 backward), biases whose gradients are sums over tokens (10 per channel of the residual, 2 of the MLP), no RoPE, and the
# gradients of q, k, v put together (12).
MPT = Program(
    kind="eager PyTorch",
    attention="flash 2",
    forward=Pass(residual=20, rotated=0, hidden=4, kernels=5),
    backward=Pass(residual=54, rotated=0, hidden=8, kernels=14),
    logits=36,
    optimizer=92,
)
# Inductor: norm and addition are one kernel (8), RoPE one (4), SwiGLU one (6). Backward: norm, addition and the sum of what
# products give (12 and 10) with the norm's weight (8), RoPE, SwiGLU with what the last product takes (12).
COMPILED = Program(
    kind="torch.compile",
    attention="flash 2",
    forward=Pass(residual=16, rotated=4, hidden=6, kernels=5),
    backward=Pass(residual=30, rotated=4, hidden=12, kernels=9),
    logits=12,
    optimizer=34,
)
# Megatron-LM of 2023: as above, but one product gives q, k, v and one gate, up, so that no gradients are summed. What it
# moves to sum over micro-batches is the run's (`copies`). Its vocabulary-parallel loss works in float32, one kernel per
# operation; AdamW is one kernel (apex).
MEGATRON_2023 = dataclasses.replace(
    EAGER, kind="Megatron, TransformerEngine", attention="flash 1", logits=60, optimizer=38, joins_products=True,
    backward=Pass(residual=24, rotated=20, hidden=18, kernels=20),
)  # fmt: skip
# Megatron-LM of 2021, a GPT: attention is products, masked softmax and dropout, one after the other. Each of eight GPUs that
# share a layer works on all channels of the residual stream (x 8): two LayerNorms (4); bias, dropout and addition in one
# kernel (7); backward norms with their weights (10), dropout (5), the sum of both branches (6), biases' gradients (2). Bias
# and GELU are one kernel (4; backward 6, and 2 for the bias).
MEGATRON_2021 = dataclasses.replace(
    MEGATRON_2023, attention="unfused",
    forward=Pass(residual=8 * 22, rotated=0, hidden=4, kernels=5),
    backward=Pass(residual=8 * 46, rotated=0, hidden=8, kernels=12),
)  # fmt: skip
# TransformerEngine: norm 4, addition 6, RoPE 4, SwiGLU 6; backward norms of 8 and additions, RoPE, SwiGLU 10. Float8 by the
# largest of steps before, so that numbers are read once.
TRANSFORMER_ENGINE = Program(
    kind="Megatron, TransformerEngine",
    attention="cudnn",
    forward=Pass(residual=20, rotated=4, hidden=6, kernels=7),
    backward=Pass(residual=28, rotated=4, hidden=10, kernels=9),
    logits=30,
    optimizer=38,
    joins_products=True,
    rounding=4,
)
# The same, but float8 by the largest of what is rounded, which is read once more.
CURRENT_SCALING = dataclasses.replace(TRANSFORMER_ENGINE, rounding=6)
# MaxText with a loop over layers: fused as by Inductor; what a layer keeps for its backward pass is copied into the loop's
# stack and out of it again (JAX-Toolbox, docs/frameworks/maxtext, note on dynamic-update-slice): its input, queries,
# attention's and the MLP's output, 8 bytes each. Float8 as TransformerEngine.
MAXTEXT = Program(
    kind="XLA of MaxText",
    attention="cudnn",
    forward=Pass(residual=32, rotated=6, hidden=6, kernels=9),
    backward=Pass(residual=46, rotated=6, hidden=12, kernels=15),
    logits=16,
    optimizer=34,
    rounding=4,
)
# LLM.Q: kernels of its own in CUDA, fused as TransformerEngine's; weights and moments in bfloat16 (gradient 2 and 2 for its
# norm, moments and weight read and written 12); the loss and its gradient are one kernel (read twice, written once).
LLMQ = dataclasses.replace(TRANSFORMER_ENGINE, kind="CUDA of LLM.Q", logits=6, optimizer=16, rounding=6)
