"""Opens adapters: a PEFT directory, or a checkpoint of a run that trains them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamajax.config.adapters import PROJECTIONS, AdaptersConfig, Projection
from llamajax.config.file import settings_of
from llamajax.config.json_file import read_json
from llamajax.config.peft import ADAPTER_CONFIG, REMEDY, read_peft_config
from llamajax.data.tokenizers.tokenizer import find_tokenizer
from llamajax.errors import CheckpointError, ConfigError, show
from llamajax.weights import names
from llamajax.weights.hf_files import read_header
from llamajax.weights.pretrained import Pretrained
from llamajax.weights.safetensors import Stored

ADAPTERS = "adapter_model.safetensors"
_MODULE = re.compile(rf"{re.escape(names.OF_PEFT)}model\.layers\.[0-9]+\.(?:self_attn|mlp)\.([a-z]+_proj)\.lora_.*")


def open_peft(path: Path, base: Pretrained) -> Pretrained:
    """Checks everything in a PEFT directory but the values of the weights.

    Args:
        path: the directory.
        base: the model that its adapters belong to.

    Raises:
        ConfigError: the adapters cannot be read completely, or do not fit the base.
    """
    if base.adapters is not None:
        raise ConfigError(f"{path}: its base, {base.source}, holds adapters itself; export that with --merge first")
    tensors = _tensors(path)
    found = {match[1] for name in tensors if (match := _MODULE.fullmatch(name))}
    targets: tuple[Projection, ...] = tuple(name for name in PROJECTIONS if f"{name}_proj" in found)
    if not targets:
        raise ConfigError(f"{path / ADAPTERS}: has no adapter of a layer's projections; {REMEDY}")
    adapters = read_peft_config(read_json(path / ADAPTER_CONFIG), path / ADAPTER_CONFIG, targets)
    _check(tensors, names.hf_shapes(base.config, adapters), base)
    files = path if find_tokenizer(path) is not None else base.files
    return Pretrained(
        path, base.config, files, base.hf, base.stored_dtype, {}, tensors, adapters=adapters, base=base
    )  # fmt: skip


def _tensors(path: Path) -> dict[str, Stored]:
    if not (path / ADAPTERS).exists() and (path / "adapter_model.bin").exists():
        raise ConfigError(
            f"{path / 'adapter_model.bin'}: pickles can run code and are not read; save it again where you trust it:"
            " PeftModel.from_pretrained(BASE, DIR).save_pretrained(OUT)"
        )
    return read_header(path / ADAPTERS)


def _check(tensors: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]], base: Pretrained) -> None:
    """Raises `ConfigError` if the tensors are not those of adapters of the base."""
    file = next(iter(tensors.values())).file
    if extra := [name for name in tensors if name not in shapes]:
        raise ConfigError(f"{file}: {show(extra[0])} belongs to no adapter of a layer's projections; {REMEDY}")
    if missing := [name for name in shapes if name not in tensors]:
        raise ConfigError(
            f"{file}: {missing[0]} is missing, and {len(missing) - 1} more: all layers of the base must have an adapter of"
            f" the same projections; {REMEDY}"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"{file}: {name} is {list(tensors[name].shape)}, but r and the base {base.source} need {list(shape)};"
                " name the right base in adapter_config.json"
            )


def adapters_of_run(step_dir: Path, meta: Mapping[str, Any]) -> AdaptersConfig | None:
    """Returns the adapters that a checkpoint of a run holds; None if the run trains the model itself.

    Args:
        step_dir: the checkpoint, for messages.
        meta: its metadata.

    Raises:
        CheckpointError: the metadata holds something else.
    """
    told = meta["config"].get("adapters")
    try:
        adapters = AdaptersConfig() if told is None else settings_of(AdaptersConfig, told)
    except (ConfigError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{step_dir}: holds adapters of another llamajax version ({show(reason)}); read it with that version"
        ) from error
    return adapters if adapters.enabled else None
