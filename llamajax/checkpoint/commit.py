"""How a directory that all processes have written becomes a step: hashed by all, then renamed by the first one."""

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from llamajax.checkpoint import manifest
from llamajax.disk import sync
from llamajax.parallel import processes


def hash_share(saving: Path) -> None:
    """Leaves the records of this process's share of the arrays' files for process 0.

    Raises:
        OSError: a file cannot be read, or the records cannot be written.
    """
    sizes = {path: (saving / path).stat().st_size for path in manifest.list_files(saving) if path.startswith("state/")}
    records = manifest.records_of(saving, manifest.shares(sizes, jax.process_count())[jax.process_index()])
    (saving / f"hashes.{jax.process_index()}.json").write_text(json.dumps(records))


def make_step(saving: Path, step_dir: Path, small: Mapping[str, bytes], check: Callable[[], object]) -> None:
    """On process 0: adds what is not arrays and the manifest, then renames the directory.

    Args:
        saving: the directory, with everybody's `hash_share`.
        step_dir: the step.
        small: name and content of the files that are no arrays.
        check: fails if the run is not this process's any more.

    Raises:
        OSError: the disk fails, or another process has taken the run over and removed `saving`.
    """
    with processes.uninterrupted():  # all have done their part, so the step is good whatever becomes of them
        (saving / "files").mkdir()
        records = {name: manifest.write_file(saving / name, content) for name, content in small.items()}
        for share in saving.glob("hashes.*.json"):
            records |= json.loads(share.read_text())
            share.unlink()
        # Another process may not have seen all files, or other sizes: on NFS, what it knows may be old.
        unseen = [path for path in manifest.list_files(saving) if path not in records]
        records |= manifest.records_of(saving, unseen)
        manifest.write(saving, records)
        # Who takes a run over removes what others are writing there: if it does so from here on, the rename fails.
        check()
        try:
            saving.rename(step_dir)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # The same step, of an attempt that failed after its rename.
            shutil.rmtree(saving, ignore_errors=True)
        sync(step_dir.parent)
