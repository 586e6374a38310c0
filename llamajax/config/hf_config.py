"""Converts between a Hugging Face `config.json` and `ModelConfig`."""

import json
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from llamajax.config.architectures import ARCHITECTURES, REFUSED, Architecture, architecture_of
from llamajax.config.experts import ExpertsConfig
from llamajax.config.hf_experts import expert_fields, read_experts
from llamajax.config.hf_rope import read_rope, rope_fields
from llamajax.config.json_file import read_json
from llamajax.config.model import DType, Head, ModelConfig, shortest_round
from llamajax.errors import ConfigError, show

CONFIG = "config.json"
_ONE_LABEL = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_hf_model(path: Path) -> bool:
    """Whether the file `path` names the model that it describes; other programs have a `config.json`, too.

    Raises:
        DiskError: the disk fails, which may pass.
    """
    try:
        return not read_json(path).keys().isdisjoint(("model_type", "architectures"))
    except ConfigError:
        return False


def read_hf_config(body: dict[str, Any], path: Path, param_dtype: DType) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the configuration of the model that a `config.json` describes, and its ids of special tokens.

    Settings that are left out have the values that transformers gives them.

    Args:
        body: content of the file.
        path: the file, for messages.
        param_dtype: type in which the weights are kept, and computed with unless a run or command sets another.

    Raises:
        ConfigError: the model is none of `ARCHITECTURES`, or a setting is missing, wrong, contradictory or not supported.
    """
    architecture, head = _read_architecture(body, path)
    body = {**architecture.defaults, **body}

    def number(key: str, default: Any = None, kind: type = int) -> Any:
        value = body.get(key)
        value = default if value is None else value
        if type(value) not in (int, kind) or not 0 < value < 2**31:
            what = "a positive whole number" if kind is int else "a positive number"
            raise ConfigError(f"{path}: {key}: must be {what}, not {show(str(value))}; correct it")
        return kind(value)

    def flag(key: str) -> bool:
        if type(value := body.get(key, False)) is not bool:
            raise ConfigError(f"{path}: {key}: must be true or false, not {show(str(value))}; correct it")
        return value

    keys = ("qkv_bias", "attention_bias", "mlp_bias")
    qkv_bias, attention_bias, mlp_bias = (key in architecture.biases and flag(key) for key in keys)
    max_seq_len = number("max_position_embeddings")
    theta, scaling = read_rope(body, max_seq_len, path, architecture.rope_theta)
    num_heads, embed_dim = number("num_attention_heads"), number("hidden_size")
    head_dim = number("head_dim", embed_dim // num_heads)
    if not architecture.own_head_dim and num_heads * head_dim != embed_dim:
        rule = f"{head_dim} x num_attention_heads={num_heads} must be hidden_size={embed_dim} in a {architecture.name}"
        raise ConfigError(f"{path}: head_dim: {rule}")
    try:
        experts = (
            ExpertsConfig() if (family := architecture.experts) is None else read_experts(body, family, number, flag, path)
        )
        config = ModelConfig(
            vocab_size=number("vocab_size"),
            embed_dim=embed_dim,
            mlp_dim=number("intermediate_size"),
            num_layers=number("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=number("num_key_value_heads", num_heads),
            head_dim=head_dim,
            max_seq_len=max_seq_len,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=number("rms_norm_eps", 1e-6, float),
            **_read_windows(body, architecture, path),
            qkv_bias=architecture.qkv_bias or qkv_bias or attention_bias,
            output_bias=attention_bias,
            mlp_bias=mlp_bias,
            qk_norm=architecture.qk_norm,
            qk_norm_across_heads=architecture.qk_norm_across_heads,
            experts=experts,
            tie_embeddings=flag("tie_word_embeddings"),
            head=head,
            init_std=number("initializer_range", 0.02, float),
            param_dtype=param_dtype,
            compute_dtype=param_dtype,
        )
    except ConfigError as error:
        if str(error).startswith(str(path)):
            raise
        raise ConfigError(f"{path}: {'; '.join(str(error).splitlines())}") from error
    return config, {key: token_ids(body.get(key), key, path, config) for key in SPECIAL_TOKENS}


def _read_architecture(body: dict[str, Any], path: Path) -> tuple[Architecture, Head]:
    """Returns the architecture and the head of the model; a score head if it has one label."""
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES}
    model_type = body.get("model_type")
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ConfigError(f"{path}: model_type: {model_type} is not supported: {REFUSED[model_type]}")
    if not isinstance(model_type, str) or model_type not in by_type:
        raise ConfigError(
            f"{path}: model_type: {show(str(model_type))} is not one of {', '.join(by_type)}; no other model is supported"
        )
    architecture = by_type[model_type]
    class_names = body.get("architectures")
    known: dict[str, Head] = {architecture.class_name(head): head for head in architecture.heads}
    if class_names is not None and class_names not in [[name] for name in known]:
        either = " or ".join(f'["{name}"]' for name in known)
        raise ConfigError(f"{path}: architectures: {show(str(class_names))} must be {either}")
    head: Head = "vocabulary" if class_names is None else known[class_names[0]]
    labels = body.get("id2label", {})
    num_labels = len(labels) if isinstance(labels, dict) and labels else body.get("num_labels", 2)
    if head == "score" and num_labels != 1:
        rule = f"has {show(str(num_labels))} labels; only models with a single score are supported"
        raise ConfigError(f"{path}: id2label: {rule}")
    for key, value in architecture.fixed.items():
        if body.get(key, value) != value:
            raise ConfigError(f"{path}: {key}: {show(str(body[key]))} is not supported; it must be {json.dumps(value)}")
    return architecture, head


def _read_windows(body: dict[str, Any], architecture: Architecture, path: Path) -> dict[str, Any]:
    """Returns the sliding window and the layers that have it: for `by_layer_on_request` those that `layer_types` names, or
    else those after `max_window_layers`; for `alternating_on_request` else every second layer before it."""
    if architecture.windows == "none":
        return {}
    window, kinds, num_layers = body.get("sliding_window"), body.get("layer_types"), body["num_hidden_layers"]
    if architecture.windows != "everywhere":
        if type(body.get("use_sliding_window", False)) is not bool:
            raise ConfigError(f"{path}: use_sliding_window: must be true or false; correct it")
        window = body.get("sliding_window", 4096) if body.get("use_sliding_window", False) else None
    if window is not None and (type(window) is not int or not 0 < window < 2**31):
        raise ConfigError(f"{path}: sliding_window: must be a positive whole number or null, not {show(str(window))}")
    differ = architecture.windows in ("by_layer_on_request", "alternating_on_request")
    known = ["full_attention"] if window is None else ["sliding_attention"]
    known += ["full_attention"] if window is not None and differ else []
    if kinds is None and len(known) > 1:
        bound = body.get("max_window_layers", 28)
        if type(bound) is not int:
            raise ConfigError(f"{path}: max_window_layers: must be a whole number, not {show(str(bound))}; correct it")
        by_layer = architecture.windows == "by_layer_on_request"
        kinds = [
            "sliding_attention" if (layer >= bound if by_layer else layer < bound and layer % 2 == 0) else "full_attention"
            for layer in range(num_layers)
        ]
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == num_layers and all(k in known for k in kinds)):
        rule = f"must be {' or '.join(known)} for each of the {num_layers} layers, as the other settings say"
        raise ConfigError(f"{path}: layer_types: {rule}")
    if kinds is None or len(set(kinds)) == 1:
        return {"sliding_window": None if kinds and kinds[0] == "full_attention" else window}
    return {"sliding_window": window, "layer_types": shortest_round(kinds)}


def read_ends(
    generation: Mapping[str, Any], directory: Path, special_tokens: Mapping[str, Any], config: ModelConfig
) -> tuple[int, ...]:
    """Returns the tokens that end the model's output: eos of its `config.json` and of `generation_config.json`.

    Args:
        generation: content of `generation_config.json`, which may be empty.
        directory: its folder, for messages.
        special_tokens: the ids that `read_hf_config` found.
        config: the model.

    Raises:
        ConfigError: the file has ids that the model lacks.
    """
    key, path = "eos_token_id", directory / "generation_config.json"
    said = special_tokens[key], token_ids(generation.get(key), key, path, config)
    ids = [token for ids in said for token in (ids if isinstance(ids, list) else [ids])]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def token_ids(value: Any, key: str, path: Path, config: ModelConfig) -> Any:
    """Returns an id, several (Llama 3's end of text), or None, after a check that the model has them."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and -1 <= token < config.vocab_size for token in ids):
        raise ConfigError(f"{path}: {key}: {show(str(value))} must be below vocab_size={config.vocab_size}; correct it")
    return value


def hf_config_of(
    config: ModelConfig, special_tokens: dict[str, Any], dtype: str, architecture: Architecture | None = None
) -> dict[str, Any]:
    """Returns a `config.json` with the fields of transformers 4 and 5 and of programs that read either.

    Args:
        config: the model.
        special_tokens: value of each of `SPECIAL_TOKENS`.
        dtype: type of the weights in the files.
        architecture: the architecture to write; None: see `architecture_of`.
    """
    architecture = architecture or architecture_of(config)
    biases = {"qkv_bias": config.qkv_bias, "attention_bias": config.output_bias, "mlp_bias": config.mlp_bias}
    experts = {} if architecture.experts is None else expert_fields(config, architecture.experts)
    return {
        "architectures": [architecture.class_name(config.head)],
        "model_type": architecture.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        **experts,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "use_cache": True,
        **special_tokens,
        "tie_word_embeddings": config.tie_embeddings,
        **{key: biases[key] for key in architecture.biases},
        **_window_fields(config, architecture),
        **(_ONE_LABEL if config.head == "score" else {}),
        "attention_dropout": 0.0,
        **rope_fields(config),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _window_fields(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    window, layers = config.sliding_window, range(config.num_layers)
    match architecture.windows:
        case "none":
            return {}
        case "everywhere":
            return {"sliding_window": window}
        case "everywhere_on_request":
            return {"use_sliding_window": window is not None, "sliding_window": window}
    kinds = [
        "full_attention" if of_layer is None else "sliding_attention" for _, of_layer in zip(layers, cycle(config.windows))
    ]
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.num_layers if window is None else kinds.index("sliding_attention"),
        "layer_types": kinds,
    }
