"""A Hugging Face directory as a model of ours, if it is one: everything in it is compared but the weights' values."""

import re
from pathlib import Path
from typing import Literal

from llamajax.config.hf_config import CONFIG, read_ends, read_hf_config
from llamajax.config.json_file import read_json
from llamajax.config.model import DType
from llamajax.data.tokenizers.tokenizer import find_tokenizer
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import num_params
from llamajax.weights import hf_files, names
from llamajax.weights.float8 import quantization_of, with_scales
from llamajax.weights.pretrained import Pretrained
from llamajax.weights.safetensors import DTYPES

_BUFFER = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")
"""Old Llamas store these frequencies beside the weights; they follow from config.json."""


def open_directory(path: Path, dtype: DType | None = None) -> Pretrained:
    """Looks at everything in a Hugging Face directory but the weights' values; needs a current mesh.

    Args:
        path: the directory.
        dtype: type to keep the weights in; None: bfloat16 if all are, else float32, which holds them exactly.

    Raises:
        ConfigError: it is no model that can be read whole and without doubt; says why in one line.
    """
    body, generation = read_json(path / CONFIG), hf_files.read_generation(path)
    name, license = hf_files.source_name(path), hf_files.read_license(path / "README.md")
    hf_files.read_travelling(path)  # as training would, to take them along
    quantization = quantization_of(body, path / CONFIG)
    tensors = {name: stored for name, stored in hf_files.open_model(path).items() if not _BUFFER.fullmatch(name)}
    tensors = with_scales(tensors, quantization)
    stored_dtypes = {stored.dtype for stored in tensors.values()}
    as_stored: Literal["float32", "bfloat16"] = "bfloat16" if stored_dtypes == {DTYPES["BF16"]} else "float32"
    config, special_tokens = read_hf_config(body, path / CONFIG, dtype or as_stored)
    read_ends(generation, path, special_tokens, config)  # which generating would, later
    hf = {"source": name, "model_type": body["model_type"], "special_tokens": special_tokens, "license": license}
    num_stored = sum(stored.nbytes // stored.dtype.itemsize for stored in tensors.values())
    if num_params(config) > 2 * num_stored + 1_000_000:  # too large a model to list all that is missing
        raise ConfigError(
            f"{path / CONFIG}: describes {num_params(config):,} parameters, but the files hold {num_stored:,};"
            " download the whole model"
        )
    tensors = names.tensors_for(config, tensors, path)
    try:
        find_tokenizer(path)  # as training would
    except Exception as error:  # a damaged file makes the tokenizer libraries raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}: the tokenizer cannot be read: {reason}; download it again") from error
    stored_dtype = "float16" if dtype is None and stored_dtypes == {DTYPES["F16"]} else config.param_dtype
    return Pretrained(path, config, path, hf, stored_dtype, {}, tensors)
