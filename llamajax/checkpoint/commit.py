"""How a directory becomes a step: written and hashed by all processes, then renamed by the first one."""

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from llamajax.checkpoint import manifest, retention
from llamajax.checkpoint.array_writer import files_of
from llamajax.disk import make_folder, sync
from llamajax.processes import peers
from llamajax.units import format_bytes


def make_room(saving: Path, num_bytes: int) -> None:
    """On process 0: makes the directory for a step of so many bytes, and removes what is left of others.

    Raises:
        OSError: there is no room, or the disk fails.
    """
    retention.remove_unfinished(saving.parent)
    make_folder(saving.parent)
    disk = shutil.disk_usage(saving.parent)  # not of the run's: it may be a link
    if disk.free < num_bytes and disk.total:
        raise OSError(f"it takes {format_bytes(num_bytes)}, but only {format_bytes(disk.free)} are free")
    (saving / "state").mkdir(parents=True)


def hash_share(saving: Path) -> None:
    """Brings this process's share of the arrays' files onto the disk itself, and leaves their records for process 0.

    Each hashes what it has written: it looks at no other file, and asks no server for what is in its memory.

    Raises:
        OSError: a file cannot be read, or the records cannot be written.
    """
    rank = jax.process_index()
    paths = [path.relative_to(saving).as_posix() for path in files_of(saving / "state", rank)]
    (saving / f"hashes.{rank}.json").write_text(json.dumps(manifest.records_of(saving, paths)))


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
    with peers.uninterrupted():  # all have done their part, so the step is good whatever becomes of them
        (saving / "files").mkdir()
        records = {name: manifest.write_file(saving / name, content) for name, content in small.items()}
        for share in saving.glob("hashes.*.json"):
            records |= json.loads(share.read_text())
            share.unlink()
        # Another process may not have seen all its files: on NFS, what it knows may be old.
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
