"""Beginning of a run: its checkpoint, the weights of another model, or random weights."""

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
from llamajax.step.state import TrainState, abstract_model, init_state, with_copies
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
    """Beginning of a run; no array of it is read yet."""

    found: Found[TrainState] | None
    """Checkpoint that the run resumes from; None: the run is new."""
    passed_over: tuple[PassedOver, ...]
    """Rows that the run skips."""
    pretrained: Pretrained | None
    """Model that supplies the weights of a new run; None: they are random."""
    origin: Origin
    """Tokenizer and files that the run takes over from its initial weights, or from its checkpoint."""

    def described(self, config: Config) -> str:
        """Returns a line for people."""
        if self.found is not None:
            return f"resuming at step {self.found.step}{self.found.place}"
        if self.pretrained is not None:
            return f"from {self.pretrained.about}{self.pretrained.changed_by(config.model)}"
        return f"from scratch, seed {config.seed}"

    def start_from(
        self, restored: Restored[TrainState] | None, config: Config, passed_over: tuple[PassedOver, ...]
    ) -> Start:
        """Returns the start of the loop: after a checkpoint that was read, or with the weights of a new run."""
        if restored is not None:
            state = with_copies(config, restored.state)
            return Start(state, restored.step, passed_over, restored.meta.get("recent_losses", ()))
        assert config.init_from is None or self.pretrained, "a resumed run has a checkpoint to go back to"
        model, of_adapters = None, config.model.param_dtype
        if self.pretrained is not None:
            model = load_model(self.pretrained, config.model, abstract_model(config), adapters_dtype=of_adapters)
        return Start(init_state(config, model), passed_over=passed_over)


def open_weights(config: Config, run_dir: Path) -> Pretrained | None:
    """Opens the model that supplies the weights of a new run; it must match the configuration.

    Returns:
        The model; None if the run resumes or draws random weights.

    Raises:
        UserError: see `open_pretrained` and `Pretrained.check`.
    """
    if config.init_from is None or of_first(latest_step(run_dir)) is not None:
        return None
    pretrained = open_pretrained(Path(config.init_from))
    pretrained.check(config.model, config.init_changes)
    pretrained.check_adapters(config.adapters)
    return pretrained


def find_beginning(
    asked: Config, config: Config, abstract: TrainState, pretrained: Pretrained | None, checkpointer: Checkpointer
) -> Beginning:
    """Finds the checkpoint that the run resumes from, and checks everything that the run needs; all processes call this
    together.

    Args:
        asked: the run, as its user wrote it.
        config: the run on these devices.
        abstract: its `abstract_state`.
        pretrained: the result of `open_weights`.
        checkpointer: the run's.

    Raises:
        UserError: checkpoint, data or disk do not allow the run.
    """
    run_dir = Path(config.run_dir).expanduser()
    passed_over = read_passed_over(run_dir, checkpointer)
    found = checkpointer.find(abstract.without_copies(), passed_over=passed_over)
    if found is not None:
        passed_over = agreed(run_dir, passed_over, found)
    origin = _look(asked, config, abstract, found, pretrained)
    return Beginning(found=found, passed_over=passed_over, pretrained=pretrained, origin=origin)


def check_beginning(asked: Config, config: Config, abstract: TrainState, pretrained: Pretrained | None) -> None:
    """Does the checks of `find_beginning` for a dry run: locks, writes and sets aside nothing; all processes call this
    together."""
    run_dir, found = Path(config.run_dir).expanduser(), None
    if of_first(latest_step(run_dir)) is not None:
        found = find_arrays(good_step(run_dir / "checkpoints"), concretise(abstract.without_copies()), partial=False)
    origin = _look(asked, config, abstract, found, pretrained)
    look_at_data(config, origin.tokenizer, console.log)


def _look(
    asked: Config, config: Config, abstract: TrainState, found: Found[TrainState] | None, pretrained: Pretrained | None
) -> Origin:
    if found is not None:
        check_settings(asked, found)
    if found is None or found.step < config.train.num_steps:
        num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract.without_copies()))
        check_room(Path(config.run_dir).expanduser(), num_bytes)
    source = found if pretrained is None else pretrained
    return Origin() if config.init_from is None or source is None else take_along(source.files, source.hf)
