"""Imports a Hugging Face directory as a checkpoint at step 0."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import yaml

import llamajax
from converters.blocks import BlockArray, block_shape
from converters.verify import compare_logits
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.model import DType, ModelConfig
from llamajax.config.peft import is_peft
from llamajax.config.training import CheckpointConfig
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import num_params
from llamajax.weights import names
from llamajax.weights.hf_files import read_travelling
from llamajax.weights.names import Box
from llamajax.weights.open_model import open_directory
from llamajax.weights.pretrained import Pretrained
from llamajax.weights.safetensors import Stored


@dataclass(frozen=True)
class Import:
    """Hugging Face model that can be written as a checkpoint."""

    found: Pretrained
    tensors: Mapping[str, Stored]
    """Weights by their Hugging Face name."""
    files: Mapping[str, bytes]
    """Contents of the tokenizer's and other small files, by name."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.found.config

    @property
    def about(self) -> str:
        """Describes the model in one line."""
        num_files = len({stored.file for stored in self.tensors.values()})
        return (
            f"read       {self.found.source}: {self.found.architecture.name}"
            f" of {num_params(self.config):,} parameters in {num_files} file(s); stored as {self.config.param_dtype},"
            f" with {', '.join(self.files) or 'no tokenizer'}"
        )

    def write(self, out: Path) -> int:
        """Fills the directory `out` with the checkpoint, `model.yaml` and small files. Returns the bytes of weights read."""
        for name, content in self.files.items():
            (out / name).write_bytes(content)
        # Training chooses its own dtypes: float32 master weights, whatever the stored dtype.
        types = {"param_dtype": ModelConfig.param_dtype, "compute_dtype": ModelConfig.compute_dtype}
        (out / "model.yaml").write_text(
            f"# The model {self.found.source.name}, for a configuration that continues training it. Dtypes and remat may"
            " change.\n" + yaml.safe_dump({"model": dataclasses.asdict(self.config) | types}, sort_keys=False),
            encoding="utf-8",
        )
        meta = {
            "llamajax": llamajax.__version__,
            "jax": jax.__version__,
            "config": {"model": dataclasses.asdict(self.config)},
            "hf": self.found.hf,
            "stored_dtype": self.found.stored_dtype,
        }
        arrays = {name: self._array(name, shape) for name, shape in names.our_shapes(self.config).items()}
        with Checkpointer(out, CheckpointConfig(async_save=False), use_ocdbt=False) as checkpointer:
            checkpointer.save(0, arrays, meta, self.files)
        return sum(stored.nbytes for stored in self.tensors.values())

    def verify(self, out: Path) -> str:
        """Compares the logits of the source and the checkpoint; see `compare_logits`."""
        return compare_logits(self.found.source, out, 0, self.config, self.config.param_dtype)

    def _array(self, name: str, shape: tuple[int, ...]) -> BlockArray:
        dtype = np.dtype(jax.numpy.dtype(self.config.param_dtype))
        stacked = names.is_stacked(name)

        def make(box: Box) -> np.ndarray:
            block = np.empty([dim.stop - dim.start for dim in box], dtype)
            if stacked:
                for layer, of_layer in enumerate(block, box[0].start):
                    names.from_hf(name, layer, self.tensors, shape[1:], box[1:], of_layer, self.config)
            else:
                names.from_hf(name, 0, self.tensors, shape, box, block, self.config)
            return block

        return BlockArray(shape, dtype, block_shape(shape, dtype, names.split_dims(name, self.config)), make)


def open_import(source: Path, dtype: DType | None) -> Import:
    """Opens the Hugging Face model in `source`; see `open_directory`."""
    if is_peft(source):
        raise ConfigError(f"{source}: holds adapters, which are used as they are; `export {source} OUT --merge` merges them")
    found = open_directory(source, dtype)
    assert found.tensors is not None
    return Import(found, found.tensors, read_travelling(source))
