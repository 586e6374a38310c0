"""Writes arrays to files with Orbax: each process writes the parts on its devices, and process 0 joins them.

Arrays are stored in Orbax's OCDBT format: about twenty files per process, whatever the number of parameters. They are not
compressed: weights hardly shrink (7%), and without compression saving and restoring are two to three times faster.
"""

import asyncio
import concurrent.futures
import contextlib
import glob
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # Orbax's paths

from llamajax.disk import files_below
from llamajax.parallel.host_memory import KIND

# Larger arrays have their layers stored separately.
_MANY_BYTES = 16 << 20

# Each file is hashed sequentially; with files of at most this size, all threads hash a large state at once.
_FILE_BYTES = 512 << 20

_COPIED_GB = 16  # of a state in host memory that Orbax copies at once

_OF_PROCESS = "ocdbt.process_"  # prefix of Orbax's directories, one for each writing process


def _is_news(record: logging.LogRecord) -> bool:
    if not record.exc_info:
        return True
    told = [record.pathname, record.getMessage()]
    told += [frame.f_code.co_filename for frame, _ in traceback.walk_tb(record.exc_info[2])]
    return not re.search("orbax|[.]saving/", " ".join(told))


def _is_late(unraisable: "sys.UnraisableHookArgs") -> bool:
    return str(unraisable.exc_value).startswith(("Event loop is closed", "Encountered error while reading array index"))


# After a failure Orbax raises one error, which we report in one line. It also logs a traceback for every array, leaves
# coroutines behind, and closes the event loop to which TensorStore then reports the outcome of the other arrays.
logging.getLogger("absl").addFilter(_is_news)
logging.getLogger("asyncio").addFilter(_is_news)
_report = sys.unraisablehook
warnings.filterwarnings("ignore", "coroutine 'async_serialize", RuntimeWarning)
sys.unraisablehook = lambda unraisable: None if _is_late(unraisable) else _report(unraisable)


class ArrayWriter:
    """Writes arrays. Replaces Orbax's own checkpointer, in which processes wait an hour for one with a full disk."""

    def __init__(self, *, use_ocdbt: bool) -> None:
        """Creates the writer; without `use_ocdbt`, every chunk of an array becomes a file."""
        self._use_ocdbt = use_ocdbt
        self._handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=use_ocdbt)
        self._sparing = ocp.PyTreeCheckpointHandler(
            use_compression=False, use_ocdbt=use_ocdbt, save_device_host_concurrent_gb=_COPIED_GB
        )

    def begin(self, directory: Path, arrays: dict[str, jax.Array]) -> list[Any]:
        """Starts writing this process's part of `arrays`, by name. The arrays have left the devices when this returns; where
        some are in host memory, they are also written, because there may be no room for a second copy of all of them.

        Returns:
            Futures to await. Errors are raised by their results, never here.
        """
        # Large arrays are stored layer by layer, so that a reader, such as an export, never needs to hold all layers.
        apart = {name for name, array in arrays.items() if ".layers." in name and array.nbytes > _MANY_BYTES}
        chunks = {name: ocp.SaveArgs(shard_axes=(0,) if name in apart else ()) for name in arrays}
        most = _FILE_BYTES if self._use_ocdbt else None
        request = ocp.args.PyTreeSave(arrays, save_args=chunks, ocdbt_target_data_file_size=most)
        on_devices = (array for array in arrays.values() if isinstance(array, jax.Array))  # an import writes arrays of files
        is_on_host = any(array.sharding.memory_kind == KIND for array in on_devices)
        handler = self._sparing if is_on_host else self._handler

        def save() -> list[Any] | None:
            with contextlib.closing(asyncio.new_event_loop()) as loop:
                writing = loop.run_until_complete(handler.async_save(epath.Path(directory), args=request))
            if is_on_host:
                for future in writing or []:
                    future.result()
            return writing

        try:  # in a thread of its own: the caller's may run an event loop, as a notebook does
            with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="save") as pool:
                return pool.submit(save).result() or []
        except Exception as error:
            failed: concurrent.futures.Future[None] = concurrent.futures.Future()
            failed.set_exception(error)
            return [failed]

    def finalize(self, directory: Path) -> None:
        """Joins the parts that all processes have written; called by process 0.

        Raises:
            OSError: the disk fails.
            ValueError: Orbax finds an array incomplete, or there is no part at all, which Orbax does not report.
        """
        with contextlib.ExitStack() as stack:
            if glob.has_magic(str(directory)):
                # Orbax treats the whole path as a pattern, finds no parts and joins nothing, so it gets another name.
                descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, descriptor)
                directory = Path(f"/proc/self/fd/{descriptor}")
            self._handler.finalize(epath.Path(directory))
            if self._use_ocdbt and not (directory / "manifest.ocdbt").exists():
                raise ValueError("no array has been written")

    def close(self) -> None:
        """Ends the writer's threads."""
        self._handler.close()
        self._sparing.close()


def files_of(directory: Path, rank: int) -> Iterator[Path]:
    """Yields the files in a finalized directory that process `rank` has written, according to their location.

    Process 0 also has all other files: small ones in the OCDBT format, all of them without it.
    """
    own = f"{_OF_PROCESS}{rank}"
    for parent, folders, names in files_below(directory / own if rank else directory):
        folders[:] = [name for name in folders if name == own or not name.startswith(_OF_PROCESS)]
        yield from (parent / name for name in names)


def os_error(error: BaseException | None) -> OSError | None:
    """Returns the file system error that TensorStore met, which Orbax may have wrapped; None for any other error."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        if code := re.search(r"os_error_code='(\d+)'", str(error)):
            return OSError(int(code[1]), os.strerror(int(code[1])))
        error = error.__cause__
    return None


def reason(error: Exception) -> str:
    """Describes an error of the file system or of Orbax in a few words."""
    error = os_error(error) or error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return (str(error) or type(error).__name__).splitlines()[0][:200]
