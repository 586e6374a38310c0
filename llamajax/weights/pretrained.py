"""A model found in a run, an import or a Hugging Face directory, in one common form."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from llamajax.config import experts
from llamajax.config.adapters import AdaptersConfig
from llamajax.config.architectures import Architecture, architecture_of
from llamajax.config.hf_config import SPECIAL_TOKENS, read_ends
from llamajax.config.inherited import OF_THE_RUN
from llamajax.config.model import InitChange, ModelConfig
from llamajax.data.tokenizers.tokenizer import find_tokenizer, load_tokenizer
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import num_params
from llamajax.weights.hf_files import GENERATION, read_generation, shown_directory
from llamajax.weights.safetensors import Stored

ExportDType = Literal["float32", "bfloat16", "float16"]

MAY_DIFFER = (
    *OF_THE_RUN, "attend_across_documents", "init_std", "max_seq_len", *(f"experts.{name}" for name in experts.OF_A_RUN),
)  # fmt: skip
"""Model settings in which a run may differ from the weights that it starts from."""


@dataclass(frozen=True)
class Pretrained:
    """A model that has been found and checked; `llamajax.weights.loading` reads its weights."""

    source: Path
    """Directory of the weights: RUN/checkpoints/STEP, or the Hugging Face model."""
    config: ModelConfig
    """Configuration of the model: `param_dtype` is the stored type; `compute_dtype` is that of the run, or also the stored
    type."""
    files: Path
    """Directory with the tokenizer files and chat template, if there are any."""
    hf: dict[str, Any] | None
    """Hugging Face metadata that our configuration has no place for, as checkpoints keep it, or None."""
    stored_dtype: ExportDType
    """Default type of an export: `config.param_dtype`, or float16 for an import from float16."""
    meta: dict[str, Any]
    """Metadata of a checkpoint; empty for a Hugging Face directory."""
    tensors: Mapping[str, Stored] | None
    """Weights of a Hugging Face or PEFT directory by their name in it; None for a checkpoint."""
    adapters: AdaptersConfig | None = None
    """Adapters that `source` holds, in place of a whole model; None: it holds a model."""
    base: "Pretrained | None" = None
    """Model that the adapters belong to, which has none."""

    @property
    def about(self) -> str:
        """The model in one line."""
        if self.adapters is not None and self.base is not None:
            return f"{self.source}: {self.adapters.about} for {self.base.about}"
        reward = "reward " if self.config.head == "score" else ""
        kind = f"{reward}model" if self.tensors is None else f"Hugging Face {self.architecture.name}"
        return f"{self.shown}: {kind} of {num_params(self.config):,} parameters in {self.config.param_dtype}"

    @property
    def shown(self) -> str:
        """The location of the weights, for people."""
        return shown_directory(self.source)

    @property
    def described(self) -> str:
        """The location and the shape of the model in one line, to be followed by `changed_by`."""
        model = self.config
        heads = f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} of keys and values"
        own = model.experts
        width = f"{own.num_experts} experts of {own.mlp_dim or model.mlp_dim}" if own.enabled else f"{model.mlp_dim}"
        return (
            f"{self.shown} describes the model: {model.num_layers} layers of {model.embed_dim} x {width}, {heads},"
            f" max_seq_len {model.max_seq_len}, vocab_size {model.vocab_size}"
        )

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model in transformers.

        Raises:
            ConfigError: transformers has no such model.
        """
        return architecture_of(self.config, (self.hf or {}).get("model_type"))

    def check_predicts(self) -> None:
        """Checks that the model predicts tokens.

        Raises:
            ConfigError: it is a reward model.
        """
        if self.config.head == "score":
            rule = "is a reward model, which scores texts and predicts no tokens"
            raise ConfigError(f"{self.shown}: {rule}; name a language model")

    def check(self, config: ModelConfig, changes: Collection[str] = ()) -> None:
        """Checks that a run's model is this one.

        Args:
            config: configuration of the run's model.
            changes: settings that the run changes on purpose; see `Config.init_changes`.

        Raises:
            ConfigError: the models differ, with a line for every setting that must be equal.
        """
        lines = []
        for key, (here, theirs) in self._differences(config).items():
            is_new_head = (key, here) == ("head", "score")
            is_rate = key == "experts.bias_update_rate" and None not in (here, theirs)
            if key not in MAY_DIFFER and key not in changes and not is_new_head and not is_rate:
                remedy = f", or init_changes must name {key}" if key in get_args(InitChange) else ""
                lines.append(f"model.{key}: {here} differs from {self.shown}; it must be {theirs}{remedy}")
        if lines:
            raise ConfigError("\n".join(lines))

    def check_adapters(self, adapters: AdaptersConfig) -> None:
        """Checks that a run that starts from adapters continues to train these.

        Raises:
            ConfigError: it has others, or none; a line for every setting that must be equal.
        """
        own = self.adapters
        if own is None:
            return
        remedy = "or start from an export with --merge, which is a whole model"
        if not adapters.enabled:
            raise ConfigError(f"adapters: are not set, but {self.source} holds {own.about}; set them, {remedy}")
        pairs: dict[str, tuple[Any, Any]] = {
            key: (getattr(adapters, key), getattr(own, key)) for key in ("kind", "rank", "alpha")
        }
        pairs["targets"] = sorted(adapters.targets), sorted(own.targets)
        lines = [
            f"adapters.{key}: {here} differs from {self.source}; it must be {theirs}, {remedy}"
            for key, (here, theirs) in pairs.items()
            if here != theirs
        ]
        if lines:
            raise ConfigError("\n".join(lines))

    def changed_by(self, config: ModelConfig) -> str:
        """Lists the run's changes to the model's computation or purpose, as text to follow `described`; empty if there are
        none."""
        told = {key: pair for key, pair in self._differences(config).items() if key not in (*OF_THE_RUN, "init_std")}
        drawn = "; a new score head in place of its head" if told.pop("head", None) else ""
        return drawn + "".join(f"; model.{key} {here} instead of {theirs}" for key, (here, theirs) in told.items())

    def _differences(self, config: ModelConfig) -> dict[str, tuple[Any, Any]]:
        """Returns settings in which a run's model differs: the run's value and this model's."""
        here, theirs = _settings(config), _settings(self.config)
        return {key: (here[key], theirs[key]) for key in here if here[key] != theirs[key]}

    def special_tokens(self) -> dict[str, Any]:
        """Returns bos_token_id, eos_token_id and pad_token_id: an id, several ids (Llama 3's eos), or None.

        Raises:
            DataError: the tokenizer cannot be read.
        """
        if self.hf is not None:
            return self.hf["special_tokens"]
        found: dict[str, Any] = dict.fromkeys(SPECIAL_TOKENS)
        if self.files.is_dir() and (tokenizer := find_tokenizer(self.files)) is not None:
            found |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        return found

    def ends(self) -> tuple[int, ...]:
        """Returns the tokens that end generated text, according to the model's own configuration; Llama 3 and Qwen have
        several.

        Raises:
            ConfigError: generation_config.json names ids outside the vocabulary.
            DataError: the tokenizer cannot be read.
        """
        files = self.files if self.base is None or (self.files / GENERATION).is_file() else self.base.files
        return read_ends(read_generation(files), files, self.special_tokens(), self.config)

    def tokenizer(self) -> Tokenizer:
        """Loads the model's tokenizer.

        Raises:
            DataError: the model has no tokenizer, or one that cannot be read.
        """
        return load_tokenizer(self.files)


def _settings(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings of a model by key, those of its experts too, with the width that these have."""
    values = dataclasses.asdict(config)
    own = values.pop("experts")
    if config.experts.enabled:
        own["mlp_dim"] = own["mlp_dim"] or config.mlp_dim
    return values | {f"experts.{name}": value for name, value in own.items()}
