"""What a run takes along from the weights it starts from, and hands on with every checkpoint and export."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from llamajax.config.parallel import MeshConfig
from llamajax.data.tokenizers.tokenizer import find_tokenizer
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.parallel.mesh import make_mesh
from llamajax.weights.hf_files import read_travelling
from llamajax.weights.open_model import open_pretrained


@dataclass(frozen=True)
class Origin:
    """The small things beside the weights that a run started from."""

    tokenizer: Tokenizer | None = None
    """The model's own; None if it came without one."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Name and content of tokenizer, chat template, generation settings and licence, as they were read."""
    hf: dict[str, Any] | None = None
    """`hf` in the meta of checkpoints: what Hugging Face's files said that ours have no place for."""


def take_along(source: Path, hf: dict[str, Any] | None) -> Origin:
    """Reads the small files of `source`, which may be gone when a checkpoint is saved.

    Raises:
        ConfigError: a file cannot be read, or is not what its name says.
        DataError: there is a tokenizer that cannot be read.
    """
    if not source.is_dir():
        return Origin(hf=hf)
    files = read_travelling(source)  # refuses damaged ones, as an import does
    return Origin(find_tokenizer(source), files, hf)


def models_tokenizer(init_from: str | None) -> Tokenizer | None:
    """The tokenizer of the weights that a run starts from, if it does and they have one; devices are looked for.

    Raises:
        UserError: as of `open_pretrained` and `take_along`.
    """
    if init_from is None:
        return None
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        pretrained = open_pretrained(Path(init_from))
    return take_along(pretrained.files, pretrained.hf).tokenizer
