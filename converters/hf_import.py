"""From a Hugging Face directory to a checkpoint at step 0."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import yaml

import llamajax
from converters import names
from converters.architectures import architecture_of
from converters.blocks import BlockArray, Box, block_shape
from converters.hf_config import read_config, read_ends
from converters.hf_files import read_license, read_travelling, travelling_files
from converters.safetensors_io import DTYPES, Stored, open_model, read_json
from converters.verify import compare_logits
from llamajax.checkpoint import Checkpointer
from llamajax.config import CheckpointConfig, DType, ModelConfig
from llamajax.data.tokenizer import load_tokenizer
from llamajax.data.tokenizer_files import has_vocabulary
from llamajax.errors import ConfigError
from llamajax.yaml_text import show

_BUFFER = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")
"""Old Llamas store these frequencies beside the weights; they follow from config.json."""


@dataclass(frozen=True)
class Import:
    """A Hugging Face model that was looked at and can be read."""

    source: Path
    config: ModelConfig
    model_type: str
    """In its `config.json`."""
    stored_dtype: str
    """What an export has by default: `config.param_dtype`, or float16 where that is what the files have."""
    special_tokens: dict[str, Any]
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

    @property
    def about(self) -> str:
        """What was found, in a line."""
        num_files = len({stored.file for stored in self.tensors.values()})
        return (
            f"read       {self.source}: {architecture_of(self.config, self.model_type).name}"
            f" of {self.config.num_params:,} parameters in {num_files} file(s); kept as {self.config.param_dtype},"
            f" with {', '.join(self.files) or 'no tokenizer'}"
        )

    def write(self, out: Path) -> int:
        """Fills the directory `out`: checkpoint, `model.yaml` and small files. Returns the bytes of weights read."""
        for name, content in self.files.items():
            (out / name).write_bytes(content)
        # Training has its own types: master weights in float32, whatever they are stored in.
        types = {"param_dtype": ModelConfig.param_dtype, "compute_dtype": ModelConfig.compute_dtype}
        (out / "model.yaml").write_text(
            f"# The model of {self.source.name}, for a configuration that trains on from it; types and remat are free.\n"
            + yaml.safe_dump({"model": dataclasses.asdict(self.config) | types}, sort_keys=False)
        )
        meta = {
            "llamajax": llamajax.__version__,
            "jax": jax.__version__,
            "config": {"model": dataclasses.asdict(self.config)},
            "hf": self.hf,
            "stored_dtype": self.stored_dtype,
        }
        arrays = {name: self._array(name, shape) for name, shape in names.our_shapes(self.config).items()}
        with Checkpointer(out, CheckpointConfig(async_save=False), use_ocdbt=False) as checkpointer:
            checkpointer.save(0, arrays, meta, self.files)
        return sum(stored.nbytes for stored in self.tensors.values())

    def verify(self, out: Path) -> str:
        """Compares the logits of source and checkpoint; see `compare_logits`."""
        return compare_logits(self.source, out, 0, self.config, self.config.param_dtype)

    def _array(self, name: str, shape: tuple[int, ...]) -> BlockArray:
        dtype = np.dtype(jax.numpy.dtype(self.config.param_dtype))
        stacked = names.is_stacked(name)

        def make(box: Box) -> np.ndarray:
            block = np.empty([dim.stop - dim.start for dim in box], dtype)
            if stacked:
                for layer, of_layer in enumerate(block, box[0].start):
                    names.from_hf(name, layer, self.tensors, shape[1:], box[1:], of_layer)
            else:
                names.from_hf(name, 0, self.tensors, shape, box, block)
            return block

        return BlockArray(shape, dtype, block_shape(shape, dtype, names.rows_dim(name)), make)


def read_model(source: Path, dtype: DType | None) -> Import:
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
    read_ends(source, special_tokens, config)  # which is refused here rather than when the model is to write
    tensors = _check_tensors(source, config, tensors)
    files = read_travelling(travelling_files(source))
    _check_tokenizer(source, files)
    return Import(
        source=source,
        config=config,
        model_type=body["model_type"],
        stored_dtype="float16" if dtype is None and stored_dtypes == {DTYPES["F16"]} else config.param_dtype,
        special_tokens=special_tokens,
        tensors=tensors,
        license=read_license(source / "README.md"),
        files=files,
    )


def _check_tensors(source: Path, config: ModelConfig, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors that `config` asks for, after comparing names and shapes."""
    num_stored = sum(stored.nbytes // stored.dtype.itemsize for stored in tensors.values())
    if config.num_params > 2 * num_stored + 1_000_000:  # too large a model to list all that is missing
        raise ConfigError(
            f"{source / 'config.json'}: describes {config.num_params:,} parameters, but the files hold {num_stored:,};"
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


def _check_tokenizer(source: Path, files: Mapping[str, bytes]) -> None:
    """Refuses a tokenizer that training could not load later."""
    if not has_vocabulary(files):
        return
    try:
        load_tokenizer(source)
    except Exception as error:  # a damaged file makes the tokenizer libraries raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{source}: the tokenizer cannot be read: {reason}; download it again") from error
