"""Becomes the program that is named after the launcher's process id, and ends with the launcher, even if that is killed.

Started by its path, with nothing but the standard library, in the few milliseconds before the program takes its place. Not a
`preexec_fn`, which would run between fork and exec of a process that may have threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends; it outlives exec


def main() -> None:
    """`bind.py LAUNCHER PROGRAM ARGUMENT ...`"""
    launcher, *program = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it has ended already
        os._exit(128 + signal.SIGKILL)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
