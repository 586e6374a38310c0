"""From a checkpoint to a Hugging Face directory."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import tokenizers

from converters import names
from converters.blocks import open_array
from converters.hf_config import SPECIAL_TOKENS, write_config
from converters.hf_files import read_travelling, travelling_files
from converters.hf_tokenizer import convert_sentencepiece, tokenizer_config
from converters.safetensors_io import Writer
from converters.verify import compare_logits
from llamajax import manifest
from llamajax.config import DType, ModelConfig, RopeScalingConfig
from llamajax.data.tokenizer import Tokenizer, load_tokenizer
from llamajax.errors import CheckpointError
from llamajax.restore import damage_line, newest_good, none_good_line, say

MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Export:
    """A good checkpoint that can be exported."""

    step_dir: Path
    config: ModelConfig
    special_tokens: dict[str, Any]
    dtype: DType
    """Type of the weights to write."""
    files: Mapping[str, bytes]
    """Name and content of the tokenizer's and other small files."""

    @property
    def about(self) -> str:
        """What was found, in a line."""
        return (
            f"read       {self.step_dir}: Llama of {self.config.num_params:,} parameters;"
            f" written as {self.dtype}, with {', '.join(self.files) or 'no tokenizer'}"
        )

    def write(self, out: Path) -> int:
        """Fills the directory `out`. Returns the bytes of weights written.

        Raises:
            CheckpointError: a running run deleted the step meanwhile.
        """
        for name, content in self.files.items():
            (out / name).write_bytes(content)
        _write_json(out / "config.json", write_config(self.config, self.special_tokens, self.dtype))
        if "generation_config.json" not in self.files:
            _write_json(out / "generation_config.json", {"_from_model_config": True, **self.special_tokens})
        (out / "README.md").write_text(self._model_card())
        dtype = np.dtype(jax.numpy.dtype(self.dtype))
        try:
            with Writer(out, names.hf_shapes(self.config), dtype, MAX_SHARD_BYTES) as writer:
                for array in names.our_shapes(self.config):
                    for start, block in open_array(self.step_dir, array).blocks():
                        _write_block(writer, array, start, block)
        except Exception as error:
            if not self.step_dir.exists():
                raise CheckpointError(f"{self.step_dir} was deleted by its run while it was read; try again") from error
            raise
        return writer.nbytes

    def verify(self, out: Path) -> str:
        """Compares the logits of checkpoint and directory; see `compare_logits`."""
        return compare_logits(out, self.step_dir.parent.parent, int(self.step_dir.name), self.config, self.dtype)

    def _model_card(self) -> str:
        config = self.config
        return (
            "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- llama\n- llamajax\n---\n\n"
            f"A Llama of {config.num_params:,} parameters: {config.num_layers} layers, width {config.embed_dim},"
            f" {config.num_heads} query and {config.num_kv_heads} key/value heads, {config.vocab_size:,} tokens,"
            f" context of {config.max_seq_len:,}. Trained with llamajax, exported at step {self.step_dir.name}"
            f" as {self.dtype}.\n"
        )


def _write_block(writer: Writer, array: str, start: int, block: np.ndarray) -> None:
    """Writes rows of one of our arrays, from row `start` on, to the tensors they belong to."""
    for tensor in names.tensors_of(array):
        if tensor.is_stacked:
            for layer, layer_block in enumerate(block, start):
                writer.write(tensor.hf_name.format(layer=layer), names.to_hf(tensor, layer_block))
        else:
            writer.write(tensor.hf_name, names.to_hf(tensor, block), start)


def _write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n")


def read_checkpoint(source: Path, dtype: DType | None) -> Export:
    """Finds and verifies a checkpoint; needs a current mesh.

    Args:
        source: a run's directory, whose newest good step is taken, or `RUN/checkpoints/STEP`.
        dtype: type of the weights to write; None: that of the master weights.

    Raises:
        CheckpointError: there is no good checkpoint of a Llama.
    """
    step_dir = _step_dir(source.absolute())
    meta = json.loads((step_dir / "meta.json").read_text())
    saved = json.loads((step_dir / "arrays.json").read_text())
    try:
        fields: dict[str, Any] = dict(meta["config"]["model"])
        fields["rope_scaling"] = RopeScalingConfig(**fields["rope_scaling"])
        config = ModelConfig(**fields)
        shapes = {name: tuple(saved[name]["shape"]) for name in names.our_shapes(config)}
        dtypes = {saved[name]["dtype"] for name in shapes}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{step_dir}: was not written by this version's model ({error}); export it with its own"
        ) from error
    assert shapes == names.our_shapes(config)
    assert dtypes <= set(get_args(DType))
    files = read_travelling(travelling_files(step_dir / "files"))
    special_tokens: dict[str, Any] = dict.fromkeys(SPECIAL_TOKENS)
    if {"tokenizer.json", "tokenizer.model"} & files.keys():
        tokenizer = load_tokenizer(step_dir / "files")
        special_tokens |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        files |= _missing_tokenizer_files(files, tokenizer)
    if "hf" in meta:
        special_tokens = meta["hf"]["special_tokens"]
    return Export(step_dir, config, special_tokens, dtype or config.param_dtype, files)


def _missing_tokenizer_files(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """What `AutoTokenizer` needs beside `files`; nothing for kinds of SentencePiece models that it converts itself."""
    if "tokenizer_config.json" in files:
        return {}
    if "tokenizer.json" not in files:
        return convert_sentencepiece(files["tokenizer.model"]) or {}
    pieces = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    bos, eos = pieces.id_to_token(tokenizer.bos_id), pieces.id_to_token(tokenizer.eos_id)
    assert bos is not None
    assert eos is not None
    return {"tokenizer_config.json": tokenizer_config(bos, eos)}


def _step_dir(source: Path) -> Path:
    """The directory of the step that `source` names, after comparing every file of it with the manifest."""
    if source.parent.name == "checkpoints" and source.name.isdecimal():
        if not source.is_dir():
            raise CheckpointError(f"{source}: there is no such checkpoint; choose another step")
        if problems := manifest.problems(source, manifest.read(source)):
            raise CheckpointError(f"{damage_line(source.parent, int(source.name), problems)}; choose another step")
        return source
    step, damaged = newest_good(source / "checkpoints")
    if step is None:
        raise CheckpointError(none_good_line(source / "checkpoints", damaged))
    for bad, found in damaged.items():
        say(f"{damage_line(source / 'checkpoints', bad, found)}; reading step {step} instead")
    return source / "checkpoints" / str(step)
