"""Ends a command: turns errors into a message on stderr and an exit code."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from llamajax.disk import keep_from_others
from llamajax.errors import (
    DEVICE_ERROR,
    DISK_ERROR,
    INTERNAL_ERROR,
    OUT_OF_MEMORY,
    UserError,
    missing_package,
    without_passwords,
)
from llamajax.processes import peers

_OF_DEVICES = ("INTERNAL", "UNKNOWN", "UNAVAILABLE", "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "DATA_LOSS")
"""Prefixes of jax runtime errors that may not recur, such as a failed card or a broken connection. Some programs that cannot
run fail with the same prefixes at every start."""
_AWAIT_S = 2.0  # time to wait for the root-cause error from another process


def exit_code(work: Callable[[], object], *, memory_remedy: str, disk: str, disk_remedy: str) -> int:
    """Runs a command. Files that it creates are closed to users outside its group.

    Args:
        work: the command.
        memory_remedy: what to try if device memory is insufficient.
        disk: what was being read or written when the disk failed, if the error does not say.
        disk_remedy: what to do if the disk fails.

    Returns:
        0, or the exit code of the error, which has been reported.
    """
    keep_from_others()
    try:
        work()
    except UserError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted", 128 + signal.SIGINT)
    except Exception as error:
        if (others := peers.current()) is not None:
            others.give_way(_AWAIT_S)
        if isinstance(error, OSError):
            return _failed(f"{error.filename or disk}: {error.strerror or error}; {disk_remedy}", DISK_ERROR)
        if isinstance(error, ModuleNotFoundError) and (missing := missing_package(error)) is not None:
            return _failed(str(missing), missing.exit_code)
        first_line = (str(error).splitlines() or [""])[0]
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            return _failed(f"out of device memory: {first_line}; try {memory_remedy}", OUT_OF_MEMORY)
        is_of_devices = isinstance(error, jax.errors.JaxRuntimeError) and first_line.startswith(_OF_DEVICES)
        code = DEVICE_ERROR if is_of_devices else INTERNAL_ERROR
        return _failed(f"{type(error).__name__}: {first_line}", code, traceback.format_exc().rstrip())
    return 0


def _failed(reason: str, code: int, told: str | None = None) -> int:
    """Reports the reason to the user (as `told`, if that is longer) and to the other processes of the run; returns
    `code`."""
    reason = without_passwords(reason)
    with contextlib.suppress(OSError):
        print(without_passwords(told or reason), file=sys.stderr, flush=True)
    if (others := peers.current()) is not None:
        others.tell_failure(reason, code)
    return code


def end_process(code: int, *, distributed: bool) -> NoReturn:
    """Ends this process. If it failed as one of several, or was interrupted, ends it without cleanup.

    The exit code is `DISK_ERROR` if all else went well but the output cannot be written: the disk is full, or nobody reads
    it.

    A normal exit would wait for the other processes, and they for this one: five minutes, then an abort. After an
    interruption XLA threads may be compiling, which the interpreter's own shutdown does not survive.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if code == 0 and (others := peers.current()) is not None:
                others.tell_failure(f"{stream.name} cannot be written: {error.strerror}", DISK_ERROR)
            code = code or DISK_ERROR
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or the interpreter tries again and exits with 120
    if (code and distributed) or code > 128:
        peers.await_commit()
        os._exit(code)
    sys.exit(code)


def end_with(work: Callable[[], int]) -> NoReturn:
    """Ends this process with the code that `work` returns. SIGTERM raises an exception in it, so that it cleans up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = work()
    except SystemExit as ended:
        code = int(ended.code or 0)
    end_process(code, distributed=False)
