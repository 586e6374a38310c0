"""Failures in a run: time limits, bad steps, and numbers that cannot be trusted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llamajax.config.rules import Bound, NonNegativeInt, PositiveFloat, PositiveFloatOrUnset, PositiveIntOrUnset, Section

Factor = Annotated[float, Bound(lambda value: value > 1, "must be above 1")]
Window = Annotated[int, Bound(lambda value: value >= 16, "must be at least 16")]


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig(Section):
    """Time limit of each phase of a run.

    A phase that exceeds its limit is stuck: the watchdog writes the stacks of all threads to `stacks/` in the run directory
    and ends the process with exit code 75, after which a launcher restarts the run.

    The limit of a phase is `factor` times the longest such phase so far in this process, and at least the floor here. Each
    process accounts for its own phases: while it waits for other processes to agree on something, or to release it, it may
    also take as long as they may. Time in which the whole process was stopped does not count. Only the launcher notices
    native code that holds Python's interpreter and so keeps all threads from running.
    """

    enabled: bool = True
    """Watch the phases. Without the watchdog, a stuck process hangs until somebody ends it."""
    factor: Factor = 4.0
    """Multiple of the longest phase so far that a phase may take."""
    start_s: PositiveFloat = 900.0
    """Seconds until the mesh exists: devices and the other processes."""
    compile_s: PositiveFloat = 3600.0
    """Seconds to compile, or to load what was compiled before, including the first step, which opens the connections between
    devices."""
    load_s: PositiveFloat = 1800.0
    """Seconds to load each of checkpoint, data and weights before the first step. For data, and for the hashes of a
    checkpoint, the limit runs from one sign of progress to the next."""
    step_s: PositiveFloat = 300.0
    """Seconds for a training step, including the wait for its batch. For the second step, the first one is the longest so
    far."""
    save_s: PositiveFloat = 1800.0
    """Seconds for a checkpoint, also while it is written in the background. For its hashes, the limit runs from one sign of
    progress to the next, and the other processes wait up to twice as long."""
    evaluate_s: PositiveFloat = 1800.0
    """Seconds for an evaluation, or for the sample at the end."""
    rollout_s: PositiveFloat = 3600.0
    """Seconds to write and reward the completions of a rollout."""


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig(Section):
    """Rollbacks after bad steps, and comparisons of state across devices."""

    max_rollbacks: NonNegativeInt = 3
    """Maximum number of rollbacks in the whole life of the run. A rollback resumes from the newest good checkpoint before a
    bad step (`train.max_nonfinite_steps`, `spike_zscore`) and skips the rows that led to it, which `passed_over.json` in the
    run directory lists. One more ends the run with exit code 93. 0: the first bad step ends it."""
    spike_zscore: PositiveFloatOrUnset = None
    """Robust standard deviations above the recent median from which a loss counts as a spike. The median is that of the last
    `spike_window` steps, the deviation 1.4826 times the median absolute deviation. The noise of batches rarely reaches 5.
    Unset: no loss is a spike."""
    spike_window: Window = 128
    """Number of steps with which a loss is compared."""
    checksum_every: PositiveIntOrUnset = 100
    """Steps between comparisons of weights and optimizer state across devices that hold the same part of them; they are also
    compared before every checkpoint. Devices that differ are named, and the steps since the last checkpoint are computed
    again: a difference that does not return was transient, one that returns ends the run. Unset: no comparisons."""

    def broken_rules(self) -> Iterator[str]:
        if self.spike_zscore is not None and self.max_rollbacks == 0:
            yield f"spike_zscore: {self.spike_zscore} has no effect with max_rollbacks=0; raise that, or remove this"
