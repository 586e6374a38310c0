"""Forwards the output of the processes line by line: whole lines, marked by rank."""

import os
import re
import subprocess
import threading
import time
from typing import IO

_LONGEST = 1 << 16  # bytes of an unfinished line that are held
# Lines that gloo, the CPU backend, prints for every group of devices: dozens without information, at times interleaved.
_CHATTER = re.compile(rb"\[Gloo\] Rank |\d+ is connected to \d+ peer ranks")


class Output:
    """Standard output and standard error of the launcher, shared by all its processes.

    Lines of process 0 appear unchanged, other lines after their rank in brackets; gloo's lines about its connections are
    omitted. If nobody reads the output, a process waits, as it would without a launcher; only unfinished lines are buffered.
    """

    def __init__(self) -> None:
        """Creates the output; nothing has been printed."""
        self.is_lost = False
        """Whether something could not be written: the disk is full, or nobody reads."""
        one = threading.Lock()  # both may be one pipe, which splits long writes
        self._writing = {1: one, 2: one if _are_one(1, 2) else threading.Lock()}

    def say(self, text: str) -> None:
        """Prints a line of the launcher's own to stderr."""
        self._write(2, f"launch     {text}\n".encode(errors="replace"))

    def follow(self, rank: int, process: subprocess.Popen[bytes]) -> list[threading.Thread]:
        """Shows the output of a process from now on; the threads end when it can print no more."""
        assert process.stdout is not None
        assert process.stderr is not None
        prefix = f"[{rank}] ".encode() if rank else b""
        streams = ((process.stdout, 1), (process.stderr, 2))
        threads = [threading.Thread(target=self._follow, args=(*one, prefix), daemon=True) for one in streams]
        for thread in threads:
            thread.start()
        return threads

    def _follow(self, stream: IO[bytes], to: int, prefix: bytes) -> None:
        rest = b""
        with stream:
            while data := os.read(stream.fileno(), _LONGEST):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _LONGEST:
                    lines, rest = [*lines, rest], b""
                self._write(to, b"".join(prefix + line + b"\n" for line in lines if not _CHATTER.match(line)))
        if rest:
            self._write(to, prefix + rest + b"\n")

    def _write(self, to: int, text: bytes) -> None:
        rest = memoryview(text)
        with self._writing[to]:
            try:
                while rest:
                    rest = rest[os.write(to, rest) :]
            except OSError:  # later writes may succeed, and the other stream may still work
                self.is_lost = True


def _are_one(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:  # one is closed
        return False


def wait_for(threads: list[threading.Thread], timeout_s: float) -> None:
    """Waits until all output is shown, unless a child of a process still holds its streams."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
