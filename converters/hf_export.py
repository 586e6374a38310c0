"""Exports a model to a Hugging Face directory: a checkpoint, or adapters merged into their base."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import jax
import numpy as np

from converters.copying import PIECE_BYTES, copy_array, copy_tensor, rounded
from converters.merging import Merging
from converters.model_card import model_card
from converters.small_files import SmallFiles, read_small_files
from converters.verify import compare_logits, compare_merged
from converters.verify_ids import compare_ids
from llamajax.checkpoint.read import saved_arrays, unless_deleted
from llamajax.config.hf_config import hf_config_of
from llamajax.config.model import DType, ModelConfig
from llamajax.errors import CheckpointError, ConfigError
from llamajax.weights import names
from llamajax.weights.pretrained import ExportDType, Pretrained
from llamajax.weights.safetensors import Writer

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Export:
    """Model that can be exported whole."""

    found: Pretrained
    """A checkpoint of a model, or adapters to merge."""
    dtype: ExportDType
    """Dtype of the weights to write."""
    license: str | None
    """Licence identifier for the model card; None: the imported model's, or its licence file."""
    files: SmallFiles
    """Tokenizer and other small files."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.found.config

    @property
    def about(self) -> str:
        """Describes the model in one line."""
        merged = "" if self.found.adapters is None else ", adapters merged"
        class_name = self.found.architecture.class_name(self.config.head)
        return f"read       {self.found.about}; written for {class_name} as {self.dtype}{merged}, with {self.files.listed}"

    def write(self, out: Path) -> int:
        """Fills the directory `out`. Returns the bytes of weights written.

        Raises:
            CheckpointError: a running run deleted the step during the export.
            ConfigError: a weight is too large for `dtype`.
        """
        self.files.write(out)
        body = hf_config_of(self.config, self.files.special_tokens, self.dtype, self.found.architecture)
        (out / "config.json").write_text(json.dumps(body, indent=2) + "\n")
        card = model_card(self.found, self.found.architecture, self.dtype, self.license)
        (out / "README.md").write_text(card, encoding="utf-8")
        dtype, weights = np.dtype(jax.numpy.dtype(self.dtype)), self.found.base or self.found
        merge = None if self.found.adapters is None else Merging(self.found)
        shapes, own_name = names.hf_shapes(self.config), self.found.architecture.own_name
        own_shapes = {own_name(name): shape for name, shape in shapes.items()}
        with unless_deleted(self.found.source), Writer(out, own_shapes, dtype, MAX_SHARD_BYTES) as writer:

            def put(name: str, values: np.ndarray, first_row: int) -> None:
                values = values if merge is None else merge(name, values, first_row)
                writer.write(own_name(name), rounded(values, dtype, name), first_row)

            piece_bytes = max(PIECE_BYTES, writer.largest_nbytes // 4)
            if weights.tensors is None:
                for array in names.our_shapes(self.config):
                    copy_array(weights.source, array, put, piece_bytes, self.config)
            else:
                for name in shapes:
                    copy_tensor(name, weights.tensors[name], put)
        return writer.nbytes

    def verify_ids(self, out: Path) -> str:
        """Compares the token ids of texts in training and in the directory; see `compare_ids`."""
        return compare_ids(out, self.found.tokenizer())

    def verify(self, out: Path) -> str:
        """Compares the logits of the weights as they were and in the directory; see `compare_logits`."""
        if self.found.adapters is not None:
            return compare_merged(out, self.found, self.dtype)
        step_dir = self.found.source
        return compare_logits(out, step_dir.parent.parent, int(step_dir.name), self.config, self.dtype)


def read_model(found: Pretrained, dtype: ExportDType | None, license: str | None) -> Export:
    """Checks a model that is exported whole.

    Args:
        found: a checkpoint, or adapters to merge into their base.
        dtype: dtype of the weights to write; None: the dtype of the master weights, of the imported weights, or of the base.
        license: licence for the model card.

    Raises:
        CheckpointError: a checkpoint has no good weights of the model.
        ConfigError: transformers has no architecture for the model, or it is a Hugging Face directory already.
    """
    weights = found.base or found
    if found.adapters is None and found.tensors is not None:
        raise ConfigError(f"{found.source}: is already a Hugging Face directory; give a run or RUN/checkpoints/STEP")
    assert found.architecture  # raises if transformers has none
    if weights.tensors is None:
        check_arrays(weights, names.our_shapes(found.config))
    if found.adapters is not None and found.tensors is None:
        check_arrays(found, names.adapter_shapes(found.config, found.adapters))
    return Export(found, dtype or weights.stored_dtype, license, read_small_files(found))


def check_arrays(found: Pretrained, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `CheckpointError` if a checkpoint lacks an array of these names and shapes."""
    saved = saved_arrays(found.source)
    for name, shape in shapes.items():
        if name not in saved or saved[name][0] not in get_args(DType) or saved[name][1] != shape:
            text = (
                f"has no {name} of shape {list(shape)}, which this version needs; export it with the version that wrote it"
            )
            raise CheckpointError(f"{found.source}: {text}")
