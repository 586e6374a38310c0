"""Converts experts between a Hugging Face `config.json` and `ExpertsConfig`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llamajax.config.architectures import ExpertFamily
from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError, show

_NORMALIZE, _SHARED_DIM, _NUM_SHARED = "norm_topk_prob", "shared_expert_intermediate_size", "n_shared_experts"

_MAX_LAYERS = 10_000
"""Layers are listed one by one, which a damaged file must not make endless."""


def read_experts(
    body: Mapping[str, Any], family: ExpertFamily, number: Callable[..., Any], flag: Callable[[str], bool], path: Path
) -> ExpertsConfig:
    """Returns the experts that a `config.json` describes. Losses that balance them belong to a run, and are not read.

    Args:
        body: content of the file.
        family: the experts of its architecture.
        number: reads a positive number of the file, with a default.
        flag: reads a setting that is true or false.
        path: the file, for messages.

    Raises:
        ConfigError: a setting is missing, wrong, contradictory or not supported.
    """
    known = {key: number(key) for key in family.num_experts if body.get(key) is not None}
    if len(set(known.values())) > 1:
        told = " and ".join(f"{key}: {value}" for key, value in known.items())
        raise ConfigError(f"{path}: {told} contradict each other; keep the right one")
    num_experts = number(family.num_experts[0], next(iter(known.values()), family.default_num))
    width, num_layers = number(family.mlp_dim), number("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise ConfigError(f"{path}: num_hidden_layers: {num_layers} is more than {_MAX_LAYERS}; download the file again")
    normalize = family.normalize == "always" or flag(_NORMALIZE)
    top_k = number("num_experts_per_tok")
    shared = 0
    if family.shared == "gated":
        shared = number(_SHARED_DIM)
    elif family.shared == "several":
        shared = width * (number(_NUM_SHARED) if body.get(_NUM_SHARED) else 0)
        normalize = normalize and top_k > 1  # as the model's own code does
    first_dense_layers, layer_step = _read_layers(body, family, num_layers, number, path)
    return ExpertsConfig(
        num_experts=num_experts,
        first_dense_layers=first_dense_layers,
        layer_step=layer_step,
        top_k=top_k,
        mlp_dim=None if family.mlp_dim == "intermediate_size" else width,
        shared_mlp_dim=shared,
        shared_gate=family.shared == "gated",
        normalize=normalize,
    )


def _read_layers(
    body: Mapping[str, Any], family: ExpertFamily, num_layers: int, number: Callable[..., Any], path: Path
) -> tuple[int, int]:
    """Returns the number of dense layers at the beginning, and the step between layers with experts after them."""
    if family.dense_layers == "none":
        return 0, 1
    if family.dense_layers == "listed":
        listed, step = body.get("mlp_only_layers") or [], number("decoder_sparse_step", 1)
        if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
            raise ConfigError(f"{path}: mlp_only_layers: must list numbers of layers, not {show(str(listed))}; correct it")
        dense = tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
        keys = "mlp_only_layers, decoder_sparse_step"
    else:
        first, step = body.get("first_k_dense_replace", 0), number("moe_layer_freq", 1)
        if type(first) is not int or first < 0:
            raise ConfigError(f"{path}: first_k_dense_replace: must be a whole number, not {show(str(first))}; correct it")
        dense = tuple(layer for layer in range(num_layers) if layer < first or layer % step)
        keys = "first_k_dense_replace, moe_layer_freq"
    return _pattern(dense, num_layers, f"{path}: {keys}")


def _pattern(dense: tuple[int, ...], num_layers: int, where: str) -> tuple[int, int]:
    sparse = [layer for layer in range(num_layers) if layer not in dense]
    if sparse:
        step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        first = sparse[0] + 1 - step
        if first >= 0 and sparse == list(range(sparse[0], num_layers, step)) and sparse[-1] == num_layers - 1:
            return first, step
    raise ConfigError(
        f"{where}: layers {show(str(sparse))} of {num_layers} have experts, which is not supported; after dense layers at"
        " the beginning, every layer must have them, or every second, every third and so on, the last one included"
    )


def expert_fields(config: ModelConfig, family: ExpertFamily) -> dict[str, Any]:
    """Returns the experts of a `config.json`."""
    own, dense = config.experts, config.experts.dense_layers(config.num_layers)
    width = own.mlp_dim or config.mlp_dim
    fields: dict[str, Any] = {
        family.num_experts[0]: own.num_experts,
        "num_experts_per_tok": own.top_k,
        family.mlp_dim: width,
    }
    if family.normalize == "on_request":
        fields[_NORMALIZE] = own.normalize
    if family.shared == "gated":
        fields[_SHARED_DIM] = own.shared_mlp_dim
    elif family.shared == "several":
        fields |= {_NUM_SHARED: own.shared_mlp_dim // width or None, "scoring_func": "softmax"}
    if family.dense_layers == "listed":
        is_regular = own.first_dense_layers == 0
        fields["decoder_sparse_step"] = own.layer_step if is_regular else 1
        fields["mlp_only_layers"] = [] if is_regular else list(dense)
    elif family.dense_layers == "counted":
        fields |= {"first_k_dense_replace": own.first_dense_layers, "moe_layer_freq": own.layer_step}
    return fields
