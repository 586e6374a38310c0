"""A model as Hugging Face stores it, looked at and ready to be read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llamajax.config.formulas import num_params
from llamajax.config.model import DType, ModelConfig
from llamajax.data.tokenizer import find_tokenizer
from llamajax.errors import ConfigError
from llamajax.weights import names
from llamajax.weights.hf_config import read_config, read_ends
from llamajax.weights.hf_files import CONFIG, HfDirectory, read_directory
from llamajax.weights.safetensors import DTYPES, Stored

_BUFFER = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")
"""Old Llamas store these frequencies beside the weights; they follow from config.json."""


@dataclass(frozen=True)
class HfModel:
    """A Hugging Face model that was looked at and can be read."""

    directory: HfDirectory
    config: ModelConfig
    stored_dtype: str
    """What an export has by default: `config.param_dtype`, or float16 where that is what the files have."""
    hf: dict[str, Any]
    """What a checkpoint keeps of it beside weights and files, for a later export: source, model_type, special_tokens and
    license."""
    ends: tuple[int, ...]
    """Tokens that end what the model writes, by its own configurations."""
    tensors: Mapping[str, Stored]
    """The weights, by their Hugging Face name."""


def read_model(source: Path, dtype: DType | None) -> HfModel:
    """Looks at everything in `source` but the weights' values; needs a current mesh.

    Args:
        source: the directory.
        dtype: type to keep the weights in; None: bfloat16 if all are, else float32, which holds them exactly.

    Raises:
        ConfigError: it is no model that can be read whole and without doubt; says why in one line.
    """
    found = read_directory(source)
    tensors = {name: stored for name, stored in found.tensors.items() if not _BUFFER.fullmatch(name)}
    stored_dtypes = {stored.dtype for stored in tensors.values()}
    as_stored: Literal["float32", "bfloat16"] = "bfloat16" if stored_dtypes == {DTYPES["BF16"]} else "float32"
    config, special_tokens = read_config(found.config, source / CONFIG, dtype or as_stored)
    ends = read_ends(found.generation, source, special_tokens, config)
    num_stored = sum(stored.nbytes // stored.dtype.itemsize for stored in tensors.values())
    if num_params(config) > 2 * num_stored + 1_000_000:  # too large a model to list all that is missing
        raise ConfigError(
            f"{source / CONFIG}: describes {num_params(config):,} parameters, but the files hold {num_stored:,};"
            " download the whole model"
        )
    tensors = names.tensors_for(config, tensors, source)
    try:
        find_tokenizer(source)  # which training would have to, later
    except Exception as error:  # a damaged file makes the tokenizer libraries raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{source}: the tokenizer cannot be read: {reason}; download it again") from error
    hf = {
        "source": found.name,
        "model_type": found.config["model_type"],
        "special_tokens": special_tokens,
        "license": found.license,
    }
    is_half = dtype is None and stored_dtypes == {DTYPES["F16"]}
    return HfModel(found, config, "float16" if is_half else config.param_dtype, hf, ends, tensors)
