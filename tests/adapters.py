"""Tiny models with adapters as peft writes them, shared by the tests of adapters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamajax.config.hf_config import hf_config_of
from llamajax.config.model import ModelConfig
from tests.converters.models import SPECIAL

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
"""Settings of peft for each kind of adapters."""
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_base(directory: Path, config: ModelConfig, dtype: str = "float32") -> None:
    """Writes a model of random weights, biases and norms included, as transformers does."""
    known = transformers.AutoConfig.for_model(**hf_config_of(config, SPECIAL, dtype))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(known)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.2 * torch.randn_like(weight) + ("norm" in name))
    model.to(getattr(torch, dtype)).save_pretrained(directory)


def base(directory: Path) -> Any:
    """The model in a directory, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def adapted(directory: Path, targets: Sequence[str] | str = ALL, *, seed: int | None = 0, **settings: Any) -> Any:
    """The model in a directory with adapters of peft.

    Args:
        directory: the model.
        targets: `target_modules`.
        seed: seed of random numbers in all factors, large enough to matter; None: those that peft starts with.
        settings: other settings of `LoraConfig`.
    """
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM", **settings}
    )  # fmt: skip
    model = peft.get_peft_model(base(directory), config)
    if seed is not None:
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_magnitude" in name:
                    weight *= 1 + 0.2 * torch.randn_like(weight)
                elif "lora_" in name:
                    weight.copy_(0.3 * torch.randn_like(weight))
    return model.eval()


def write_adapters(directory: Path, out: Path, targets: Sequence[str] | str = ALL, **settings: Any) -> Any:
    """Writes adapters of the model in `directory` as peft does; returns the model with them."""
    model = adapted(directory, targets, **settings)
    model.save_pretrained(out)
    return model


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits of a torch model."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
