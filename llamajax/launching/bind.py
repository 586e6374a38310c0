"""Replaces itself with the program named after the launcher's process id, and ties it to the launcher's end, even by a kill.

Started by its path, with only the standard library, in the few milliseconds before the program takes its place. A
`preexec_fn` would not do: it runs between fork and exec of a process that may have threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends; it survives exec


def main() -> None:
    """Runs `bind.py LAUNCHER PROGRAM ARGUMENT ...`."""
    launcher, *program = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it has ended already
        os._exit(128 + signal.SIGKILL)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
