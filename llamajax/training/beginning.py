"""Where a run begins: behind its checkpoint, with the weights of another model, or with weights that it draws."""

import math
from dataclasses import dataclass
from pathlib import Path

import jax

from llamajax.checkpoint.read import Found, Restored, find_arrays
from llamajax.checkpoint.retention import check_room
from llamajax.checkpoint.steps import good_step, latest_step
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.run import Config
from llamajax.data.rows.position import PassedOver
from llamajax.data.tokens.tokenize_run import look_at_data
from llamajax.parallel.arrays import concretise
from llamajax.processes.peers import of_first
from llamajax.step.state import TrainState, init_state
from llamajax.training.loop import Start
from llamajax.training.resume import check_settings
from llamajax.training.rollback import agreed, read_passed_over
from llamajax.watch import console
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.origin import Origin, take_along
from llamajax.weights.pretrained import Pretrained


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a run begins with; nothing large of it is read yet."""

    found: Found[TrainState] | None
    """The checkpoint that it goes on from; None: it is new."""
    passed_over: tuple[PassedOver, ...]
    """Rows that it does not take."""
    pretrained: Pretrained | None
    """The model whose weights a new run starts from; None: it draws them."""
    origin: Origin
    """What it takes along: of the weights that it starts from, or as its checkpoint has kept it."""

    def described(self, config: Config) -> str:
        """Where it begins, for people."""
        if self.found is not None:
            return f"resuming at step {self.found.step}{self.found.place}"
        if self.pretrained is not None:
            return f"from {self.pretrained.about}{self.pretrained.changed_by(config.model)}"
        return f"from scratch, seed {config.seed}"

    def start_from(
        self, restored: Restored[TrainState] | None, config: Config, passed_over: tuple[PassedOver, ...]
    ) -> Start:
        """Where the loop begins: behind a checkpoint that was read, or with the weights of a new run."""
        if restored is not None:
            return Start(restored.state, restored.step, passed_over, restored.meta.get("recent_losses", ()))
        assert config.init_from is None or self.pretrained, "a run that was resumed has a checkpoint to go back to"
        model = None if self.pretrained is None else load_model(self.pretrained, config.model)
        return Start(init_state(config, model), passed_over=passed_over)


def open_weights(config: Config, run_dir: Path) -> Pretrained | None:
    """The model that a new run starts from, which must be the configuration's; None: the run draws its weights, or goes on.

    Raises:
        UserError: as of `open_pretrained` and `Pretrained.check`.
    """
    if config.init_from is None or of_first(latest_step(run_dir)) is not None:
        return None
    pretrained = open_pretrained(Path(config.init_from))
    pretrained.check(config.model, config.init_changes)
    return pretrained


def find_beginning(
    asked: Config, config: Config, abstract: TrainState, pretrained: Pretrained | None, checkpointer: Checkpointer
) -> Beginning:
    """Finds what the run in its directory goes on from, and looks at all that it needs; all processes call this together.

    Args:
        asked: the run, as its user wrote it.
        config: the run on these devices.
        abstract: its `abstract_state`.
        pretrained: of `open_weights`.
        checkpointer: of the run.

    Raises:
        UserError: checkpoint, data or disk do not allow it.
    """
    run_dir = Path(config.run_dir).expanduser()
    passed_over = read_passed_over(run_dir, checkpointer)
    found = checkpointer.find(abstract, passed_over=passed_over)
    if found is not None:
        passed_over = agreed(run_dir, passed_over, found)
    origin = _look(asked, config, abstract, found, pretrained)
    return Beginning(found=found, passed_over=passed_over, pretrained=pretrained, origin=origin)


def check_beginning(asked: Config, config: Config, abstract: TrainState, pretrained: Pretrained | None) -> None:
    """`find_beginning` for a run that does not begin: nothing is locked, written or set aside; all processes call this
    together."""
    run_dir, found = Path(config.run_dir).expanduser(), None
    if of_first(latest_step(run_dir)) is not None:
        found = find_arrays(good_step(run_dir / "checkpoints"), concretise(abstract), partial=False)
    origin = _look(asked, config, abstract, found, pretrained)
    look_at_data(config, origin.tokenizer, console.log)


def _look(
    asked: Config, config: Config, abstract: TrainState, found: Found[TrainState] | None, pretrained: Pretrained | None
) -> Origin:
    if found is not None:
        check_settings(asked, found)
    if found is None or found.step < config.train.num_steps:
        num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
        check_room(Path(config.run_dir).expanduser(), num_bytes)
    source = found if pretrained is None else pretrained
    return Origin() if config.init_from is None or source is None else take_along(source.files, source.hf)
