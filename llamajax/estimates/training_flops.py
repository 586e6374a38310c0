"""FLOPs of training by arithmetic, with weights that get no gradient and with adapters."""

from llamajax.config.model import ModelConfig
from llamajax.config.run import Config
from llamajax.estimates.adapters import adapter_weights
from llamajax.estimates.formulas import (
    active_weights,
    flops_per_token,
    is_layer_matrix,
    num_matmul_params,
    trained_weights,
)


def training_flops_per_token(
    config: Config, seq_len: int, *, full_attention: bool = False, keys: float | None = None
) -> int:
    """Returns `flops_per_token` of the run's model as it is trained: a frozen parameter of a matmul counts four, because it
    has no gradient, and a parameter of an adapter six. Passes without gradients, such as that of a reference, count a third
    of the model each."""
    model = config.model
    whole = flops_per_token(model, seq_len, full_attention=full_attention, keys=keys)
    further = config.objective.forward_passes(config.adapters) * (whole // 3)
    return whole - 6 * num_matmul_params(model) + matmul_flops_per_token(config, model) + further


def matmul_flops_per_token(config: Config, model: ModelConfig) -> int:
    """Returns the part of `training_flops_per_token` of products with weights, for the run's model or `computed_model`."""
    trained, sizes = trained_weights(config, model), active_weights(model)
    of_matmuls = [name for name in sizes if is_layer_matrix(name) or name == output_weight(model)]
    without_gradient = sum(sizes[name] for name in of_matmuls if name not in trained)
    return 6 * (num_matmul_params(model) + adapter_matmul_params(config, model)) - 2 * without_gradient


def adapter_matmul_params(config: Config, model: ModelConfig) -> int:
    """Returns the number of adapter parameters that take part in a matmul."""
    return sum(size for name, size in adapter_weights(config.adapters, model).items() if name.endswith((".a", ".b")))


def output_weight(model: ModelConfig) -> str:
    """Returns the name of the head's weight."""
    return "head" if model.has_own_head else "embedding"
