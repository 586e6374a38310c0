"""Weights to start from, of any kind: a run, one of its checkpoints, an imported model, a Hugging Face directory."""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import NamedSharding

from llamajax.checkpoint.meta import model_config
from llamajax.checkpoint.read import find_step, read_step
from llamajax.config.formulas import num_params
from llamajax.config.model import DType, ModelConfig
from llamajax.data.tokenizer import find_tokenizer, load_tokenizer
from llamajax.data.tokenizer_base import Tokenizer
from llamajax.errors import CheckpointError, ConfigError
from llamajax.model import Llama
from llamajax.parallel.mesh import concretise, named_arrays
from llamajax.weights import names
from llamajax.weights.architectures import Architecture, architecture_of
from llamajax.weights.hf_config import SPECIAL_TOKENS, read_ends, read_hf_config
from llamajax.weights.hf_files import CONFIG, read_directory, read_generation
from llamajax.weights.safetensors import DTYPES, Stored

Index = tuple[slice, ...]
ExportDType = Literal["float32", "bfloat16", "float16"]

_BUFFER = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")
"""Old Llamas store these frequencies beside the weights; they follow from config.json."""

MAY_DIFFER = (
    "param_dtype", "compute_dtype", "remat", "attention_kernel", "attend_across_documents", "init_std", "max_seq_len",
    "rope_scaling",
)  # fmt: skip
"""Settings of the model in which a run may differ from the weights it starts from."""


@dataclass(frozen=True)
class Pretrained:
    """A model that was found and looked at; its weights are read by `load`."""

    source: Path
    """The directory of the weights: RUN/checkpoints/STEP, or of the Hugging Face model."""
    config: ModelConfig
    """Of the model: `param_dtype` is what its weights are stored in; `compute_dtype` the run's, or also that."""
    files: Path
    """The directory with its tokenizer files and chat template, if it has any."""
    special_tokens: dict[str, Any]
    """bos_token_id, eos_token_id and pad_token_id: an id, several (Llama 3's eos), or None."""
    ends: tuple[int, ...]
    """Tokens that end what the model writes, by its own configurations; Llama 3 and Qwen have several."""
    hf: dict[str, Any] | None
    """What Hugging Face's files said that ours have no place for, as checkpoints keep it; None if nothing did."""
    stored_dtype: ExportDType
    """What an export has by default: `config.param_dtype`, or float16 where that is what was imported."""
    meta: dict[str, Any]
    """What a checkpoint says about itself; empty for a Hugging Face directory."""
    tensors: Mapping[str, Stored] | None
    """The weights of a Hugging Face directory by their name in it; None for a checkpoint."""

    @property
    def about(self) -> str:
        """The model in a line."""
        kind = "model" if self.tensors is None else f"Hugging Face {self.architecture.name}"
        return f"{self.source}: {kind} of {num_params(self.config):,} parameters in {self.config.param_dtype}"

    @property
    def architecture(self) -> Architecture:
        """What it is for transformers.

        Raises:
            ConfigError: transformers has no such model.
        """
        return architecture_of(self.config, (self.hf or {}).get("model_type"))

    def check(self, config: ModelConfig) -> None:
        """Raises `ConfigError` if `config` is of another model, with a line for every setting that must not differ."""
        here, theirs = dataclasses.asdict(config), dataclasses.asdict(self.config)
        if wrong := [key for key in here if key not in MAY_DIFFER and here[key] != theirs[key]]:
            lines = (f"model.{key}: {here[key]} is not that of {self.source}; it must be {theirs[key]}" for key in wrong)
            raise ConfigError("\n".join(lines))

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            DataError: it has none, or one that cannot be read.
        """
        return load_tokenizer(self.files)

    def load(self, config: ModelConfig) -> Llama:
        """The model on the current mesh, in `config.param_dtype`; processes call this together.

        On the host is never more than what this process's devices need of one layer's largest array, or of a
        vocabulary's table.

        Args:
            config: the model's, but for the settings in `MAY_DIFFER`.

        Raises:
            ConfigError: `config` is of another model.
            CheckpointError: the checkpoint was deleted meanwhile, or is of another version of the model, or a weight is no
                finite number.
        """
        self.check(config)
        model = self._restore(config) if self.tensors is None else self._read(config, self.tensors)
        finite = _are_finite(model)
        if bad := [name for name, is_finite in named_arrays({"model": finite}).items() if not is_finite]:
            raise CheckpointError(
                f"{self.source}: {', '.join(bad)} holds values that are no finite numbers; take weights from before that"
            )
        return model

    def _read(self, config: ModelConfig, tensors: Mapping[str, Stored]) -> Llama:
        abstract = concretise(_abstract_model(config))
        arrays = named_arrays({"model": abstract})
        leaves = [_read_array(name, leaf, tensors) for name, leaf in arrays.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    def _restore(self, config: ModelConfig) -> Llama:
        as_stored = dataclasses.replace(config, param_dtype=self.config.param_dtype)
        try:
            model = read_step(self.source, concretise({"model": _abstract_model(as_stored)}), partial=True).state["model"]
        except Exception as error:
            if not self.source.exists():
                raise CheckpointError(f"{self.source} was deleted by its run while it was read; try again") from error
            raise
        leaves = jax.tree.leaves(model)
        del model  # so that no array lives in both types longer than it takes to make it
        for i, array in enumerate(leaves):
            leaves[i] = array.astype(config.param_dtype)
        return jax.tree.unflatten(jax.tree.structure(_abstract_model(config)), leaves)


def open_pretrained(path: Path) -> Pretrained:
    """Finds out what `path` is and looks at everything but the weights; needs a current mesh.

    Args:
        path: a run's directory, whose newest good checkpoint is taken; RUN/checkpoints/STEP; a directory made by
            `python -m converters.hf import`; or a Hugging Face directory. Processes call this together.

    Raises:
        CheckpointError: there is no good checkpoint, or not of this version's model.
        ConfigError: it is none of these, or a Hugging Face model that cannot be read.
    """
    path = path.expanduser().absolute()
    if (step_dir := find_step(path)) is not None:
        meta = json.loads((step_dir / "meta.json").read_text())
        config = model_config(meta, step_dir)
        files = step_dir / "files"
        special_tokens: dict[str, Any] = dict.fromkeys(SPECIAL_TOKENS)
        if "hf" in meta:
            special_tokens = meta["hf"]["special_tokens"]
        elif files.is_dir() and (tokenizer := find_tokenizer(files)) is not None:
            special_tokens |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        ends = read_ends(read_generation(files), files, special_tokens, config)
        stored_dtype = meta.get("stored_dtype", config.param_dtype)
        return Pretrained(step_dir, config, files, special_tokens, ends, meta.get("hf"), stored_dtype, meta, None)
    if (path / CONFIG).is_file():
        return open_directory(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such directory; give a run, RUN/checkpoints/STEP or a Hugging Face model")
    raise ConfigError(
        f"{path}: has neither checkpoints/, as a run has, nor config.json, as a Hugging Face model has, and is no"
        " RUN/checkpoints/STEP; give one of these"
    )


def open_directory(path: Path, dtype: DType | None = None) -> Pretrained:
    """Looks at everything in a Hugging Face directory but the weights' values; needs a current mesh.

    Args:
        path: the directory.
        dtype: type to keep the weights in; None: bfloat16 if all are, else float32, which holds them exactly.

    Raises:
        ConfigError: it is no model that can be read whole and without doubt; says why in one line.
    """
    found = read_directory(path)
    tensors = {name: stored for name, stored in found.tensors.items() if not _BUFFER.fullmatch(name)}
    stored_dtypes = {stored.dtype for stored in tensors.values()}
    as_stored: Literal["float32", "bfloat16"] = "bfloat16" if stored_dtypes == {DTYPES["BF16"]} else "float32"
    config, special_tokens = read_hf_config(found.config, path / CONFIG, dtype or as_stored)
    ends = read_ends(found.generation, path, special_tokens, config)
    num_stored = sum(stored.nbytes // stored.dtype.itemsize for stored in tensors.values())
    if num_params(config) > 2 * num_stored + 1_000_000:  # too large a model to list all that is missing
        raise ConfigError(
            f"{path / CONFIG}: describes {num_params(config):,} parameters, but the files hold {num_stored:,};"
            " download the whole model"
        )
    tensors = names.tensors_for(config, tensors, path)
    try:
        find_tokenizer(path)  # which training would have to, later
    except Exception as error:  # a damaged file makes the tokenizer libraries raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}: the tokenizer cannot be read: {reason}; download it again") from error
    hf = {
        "source": found.name,
        "model_type": found.config["model_type"],
        "special_tokens": special_tokens,
        "license": found.license,
    }
    stored_dtype = "float16" if dtype is None and stored_dtypes == {DTYPES["F16"]} else config.param_dtype
    return Pretrained(path, config, path, special_tokens, ends, hf, stored_dtype, {}, tensors)


def _abstract_model(config: ModelConfig) -> Llama:
    return jax.eval_shape(partial(Llama, config), jax.random.key(0))


def _read_array(name: str, abstract: jax.ShapeDtypeStruct, tensors: Mapping[str, Stored]) -> jax.Array:
    """One of our arrays, of its type and sharding; a stacked one grows on the devices, layer by layer."""
    sharding = abstract.sharding
    assert isinstance(sharding, NamedSharding)
    if not names.is_stacked(name):
        return _place(abstract.shape, abstract.dtype, sharding, partial(names.from_hf, name, 0, tensors, abstract.shape))
    array = jnp.zeros(abstract.shape, abstract.dtype, device=sharding)
    of_layer, shape = NamedSharding(sharding.mesh, P(*sharding.spec[1:])), abstract.shape[1:]
    for layer in range(abstract.shape[0]):
        read = partial(names.from_hf, name, layer, tensors, shape)
        array = _set_layer(array, _place(shape, abstract.dtype, of_layer, read), layer)
        array.block_until_ready()  # or the host would read ahead, and hold more than one layer
    return array


@jax.jit
def _are_finite(model: Llama) -> Llama:
    """A bool [] for every weight, on every device."""
    return jax.tree.map(lambda weight: jnp.all(jnp.isfinite(weight)), model)


@partial(jax.jit, donate_argnums=0)
def _set_layer(stacked: jax.Array, block: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stacked, block, layer, 0)


def _place(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: NamedSharding,
    read: Callable[[Index, np.ndarray], None],
) -> jax.Array:
    """A sharded array, of which `read` fills the box around the parts of this process's devices."""

    def ranges(index: Index | None) -> list[range]:
        assert index is not None
        return [range(size)[dim] for dim, size in zip(index, shape, strict=True)]

    parts = [ranges(index) for index in sharding.addressable_devices_indices_map(shape).values()]
    box = tuple(slice(min(dim.start for dim in dims), max(dim.stop for dim in dims)) for dims in zip(*parts, strict=True))
    block = np.empty([dim.stop - dim.start for dim in box], dtype)
    read(box, block)

    def part(index: Index | None) -> np.ndarray:
        inside = zip(ranges(index), box, strict=True)
        return block[tuple(slice(dim.start - around.start, dim.stop - around.start) for dim, around in inside)]

    return jax.make_array_from_callback(shape, sharding, part)
