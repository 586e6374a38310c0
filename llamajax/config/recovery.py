"""How a run goes on when something breaks: limits of time, steps that went wrong, numbers that cannot be trusted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from llamajax.config.rules import Bound, NonNegativeInt, PositiveFloat, PositiveFloatOrUnset, PositiveIntOrUnset, Section

Factor = Annotated[float, Bound(lambda value: value > 1, "must be above 1")]
Window = Annotated[int, Bound(lambda value: value >= 16, "must be at least 16")]


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig(Section):
    """How long each phase of a run may take. One that takes longer is stuck: the stacks of all its threads are written to
    `stacks/` in the run directory, and the process ends with exit code 75, which a launcher answers by a new start.

    The limit of a phase is `factor` times the longest of its kind so far in this process, and at least the floor here. Each
    process is answerable for its own phases: where it waits for other processes to agree on something, or to give it free,
    it may take as long as they may besides. Time in which the whole process was stopped does not count. What keeps all of
    its threads from running (native code that holds Python's interpreter) is noticed by the launcher only."""

    enabled: bool = True
    """Watch at all; without, a process that is stuck stands still until somebody ends it."""
    factor: Factor = 4.0
    """How many times the longest so far a phase may take."""
    start_s: PositiveFloat = 900.0
    """Until the mesh is there: devices, the other processes."""
    compile_s: PositiveFloat = 3600.0
    """Compiling, or loading what was compiled before; also the first step, which makes the connections between devices."""
    load_s: PositiveFloat = 1800.0
    """The checkpoint, the data and the weights before the first step, each; of data, and of a checkpoint's hashes, from one
    sign of progress to the next."""
    step_s: PositiveFloat = 300.0
    """A training step, the wait for its batch included. Of the second one, the longest so far is the first."""
    save_s: PositiveFloat = 1800.0
    """A checkpoint, also while it is written in the background; of its hashes, from one sign of progress to the next, while
    the other processes wait as long as twice this."""
    evaluate_s: PositiveFloat = 1800.0
    """An evaluation, or the sample at the end."""


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig(Section):
    """What becomes of steps that went wrong."""

    max_rollbacks: NonNegativeInt = 3
    """How often, in all its life, the run may go back to its newest good checkpoint before a bad step
    (`train.max_nonfinite_steps`, `spike_zscore`) and pass over the rows that led there, which `passed_over.json` in its
    directory tells; one more ends it with exit code 93. 0: the first ends it."""
    spike_zscore: PositiveFloatOrUnset = None
    """A loss is a spike when it lies this many robust standard deviations (1.4826 times the median absolute deviation)
    above the median of the last `spike_window` steps. The noise of batches hardly reaches 5. Unset: no loss is."""
    spike_window: Window = 128
    """Steps that a loss is compared with."""
    checksum_every: PositiveIntOrUnset = 100
    """Steps between comparisons of weights and optimizer state across devices that hold the same part of them; also before
    every checkpoint. Devices that differ are named, and the steps since the last checkpoint computed again: what does not
    come back was transient, what does ends the run. Unset: no comparisons."""

    def broken_rules(self) -> Iterator[str]:
        if self.spike_zscore is not None and self.max_rollbacks == 0:
            yield f"spike_zscore: {self.spike_zscore} has no effect with max_rollbacks=0; raise that, or remove this"
