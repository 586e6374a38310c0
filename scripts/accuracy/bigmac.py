"""Simulates fine-grained and BigMac models (arXiv:2502.16927) on the paper's cluster.

    python -m scripts.accuracy.bigmac

Products take the time of the cost model. All-to-alls take a time per byte that the paper's table of one model sets: their
share of a step, by the number of experts that a token chooses. With both it predicts how much faster BigMac is for the
paper's four models, with experts split over all GPUs.
"""

import dataclasses
import functools

from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig
from llamajax.estimates.formulas import expert_weights, flops_per_token, layer_matrices, num_matmul_params, num_params
from llamajax.estimates.gpus import find_gpu
from llamajax.estimates.machine import Machine
from llamajax.planning.cost.kernels import Dot, dot_seconds
from llamajax.planning.cost.network import all_reduce_seconds

SHARES = {1: 0.599, 2: 0.713, 4: 0.841, 6: 0.891, 8: 0.918}
"""Published share of all-to-alls in a training step of fine-grained GPT3-XL, by chosen experts of 64, over 32 GPUs."""
MODELS = {"GPT3-Medium": (24, 1024), "GPT3-XL": (24, 2048), "GPT3-2.7B": (32, 2560), "GPT3-6.7B": (32, 4096)}
"""Layers and width of the models that the experts are put into."""
SPEED_UPS = (1.53, 3.09)
"""Published speed-ups of training over Megatron: the least and the most of all models and meshes."""
GPUS, NUM_EXPERTS, SEQ_LEN, TOKENS = 32, 64, 2048, 524_288 // 32
RATIO = 0.25
"""Width in which BigMac's tokens travel, over that of the residual stream; also the width of a fine-grained expert."""
_A100 = find_gpu("NVIDIA A100-SXM4-80GB")
assert _A100 is not None
MACHINE = Machine(
    gpu=dataclasses.replace(
        _A100, peak_flops=149.7e12, memory_bandwidth=696e9, cores=84, gpu_bandwidth=31.5e9, node_bandwidth=12.5e9
    )
)
"""The paper's cluster: GPUs of 48 GB and 149.7 TFLOP/s, PCIe 4, 100 Gb/s per node; bandwidth and cores of NVIDIA's A40."""
_STREAM, _HIDDEN, _PACKED, _LOGIT, _UPDATE = 22 + 46, 4 + 8, 4 * 8, 60, 38
"""Bytes of kernels without products, as counted for Megatron in `scripts.accuracy.programs`: per channel of the residual
stream and of an expert's hidden layer, forward and backward; per channel of a token that travels, packed and unpacked for
four all-to-alls; per word of the vocabulary; per parameter that the optimizer updates."""
_GRADIENT = 4
"""Bytes per gradient, which Megatron sums in float32."""


def model(name: str, top_k: int = 8, *, is_bigmac: bool) -> ModelConfig:
    """Returns the fine-grained model or BigMac on one of `MODELS`."""
    layers, width = MODELS[name]
    narrow = int(RATIO * width)
    experts = ExpertsConfig(num_experts=NUM_EXPERTS, top_k=top_k, gated=False, mlp_dim=narrow)
    if is_bigmac:
        experts = dataclasses.replace(experts, mlp_dim=width, latent_dim=narrow)
    return ModelConfig(
        vocab_size=50304, embed_dim=width, mlp_dim=width, num_layers=layers, num_heads=width // 128,
        num_kv_heads=width // 128, head_dim=128, tie_embeddings=True, experts=experts,
    )  # fmt: skip


@functools.cache
def compute_seconds(config: ModelConfig) -> float:
    """Returns the seconds of a step without all-to-alls: products, attention, everything else by its bytes, and the sum of
    the gradients that all GPUs have."""
    own, D = config.experts, config.embed_dim
    matrices = {matrix: size for matrix, size in layer_matrices(config).items() if matrix.matmul != "expert"}
    dots = [Dot(1, TOKENS, size // D, D, "bf16") for size in matrices.values()]
    inner, hidden = own.latent_dim or D, own.mlp_dim or 0
    rows, held = TOKENS * own.top_k, NUM_EXPERTS // GPUS
    dots += [Dot(held, rows // held, columns, k, "bf16") for k, columns in ((inner, hidden), (hidden, inner))]
    layer = 3 * sum(dot_seconds(dot, MACHINE) for dot in dots)
    head = 3 * dot_seconds(Dot(1, TOKENS, config.vocab_size, D, "bf16"), MACHINE)
    attention = (flops_per_token(config, SEQ_LEN) - 6 * num_matmul_params(config)) * TOKENS / MACHINE.gpu.peak_flops
    calibration = MACHINE.calibration
    moved = config.num_layers * (_STREAM * D + own.top_k * (_HIDDEN * hidden + _PACKED * inner)) + _LOGIT * config.vocab_size
    of_experts = sum(expert_weights(config).values())
    shared = num_params(config) - of_experts
    size = moved * TOKENS + _UPDATE * (shared + of_experts / GPUS)
    memory = size / (MACHINE.gpu.memory_bandwidth * calibration.memory_efficiency)
    reduced = all_reduce_seconds(_GRADIENT * shared, GPUS, GPUS // MACHINE.gpus_per_node, MACHINE)
    products = config.num_layers * layer + head
    return products + attention / calibration.attention_backward_efficiency + memory + reduced


def sent_bytes(config: ModelConfig) -> float:
    """Returns the bytes that a GPU sends in a step: four all-to-alls of a layer, in 16 bits."""
    width = config.experts.latent_dim or config.embed_dim
    return 4 * config.num_layers * TOKENS * config.experts.top_k * width * 2 * (GPUS - 1) / GPUS


def fitted_bandwidth() -> float:
    """Returns the bytes per second of a GPU in all-to-alls with which the largest relative error of `SHARES` is least."""
    candidates = [10e9 * 1.01**step for step in range(-400, 100)]
    return min(candidates, key=lambda bandwidth: max(abs(share(k, bandwidth) / SHARES[k] - 1) for k in SHARES))


def share(top_k: int, bandwidth: float) -> float:
    """Returns the predicted share of all-to-alls for `SHARES`."""
    config = model("GPT3-XL", top_k, is_bigmac=False)
    sending = sent_bytes(config) / bandwidth
    return sending / (sending + compute_seconds(config))


def speed_up(name: str, bandwidth: float) -> float:
    """Returns the time of a step of the fine-grained model over that of BigMac."""
    fine, bigmac = (
        compute_seconds(config) + sent_bytes(config) / bandwidth
        for config in (model(name, is_bigmac=is_bigmac) for is_bigmac in (False, True))
    )
    return fine / bigmac


def main() -> None:
    """Prints both tables."""
    bandwidth = fitted_bandwidth()
    print(f"all-to-alls at {bandwidth / 1e9:.2f} GB/s per GPU")
    for top_k, published in SHARES.items():
        print(f"top {top_k}: all-to-alls take {share(top_k, bandwidth):.1%} of the step, published {published:.1%}")
    for name in MODELS:
        print(f"{name}: BigMac is {speed_up(name, bandwidth):.2f} times as fast")


if __name__ == "__main__":
    main()
