"""config.json in both directions: what is left out, written in several ways, contradictory, or unknown to us."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from llamajax.config.hf_config import hf_config_of, read_hf_config
from llamajax.config.model import RopeScalingConfig
from llamajax.errors import ConfigError
from tests.converters.models import SPECIAL, TINY, VARIANTS, tiny

SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("variant", "left_out", "changes", "expected"),
    [
        ("mistral", ["sliding_window"], {}, {"sliding_window": 4096}),
        ("mistral", ["num_key_value_heads", "max_position_embeddings"], {"num_attention_heads": 8}, {"num_kv_heads": 8}),
        ("mistral", [], {"sliding_window": None}, {"sliding_window": None}),
        ("mistral", [], {"layer_types": ["sliding_attention"] * 3}, {"sliding_window": 8}),
        ("qwen3", ["head_dim"], {}, {"head_dim": 128}),
        ("qwen2", ["max_position_embeddings"], {}, {"max_seq_len": 32768}),
        ("qwen2", ["layer_types", "max_window_layers"], {"use_sliding_window": True}, {"sliding_window": None}),
        ("qwen2-window", ["layer_types"], {}, {"sliding_window": 8}),
        ("qwen2-window", ["layer_types"], {"max_window_layers": 3}, {"sliding_window": None}),
        ("qwen2-window", ["sliding_window"], {}, {"sliding_window": 4096}),
        (
            "qwen2-window",
            ["layer_types"],
            {"max_window_layers": 2},
            {"sliding_window": 8, "layer_types": (FULL, FULL, SLIDING)},
        ),
        ("qwen2-turns", [], {}, {"sliding_window": 8, "layer_types": (SLIDING, FULL)}),
        ("qwen2-turns", [], {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING] * 2}, {"layer_types": (FULL, SLIDING)}),
        ("qwen3-upper", ["layer_types"], {}, {"sliding_window": 8, "layer_types": (FULL, SLIDING, SLIDING)}),
        ("qwen2-window", [], {"use_sliding_window": False, "layer_types": None}, {"sliding_window": None}),
        ("qwen2-window", [], {"layer_types": ["full_attention"] * 3}, {"sliding_window": None}),
    ],
)
def test_what_transformers_reads_out_of_left_out_settings(variant, left_out, changes, expected):
    transformers = pytest.importorskip("transformers")
    body = hf_config_of(tiny(**VARIANTS[variant]), SPECIAL, "float32") | changes
    body = {key: value for key, value in body.items() if key not in left_out}
    config, _ = read_hf_config(body, Path("config.json"), "float32")
    assert {key: getattr(config, key) for key in expected} == expected
    theirs = transformers.AutoConfig.for_model(**body)
    windows = {"sliding_attention": theirs.sliding_window, "full_attention": None}
    kinds = getattr(theirs, "layer_types", None) if variant != "mistral" else None
    ours = itertools.islice(itertools.cycle(config.windows), config.num_layers)
    assert [windows[kind] for kind in kinds or [SLIDING] * config.num_layers] == [*ours]
    assert theirs.num_key_value_heads == config.num_kv_heads
    assert theirs.max_position_embeddings == config.max_seq_len
    assert getattr(theirs, "head_dim", config.head_dim) == config.head_dim


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window: must be a positive whole number or null, not 0"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types: must be sliding_attention for each of the 3"),
        ("mistral", {"layer_types": [FULL, SLIDING, SLIDING]}, "layer_types: must be sliding_attention for each of the 3"),
        (
            "qwen2-window",
            {"layer_types": None, "max_window_layers": "1"},
            "max_window_layers: must be a whole number, not 1",
        ),
        ("qwen2-window", {"layer_types": [FULL, SLIDING, "chunked_attention"]}, "layer_types: must be sliding_attention or"),
        (
            "qwen2-window",
            {"layer_types": [FULL, SLIDING, []]},
            "layer_types: must be sliding_attention or full",
        ),
        ("qwen2-window", {"layer_types": ["sliding_attention"] * 2}, "layer_types: must be sliding_attention"),
        ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window: must be true or false"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types: must be full_attention"),
        ("qwen3", {"attention_bias": "no"}, "attention_bias: must be true or false, not no"),
    ],
)
def test_layers_that_differ_are_not_read(variant, changes, message):
    body = hf_config_of(tiny(**VARIANTS[variant]), SPECIAL, "float32") | changes
    with pytest.raises(ConfigError, match=message) as error:
        read_hf_config(body, Path("config.json"), "float32")
    assert "\n" not in str(error.value)


def test_a_model_that_no_architecture_fits():
    for parts in (("qkv_bias", "qk_norm"), ("output_bias",), ("sliding_window", "mlp_bias"), ("qk_norm", "mlp_bias")):
        with pytest.raises(ConfigError, match=f"no architecture of transformers has .*{parts[-1]}"):
            hf_config_of(tiny(**dict.fromkeys(parts, True)), SPECIAL, "float32")
    with pytest.raises(ConfigError, match="has exactly sliding_window, layer_types of the optional parts"):
        hf_config_of(tiny(sliding_window=8, layer_types=(SLIDING, FULL)), SPECIAL, "float32")


def yarn(**settings: Any) -> RopeScalingConfig:
    return RopeScalingConfig(kind="yarn", factor=4.0, **settings)


DYNAMIC = RopeScalingConfig(kind="dynamic", factor=2.0, original_max_seq_len=16384)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, (10000.0, RopeScalingConfig())),
        ({"rope_theta": 500000}, (5e5, RopeScalingConfig())),
        ({"rope_theta": 1e4, "rope_scaling": None}, (1e4, RopeScalingConfig())),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, (1e4, RopeScalingConfig(kind="linear", factor=2.0))),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, (5e5, RopeScalingConfig())),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}, (1e4, RopeScalingConfig())),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, (1e4, yarn(original_max_seq_len=16384))),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": None, "attention_factor": None, "truncate": True},
                "original_max_position_embeddings": 4096,
            },
            (1e4, yarn(original_max_seq_len=4096)),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
            (1e4, yarn(original_max_seq_len=16384, attention_factor=(0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, (1e4, DYNAMIC)),
    ],
)
def test_every_way_to_write_rotary_settings(rope, expected):
    body = {key: value for key, value in hf_config_of(TINY, SPECIAL, "float32").items() if not key.startswith("rope")}
    config, special = read_hf_config(body | rope, Path("config.json"), "float32")
    assert (config.rope_theta, config.rope_scaling) == expected
    assert special == SPECIAL
