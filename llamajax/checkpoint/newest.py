"""Finds the step from which a run continues: the newest complete one among its checkpoints and its local tier."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from llamajax.checkpoint import manifest, retention
from llamajax.checkpoint.local_tier import LocalTier
from llamajax.checkpoint.read import Found, State, find_arrays
from llamajax.checkpoint.steps import newest_good, steps_in
from llamajax.data.rows.position import PassedOver
from llamajax.errors import CheckpointError
from llamajax.processes.peers import of_first
from llamajax.watch.console import say


class NoneGoodError(CheckpointError):
    """All steps of a run are damaged. Every process raises the same error."""


def find_newest(
    directory: Path,
    local: LocalTier | None,
    abstract_state: State,
    before: int | None,
    passed_over: Sequence[PassedOver],
) -> tuple[Found[State] | None, int | None]:
    """Finds that step for the processes that write the run. All call this together.

    Newer damaged checkpoints are reported and set aside. Newer local steps stay until the run continues: a run with another
    model is rejected, and the steps must survive that.

    Args:
        directory: directory of the checkpoints.
        local: the local tier, if the run has one.
        abstract_state: the pytree to restore, with devices.
        before: only steps below this one count; None: all.
        passed_over: rows that the run has skipped; a local step from before the rollback past it does not count.

    Returns:
        The step, or None; and the newest checkpoint, which is only known to be good if it is that step.

    Raises:
        NoneGoodError: no step is good.
        CheckpointError: the arrays of the step differ in name, dtype or shape from `abstract_state`.
        OSError: the disk fails.
    """
    if local is not None:
        local.wait()

    def newest_local(above: int | None) -> tuple[int | None, str]:
        if local is None:
            return None, ""
        return local.newest(abstract_state, above=above or 0, before=before, passed_over=passed_over)

    newest = max((step for step in of_first(steps_in(directory)) if before is None or step < before), default=None)
    step, why = newest_local(newest)
    if step is None:
        newest, damaged = newest_good(directory, before)
        if damaged:
            step, why = newest_local(newest)
        if damaged and newest is None and step is None:
            raise NoneGoodError(manifest.none_good_line(directory, damaged))
        for bad in damaged:
            if jax.process_index() == 0:
                retention.set_aside(directory, bad)
            line = manifest.damage_line(directory, bad, damaged[bad])
            say(f"{line}; moved to {bad}.damaged, continuing from step {newest if step is None else step}")
    if step is not None:
        assert local is not None
        place = f" from the local tier ({directory}: {'none' if newest is None else newest})"
        return dataclasses.replace(local.find(step, abstract_state), place=place), newest
    if newest is None:
        return None, None
    found = find_arrays(directory / str(newest), abstract_state, partial=False)
    return dataclasses.replace(found, place=f" ({why})" if why else ""), newest
