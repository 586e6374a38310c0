"""The FLOPs of a step, by arithmetic."""

from dataclasses import dataclass

from llamajax.config.model import SAVED_BY_REMAT
from llamajax.config.offload import BY_TOKEN
from llamajax.config.parallel import num_parts
from llamajax.estimates.device_memory import kept_results, saved_token_share
from llamajax.estimates.formulas import (
    active_matrices,
    computed_model,
    flops_per_token,
    num_matmul_params,
    stacks,
    trained_weights,
)
from llamajax.estimates.pipeline import StageWork, share_of_head
from llamajax.estimates.training_flops import adapter_matmul_params, matmul_flops_per_token, output_weight
from llamajax.planning.cost.attention import computed_scores, planned_kernel
from llamajax.step.resolve import ResolvedRun


@dataclass(frozen=True, kw_only=True)
class ExecutedFlops:
    """Matmul FLOPs of a step over all devices."""

    weights: float
    """FLOPs of products with weights, forward and backward, and in passes without gradients."""
    recomputed: float
    """FLOPs of products with weights that the backward pass repeats: those that `model.remat` does not keep, and the logits
    of a loss over answers."""
    attention: float
    """FLOPs of products of queries with keys and of weights with values, forward, backward and recomputed."""
    idle: float = 0.0
    """FLOPs that change no result, in the same products: stages of a pipeline compute while they have no micro-batch, in
    empty slots, and in the head's padding. The total leaves them out."""

    @property
    def total(self) -> float:
        return self.weights + self.recomputed + self.attention


def planned_flops(run: ResolvedRun) -> ExecutedFlops:
    """Returns the FLOPs of a step on the GPUs of the run's `hardware`, from the configuration alone.

    Attention is two products forward and five backward, because the backward pass recomputes the scores. A fused kernel
    computes the visible part; other forms compute the whole square, or, in a ring, 2 n^2 + n of its 4 n^2 pairs of chunks.
    llamajax's own kernels and tokamax's need three products for the gradients of queries and four for the gradients of keys.
    """
    config = run.config
    model, seq_len = computed_model(config.model, run.mesh), config.data.seq_len
    L, heads = model.num_layers, model.num_heads * model.head_dim
    kept = kept_results(config, run.mesh)
    lost = {name: 1 - saved_token_share(config, run.mesh) for name in BY_TOKEN}
    again = 0.0  # parameters of all layers, for one token
    for alike in stacks(model).values() if SAVED_BY_REMAT[model.remat] is not None else ():
        for matrix, size in active_matrices(alike).items():
            again += alike.num_layers * size * (lost.get(matrix.result or "", 0.0) if matrix.result in kept else 1.0)
    matmul_flops = matmul_flops_per_token(config, model)
    passes = config.objective.forward_passes(config.adapters)
    again_forward = 2 * passes + (2 if model.remat == "full" else 0)
    # Two FLOPs per multiply-add, and six products in `flops_per_token`: it counts four for the backward pass.
    if (scores := computed_scores(run)) is not None:
        by_keys = 7 if planned_kernel(run)[0] == "tokamax" else 4
        attention = 2 * L * heads * ((9 - by_keys + again_forward) * scores.by_queries + by_keys * scores.by_keys)
    elif planned_kernel(run)[0] == "cudnn":
        attention = (7 + again_forward) * (flops_per_token(model, seq_len) - 6 * num_matmul_params(model)) / 6
    else:
        parts = num_parts("seq", run.mesh) if config.parallel.sequence == "ring" else 1
        share = (2 * parts + 1) / (4 * parts) if parts > 1 else 1
        attention = (7 + again_forward) * 2 * L * heads * seq_len * share
    tokens, work = config.train.global_batch_size * seq_len, StageWork.of(config, run.mesh)
    table = model.head_rows * model.embed_dim
    head = (6.0 if output_weight(model) in trained_weights(config, model) else 4.0) * table
    of_adapters = adapter_matmul_params(config, model)
    again += of_adapters if again else 0
    of_layers = matmul_flops - head + 2.0 * again + attention
    # Without recomputation, the forward pass has two FLOPs per parameter; and two products of attention's seven, or of nine
    # in all kernels.
    forward = 2.0 * (num_matmul_params(model) - table + of_adapters) + attention * 2 / (7 + again_forward)
    executed, of_passes = 0.0, 2 / (7 + again_forward)
    for stack, alike in stacks(model).items():
        # Layers of all stacks attend alike; their products with weights differ.
        size = alike.num_layers * sum(active_matrices(alike).values())
        by_layer, by_weight = alike.num_layers / L, size / (num_matmul_params(model) - table)
        own_forward = by_weight * (forward - attention * of_passes) + by_layer * attention * of_passes
        own = by_weight * (of_layers - attention) + by_layer * attention
        passes_of = work.forward_passes * own_forward + work.backward_passes * (own - own_forward)
        executed += work.stages * work.slots_of(stack) / (alike.num_layers * work.micro_batches) * passes_of
    heads_run = work.stages * work.heads / work.micro_batches * share_of_head(config, run.mesh)
    logits_again = 2.0 * table if config.objective.kind not in ("next_token", "reward") else 0.0
    return ExecutedFlops(
        weights=float(matmul_flops + 2 * passes * num_matmul_params(model)) * tokens,
        recomputed=(2.0 * again + logits_again) * tokens,
        attention=attention * tokens,
        idle=tokens * (executed - of_layers + head * (heads_run - 1)),
    )
