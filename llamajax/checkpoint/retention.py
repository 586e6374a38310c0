"""Deletes steps by one rename within their directory, so that a process killed at any moment leaves only complete steps."""

import contextlib
import math
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from llamajax.checkpoint.array_writer import reason
from llamajax.checkpoint.steps import steps_in
from llamajax.config.training import CheckpointConfig
from llamajax.errors import SaveError
from llamajax.processes.peers import of_first
from llamajax.units import format_bytes


def check_room(run_dir: Path, num_bytes: int) -> None:
    """Rejects a disk without space for one more checkpoint. All processes call this together.

    Args:
        run_dir: directory of the run, which may not exist yet.
        num_bytes: size of a checkpoint.

    Raises:
        SaveError: there is not enough space.
    """
    there = next(folder for folder in (run_dir.absolute(), *run_dir.absolute().parents) if folder.exists())
    free = math.inf
    with contextlib.suppress(OSError):  # the write that follows reports the error
        usage = shutil.disk_usage(there)
        free = usage.free if usage.total else math.inf  # some network file systems report no sizes
    if (free := of_first(free)) < num_bytes:
        raise SaveError(
            f"run_dir: a checkpoint needs {format_bytes(num_bytes)}, but only {format_bytes(free)} are free on the disk of"
            f" {run_dir}; make room, or choose another run_dir"
        )


def remove_unfinished(directory: Path) -> None:
    """Removes unfinished steps of processes that were killed or failed."""
    for left_over in directory.glob("*.saving"):
        shutil.rmtree(left_over, ignore_errors=True)  # threads of a failed save may still write there


def set_aside(directory: Path, step: int) -> None:
    """Renames a damaged step, replacing an earlier one with the new name."""
    aside = directory / f"{step}.damaged"
    shutil.rmtree(aside, ignore_errors=True)
    (directory / str(step)).rename(aside)


def delete(directory: Path, steps: Iterable[int], say: Callable[[str], object]) -> None:
    """Deletes steps, and remains of earlier deletions. A failure to remove files costs space, not the run: `say` takes a
    line.

    Raises:
        OSError: a step cannot be renamed.
    """
    for step in steps:
        (directory / str(step)).rename(directory / f"{step}.{secrets.token_hex(4)}.deleting")
    finish_deleting(directory, say)


def delete_old(directory: Path, config: CheckpointConfig, say: Callable[[str], object]) -> None:
    """Deletes the steps that the configuration does not keep; see `delete`."""
    old = steps_in(directory)[: -config.keep_last]
    delete(directory, [step for step in old if config.keep_every is None or step % config.keep_every], say)


def finish_deleting(directory: Path, say: Callable[[str], object]) -> None:
    """Removes the directories that have been renamed for deletion; see `delete`."""
    for doomed in directory.glob("*.deleting"):
        try:
            shutil.rmtree(doomed)
        except OSError as error:
            say(f"{doomed} cannot be deleted: {reason(error)}; the next checkpoint tries again")
