"""Settings that exclude experts are refused, each in one line with a remedy."""

from typing import Any

import pytest

from llamajax.errors import ConfigError
from tests.tiny import tiny_config

EXPERTS = {"model.experts.num_experts": 8, "mesh.fsdp": 2, "mesh.expert": 4, "model.num_layers": 2}
LORA = {"adapters.kind": "lora", "init_from": "base"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"parallel.expert_parts": 5}, "parallel.expert_parts"),
        (
            {"model.experts.num_experts": 0, "mesh.expert": 1, "mesh.fsdp": 8, "parallel.expert_parts": 2},
            "parallel.expert_parts",
        ),
        (
            {"model.experts.num_experts": 0, "mesh.expert": 1, "mesh.fsdp": 8, "parallel.expert_exchange": "ragged"},
            "parallel.expert_exchange",
        ),
        ({"model.experts.num_experts": 0}, "mesh.expert"),
        ({"model.experts.num_experts": 6}, "model.experts.num_experts"),
        (LORA | {"adapters.targets": ("q", "down")}, "adapters.targets"),
        (
            LORA | {"adapters.targets": ("q",), "adapters.base": "nf4", "model.embed_dim": 512, "model.head_dim": 64},
            "adapters.base",
        ),
    ],
)
def test_what_experts_cannot_do_is_named(changes: dict[str, Any], key: str):
    tiny_config().changed(EXPERTS | {"parallel.expert_parts": 2})
    with pytest.raises(ConfigError) as error_info:
        tiny_config().changed(EXPERTS | changes)
    assert [line.partition(": ")[0] for line in str(error_info.value).splitlines()] == [key]
