"""Runs the commands of README.md, then of every page of docs/, as written: ```sh blocks by bash, ```python by the venv.

    python3 .ci/docs.py                                   # README.md, then all pages, two at a time
    python3 .ci/docs.py docs/start/laptop.md ...          # these pages only

A line `<!-- not run: REASON -->` before a block leaves it out. A page stops at its first block that fails; the others still
run. Exits with 1 when a block failed, after naming its page and line.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNNABLE = ("sh", "python")
PAGE_S, TUTORIALS_S = 20, 120
"""Seconds that the blocks of a page, and of all tutorials, should take at most."""

_FENCE = re.compile(r"( *)(`{3,})([^\s`]*)[^`]*")
_REASON = re.compile(r"<!-- not (run|checked):(.*)-->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: pathlib.Path
    line: int
    """Line of the opening fence."""
    language: str
    text: str
    reason: str | None
    """Why the block is neither run nor checked; None if it is."""

    @property
    def place(self) -> str:
        """Page and line, such as `docs/index.md:12`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Outcome:
    """The blocks of a page after they ran."""

    page: pathlib.Path
    seconds: float
    ran: int
    left_out: int
    failed: Block | None


def pages() -> list[pathlib.Path]:
    """Every page of the manual."""
    return sorted(path for path in (ROOT / "docs").rglob("*.md"))


def blocks(page: pathlib.Path) -> list[Block]:
    """The fenced blocks of a page, in order; blocks in lists lose their indentation."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        if not (fence := _FENCE.fullmatch(lines[number])):
            number += 1
            continue
        indent, ticks, language = fence.groups()
        end = next((i for i in range(number + 1, len(lines)) if lines[i] == indent + ticks), len(lines))
        text = "".join(f"{line.removeprefix(indent)}\n" for line in lines[number + 1 : end])
        before = next((line for line in reversed(lines[:number]) if line.strip()), "")
        reason = _REASON.fullmatch(before.strip())
        found.append(Block(page, number + 1, language, text, reason[2].strip() if reason else None))
        number = end + 1
    return found


def run_page(page: pathlib.Path, output: int | None = None) -> Outcome:
    """Runs the blocks of a page until one fails; prints to the file descriptor `output`, or as they run."""
    started = time.monotonic()
    ran = left_out = 0
    failed = None
    for block in blocks(page):
        if block.language not in RUNNABLE:
            continue
        if block.reason is not None:
            left_out += 1
            continue
        _write(output, f"--- {block.place}: {block.text.strip()}\n")
        began = time.monotonic()
        command = ["bash", "-euo", "pipefail", "-c"] if block.language == "sh" else [".venv/bin/python", "-c"]
        process = subprocess.run(
            [*command, block.text], check=False, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        ran += 1
        _write(output, f"--- took {time.monotonic() - began:.0f} s\n")
        if process.returncode:
            _write(output, f"--- {block.place}: ended with exit code {process.returncode}\n")
            failed = block
            break
    return Outcome(page, time.monotonic() - started, ran, left_out, failed)


def _write(output: int | None, text: str) -> None:
    if output is None:
        print(text, end="", flush=True)
    else:
        os.write(output, text.encode())


def _run_quietly(page: pathlib.Path) -> Outcome:
    """Runs a page and prints its output whole when it is over."""
    with tempfile.TemporaryFile() as file:
        outcome = run_page(page, file.fileno())
        if outcome.ran:
            file.seek(0)
            told = file.read().decode(errors="replace")
            sys.stdout.write(f"=== {page.relative_to(ROOT)}\n{told}")  # one call: pages do not mix
            sys.stdout.flush()
    return outcome


def _summary(outcomes: list[Outcome]) -> None:
    """Prints the time of every page, and which are over their budget."""
    print("\npage                                       seconds  blocks  not run")
    for outcome in outcomes:
        name = str(outcome.page.relative_to(ROOT))
        over = f"  over {PAGE_S} s" if outcome.seconds > PAGE_S and name != "README.md" else ""
        print(f"{name:<42} {outcome.seconds:7.1f} {outcome.ran:7} {outcome.left_out:8}{over}")
    tutorials = sum(outcome.seconds for outcome in outcomes if outcome.page.parent.name == "tutorials")
    print(f"tutorials together: {tutorials:.0f} s of {TUTORIALS_S}")


def main() -> int:
    """Runs the pages; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run the commands of README.md and of the manual, as written.")
    parser.add_argument("pages", nargs="*", type=pathlib.Path, metavar="PAGE", help="only these, one at a time")
    given = parser.parse_args().pages
    if given:
        outcomes = [run_page(page.resolve()) for page in given]
    else:
        outcomes = [run_page(ROOT / "README.md")]
        if outcomes[0].failed is None:  # it makes the environment and the run that the pages use
            with ThreadPoolExecutor(2) as pool:
                outcomes += pool.map(_run_quietly, pages())
    _summary(outcomes)
    failures = [outcome.failed for outcome in outcomes if outcome.failed is not None]
    for block in failures:
        print(f"{block.place}: failed:\n{block.text}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
