"""Compiled programs that jax keeps on disk: a program is compiled once and loaded at the next start.

Anyone who can write such a program runs code in the process that loads it, so the folder is private to the user. The
processes of one run must load a program together or compile it together: processes that compile share the autotuning of
kernels and wait for each other's results, for hours if one of them has nothing to try. So they use the same folder, private
to their run; only process 0 writes.
"""

import contextlib
import hashlib
import os
import re
import secrets
import stat
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache as jax_cache  # the packing of programs has no public API

from llamajax.disk import names_in
from llamajax.processes.peers import everyones, of_first, rank

MOST_BYTES = 4 * 2**30
"""Limit of all programs together; the least recently used are removed first."""
_OWN = "llamajax-programs"  # below a given folder, which may contain the user's files
_SEEN_S = 5  # time limit for the others to see a file of process 0
_NOT_SHARED = (
    "is not what process 0 sees: name a folder that all share, and give all the same run_dir, data.cache_dir, XLA_FLAGS"
    " and drivers"
)
_HIT = "/jax/compilation_cache/cache_hits"
_UNUSABLE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(\w+)': (.*)", re.DOTALL)


def start(place: str | None, say: Callable[[str], object], *, run: str | None = None) -> None:
    """Makes jax keep and load compiled programs. All processes call it together, before the first compilation.

    Leaves jax unchanged where the environment of all processes already names a cache (JAX_COMPILATION_CACHE_DIR). If the
    folder is unsafe or unusable, or only some processes set the variable, it reports this in a line, and every start
    compiles.

    Args:
        place: `xla.compilation_cache`: a directory, in which we create our own folder; `auto` for the user's cache
            directory, on GPUs; None to keep nothing.
        say: takes a line when programs cannot be kept.
        run: identifies the run, with the same value in all its processes; without it, several processes keep nothing.
    """
    named = everyones(bool(jax.config.values["jax_compilation_cache_dir"]))
    several = len(named) > 1
    if any(named) and not all(named):
        of = ", ".join(str(process) for process, names in enumerate(named) if names)
        say(f"JAX_COMPILATION_CACHE_DIR is set in process {of} only; set it in all or none; every start compiles")
        jax.config.update("jax_compilation_cache_dir", None)
        return
    on_cpu = place == "auto" and jax.default_backend() == "cpu"  # CPUs refuse their own cached programs, or crash on them
    if place is None or on_cpu or all(named) or (several and run is None):
        return
    root = folder = users_folder() if place == "auto" else Path(place).expanduser().absolute() / _OWN
    obstacle = make_private(root)
    if place != "auto" and obstacle is None and _others_can_replace_in(root.parent):
        obstacle = "is in a directory that others can write to; chmod go-w that, or name another"
    if several and obstacle is None:
        of_run = f"{run} {jax.devices()[0].client.platform_version}"  # jax also keys programs by drivers and libraries
        folder = root / hashlib.sha256(of_run.encode()).hexdigest()[:16]
        obstacle = make_private(folder)
    if rank() == 0 and obstacle is None:
        with contextlib.suppress(OSError):
            for path in folder.rglob("*") if several else ():
                path.touch()  # so that other runs do not remove it as old
        prune(root, MOST_BYTES)
    obstacles = everyones(obstacle)
    if several and not any(obstacles):
        obstacles = everyones(None if _is_shared(folder) else _NOT_SHARED)
    for process, found in enumerate(obstacles):
        if found is not None:
            of = f" (process {process})" if process else ""
            say(f"xla.compilation_cache: {folder}{of} {found}; every start compiles")
            return
    _tell_shortly(folder, say)
    # Compressed with a checksum: jax's zstd has none, and a program with a flipped bit would run.
    jax_cache.compress_executable, jax_cache.decompress_executable = zlib.compress, zlib.decompress
    jax.config.update("jax_compilation_cache_dir", str(folder))


def users_folder() -> Path:
    """Returns the default folder for programs: in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return Path(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache")) / "llamajax" / "compiled"


def make_private(folder: Path) -> str | None:
    """Creates our own folder and its parents, private to this user; returns why the folder cannot be trusted, or None."""
    if "~" in folder.parts:
        return "is in no known home directory; write the path out, or set XDG_CACHE_HOME"
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.exists():
                path.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return f"cannot be created or read: {error.strerror}"
    if status.st_uid != os.geteuid():
        return "belongs to another user, whose programs are not run; name one of your own"
    if status.st_mode & 0o022:
        return "can be written by others, whose programs are not run; empty it and chmod 700 it"
    if status.st_mode & 0o077:
        try:
            folder.chmod(0o700)
        except OSError as error:
            return f"cannot be made private: {error.strerror}"
    return None


def _others_can_replace_in(folder: Path) -> bool:
    """Returns whether another user may rename our entries in the folder."""
    mode = folder.stat().st_mode
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def prune(folder: Path, most_bytes: int) -> None:
    """Removes the least recently used files of our own folder until the rest is at most `most_bytes` large."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another run has removed it
            status = path.stat()
            if path.is_file():
                files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > most_bytes:
            with contextlib.suppress(OSError):
                path.unlink()


def _is_shared(folder: Path) -> bool:
    """Returns whether this process sees a file that process 0 writes into the folder."""
    token = folder / f"{secrets.token_hex(8)}.seen"
    if rank() == 0:
        with contextlib.suppress(OSError):
            token.touch()
    name, deadline = of_first(token.name), time.monotonic() + _SEEN_S
    while not (seen := name in names_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    everyones("looked")
    if rank() == 0:
        token.unlink(missing_ok=True)
    return seen


def _tell_shortly(folder: Path, say: Callable[[str], object]) -> None:
    """From now on, reports a program that cannot be read or written in one line, and removes it, because jax never
    overwrites one."""
    show = warnings.showwarning

    def show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        found = _UNUSABLE.match(str(message))
        if found is None:
            show(message, *args, **kwargs)
            return
        doing, program, reason = found.groups()
        say(f"{folder}: {program}: {doing} failed: {(reason.splitlines() or [''])[0]}; it is compiled")
        for path in folder.glob(f"{program}-*") if rank() == 0 else ():
            with contextlib.suppress(OSError):
                path.unlink()

    warnings.filterwarnings("always", message=_UNUSABLE.pattern)
    warnings.showwarning = show_warning


@contextlib.contextmanager
def loaded() -> Iterator[list[str]]:
    """Fills the list with an event for every program that is loaded instead of compiled while the block runs."""
    events: list[str] = []

    def listen(event: str, **_: str | int) -> None:
        if event == _HIT:
            events.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_listener(listen)
