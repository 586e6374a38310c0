"""Checkpoints of which files are changed by somebody who writes a new manifest, each opened as weights to start from are."""

import shutil
from pathlib import Path

import jax
import numpy as np

from converters.hf_export import read_model
from converters.hf_import import open_import
from llamajax.checkpoint import manifest
from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.origin import take_along
from tests.converters.mutate import VALUES, mutate, write_whole

NAMES = (
    "../../outside",
    "/dev/zero",
    "files/../../x",
    "",
    ".",
    "a\0b",
    "\ud800",
    "x" * 999,
    "none",
    "files",
    "pipe",
    "link",
)
"""Names that a manifest may contain."""
_SMALL_BYTES = 100_000
"""Largest file that mutants change; nearly all bytes of larger ones are weights, which may have any value."""


def read(step: Path) -> None:
    """Opens a step, reads its weights and what lies beside them, and says what an export would.

    Raises:
        UserError: it cannot be read.
    """
    pretrained = open_pretrained(step)
    load_model(pretrained, pretrained.config)
    take_along(pretrained.files, pretrained.hf)
    pretrained.ends()
    assert read_model(open_pretrained(step), None, None).about


def _sign(step: Path, rng: np.random.Generator) -> None:
    """Gives the step a manifest that is right, or nearly."""
    records = manifest.records_of(step, [path for path in manifest.list_files(step) if (step / path).is_file()])
    if rng.random() < 0.2:
        some = list(records)[rng.integers(len(records))]
        match rng.integers(3):
            case 0:
                records[NAMES[rng.integers(len(NAMES))]] = records[some]
            case 1:
                records[some] = VALUES[rng.integers(len(VALUES))]  # pyright: ignore[reportArgumentType] (wrong on purpose)
            case _:
                del records[some]
    (step / manifest.MANIFEST).write_bytes(manifest._text(records))
    if rng.random() < 0.1:
        mutate(step / manifest.MANIFEST, rng)


def prepare(directory: Path):
    """Reads one checkpoint after the other in `directory`."""
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))
    whole = directory / "whole" / "checkpoints" / "0"
    write_whole(directory / "hf", "llama3.2")
    (directory / "whole").mkdir()
    open_import(directory / "hf", None).write(directory / "whole")
    step = directory / "run" / "checkpoints" / "0"

    def attempt(rng: np.random.Generator) -> None:
        shutil.rmtree(step, ignore_errors=True)
        shutil.copytree(whole, step)
        files = [path for path in sorted(step.rglob("*")) if path.is_file() and path.stat().st_size < _SMALL_BYTES]
        own = [step / "meta.json", step / "arrays.json"]
        for path in dict.fromkeys(rng.permutation(np.array([*own * 4, *files]))[: rng.integers(1, 3)]):
            mutate(path, rng)
        if rng.random() < 0.1:
            (step / "files" / "link").symlink_to("/dev/zero")
        _sign(step, rng)
        read(step)

    read(whole)
    return attempt
