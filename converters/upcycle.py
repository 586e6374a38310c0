"""Turns a dense model into one with experts that computes the same (sparse upcycling, arXiv:2212.05055).

Every expert begins as a copy of the layer's MLP, and the router at random. The weights of a token's experts add up to one,
so equal experts give what the MLP gave. Narrower experts are slices of the MLP. A token that chooses one slice of a copy
chooses all of them, because these have one row of the router (virtual groups, arXiv:2410.07524). Each has a share of the
copy's weight, for which its outputs are scaled.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

from converters.copying import Put, copy_tensor, rounded
from converters.hf_export import MAX_SHARD_BYTES
from converters.model_card import model_card
from converters.small_files import SmallFiles, read_small_files
from converters.verify import compare_directories
from converters.verify_ids import compare_ids
from llamajax.config.architectures import architecture_of
from llamajax.config.experts import ExpertsConfig
from llamajax.config.hf_config import hf_config_of
from llamajax.config.model import ModelConfig
from llamajax.errors import ConfigError
from llamajax.weights import names
from llamajax.weights.pretrained import ExportDType, Pretrained
from llamajax.weights.safetensors import Stored, Writer

_EXPERT = re.compile(r"(.+\.mlp)\.experts\.([0-9]+)\.((?:gate|up|down)_proj\.weight)")


@dataclass(frozen=True)
class Upcycling:
    """Dense Hugging Face model that can be written with experts."""

    dense: Pretrained
    config: ModelConfig
    """Configuration of the model with experts."""
    dtype: ExportDType
    """Dtype of the weights to write."""
    seed: int
    """Seed of the router."""
    license: str | None
    """Licence identifier for the model card; None: the dense model's."""
    files: SmallFiles
    """Tokenizer and other small files."""

    @property
    def about(self) -> str:
        """Describes the model in one line."""
        return f"read       {self.dense.about}; written for {self._class_name} as {self.dtype}: {self._experts}"

    @property
    def num_slices(self) -> int:
        """Number of experts that share a copy of the MLP."""
        return self.config.mlp_dim // (self.config.experts.mlp_dim or self.config.mlp_dim)

    def write(self, out: Path) -> int:
        """Fills the directory `out`. Returns the bytes of weights written.

        Raises:
            ConfigError: a weight is too large for `dtype`.
        """
        architecture, tensors = architecture_of(self.config), self.dense.tensors
        assert tensors is not None
        self.files.write(out)
        body = hf_config_of(self.config, self.files.special_tokens, self.dtype, architecture)
        (out / "config.json").write_text(json.dumps(body, indent=2) + "\n")
        made = f"Upcycled by llamajax, and not trained since: {self._experts}."
        card = model_card(replace(self.dense, config=self.config), architecture, self.dtype, self.license, made)
        (out / "README.md").write_text(card, encoding="utf-8")
        dtype, shapes = np.dtype(jax.numpy.dtype(self.dtype)), names.hf_shapes(self.config)
        own_shapes = {architecture.own_name(name): shape for name, shape in shapes.items()}
        rng = np.random.default_rng(self.seed)
        with Writer(out, own_shapes, dtype, MAX_SHARD_BYTES) as writer:

            def put(name: str, values: np.ndarray, first_row: int) -> None:
                writer.write(architecture.own_name(name), rounded(values, dtype, name), first_row)

            for name in shapes:
                if name.endswith(".mlp.gate.weight"):
                    put(name, self._router(rng), 0)
                elif (of_expert := _EXPERT.fullmatch(name)) is not None:
                    mlp, number, projection = of_expert.groups()
                    self._copy_slice(name, int(number) % self.num_slices, tensors[f"{mlp}.{projection}"], put)
                else:
                    copy_tensor(name, tensors[name], put)
        return writer.nbytes

    def verify_ids(self, out: Path) -> str:
        """Compares the token ids of texts before and after; see `compare_ids`."""
        return compare_ids(out, self.dense.tokenizer())

    def verify(self, out: Path) -> str:
        """Compares the logits of the dense model with those of the directory; see `compare_directories`."""
        if not self.config.experts.normalize:
            return "skipped: with --no-normalize, experts do not compute what the MLP does"
        return compare_directories(out, self.dense, self.dtype)

    @property
    def _class_name(self) -> str:
        return architecture_of(self.config).class_name(self.config.head)

    @property
    def _experts(self) -> str:
        own, slices = self.config.experts, self.num_slices
        of_each = "copies of the MLP" if slices == 1 else f"in groups of {slices} that hold a copy of the MLP"
        return f"{own.num_experts} experts of width {own.mlp_dim}, {own.top_k} for each token, {of_each}"

    def _router(self, rng: np.random.Generator) -> np.ndarray:
        """Returns a layer's router [E, D], with one row for all slices of a copy."""
        copies = self.config.experts.num_experts // self.num_slices
        rows = rng.normal(0.0, self.config.init_std, (copies, self.config.embed_dim)).astype(np.float32)
        return np.repeat(rows, self.num_slices, axis=0)

    def _copy_slice(self, name: str, number: int, stored: Stored, put: Put) -> None:
        """Puts an expert's slice of a projection of the MLP."""
        width = self.config.mlp_dim // self.num_slices
        own = slice(number * width, (number + 1) * width)
        if not name.endswith(".down_proj.weight"):
            copy_tensor(name, stored, put, own)
            return
        scale = self.num_slices if self.config.experts.normalize else 1

        def put_columns(name: str, values: np.ndarray, first_row: int) -> None:
            put(name, values[:, own] * values.dtype.type(scale), first_row)

        copy_tensor(name, stored, put_columns)


def read_upcycling(
    dense: Pretrained, experts: ExpertsConfig, dtype: ExportDType | None, seed: int, license: str | None
) -> Upcycling:
    """Checks that a dense model can be written with experts.

    Args:
        dense: the model, a Hugging Face directory.
        experts: the experts; `mlp_dim` None: as wide as the MLP.
        dtype: dtype of the weights to write; None: the dense model's.
        seed: seed of the router.
        license: licence for the model card.

    Raises:
        ConfigError: the model is none that can be, experts do not share it evenly, or no architecture has it with experts.
    """
    config = dense.config
    if dense.tensors is None or dense.adapters is not None:
        raise ConfigError(f"{dense.source}: is no Hugging Face model; export it first, a model with adapters with --merge")
    if config.experts.enabled:
        raise ConfigError(f"{dense.source}: has experts already; give a dense model")
    width = experts.mlp_dim or config.mlp_dim
    slices = config.mlp_dim // width
    if slices * width != config.mlp_dim or slices & (slices - 1):
        rule = f"must be the width of the MLP, {config.mlp_dim}, or a half, a quarter and so on of it"
        raise ConfigError(f"--mlp_dim: {width} {rule}, so that scaling is exact")
    for option, value in (("experts", experts.num_experts), ("top_k", experts.top_k)):
        if value % slices:
            raise ConfigError(f"--{option}: {value} must be divisible by the {slices} experts that share a copy of the MLP")
    try:
        config = replace(config, experts=replace(experts, mlp_dim=width))
        assert architecture_of(config)
    except ConfigError as error:
        raise ConfigError(f"{dense.source}: {error}") from error
    return Upcycling(dense, config, dtype or dense.stored_dtype, seed, license, read_small_files(dense))
