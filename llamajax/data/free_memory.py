"""Measures how much memory a process can still take."""

import re
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int | None:
    """Returns the free bytes of this machine within the limits of this process's control groups (version 2), or None.

    None means that the system reports neither.

    Args:
        root: root of the file system.
    """
    known = []
    if (found := _number(root / "proc/meminfo", r"^MemAvailable: +(\d+) kB$")) is not None:
        known.append(1024 * found)
    groups = root / "sys/fs/cgroup"
    for name in re.findall(r"^0::/(.*)$", _text(root / "proc/self/cgroup"), re.M):
        for group in (groups / name, *(groups / name).parents):
            limit, used = (_number(group / file, r"^(?:anon )?(\d+)$") for file in ("memory.max", "memory.stat"))
            if limit is not None and used is not None:  # the root has no limit, and unlimited groups say "max"
                known.append(limit - used)
    return max(0, min(known)) if known else None


def _number(path: Path, pattern: str) -> int | None:
    found = re.search(pattern, _text(path), re.M)
    return None if found is None else int(found[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
