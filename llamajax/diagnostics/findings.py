"""The result of a check, and ways to wait for one without hanging."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llamajax.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    """Name of what was checked."""
    status: Literal["ok", "warn", "fail"]
    """`warn`: training works, but slower or less safely. `fail`: training will not work."""
    text: str
    """Result of the check."""
    remedy: str = ""
    """Remedy; empty if all is well."""


@dataclass(frozen=True)
class Outcome:
    """A program that has ended, or has not in time."""

    code: int | None
    """Exit code; None if the program did not start, or did not end."""
    out: str = ""
    err: str = ""
    problem: str = ""
    """Why there is no exit code."""


def run(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Runs a program and returns its output. After `limit_s` seconds it kills the program and no longer waits for it: a
    program that waits for a broken driver or disk may not end even then."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return Outcome(None, problem=f"{command[0]}: {error.strerror}")
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        return Outcome(None, problem=f"did not answer within {limit_s:.0f} s")
    return Outcome(process.returncode, out, err)


class Check:
    """A check in a thread of its own."""

    def __init__(self, name: str, look: Callable[[], Iterable[Finding]]) -> None:
        """Starts the check. `look` returns its findings."""
        self._name, self._found = name, list[Finding]()
        self._thread = threading.Thread(target=self._look, args=(look,), name=name, daemon=True)
        self._thread.start()

    def findings(self, limit_s: float) -> list[Finding]:
        """Returns the findings, or that there are none after `limit_s` more seconds."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            remedy = "a disk, name server or driver that this check needs does not answer; look there first"
            return [*self._found, Finding(self._name, "fail", "did not end in time", remedy)]
        return self._found

    def _look(self, look: Callable[[], Iterable[Finding]]) -> None:
        try:
            for finding in look():
                self._found.append(finding)
        except UserError as error:
            text, _, remedy = str(error).rpartition("; ")
            self._found.append(Finding(self._name, "fail", text or remedy, remedy if text else ""))
        except Exception as error:  # a defect of one check must not hide the others
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            self._found.append(Finding(self._name, "warn", f"could not be checked: {text}", "please report this"))
