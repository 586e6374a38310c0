"""Predicts the seconds of a published run's step from its program's kernels and traffic, with the cost model's constants.

llamajax's own step plays no part, so changes to it do not move these predictions.
"""

from collections.abc import Iterable, Iterator

from llamajax.estimates.machine import Machine
from llamajax.planning.cost.kernels import Dot, dot_seconds
from llamajax.planning.cost.network import all_reduce_seconds, ring_seconds
from scripts.accuracy.programs import Pass
from scripts.accuracy.run import LAYER, Matrix, Run

# TFLOP/s of FlashAttention-2, forward and backward together, causal, heads of 128, by length of the rows: the charts in its
# repository (Dao-AILab/flash-attention, README). FlashAttention-1 takes twice as long (arXiv:2307.08691, abstract).
_FLASH_2 = {"A100": {2048: 155e12, 4096: 173e12, 8192: 182e12}, "H100": {2048: 265e12, 4096: 294e12, 8192: 308e12}}
# Bytes per attention score without a fused kernel, forward and backward. Forward: written by a product (2), masked softmax
# (4), dropout with its mask (5), read by a product (2). Backward: the gradient written (2), dropout's (5), softmax's (6),
# read by products (6).
_SCORE_BYTES = (13, 19)


def predict(run: Run, share: float | None = None) -> float:
    """Tokens per second and GPU; `share`: of the peak, by large products, where it is not the built-in one."""
    return run.tokens_per_step / step_seconds(run, run.machine(share))


def step_seconds(run: Run, machine: Machine) -> float:
    """Returns the seconds of all micro-batches, the pipeline's bubble, the optimizer, and exposed communication."""
    micro_batches = run.grad_accum_steps
    forward, backward = compute_seconds(run, machine)
    bubble = (run.pipeline - 1) / (run.interleaved * micro_batches)
    layers = run.model.num_layers / run.pipeline
    layer = run.model.layer_params / run.tensor
    own = (layers * layer + 2 * run.model.vocab_size * run.model.embed_dim / run.tensor / run.pipeline) / layers
    weights = layers * _along(run, 2 * own, machine)
    gradients = layers * _along(run, run.gradient_bytes * own, machine)
    if run.exchange == "hsdp":
        gradients += layers * all_reduce_seconds(run.gradient_bytes * own / run.shards, run.replicas, run.replicas, machine)
    slowdown = machine.calibration.compute_slowdown
    edges = (weights + gradients) / layers

    def beside(compute: float, exchange: float) -> float:
        """Returns the seconds that `exchange` adds to the `compute` that it overlaps."""
        return max(exchange * slowdown / (1 + slowdown), exchange - compute)

    match run.exchange:
        case "zero3" | "hsdp":
            added = micro_batches * (beside(forward, weights) + beside(backward, weights + gradients) + edges)
        case "zero3 in turn":
            added = micro_batches * (2 * weights + gradients)
        case "zero1":
            added = beside(forward, weights) + beside(backward, gradients) + edges
        case "zero1 every micro-batch":
            added = beside(forward, weights) + micro_batches * beside(backward, gradients) + edges
        case "zero1 in turn":
            added = weights + gradients
    updated = run.model.num_params / (run.tensor * run.pipeline * run.shards)
    optimizer = _memory_seconds(run.program.optimizer * updated, machine)
    tensor = beside(forward + backward, _tensor_seconds(run, machine)) if run.hides_tensor else _tensor_seconds(run, machine)
    sends = 2 * _send_seconds(run, machine) if run.sends_apart else 0.0
    return micro_batches * (forward + backward + tensor + sends) * (1 + bubble) + optimizer + added


def compute_seconds(run: Run, machine: Machine) -> tuple[float, float]:
    """A micro-batch's kernels in the layers of one GPU and its part of embedding and head: forward; backward, with what is
    computed again."""
    model, products = run.model, list(_products(run, LAYER))
    attention, attention_back = _attention_seconds(run, machine)
    elementwise = _pass_seconds(run, run.program.forward, machine)
    elementwise_back = _pass_seconds(run, run.program.backward, machine)
    if run.float8:
        elementwise += _memory_seconds(run.program.rounding * sum(dot.rows * dot.contracted for dot in products), machine)
        elementwise_back += _memory_seconds(run.program.rounding * sum(dot.rows * dot.columns for dot in products), machine)
    forward = _seconds(products, machine) + attention + elementwise
    again = _seconds(_products(run, run.again), machine)
    again += attention if run.attention_again else 0.0
    again += elementwise if run.again else 0.0
    backward = _seconds((gradient for dot in products for gradient in _gradients(dot)), machine) + attention_back
    backward += elementwise_back + again * run.again_share
    backward += _memory_seconds(run.copies * model.layer_params / run.tensor, machine)

    head = Dot(1, run.tokens, model.vocab_size // run.tensor, model.embed_dim, "bf16")
    loss = _memory_seconds(run.program.logits * run.tokens * model.vocab_size / run.tensor, machine)
    layers, part = model.num_layers / run.pipeline, 1.0 if run.head_apart else 1 / run.pipeline
    return (
        layers * forward + part * _seconds([head], machine),
        layers * backward + part * (_seconds(_gradients(head), machine) + loss),
    )


def _products(run: Run, names: tuple[Matrix, ...]) -> Iterator[Dot]:
    """Forward, of a micro-batch, `tensor` GPUs sharing each."""
    dtype = "f8e4m3fn" if run.float8 else "bf16"
    sizes = {name: size for name, size in run.model.matrices.items() if name in names}
    joined = [("q", "k", "v"), ("gate", "up")] if run.program.joins_products else []
    for together in [*joined, *([name] for name in sizes if not any(name in several for several in joined))]:
        several = [sizes[name] for name in together if name in sizes]
        if several:
            inputs, outputs = several[0][0], sum(outputs for _, outputs in several)
            if together[0] in ("out", "down"):
                yield Dot(1, run.tokens, outputs, inputs // run.tensor, dtype)
            else:
                yield Dot(1, run.tokens, outputs // run.tensor, inputs, dtype)


def _gradients(dot: Dot) -> tuple[Dot, Dot]:
    """Returns the products of the input's and the weight's gradients."""
    return (
        Dot(1, dot.rows, dot.contracted, dot.columns, dot.dtype),
        Dot(1, dot.contracted, dot.columns, dot.rows, dot.dtype),
    )


def _seconds(products: Iterable[Dot], machine: Machine) -> float:
    start = machine.calibration.kernel_s + machine.calibration.matmul_start_s
    return sum(start + dot_seconds(dot, machine) for dot in products)


def _attention_seconds(run: Run, machine: Machine) -> tuple[float, float]:
    """Returns the seconds of a layer's attention, forward and backward: two and five products, half of each masked; without
    a fused kernel two and four whole ones, and the bytes of the scores."""
    heads = run.model.num_heads // run.tensor * run.model.head_dim
    product = run.tokens * heads * run.seq_len
    kernel = run.attention or run.program.attention
    if kernel == "unfused":
        batch, width = run.sequences * run.model.num_heads // run.tensor, run.model.head_dim
        scores = Dot(batch, run.seq_len, run.seq_len, width, "bf16")
        values = Dot(batch, run.seq_len, width, run.seq_len, "bf16")
        num_scores = batch * run.seq_len**2
        return (
            _seconds([scores, values], machine) + _memory_seconds(_SCORE_BYTES[0] * num_scores, machine),
            _seconds(2 * [scores, values], machine) + _memory_seconds(_SCORE_BYTES[1] * num_scores, machine),
        )
    if kernel == "cudnn":
        forward, backward = (share * machine.gpu.peak_flops for share in machine.calibration.attention(run.model.head_dim))
    else:
        together = _FLASH_2[machine.gpu.family][run.seq_len] * run.power ** (1 / 3)
        forward = backward = together / (2 if kernel == "flash 1" else 1)
    return 2 * product / forward, 5 * product / backward


def _pass_seconds(run: Run, kernels: Pass, machine: Machine) -> float:
    """Elementwise kernels of a layer. Where `tensor` GPUs share the layer, each has its part of the tokens outside of
    attention and MLP, and of the channels inside."""
    model = run.model
    rotated = (model.num_heads + model.num_kv_heads) * model.head_dim
    channels = kernels.residual * model.embed_dim + kernels.rotated * rotated + kernels.hidden * model.mlp_dim
    seconds = kernels.kernels * machine.calibration.kernel_s
    return seconds + _memory_seconds(channels * run.tokens / run.tensor, machine)


def _memory_seconds(moved: float, machine: Machine) -> float:
    return moved / (machine.gpu.memory_bandwidth * machine.calibration.memory_efficiency)


def _tensor_seconds(run: Run, machine: Machine) -> float:
    """Seconds of the traffic among `tensor` GPUs for a micro-batch: tokens gathered before and scattered behind attention
    and MLP, forward, backward, and gathered again for the gradients of weights."""
    if run.tensor == 1:
        return 0.0
    passed = 2 * run.tokens * run.model.embed_dim * (run.tensor - 1) / run.tensor
    passes = run.tensor_passes * run.model.num_layers / run.pipeline
    return passes * ring_seconds(passed, run.tensor - 1, 0, run.tensor, 1, machine)


def _send_seconds(run: Run, machine: Machine) -> float:
    """Seconds until the next stage, on another node, has a micro-batch's activations: each of `tensor` GPUs sends its part,
    and the receivers gather the parts."""
    whole = 2 * run.tokens * run.model.embed_dim
    gathered = ring_seconds(whole * (run.tensor - 1) / run.tensor, run.tensor - 1, 0, run.tensor, 1, machine)
    return whole / run.tensor / machine.node_link + gathered


def _along(run: Run, num_bytes: float, machine: Machine) -> float:
    """Seconds of an all-gather or reduce-scatter over the GPUs that share weights, which lie `tensor` apart."""
    size = run.shards
    nodes = max(1, size * run.tensor // machine.gpus_per_node)
    return ring_seconds(num_bytes * (size - 1) / size, size - 1, nodes - 1, size, nodes, machine)
