"""A model as Hugging Face stores it, looked at and ready to be read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llamajax.config.formulas import num_params
from llamajax.config.model import DType, ModelConfig
from llamajax.data.tokenizer import load_tokenizer
from llamajax.data.tokenizer_files import has_vocabulary
from llamajax.errors import ConfigError, show
from llamajax.weights import names
from llamajax.weights.architectures import architecture_of
from llamajax.weights.hf_config import read_config, read_ends
from llamajax.weights.hf_files import read_license, read_travelling, travelling_files
from llamajax.weights.safetensors import DTYPES, Stored, open_model, read_json

_BUFFER = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")
"""Old Llamas store these frequencies beside the weights; they follow from config.json."""


@dataclass(frozen=True)
class HfModel:
    """A Hugging Face model that was looked at and can be read."""

    source: Path
    config: ModelConfig
    model_type: str
    """In its `config.json`."""
    stored_dtype: str
    """What an export has by default: `config.param_dtype`, or float16 where that is what the files have."""
    special_tokens: dict[str, Any]
    ends: tuple[int, ...]
    """Tokens that end what the model writes, by its own configurations."""
    tensors: Mapping[str, Stored]
    """The weights, by their Hugging Face name."""
    license: str | None
    """What its model card calls its licence."""
    files: Mapping[str, bytes]
    """Name and content of the tokenizer's and other small files."""

    @property
    def hf(self) -> dict[str, Any]:
        """What a checkpoint keeps of it beside weights and files, for a later export: `hf` in its meta."""
        return {
            "source": self._model_id,
            "model_type": self.model_type,
            "special_tokens": self.special_tokens,
            "license": self.license,
        }

    @property
    def _model_id(self) -> str:
        """The model's name: OWNER/NAME if it lies in the cache of Hugging Face's downloads, else the directory's."""
        cached = re.fullmatch("models--(.+?)--(.+)", self.source.absolute().parent.parent.name)
        return f"{cached[1]}/{cached[2]}" if cached else self.source.absolute().name


def read_model(source: Path, dtype: DType | None) -> HfModel:
    """Looks at everything in `source` but the weights' values; needs a current mesh.

    Args:
        source: the directory.
        dtype: type to keep the weights in; None: bfloat16 if all are, else float32, which holds them exactly.

    Raises:
        ConfigError: it is no model that can be read whole and without doubt; says why in one line.
    """
    config_path = source / "config.json"
    body = read_json(config_path)
    found = open_model(source)
    tensors = {name: stored for name, stored in found.items() if not _BUFFER.fullmatch(name)}
    stored_dtypes = {stored.dtype for stored in tensors.values()}
    as_stored: Literal["float32", "bfloat16"] = "bfloat16" if stored_dtypes == {DTYPES["BF16"]} else "float32"
    config, special_tokens = read_config(body, config_path, dtype or as_stored)
    ends = read_ends(source, special_tokens, config)
    tensors = _check_tensors(source, config, tensors)
    license = read_license(source / "README.md")
    files = read_travelling(travelling_files(source))
    if has_vocabulary(files):
        try:
            load_tokenizer(source)  # which training would have to, later
        except Exception as error:  # a damaged file makes the tokenizer libraries raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{source}: the tokenizer cannot be read: {reason}; download it again") from error
    return HfModel(
        source=source,
        config=config,
        model_type=body["model_type"],
        stored_dtype="float16" if dtype is None and stored_dtypes == {DTYPES["F16"]} else config.param_dtype,
        special_tokens=special_tokens,
        ends=ends,
        tensors=tensors,
        license=license,
        files=files,
    )


def _check_tensors(source: Path, config: ModelConfig, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors that `config` asks for, after comparing names and shapes."""
    num_stored = sum(stored.nbytes // stored.dtype.itemsize for stored in tensors.values())
    if num_params(config) > 2 * num_stored + 1_000_000:  # too large a model to list all that is missing
        raise ConfigError(
            f"{source / 'config.json'}: describes {num_params(config):,} parameters, but the files hold {num_stored:,};"
            " download the whole model"
        )
    shapes = names.hf_shapes(config)
    if missing := [name for name in shapes if name not in tensors]:
        raise ConfigError(f"{source}: {missing[0]} is missing, and {len(missing) - 1} more; download the whole model")
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"{tensors[name].file}: {name} is {list(tensors[name].shape)}, but config.json asks for {list(shape)};"
                " the files are of two models"
            )
    extra = [name for name in tensors if name not in shapes]
    if extra == ["lm_head.weight"] and config.tie_embeddings:
        if not _equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            raise ConfigError(
                f"{tensors['lm_head.weight'].file}: lm_head.weight differs from model.embed_tokens.weight, but config.json"
                " says tie_word_embeddings; correct that"
            )
    elif extra:
        architecture = architecture_of(config).name
        more = f", and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConfigError(f"{tensors[extra[0]].file}: {show(extra[0])} is no tensor of a {architecture}{more}; remove it")
    return {name: tensors[name] for name in shapes}


def _equal(first: Stored, second: Stored) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    rows = max(1, (64 << 20) // (first.nbytes // first.shape[0]))
    starts = range(0, first.shape[0], rows)
    return all(np.array_equal(first.read(at, at + rows), second.read(at, at + rows)) for at in starts)
