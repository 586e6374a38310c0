"""From a Hugging Face directory to a checkpoint at step 0."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import yaml

import llamajax
from converters.blocks import BlockArray, block_shape
from converters.verify import compare_logits
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.formulas import num_params
from llamajax.config.model import ModelConfig
from llamajax.config.training import CheckpointConfig
from llamajax.weights import names
from llamajax.weights.architectures import architecture_of
from llamajax.weights.hf_model import HfModel
from llamajax.weights.names import Box


@dataclass(frozen=True)
class Import:
    """A Hugging Face model that can be written as a checkpoint."""

    model: HfModel

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.model.config

    @property
    def about(self) -> str:
        """What was found, in a line."""
        num_files = len({stored.file for stored in self.model.tensors.values()})
        architecture, directory = architecture_of(self.config, self.model.hf["model_type"]), self.model.directory
        return (
            f"read       {directory.path}: {architecture.name}"
            f" of {num_params(self.config):,} parameters in {num_files} file(s); kept as {self.config.param_dtype},"
            f" with {', '.join(directory.files) or 'no tokenizer'}"
        )

    def write(self, out: Path) -> int:
        """Fills the directory `out`: checkpoint, `model.yaml` and small files. Returns the bytes of weights read."""
        for name, content in self.model.directory.files.items():
            (out / name).write_bytes(content)
        # Training has its own types: master weights in float32, whatever they are stored in.
        types = {"param_dtype": ModelConfig.param_dtype, "compute_dtype": ModelConfig.compute_dtype}
        (out / "model.yaml").write_text(
            f"# The model of {self.model.directory.path.name}, for a configuration that trains on from it; types and remat"
            " are free.\n" + yaml.safe_dump({"model": dataclasses.asdict(self.config) | types}, sort_keys=False)
        )
        meta = {
            "llamajax": llamajax.__version__,
            "jax": jax.__version__,
            "config": {"model": dataclasses.asdict(self.config)},
            "hf": self.model.hf,
            "stored_dtype": self.model.stored_dtype,
        }
        arrays = {name: self._array(name, shape) for name, shape in names.our_shapes(self.config).items()}
        with Checkpointer(out, CheckpointConfig(async_save=False), use_ocdbt=False) as checkpointer:
            checkpointer.save(0, arrays, meta, self.model.directory.files)
        return sum(stored.nbytes for stored in self.model.tensors.values())

    def verify(self, out: Path) -> str:
        """Compares the logits of source and checkpoint; see `compare_logits`."""
        return compare_logits(self.model.directory.path, out, 0, self.config, self.config.param_dtype)

    def _array(self, name: str, shape: tuple[int, ...]) -> BlockArray:
        dtype = np.dtype(jax.numpy.dtype(self.config.param_dtype))
        stacked = names.is_stacked(name)

        def make(box: Box) -> np.ndarray:
            block = np.empty([dim.stop - dim.start for dim in box], dtype)
            if stacked:
                for layer, of_layer in enumerate(block, box[0].start):
                    names.from_hf(name, layer, self.model.tensors, shape[1:], box[1:], of_layer)
            else:
                names.from_hf(name, 0, self.model.tensors, shape, box, block)
            return block

        return BlockArray(shape, dtype, block_shape(shape, dtype, names.rows_dim(name)), make)
