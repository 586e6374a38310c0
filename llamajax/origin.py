"""What a run takes along from the weights it starts from, and hands on with every checkpoint and export."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from converters.hf_files import travelling_files
from llamajax.data.tokenizer import Tokenizer, load_tokenizer
from llamajax.restore import gather


@dataclass(frozen=True)
class Origin:
    """The small things beside the weights that a run started from."""

    tokenizer: Tokenizer | None = None
    """The model's own; None if it came without one."""
    files: tuple[Path, ...] = ()
    """Tokenizer, chat template, generation settings and licence, kept in the run directory."""
    hf: dict[str, Any] | None = None
    """`hf` in the meta of checkpoints: what Hugging Face's files said that ours have no place for."""


def take_along(source: Path, hf: dict[str, Any] | None, run_dir: Path) -> Origin:
    """Copies the small files of `source` to `run_dir/init`, where the run finds them when `source` is gone.

    All processes of a run call this together.

    Raises:
        DataError: there is a tokenizer that cannot be read.
    """
    kept = run_dir / "init"
    if jax.process_index() == 0:
        unfinished = run_dir / "init.writing"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for path in travelling_files(source) if source.is_dir() else ():
            shutil.copyfile(path, unfinished / path.name)
        shutil.rmtree(kept, ignore_errors=True)
        unfinished.rename(kept)
    gather("copied")
    files = tuple(travelling_files(kept))
    has_tokenizer = any(path.name in ("tokenizer.json", "tokenizer.model") for path in files)
    return Origin(load_tokenizer(kept) if has_tokenizer else None, files, hf)
