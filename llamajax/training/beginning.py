"""Beginning of a run: its checkpoint, the weights of another model, or random weights."""

import math
from dataclasses import dataclass
from pathlib import Path

import jax

from llamajax.checkpoint.read import Found, Restored, find_arrays
from llamajax.checkpoint.retention import check_room
from llamajax.checkpoint.steps import good_step, latest_step
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.hub import is_on_hub
from llamajax.config.run import Config
from llamajax.data.rows.position import PassedOver
from llamajax.data.tokens.tokenize_run import look_at_data
from llamajax.errors import CheckpointError
from llamajax.model import Llama
from llamajax.parallel.arrays import concretise
from llamajax.parallel.zero import trained_only
from llamajax.processes.peers import of_first
from llamajax.step.checksum import fingerprint
from llamajax.step.frozen import partition
from llamajax.step.state import (
    TrainState,
    abstract_model,
    drawn_head,
    init_state,
    with_adapters,
    with_base,
    with_copies,
)
from llamajax.training import rollouts
from llamajax.training.loop import Start
from llamajax.training.resume import check_settings
from llamajax.training.rollback import agreed, read_passed_over
from llamajax.watch import console
from llamajax.weights.loading import load_adapters, load_model
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
    """Model that supplies the weights of a new run, or those that adapters add to; None: they are random."""
    origin: Origin
    """Tokenizer and files that the run takes over from its initial weights, or from its checkpoint."""

    def described(self, config: Config) -> str:
        """Returns a line for people."""
        if self.found is not None:
            return f"resuming at step {self.found.step}{self.found.place}"
        if self.pretrained is not None:
            return f"from {self.pretrained.about}"
        return f"from scratch, seed {config.seed}"

    def start_from(
        self, restored: Restored[TrainState] | None, config: Config, passed_over: tuple[PassedOver, ...]
    ) -> Start:
        """Returns the start of the loop: after a checkpoint that was read, or with the weights of a new run."""
        assert restored is not None or config.init_from is None or self.pretrained, (
            "a resumed run has a checkpoint to go back to"
        )
        rollout = None
        if restored is None:
            state, step, losses = first_state(config, self.pretrained), 0, ()
        else:
            found, state = self.pretrained, restored.state
            if found is not None:
                state = with_base(config, state, _loaded(config, found))
            state, step = with_copies(config, state), restored.step
            losses, file = restored.meta.get("recent_losses", ()), restored.files / rollouts.FILE
            rollout = file.read_bytes() if file.exists() else None
        if not config.adapters.enabled:
            return Start(state, step, passed_over, losses, rollout)
        base = fingerprint(partition(config, state.model)[1])
        if restored is not None and restored.meta.get("base") != base:
            raise CheckpointError(
                f"init_from: {config.init_from} holds other weights than those that the adapters in {config.run_dir} were"
                " trained beside; name these, or choose another run_dir"
            )
        return Start(state, step, passed_over, losses, rollout, base)


def first_state(config: Config, found: Pretrained | None) -> TrainState:
    """Returns the state before the first step, with the weights of a model or random ones."""
    if found is None:
        return init_state(config)
    state = init_state(config, _loaded(config, found))
    if found.adapters is None:
        return state
    return with_adapters(state, load_adapters(found, trained_only(state.model)))


def _loaded(config: Config, found: Pretrained) -> Llama:
    """Returns the weights of a model; a head that it does not have is drawn as for random weights."""
    abstract = abstract_model(config)
    model = load_model(found.base or found, config.stored_model, abstract)
    if model.head is None and abstract.head is not None:
        model.head = jax.device_put(drawn_head(config), jax.tree.map(lambda like: like.sharding, abstract.head))
    return model


def with_commit(config: Config, run_dir: Path) -> Config:
    """Returns a new run with the commit of the weights on the Hub that it starts from; all processes call this together.

    A run that resumes has it from its checkpoint (`llamajax.config.inherited`).

    Raises:
        ConfigError, DiskError: see `llamajax.config.hub.pin`.
    """
    if config.init_from is None or not is_on_hub(config.init_from) or of_first(latest_step(run_dir)) is not None:
        return config
    from llamajax.weights.download import pinned  # takes a second to import

    return config.changed({"init_from": pinned(config.init_from)})


def open_weights(config: Config, run_dir: Path) -> Pretrained | None:
    """Opens the model that supplies the weights of a new run, or those that adapters add to; it must match the
    configuration.

    Returns:
        The model; None if a checkpoint has all weights, or if they are random.

    Raises:
        UserError: see `open_pretrained` and `Pretrained.check`.
    """
    if config.init_from is None or (not config.adapters.enabled and of_first(latest_step(run_dir)) is not None):
        return None
    return open_first_weights(config)


def open_first_weights(config: Config) -> Pretrained:
    """Opens the model of `init_from`; raises as `open_weights`."""
    assert config.init_from is not None
    pretrained = open_pretrained(config.init_from)
    pretrained.check(config.stored_model, config.init_changes)
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
    found = checkpointer.find(abstract.as_saved(), passed_over=passed_over)
    if found is not None:
        passed_over = agreed(run_dir, passed_over, found)
    origin = _look(asked, config, abstract, found, pretrained)
    return Beginning(found=found, passed_over=passed_over, pretrained=pretrained, origin=origin)


def check_beginning(asked: Config, config: Config, abstract: TrainState, pretrained: Pretrained | None) -> None:
    """Does the checks of `find_beginning` for a dry run: locks, writes and sets aside nothing; all processes call this
    together."""
    run_dir, found = Path(config.run_dir).expanduser(), None
    if of_first(latest_step(run_dir)) is not None:
        found = find_arrays(good_step(run_dir / "checkpoints"), concretise(abstract.as_saved()), partial=False)
    origin = _look(asked, config, abstract, found, pretrained)
    look_at_data(config, origin.tokenizer, console.log)


def _look(
    asked: Config, config: Config, abstract: TrainState, found: Found[TrainState] | None, pretrained: Pretrained | None
) -> Origin:
    if found is not None:
        check_settings(asked, found)
    if found is None or not config.train.num_steps or found.step < config.train.num_steps:
        num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract.as_saved()))
        check_room(Path(config.run_dir).expanduser(), num_bytes)
    source = pretrained if found is None else found
    return Origin() if config.init_from is None or source is None else take_along(source.files, source.hf)
