"""Commits a step: all processes write and hash its directory, then process 0 renames it."""

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
    """Creates the directory for a step of this size, on process 0, and removes unfinished steps.

    Raises:
        OSError: there is no space, or the disk fails.
    """
    retention.remove_unfinished(saving.parent)
    make_folder(saving.parent)
    disk = shutil.disk_usage(saving.parent)  # not of the run directory: `checkpoints` may be a link
    if disk.free < num_bytes and disk.total:
        raise OSError(f"it takes {format_bytes(num_bytes)}, but only {format_bytes(disk.free)} are free")
    (saving / "state").mkdir(parents=True)


def hash_share(saving: Path) -> None:
    """Flushes this process's share of the array files to the disk, and leaves their records for process 0.

    Each process hashes the files that it has written. It reads no other files, and its own are still in its memory rather
    than on a server.

    Raises:
        OSError: a file cannot be read, or the records cannot be written.
    """
    rank = jax.process_index()
    paths = [path.relative_to(saving).as_posix() for path in files_of(saving / "state", rank)]
    (saving / f"hashes.{rank}.json").write_text(json.dumps(manifest.records_of(saving, paths)))


def make_step(saving: Path, step_dir: Path, small: Mapping[str, bytes], check: Callable[[], object]) -> None:
    """Adds the small files and the manifest on process 0, then renames the directory.

    Args:
        saving: the directory, with the `hash_share` of every process.
        step_dir: the directory of the step.
        small: name and content of the files that are not arrays.
        check: fails if the run no longer belongs to this process.

    Raises:
        OSError: the disk fails, or another process has taken over the run and removed `saving`.
    """
    with peers.uninterrupted():  # all have done their part: the step is good even if one dies now
        (saving / "files").mkdir()
        records = {name: manifest.write_file(saving / name, content) for name, content in small.items()}
        for share in saving.glob("hashes.*.json"):
            records |= json.loads(share.read_text())
            share.unlink()
        # Process 0 may not have seen all files of another process: on NFS its cached listing may be old.
        unseen = [path for path in manifest.list_files(saving) if path not in records]
        records |= manifest.records_of(saving, unseen)
        manifest.write(saving, records)
        # A process that takes over a run removes unfinished steps; if it does so from here on, the rename fails.
        check()
        try:
            saving.rename(step_dir)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # The same step, from an attempt that failed after its rename.
            shutil.rmtree(saving, ignore_errors=True)
        sync(step_dir.parent)
