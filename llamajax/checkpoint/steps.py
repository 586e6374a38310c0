"""Lists the steps of a run, verifies them and selects one.

The layout of a step is described in `llamajax.checkpoint.write`.
"""

import re
from pathlib import Path

from llamajax.checkpoint import manifest
from llamajax.disk import names_in, read_again
from llamajax.errors import CheckpointError
from llamajax.processes.peers import of_first
from llamajax.watch.console import say


def latest_step(run_dir: Path) -> int | None:
    """Returns the newest committed step of a run, unverified; None if there is none."""
    return max(steps_in(run_dir / "checkpoints"), default=None)


def find_step(path: Path) -> Path | None:
    """Returns the verified step that `path` names: the newest good one of a run directory, or RUN/checkpoints/STEP itself.

    Returns None if the path is neither. Processes call this together.

    Raises:
        CheckpointError: the run has no good step, or the named step is damaged.
    """
    is_step = path.parent.name == "checkpoints" and path.name.isdecimal() and path.is_dir()
    directory, step = (path.parent, int(path.name)) if is_step else (path / "checkpoints", None)
    return good_step(directory, step) if directory.is_dir() else None


def good_step(directory: Path, step: int | None = None) -> Path:
    """Returns the directory of the verified step; None selects the newest good one and reports newer damaged ones on stderr.

    Raises:
        CheckpointError: the step is damaged, or no step is good.
    """
    if step is None:
        step, damaged = newest_good(directory)
        if step is None:
            raise CheckpointError(manifest.none_good_line(directory, damaged))
        for bad, found in damaged.items():
            say(f"{manifest.damage_line(directory, bad, found)}; reading step {step} instead")
    elif found := manifest.damage(directory / str(step)):
        raise CheckpointError(f"{manifest.damage_line(directory, step, found)}; choose another step")
    return directory / str(step)


def steps_in(directory: Path) -> list[int]:
    """Returns the committed steps in order."""
    return sorted(int(name) for name in read_again(lambda: names_in(directory)) if re.fullmatch("0|[1-9][0-9]*", name))


def newest_good(directory: Path, before: int | None = None) -> tuple[int | None, dict[int, manifest.Damage]]:
    """Returns the newest undamaged step, and the problems of newer ones; the same on every process.

    Args:
        directory: directory of the steps.
        before: only steps below this one count; None: all.
    """
    damaged: dict[int, manifest.Damage] = {}
    while True:
        # Listed again each time: a running writer may have committed one step and deleted another meanwhile.
        own = steps_in(directory)
        steps = [step for step in of_first(own) if before is None or step < before]
        step = max(set(steps) - damaged.keys(), default=None)
        if step is None or not (found := manifest.damage(directory / str(step))):
            return step, {bad: damaged[bad] for bad in damaged if bad in steps}
        damaged[step] = found
