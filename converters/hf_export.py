"""Exports a checkpoint to a Hugging Face directory."""

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from converters.blocks import THREADS, StoredArray, boxes, open_array
from converters.hf_tokenizer import tokenizer_files
from converters.model_card import model_card
from converters.verify import compare_logits
from converters.verify_ids import compare_ids
from llamajax.checkpoint.read import saved_arrays, unless_deleted
from llamajax.config.hf_config import hf_config_of
from llamajax.config.hub import is_on_hub
from llamajax.config.model import DType, ModelConfig
from llamajax.data.chat.chat_template import load_chat_template
from llamajax.errors import CheckpointError, ConfigError
from llamajax.generation.prompts import find_ends
from llamajax.weights import names
from llamajax.weights.hf_files import TOKENIZERS, read_travelling
from llamajax.weights.names import Box
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.pretrained import ExportDType, Pretrained
from llamajax.weights.safetensors import Writer

MAX_SHARD_BYTES = 5_000_000_000

_PIECE_BYTES = 16 << 20
"""Threads copy pieces of arrays up to this size or a quarter of the largest tensor; each thread needs less than four times
that. Larger pieces are copied one at a time, tensor by tensor. Memory stays below twice the largest tensor and a little."""


@dataclass(frozen=True)
class Export:
    """Good checkpoint that can be exported."""

    found: Pretrained
    dtype: ExportDType
    """Dtype of the weights to write."""
    license: str | None
    """Licence identifier for the model card; None: the imported model's, or its licence file."""
    files: Mapping[str, bytes]
    """Contents of the tokenizer's and other small files, by name."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.found.config

    @property
    def has_tokenizer(self) -> bool:
        """Whether the files include a tokenizer."""
        return bool(TOKENIZERS & self.files.keys())

    @property
    def about(self) -> str:
        """Describes the model in one line."""
        return (
            f"read       {self.found.about}; written for {self.found.architecture.class_name} as {self.dtype},"
            f" with {', '.join(self.files) or 'no tokenizer'}"
        )

    def write(self, out: Path) -> int:
        """Fills the directory `out`. Returns the bytes of weights written.

        Raises:
            CheckpointError: a running run deleted the step during the export.
            ConfigError: a weight is too large for `dtype`.
        """
        special_tokens, ends = self.found.special_tokens(), self._template_ends()
        of_config = special_tokens | {"eos_token_id": _with_ends(special_tokens["eos_token_id"], ends)}
        for name, content in self.files.items():
            (out / name).write_bytes(content)
        _write_json(out / "config.json", hf_config_of(self.config, of_config, self.dtype, self.found.architecture))
        if "generation_config.json" not in self.files:
            _write_json(out / "generation_config.json", {"_from_model_config": True, **of_config})
        elif ends:
            generation = json.loads(self.files["generation_config.json"])
            known = generation.get("eos_token_id", special_tokens["eos_token_id"])
            _write_json(out / "generation_config.json", generation | {"eos_token_id": _with_ends(known, ends)})
        card = model_card(self.found, self.found.architecture, self.dtype, self.license)
        (out / "README.md").write_text(card, encoding="utf-8")
        dtype = np.dtype(jax.numpy.dtype(self.dtype))
        shapes = names.hf_shapes(self.config)
        with unless_deleted(self.found.source), Writer(out, shapes, dtype, MAX_SHARD_BYTES) as writer:
            piece_bytes = max(_PIECE_BYTES, writer.largest_nbytes // 4)
            for array in names.our_shapes(self.config):
                _copy_array(self.found.source, array, writer, dtype, piece_bytes)
        return writer.nbytes

    def verify_ids(self, out: Path) -> str:
        """Compares the token ids of texts in training and in the directory; see `compare_ids`."""
        return compare_ids(out, self.found.tokenizer())

    def verify(self, out: Path) -> str:
        """Compares the logits of the checkpoint and the directory; see `compare_logits`."""
        step_dir = self.found.source
        return compare_logits(out, step_dir.parent.parent, int(step_dir.name), self.config, self.dtype)

    def _template_ends(self) -> frozenset[int]:
        """Returns the special tokens that end an answer in the chat template, if the model has one."""
        if not self.has_tokenizer:
            return frozenset()
        tokenizer = self.found.tokenizer()
        template = load_chat_template(self.found.files, tokenizer)
        return frozenset() if template is None else find_ends((), tokenizer, template)


def _with_ends(known: int | list[int] | None, ends: frozenset[int]) -> int | list[int] | None:
    """Returns `known` unchanged if it has all of `ends`, else a list with the missing ones appended."""
    before = known if isinstance(known, list) else [] if known is None else [known]
    new = sorted(ends - set(before))
    return [*before, *new] if new else known


def _copy_array(step_dir: Path, array: str, writer: Writer, dtype: np.dtype[Any], piece_bytes: int) -> None:
    """Writes the tensors that make up one of our arrays."""
    stored = open_array(step_dir, array)
    with ThreadPoolExecutor(THREADS) as pool:
        small = []
        for box in _boxes(array, stored):
            if stored.nbytes(box) <= piece_bytes:
                small.append(pool.submit(_copy_piece, array, stored, box, names.tensors_of(array), writer, dtype))
            else:
                for tensor in names.tensors_of(array):
                    _copy_piece(array, stored, box, [tensor], writer, dtype)
        try:
            for piece in small:
                piece.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _boxes(array: str, stored: StoredArray) -> Iterator[Box]:
    """Yields the parts of an array to copy at a time: stored blocks along layers and tensor rows, whole in other dims."""
    split_dims = (0, names.rows_dim(array))
    shape = [stored.block_shape[dim] if dim in split_dims else size for dim, size in enumerate(stored.shape)]
    return boxes(stored.shape, tuple(shape))


def _copy_piece(
    array: str, stored: StoredArray, box: Box, tensors: list[names.Tensor], writer: Writer, dtype: np.dtype[Any]
) -> None:
    stacked = names.is_stacked(array)
    of_layer, shape = (box[1:], stored.shape[1:]) if stacked else (box, stored.shape)
    layers = box[:1] if stacked else ()
    block = stored.read(box) if len(tensors) > 1 else None
    for tensor in tensors:
        if block is None:
            part = stored.read((*layers, *names.part_index(tensor, shape, of_layer)))
        else:
            part = block[(slice(None),) * stacked + tensor.part]
        first_row = names.first_row(tensor, shape, of_layer)
        for layer, values in enumerate(part, box[0].start) if stacked else [(0, part)]:
            name = tensor.hf_name.format(layer=layer)
            writer.write(name, _round(names.to_hf(tensor, values), dtype, name), first_row)


def _round(values: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        rounded = values.astype(dtype)
    if dtype == np.float16 and not np.isfinite(rounded).all():
        largest = float(np.max(np.abs(values.astype(np.float32))))
        raise ConfigError(
            f"--dtype float16: {name} has a weight {largest:.3g}, above float16's maximum 65504; choose bfloat16 or float32"
        )
    return rounded


def _write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n")


def read_checkpoint(source: str | os.PathLike[str], dtype: ExportDType | None, license: str | None) -> Export:
    """Finds and verifies a checkpoint; needs a current mesh.

    Args:
        source: run directory, for its newest good step, or `RUN/checkpoints/STEP`.
        dtype: dtype of the weights to write; None: the dtype of the master weights, or of the imported weights.
        license: licence for the model card.

    Raises:
        CheckpointError: `source` has no good checkpoint of a model.
        ConfigError: transformers has no architecture for the model.
    """
    if is_on_hub(os.fspath(source)):
        raise ConfigError(f"{source}: is in the form of Hugging Face already; give a run or RUN/checkpoints/STEP")
    found = open_pretrained(source)
    if found.tensors is not None:
        raise ConfigError(f"{source}: is already a Hugging Face directory; give a run or RUN/checkpoints/STEP")
    assert found.architecture  # raises if transformers has none
    saved = saved_arrays(found.source)
    shapes = names.our_shapes(found.config)
    for name, shape in shapes.items():
        if name not in saved or saved[name][0] not in get_args(DType) or saved[name][1] != shape:
            text = (
                f"has no {name} of shape {list(shape)}, which this version needs; export it with the version that wrote it"
            )
            raise CheckpointError(f"{found.source}: {text}")
    files = read_travelling(found.files)
    if TOKENIZERS & files.keys():
        files |= tokenizer_files(files, found.tokenizer())
    return Export(found, dtype or found.stored_dtype, license, files)
