"""A model that was found: a run's, an imported one or a Hugging Face directory's, all alike from here on."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from llamajax.config.architectures import Architecture, architecture_of
from llamajax.config.hf_config import SPECIAL_TOKENS, read_ends
from llamajax.config.inherited import OF_THE_RUN
from llamajax.config.model import InitChange, ModelConfig
from llamajax.data.tokenizers.tokenizer import find_tokenizer, load_tokenizer
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import num_params
from llamajax.weights.hf_files import read_generation
from llamajax.weights.safetensors import Stored

ExportDType = Literal["float32", "bfloat16", "float16"]

MAY_DIFFER = (*OF_THE_RUN, "attend_across_documents", "init_std", "max_seq_len")
"""Settings of the model in which a run may differ from the weights that it starts from."""


@dataclass(frozen=True)
class Pretrained:
    """A model that was found and looked at; `llamajax.weights.loading` reads its weights."""

    source: Path
    """The directory of the weights: RUN/checkpoints/STEP, or of the Hugging Face model."""
    config: ModelConfig
    """Of the model: `param_dtype` is what its weights are stored in; `compute_dtype` the run's, or also that."""
    files: Path
    """The directory with its tokenizer files and chat template, if it has any."""
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

    def check(self, config: ModelConfig, changes: Collection[str] = ()) -> None:
        """Whether a run's model is this one.

        Args:
            config: of the run's model.
            changes: settings that the run changes on purpose; see `Config.init_changes`.

        Raises:
            ConfigError: it is another, with a line for every setting that must not differ.
        """
        lines = []
        for key, (here, theirs) in self._differences(config).items():
            if key not in MAY_DIFFER and key not in changes:
                remedy = f", or init_changes must name {key}" if key in get_args(InitChange) else ""
                lines.append(f"model.{key}: {here} is not that of {self.source}; it must be {theirs}{remedy}")
        if lines:
            raise ConfigError("\n".join(lines))

    def changed_by(self, config: ModelConfig) -> str:
        """What a run changes of what the model computes or is meant for, to follow `about`; empty if nothing."""
        told = {key: pair for key, pair in self._differences(config).items() if key not in (*OF_THE_RUN, "init_std")}
        return "".join(f"; model.{key} {here} instead of {theirs}" for key, (here, theirs) in told.items())

    def _differences(self, config: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """Settings in which a run's model differs: the run's value and this model's."""
        here, theirs = dataclasses.asdict(config), dataclasses.asdict(self.config)
        return {key: (here[key], theirs[key]) for key in here if here[key] != theirs[key]}

    def special_tokens(self) -> dict[str, Any]:
        """bos_token_id, eos_token_id and pad_token_id: an id, several (Llama 3's eos), or None.

        Raises:
            DataError: its tokenizer cannot be read.
        """
        if self.hf is not None:
            return self.hf["special_tokens"]
        found: dict[str, Any] = dict.fromkeys(SPECIAL_TOKENS)
        if self.files.is_dir() and (tokenizer := find_tokenizer(self.files)) is not None:
            found |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        return found

    def ends(self) -> tuple[int, ...]:
        """Tokens that end what the model writes, by its own configurations; Llama 3 and Qwen have several.

        Raises:
            ConfigError: its generation_config.json names others than ids of its vocabulary.
            DataError: its tokenizer cannot be read.
        """
        return read_ends(read_generation(self.files), self.files, self.special_tokens(), self.config)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            DataError: it has none, or one that cannot be read.
        """
        return load_tokenizer(self.files)
