"""How a command ends: what goes wrong becomes a message on stderr and an exit code."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import jax

from llamajax.errors import DISK_ERROR, INTERNAL_ERROR, OUT_OF_MEMORY, UserError


def exit_code(work: Callable[[], object], *, memory_remedy: str, disk: str, disk_remedy: str) -> int:
    """Runs a command.

    Args:
        work: the command.
        memory_remedy: what to try when a device's memory does not suffice.
        disk: what was written or read when the disk fails, if the error does not say.
        disk_remedy: what to do then.

    Returns:
        0, or the code of what went wrong, which has been said.
    """
    try:
        work()
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            traceback.print_exc()
            return INTERNAL_ERROR
        print(f"out of device memory: {str(error).splitlines()[0]}; try {memory_remedy}", file=sys.stderr)
        return OUT_OF_MEMORY
    except OSError as error:
        print(f"{error.filename or disk}: {error.strerror or error}; {disk_remedy}", file=sys.stderr)
        return DISK_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception:
        traceback.print_exc()
        return INTERNAL_ERROR
    return 0


def end_process(code: int, *, distributed: bool) -> NoReturn:
    """Ends this process; when it failed as one of several, without waiting for the others.

    A normal exit would wait for them, and they for this one: five minutes, then an abort.
    """
    if code and distributed:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
