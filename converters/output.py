"""Directories that appear whole, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llamajax.manifest import sync


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """A directory to fill, which gets the name `out` at the end, or is removed if something goes wrong."""
    unfinished = out.absolute().with_name(f".{out.name}.{os.getpid()}.writing")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    unfinished.mkdir()
    try:
        yield unfinished
        for path in unfinished.rglob("*"):
            sync(path)
        unfinished.rename(out)
        sync(unfinished.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
