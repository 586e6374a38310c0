"""The results of the campaign as people read them: lines while it runs, and docs/reliability.md."""

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

from tests import runs
from tests.faults.groups import GROUPS, Group
from tests.faults.results import Result

DOCUMENT = runs.ROOT / "docs" / "reliability.md"
HEAD = """# Reliability, as tried

`python -m tests.faults --write` breaks runs on purpose and writes this page. Runs that should continue (R1, R7, R9, R10,
R13, R14, R16, R18, R19, one try in 51 of R5, one in ten of R11) are compared with untouched runs: every step's loss and
every array of the last checkpoint, to the bit. A run that went back is compared with a run that passes over the same rows
from the start. In the other groups the campaign counts what was found, what was reported, and how soon.
"""
TABLE = """
| | faults | target | tried | passed | measured | when, where |
| --- | --- | --- | --- | --- | --- | --- |
"""
TAIL = """
A failure prints its seed. `python -m tests.faults --only GROUP --count 1 --seed SEED` repeats that try; leave `--count` out
for R15, R16, S and the flips in one of eight devices, which run in one go. Every random choice is drawn from the seed. The
operating system's scheduling of processes is not.

CI runs separate tests for: resuming to the bit, the same order of data on every mesh, other numbers of hosts and devices
(`tests/training`, `tests/data`), full and failing disks call by call (`tests/checkpoint`), no code from files, no open
ports, no secrets in logs (`tests/test_security.py`). `scripts/bench_checkpoint.py` measures the cost of a save: with 20 GB
from four processes training waited 0.07 s, and the files were written at 0.65 of the rate of `dd` on the same disk (LOG.md,
2026-11-25).

## What only a cluster can show

These runs use one machine, emulated devices and the loopback network. They do not show:

- lost hosts, switches and links: here a lost host is a killed process group;
- NCCL's own failures: hangs inside a collective on a GPU, and whether the process can still write its stacks;
- GPU errors (Xid, ECC, a card that falls off the bus), memory that a dead process has not released yet, and flipped bits in
  real hardware;
- NFS and Lustre: locks, attribute caches and renames are imitated with a local disk and a preloaded library;
- hosts with different clocks, and preemption by a real scheduler (the campaign sends Slurm's and Kubernetes' signals
itself); - the time in which thousands of processes connect, restore, and agree that one is lost.
"""


def line(group: Group, result: Result) -> str:
    """One group in a line."""
    measured = "; ".join(f"{key} {value}" for key, value in result.figures.items())
    verdict = "passed" if result.good else "FAILED"
    return f"{group.name} {group.title}: {verdict}, {result.passed} of {result.tries}, {result.seconds:.0f} s; {measured}"


def facts(seed: int, slowness: float) -> dict[str, Any]:
    """When, where and of what the results are."""
    git = ["git", "-C", str(runs.ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    but = f":(exclude){DOCUMENT.relative_to(runs.ROOT)}"  # which the groups before have changed
    changed = subprocess.run([*git, "status", "--porcelain", "--", ".", but], capture_output=True, text=True, check=False)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip() + (" with changes" if changed.stdout.strip() else ""),
        "machine": f"{os.cpu_count()} x {_processor()}, {_memory_gib():.0f} GiB, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "seed": seed,
        "slowness": slowness,
    }


def write(results: list[Result], seed: int, slowness: float) -> None:
    """Puts the rows of `results` into the document; those of other groups stay."""
    rows = _rows()
    about = facts(seed, slowness)
    slow = f", limits of time x {slowness:g}" if slowness != 1 else ""
    when = f"{about['date']}, {about['commit']}, Python {about['python']}, {about['machine']}, seed {seed}{slow}"
    groups = {group.name: group for group in GROUPS}
    for result in results:
        group = groups[result.name]
        measured = "; ".join(f"{key}: {value}" for key, value in result.figures.items())
        failed = "".join(f"; seed {failure.seed} ({failure.kind}) failed: {failure.what}" for failure in result.failures[:3])
        cells = [group.name, group.title, group.target, str(result.tries), str(result.passed), measured + failed, when]
        rows[result.name] = "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
    ordered = [rows[group.name] for group in GROUPS if group.name in rows]
    DOCUMENT.write_text(HEAD + TABLE + "\n".join(ordered) + "\n" + TAIL)


def _rows() -> dict[str, str]:
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    return {match[1]: match[0] for match in re.finditer(r"^\| (\w+) \| .* \|$", text, flags=re.MULTILINE)}


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    return found[1] if found else platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
