"""Waiting for programs and checks, never without a limit."""

import sys
import threading
import time

from llamajax.diagnostics.findings import Check, Finding, run
from llamajax.errors import EnvironmentMismatchError


def test_a_program_that_does_not_end_is_given_up():
    began = time.monotonic()
    outcome = run([sys.executable, "-S", "-c", "import time; time.sleep(60)"], 0.2)
    assert time.monotonic() - began < 5
    assert outcome.code is None
    assert outcome.problem == "did not answer within 0 s"


def test_a_program_that_does_not_exist():
    assert run(["no-such-program"], 1).problem == "no-such-program: No such file or directory"


def test_a_check_that_does_not_end_is_given_up_and_keeps_what_it_found():
    never = threading.Event()

    def look():
        yield Finding("disk", "ok", "found before")
        never.wait()

    first, last = Check("disk", look).findings(0.1)
    never.set()
    assert first.text == "found before"
    assert (last.check, last.status, last.text) == ("disk", "fail", "did not end in time")


def test_errors_of_a_check_are_findings():
    def refuse():
        yield Finding("ports", "ok", "first")
        raise EnvironmentMismatchError("SLURM_NODEID='x' must be a number; set it")

    assert Check("ports", refuse).findings(5)[1:] == [
        Finding("ports", "fail", "SLURM_NODEID='x' must be a number", "set it")
    ]

    def break_down():
        yield Finding("host", "ok", str(1 // 0))

    (finding,) = Check("host", break_down).findings(5)
    assert (finding.status, finding.text) == (
        "warn",
        "could not be checked: ZeroDivisionError: integer division or modulo by zero",
    )
