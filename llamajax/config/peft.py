"""Converts between PEFT's `adapter_config.json` and `AdaptersConfig`."""

import json
import math
import os
from pathlib import Path
from typing import Any

from llamajax.config.adapters import AdapterKind, AdaptersConfig, Projection
from llamajax.config.json_file import read_json
from llamajax.errors import ConfigError, show

ADAPTER_CONFIG = "adapter_config.json"
REMEDY = (
    "merge it with peft, and use the model that this writes:"
    " PeftModel.from_pretrained(BASE, DIR).merge_and_unload().save_pretrained(OUT)"
)
"""Way around adapters that llamajax does not read."""
_ACCEPTED = {
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),  # others change the weights of the base
}
"""Values of settings that have others, which are not supported."""
_READ = {
    "peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "bias", "init_lora_weights",
    "target_modules", "base_model_name_or_path", "revision",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "auto_mapping", "inference_mode", "peft_version", "megatron_core", "qalora_group_size", "eva_config", "exclude_modules",
    "ensure_weight_tying", "runtime_config",
}  # fmt: skip
"""Settings that change nothing of a trained adapter, or nothing without another one that is refused."""


def is_peft(directory: Path) -> bool:
    """Whether a directory holds adapters, as PEFT writes them."""
    return os.path.isfile(directory / ADAPTER_CONFIG)  # False for a path that may not be read, too


def read_peft_config(body: dict[str, Any], path: Path, targets: tuple[Projection, ...]) -> AdaptersConfig:
    """Returns the adapters that an `adapter_config.json` describes.

    The tensors beside the file tell which modules have an adapter. Its `target_modules`, which may be a regular expression
    over the modules of any model, is only compared with them where it is a list.

    Args:
        body: content of the file.
        path: the file, for messages.
        targets: projections with an adapter.

    Raises:
        ConfigError: they are no LoRA, rsLoRA or DoRA, or have a setting that is missing, wrong or not supported.
    """

    def refused(key: str) -> ConfigError:
        return ConfigError(f"{path}: {key}: {show(json.dumps(body[key]))} is not supported; {REMEDY}")

    def number(key: str, default: float, kind: type, least: float, below: float) -> Any:
        value = body.get(key, default)
        if type(value) not in (int, kind) or not least <= value < below:
            what = "a whole number" if kind is int else "a number"
            rule = f"must be {what} from {least:g} to below {below:g}, not {show(str(value))}"
            raise ConfigError(f"{path}: {key}: {rule}; correct it")
        return kind(value)

    def flag(key: str) -> bool:
        if type(value := body.get(key) or False) is not bool:
            raise ConfigError(f"{path}: {key}: must be true or false, not {show(str(value))}; correct it")
        return value

    if body.get("peft_type") != "LORA":
        raise refused("peft_type") if "peft_type" in body else ConfigError(f"{path}: peft_type: is missing; {REMEDY}")
    for key, accepted in _ACCEPTED.items():
        if body.get(key) not in accepted:
            raise refused(key)
    for key, value in body.items():
        if key not in _READ | _WITHOUT_EFFECT and value:
            raise refused(key)
    if isinstance(modules := body.get("target_modules"), list):
        _check_targets(modules, path, targets)
    rank = number("r", 8, int, 1, 2**16)
    alpha = number("lora_alpha", 8, float, 2**-16, 2**31)
    dropout = number("lora_dropout", 0.0, float, 0, 1)
    kind: AdapterKind = "dora" if flag("use_dora") else "rslora" if flag("use_rslora") else "lora"
    if kind == "dora" and flag("use_rslora"):
        alpha *= math.sqrt(rank)  # the same factor, written for DoRA's own rule
    return AdaptersConfig(kind=kind, rank=rank, alpha=alpha, dropout=dropout, targets=targets)


def _check_targets(modules: list[Any], path: Path, targets: tuple[Projection, ...]) -> None:
    """Checks that tensors exist for a list of modules."""
    named = {str(module).rpartition(".")[2] for module in modules}
    found = {f"{name}_proj" for name in targets}
    if wrong := sorted(named ^ found):
        rule = "has no tensors" if wrong[0] in named else "has tensors, but is not named"
        raise ConfigError(f"{path}: target_modules: {show(wrong[0])} {rule}; save the adapters again, or correct the list")


def base_of(directory: Path) -> str:
    """Returns the model that the adapters in a directory belong to: a directory, or `hf://ORG/NAME[@REVISION]`.

    A directory of this name comes first, as it does in transformers.

    Raises:
        ConfigError: `adapter_config.json` cannot be read, or names no model.
        DiskError: the disk fails, which may pass.
    """
    body, path = read_json(directory / ADAPTER_CONFIG), directory / ADAPTER_CONFIG
    named, revision = body.get("base_model_name_or_path"), body.get("revision")
    if not isinstance(named, str) or not named:
        raise ConfigError(f"{path}: base_model_name_or_path: names no model; write the directory or the name of the base")
    if os.path.isdir(os.path.expanduser(named)):
        return named
    if named.startswith(("/", "~", ".")) or named.count("/") != 1:
        raise ConfigError(
            f"{path}: base_model_name_or_path: there is no directory {show(named)}; write the one that has the base"
        )
    return f"hf://{named}@{revision}" if isinstance(revision, str) and revision else f"hf://{named}"


def peft_config_of(adapters: AdaptersConfig, base: str, revision: str | None) -> dict[str, Any]:
    """Returns an `adapter_config.json`.

    Args:
        adapters: the adapters.
        base: name or directory of the model that they belong to.
        revision: commit of a base on the Hub.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": sorted(f"{name}_proj" for name in adapters.targets),
        "use_rslora": adapters.kind == "rslora",
        "use_dora": adapters.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
