"""Thousands of damaged inputs, each read as the product reads it: `python -m tests.faults.inputs [COUNT] [SEED]`.

They are read in processes of their own, whose memory is capped and which nobody imports into; a process that ends, or takes
too long, costs its one input and is started again for the rest. An input may be read, or refused as a `UserError`; what else
it does is a defect.
"""

import collections
import importlib
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llamajax.errors import UserError

ROOT = Path(__file__).parent.parent.parent
SHARES = {"configs": 2, "models": 2, "checkpoints": 10, "data": 10, "templates": 50}
"""Kinds of inputs, each a module `bad_KIND` beside this one; of `count` inputs, so many parts of one."""
ROOM_BYTES = {"configs": 128 << 20, "models": 512 << 20, "checkpoints": 512 << 20, "data": 1 << 30, "templates": 512 << 20}
"""Address space that reading may take beyond what the process has when its modules are imported and one input was read."""
REFUSED, READ, TRACEBACK, SIGNAL, HANG, MEMORY = OUTCOMES = (
    "refused with a line", "read", "traceback", "signal", "hang", "over the memory cap",
)  # fmt: skip
HANG_S = 2.0
"""Processor time, which other programs of the machine do not lengthen."""
_SILENT_S = 120.0
"""Without a word, which is a hang however little the process computes."""

Attempt = Callable[[np.random.Generator], None]
"""Makes one bad input and reads it; raises a `UserError` if it is refused."""


def run(count: int, seed: int, say: Callable[[str], object] = print) -> dict[str, dict[str, int]]:
    """Reads `count` configurations and model directories, and a part as many checkpoints, data files and chat templates.

    Args:
        count: how many configurations and model directories in all.
        seed: decides what they are.
        say: takes what is known of each defect.

    Returns:
        How many had which outcome, by kind.
    """
    return {kind: run_kind(kind, -(-count // share), seed, say) for kind, share in SHARES.items()}


def run_kind(kind: str, count: int, seed: int, say: Callable[[str], object] = print) -> dict[str, int]:
    """As `run`, for `count` inputs of one kind."""
    counts: collections.Counter[str] = collections.Counter(dict.fromkeys(OUTCOMES, 0))
    done = 0
    while done < count:
        with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as told:
            arguments = [kind, str(seed), str(done), str(count), directory]
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.inputs", "--read", *arguments],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE, stderr=told,
            )  # fmt: skip
            has_begun, outcomes, ended = _watch(process)
            told.seek(0)
            errors = told.read()
        assert has_begun, errors
        counts.update(outcomes)
        done += len(outcomes)
        if TRACEBACK in outcomes or MEMORY in outcomes or HANG in outcomes:
            say(errors)
        if ended is not None and done < count:
            say(f"{kind} {done} of seed {seed}: {ended}\n{errors[-3000:]}")
            counts[ended] += 1
            done += 1
    return dict(counts)


def _watch(process: subprocess.Popen[bytes]) -> tuple[bool, list[str], str | None]:
    """Whether a process has come to its first input, the outcomes that it tells, and what its last input did to it, if it
    ended there."""
    assert process.stdout is not None
    outcomes: list[str] = []
    heard = time.monotonic()
    with process, selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        used, unread, has_begun = 0.0, b"", False
        while True:
            if selector.select(0.5):
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                heard, used = time.monotonic(), _processor_s(process.pid)
                *lines, unread = (unread + data).split(b"\n")
                has_begun |= bool(lines)
                outcomes += [line.decode() for line in lines if line != b"begun"]
            elif has_begun and (_processor_s(process.pid) - used > 2 * HANG_S or time.monotonic() - heard > _SILENT_S):
                process.kill()
                return True, outcomes, HANG
    if process.returncode < 0:
        return has_begun, outcomes, SIGNAL
    return has_begun, outcomes, None if process.returncode == 0 else TRACEBACK


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_all(kind: str, seed: int, first: int, end: int, directory: Path) -> None:
    """In a process of its own: says the outcome of each input."""
    attempt: Attempt = importlib.import_module(f"tests.faults.bad_{kind}").prepare(directory)
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("begun", file=said, flush=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = used + ROOM_BYTES[kind]
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for number in range(first, end):
        started = time.process_time()
        outcome, reason = READ, ""
        try:
            attempt(np.random.default_rng((seed, number)))
        except UserError as error:
            outcome = REFUSED
            if "Traceback" in str(error) or not str(error).strip():
                outcome, reason = TRACEBACK, f"says {error}"
        except MemoryError:
            outcome, reason = MEMORY, traceback.format_exc()
        except BaseException:  # Rust's panics are no Exceptions
            outcome, reason = TRACEBACK, traceback.format_exc()
        if (seconds := time.process_time() - started) > HANG_S:
            outcome, reason = HANG, f"took {seconds:.1f} s of processor time; {outcome} {reason}"
        if reason:
            print(f"{kind} {number} of seed {seed}: {reason}", file=sys.stderr, flush=True)
        print(outcome, file=said, flush=True)


def table(counts: dict[str, dict[str, int]]) -> str:
    """Counts as a table in Markdown."""
    rows = [["inputs", *OUTCOMES], ["---"] * (len(OUTCOMES) + 1)]
    rows += [[kind, *(f"{found[outcome]:,}" for outcome in OUTCOMES)] for kind, found in counts.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        kind, seed, first, end, directory = sys.argv[2:]
        _read_all(kind, int(seed), int(first), int(end), Path(directory))
    else:
        count, seed = [*map(int, sys.argv[1:]), *(10_000, 0)[len(sys.argv) - 1 :]]
        print(table(run(count, seed)))
