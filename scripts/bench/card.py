"""Reads from nvidia-smi the GPU's data, and its clock and power during a measurement."""

import datetime
import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any, Self

from llamajax.errors import ConfigError

_FACTS = ("name", "memory.total", "driver_version", "power.limit", "clocks.max.sm")
_SAMPLED = ("clocks.sm", "power.draw")
_EVERY_MS = 200


def index() -> str:
    """Index of the measured GPU: the first one visible to this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def hardware(*, toy: bool) -> dict[str, Any]:
    """Returns `name`, `memory_bytes` and more of the GPU, or of the machine for a toy.

    Raises:
        ConfigError: no GPU exists.
    """
    if toy:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return {"name": f"{os.cpu_count()} CPU cores", "memory_bytes": memory_bytes}
    found, reason = "", "nvidia-smi was not found"
    if shutil.which("nvidia-smi") is not None:
        asked = subprocess.run(_query(_FACTS), capture_output=True, text=True, check=False)
        found, reason = asked.stdout.strip(), (asked.stderr or asked.stdout).strip().partition("\n")[0]
        found = "" if asked.returncode else found
    if not found:
        raise ConfigError(
            f"no GPU to measure on ({reason}); run it on a machine with an NVIDIA GPU, or give --toy to try it on a CPU"
        )
    name, memory, driver, power, clock = found.split(", ")
    return {
        "name": name,
        "memory_bytes": int(memory) * 2**20,
        "driver": driver,
        "power_limit_w": _number(power),
        "max_sm_mhz": _number(clock),
    }


def _query(fields: tuple[str, ...]) -> list[str]:
    return ["nvidia-smi", f"--id={index()}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def _number(text: str) -> float | None:
    """Returns the number; None if the GPU does not report it."""
    try:
        return float(text)
    except ValueError:
        return None


class Watch:
    """Samples clock and power while open; takes no samples at toy size."""

    def __init__(self, file: Path, *, toy: bool) -> None:
        self._file, self._toy = file, toy

    def __enter__(self) -> Self:
        command = ["true"] if self._toy else [*_query(("timestamp", *_SAMPLED)), f"--loop-ms={_EVERY_MS}"]
        with self._file.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def between(self, started: float, ended: float) -> dict[str, float | None]:
        """Returns the medians of `sm_mhz` and `watts` between two times of day; None without samples."""
        samples = [line.split(", ") for line in self._file.read_text().splitlines() if line.count(",") == len(_SAMPLED)]
        inside = [sample for at, *sample in samples if started <= _seconds(at) <= ended]
        known = [[value for value in map(_number, column) if value is not None] for column in zip(*inside, strict=True)]
        sm_mhz, watts = (statistics.median(values) if values else None for values in known or [[], []])
        return {"sm_mhz": sm_mhz, "watts": watts}


def _seconds(timestamp: str) -> float:
    """Parses nvidia-smi's time, which is local time as in this process."""
    return datetime.datetime.strptime(timestamp, "%Y/%m/%d %H:%M:%S.%f").timestamp()
