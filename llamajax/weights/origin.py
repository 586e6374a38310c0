"""Reads the small files beside initial weights, which a run passes on with every checkpoint and export."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from llamajax.config.hub import is_on_hub
from llamajax.config.parallel import MeshConfig
from llamajax.data.tokenizers.tokenizer import find_tokenizer
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.parallel.mesh import make_mesh
from llamajax.weights.hf_files import read_travelling
from llamajax.weights.open_model import open_pretrained


@dataclass(frozen=True)
class Origin:
    """The small files and metadata beside the weights that a run started from."""

    tokenizer: Tokenizer | None = None
    """Tokenizer of the model, or None."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Name and original content of the tokenizer, chat template, generation settings and licence."""
    hf: dict[str, Any] | None = None
    """`hf` in the metadata of checkpoints: Hugging Face metadata that our configuration has no place for."""


def take_along(source: Path, hf: dict[str, Any] | None) -> Origin:
    """Reads the small files of `source`, which may no longer exist when a checkpoint is saved.

    Raises:
        ConfigError: a file cannot be read, or does not have the format that its name implies.
        DataError: the tokenizer cannot be read.
    """
    if not source.is_dir():
        return Origin(hf=hf)
    files = read_travelling(source)  # rejects damaged ones, as an import does
    return Origin(find_tokenizer(source), files, hf)


def models_tokenizer(init_from: str | None) -> Tokenizer | None:
    """Returns the tokenizer of the weights that a run starts from, if there is one; initializes the devices.

    Raises:
        UserError: as for `open_pretrained` and `take_along`.
    """
    if init_from is None:
        return None
    if is_on_hub(init_from):
        from llamajax.weights.download import fetched

        return find_tokenizer(fetched(init_from, weights=False))  # without gigabytes of weights
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        pretrained = open_pretrained(init_from)
    return take_along(pretrained.files, pretrained.hf).tokenizer
