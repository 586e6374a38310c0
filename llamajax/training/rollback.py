"""Rolls back from a bad step to the newest good checkpoint before it, and skips the rows that led to the bad step.

A process may be killed at any moment, and the same command continues as if it had not been: `passed_over.json` in the run
directory is written whole before anything is removed. Without the file the run meets the bad step again; with it,
checkpoints after the rollback target no longer belong to the run and are removed.

"""

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any, TypeVar

import jax

from llamajax.checkpoint.meta import read_meta
from llamajax.checkpoint.newest import NoneGoodError
from llamajax.checkpoint.read import Restored, Saved
from llamajax.checkpoint.steps import steps_in
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.run import Config
from llamajax.data.rows.position import PassedOver, is_left_behind, next_row, rows_read
from llamajax.disk import read_again, write_atomically
from llamajax.errors import CheckpointError, SaveError
from llamajax.processes.peers import everyones, of_first
from llamajax.training.bad_steps import GoBack
from llamajax.watch import console, run_log

State = TypeVar("State")
PASSED_OVER_FILE = "passed_over.json"


def read_passed_over(run_dir: Path, checkpointer: Checkpointer) -> tuple[PassedOver, ...]:
    """Returns the rows that the run in `run_dir` has skipped, and removes obsolete checkpoints that a kill left behind.

    Obsolete checkpoints were saved before the run rolled back to an earlier step. All processes call this together and
    return the same.

    Raises:
        CheckpointError: the record is damaged.
        OSError: the disk fails; nothing is removed.
    """
    problem, content, left = None, [], []
    if jax.process_index() == 0:
        try:
            path = run_dir / PASSED_OVER_FILE
            content = json.loads(read_again(path.read_bytes)) if path.exists() else []
            left = steps_left_behind(run_dir / "checkpoints", parse_passed_over(content))
        except (ValueError, TypeError, RecursionError) as error:
            problem = f"{run_dir / PASSED_OVER_FILE} is damaged ({error}); restore it, or remove it: the run then uses"
            problem += " the record in its newest checkpoint"
    problem, content, left = of_first((problem, content, left))
    if problem is not None:
        raise CheckpointError(problem)
    checkpointer.drop(left)
    return parse_passed_over(content)


def steps_left_behind(directory: Path, passed_over: tuple[PassedOver, ...]) -> list[int]:
    """Returns the checkpoints in `directory` that were saved before the run rolled back to an earlier step.

    Raises:
        OSError: the disk fails, and an unreadable checkpoint would count as the run's own.
    """
    left = []
    for step in steps_in(directory):
        meta = read_meta(directory / str(step)) if is_left_behind(step, 0, passed_over) else None
        known = () if meta is None else parse_passed_over(meta["data"].get("passed_over", ()))
        is_own = meta is not None and known == passed_over[: len(known)]  # else `agreed` reports it
        if is_own and is_left_behind(step, len(known), passed_over):
            left.append(step)
    return left


def agreed(run_dir: Path, passed_over: tuple[PassedOver, ...], saved: Saved) -> tuple[PassedOver, ...]:
    """Returns the rows skipped according to the run's record and its checkpoint, either of which may have lost its end.

    Raises:
        CheckpointError: the two contradict each other.
    """
    known = parse_passed_over(saved.meta["data"].get("passed_over", []))
    if known[: len(passed_over)] != passed_over[: len(known)]:
        raise CheckpointError(
            f"{run_dir / PASSED_OVER_FILE} does not belong to the run of checkpoint {saved.step}; restore the run's own"
            " file, or remove it: the run then uses the record in its checkpoint"
        )
    return max(known, passed_over, key=len)


def go_back(
    bad: GoBack,
    config: Config,
    abstract_state: State,
    checkpointer: Checkpointer,
    passed_over: tuple[PassedOver, ...],
) -> tuple[Restored[State] | None, tuple[PassedOver, ...]]:
    """Rolls back to the newest good checkpoint before a bad step. All processes call this together.

    If the last rollback, which skipped rows, ended at that same checkpoint, this one uses the checkpoint before it.

    Args:
        bad: what went wrong, and at which step.
        config: the run.
        abstract_state: the abstract state, as for `Checkpointer.restore`.
        checkpointer: the checkpointer of the run.
        passed_over: rows that the run has skipped so far.

    Returns:
        The checkpoint, or None for the beginning of the run; and the rows that the run skips from now on.

    Raises:
        CheckpointError: the run has checkpoints, but none of them is good; or another process has taken over the run.
        OSError: the record cannot be written.
    """
    run_dir, rows_after = Path(config.run_dir).expanduser(), rows_read(config)
    with contextlib.suppress(SaveError):  # already reported; that checkpoint is not the target
        checkpointer.wait()
    restored = checkpointer.restore(abstract_state, before=bad.first_step, passed_over=passed_over)
    if restored is None and bad.pass_over:  # amid skipped steps, which do not change weights
        restored = checkpointer.restore(abstract_state, passed_over=passed_over)
    elif restored is not None and bad.pass_over and passed_over and passed_over[-1].after_step == restored.step:
        # Different rows after that checkpoint did not help: the cause is earlier.
        again, restored = restored.step, None  # frees its arrays before the next ones are loaded
        with contextlib.suppress(NoneGoodError):
            restored = checkpointer.restore(abstract_state, before=again, passed_over=passed_over)
        if restored is None:
            restored = checkpointer.restore(abstract_state, before=bad.first_step, passed_over=passed_over)
    step = 0 if restored is None else restored.step
    first, end = (next_row(n, rows_after, passed_over) for n in (step, bad.last_step))
    first_row, num_rows = (first, end - first) if bad.pass_over else (first, 0)
    now = of_first(round(time.time(), 3))
    if bad.pass_over:
        window = PassedOver(after_step=step, first_row=first_row, num_rows=num_rows, reason=bad.reason, time=now)
        passed_over = (*passed_over, window)
    rows = f"passing over rows {first_row:,} to {end - 1:,}" if bad.pass_over else "recomputing the steps since"
    of = f" ({len(passed_over)} of at most {config.recovery.max_rollbacks} times)" if bad.pass_over else ""
    where = f"step {step}" if restored is not None else "the beginning"
    console.log(f"rollback   {bad.reason}; going back to {where}, {rows}{of}")
    checkpointer.check()  # another process may have taken over during the restore
    if jax.process_index() == 0:
        with run_log.Appender(run_dir / run_log.ROLLED_BACK_FILE, console.say) as file:
            file.append_record(run_log.later_steps(run_dir / run_log.METRICS_FILE, step))
        event = {"time": now, "event": "rollback", "step": bad.last_step, "to_step": step, "first_row": first_row}
        event |= {"num_rows": num_rows, "reason": bad.reason, **bad.facts}
        with run_log.Appender(run_dir / run_log.EVENTS_FILE, console.say) as file:
            file.append_record(f"{run_log.encode(event)}\n".encode())
        if bad.pass_over:
            content = json.dumps([dataclasses.asdict(window) for window in passed_over], indent=1)
            write_atomically(run_dir / PASSED_OVER_FILE, content.encode())
    everyones("recorded")
    checkpointer.drop([later for later in steps_in(run_dir / "checkpoints") if later > step])
    return restored, passed_over


def parse_passed_over(content: Any) -> tuple[PassedOver, ...]:
    """Parses the contents of `passed_over.json` or the same list in a checkpoint.

    Raises:
        TypeError: the content is not such a list.
    """
    windows = tuple(PassedOver(**window) for window in content)
    if not all(type(n) is int and n >= 0 for w in windows for n in (w.after_step, w.first_row, w.num_rows)):
        raise TypeError("positions are not numbers")
    return windows
