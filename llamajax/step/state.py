"""The state that a run carries from step to step, and its initial value."""

import dataclasses
import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamajax.config.parallel import axes_of
from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.model.adapters import quantized_layers
from llamajax.parallel.arrays import concretise, named_arrays
from llamajax.parallel.sharding import axes_in
from llamajax.parallel.stages import STAGE, num_stages
from llamajax.parallel.zero import DATA, as_frozen, split_over, trained_only
from llamajax.step import host_state
from llamajax.step.frozen import combine, partition
from llamajax.step.optim import make_optimizer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a run carries from step to step; saved whole, restored whole."""

    step: jax.Array
    """Number of finished steps, int32; it decides the data position, see `llamajax.data.rows.position.rows_read`."""
    model: Llama
    """Master weights in `param_dtype`."""
    opt_state: Any
    """optax state of the trained weights, sharded like them."""
    rng: jax.Array
    """Key for random draws after initialisation."""
    skipped_steps: jax.Array
    """Number of steps that were not applied, because gradients were not finite or no target was counted, int32."""
    skipped_in_a_row: jax.Array
    """Number of steps with non-finite gradients since the last step with finite ones, int32."""
    copies: Llama | None = None
    """Copies to compute with of the master weights that are in host memory, in `compute_dtype`; None for other weights. They
    follow from the master weights, so checkpoints leave them out."""

    @property
    def weights(self) -> Llama:
        """Returns the weights to compute with: copies where there are some, master weights otherwise."""
        return self.model if self.copies is None else combine(self.copies, self.model)

    def as_saved(self) -> "TrainState":
        """Returns the state as checkpoints hold it: without copies, and without frozen weights that adapters add to."""
        return dataclasses.replace(self, model=trained_only(self.model), copies=None)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def with_copies(config: Config, state: TrainState) -> TrainState:
    """Returns the state from a checkpoint with the copies that the run's steps need; the given one is used up."""
    return dataclasses.replace(state, copies=_copies(config, state.model))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def init_state(config: Config, model: Llama | None = None) -> TrainState:
    """Returns the state before the first step, created sharded over the current mesh; equal on every mesh for one seed.

    Args:
        config: the run.
        model: weights to start from, which are donated; None: draw them.
    """
    model_key, rng = jax.random.split(jax.random.key(config.seed))
    of_run, zero = (config.optimizer, config.train.num_steps), jnp.zeros((), jnp.int32)
    if config.offload.state_share:
        split = partial(split_over, further=DATA if config.parallel.zero_data == 1 else ())
        weights, opt_state = host_state.create(config, make_optimizer(*of_run, whole=False), model_key, model, split)
    else:
        weights = drawn(config, model_key) if model is None else model
        if config.adapters.enabled:
            key = jax.random.fold_in(model_key, 1)
            weights = as_frozen(weights).with_adapters(config.adapters, config.model.param_dtype, key)
        weights = _split_further(config, weights)
        trained: Any = partition(config, weights)[0]  # optax's types know dicts and tuples only
        opt_state = make_optimizer(*of_run).init(trained)
    state = TrainState(
        step=zero, model=weights, opt_state=opt_state, rng=rng, skipped_steps=zero, skipped_in_a_row=zero
    )  # fmt: skip
    return dataclasses.replace(state, copies=_copies(config, weights))


def with_base(config: Config, state: TrainState, base: Llama) -> TrainState:
    """Returns the state from a checkpoint of adapters with the frozen weights, which are donated."""
    return dataclasses.replace(state, model=combine(state.model, init_state(config, base).model))


def with_adapters(state: TrainState, adapters: Llama) -> TrainState:
    """Returns the state before the first step with these adapters, a model with None for other weights, in place of its
    own."""
    return dataclasses.replace(state, model=combine(adapters, state.model))


def _copies(config: Config, model: Llama) -> Llama | None:
    if not config.offload.state_share:
        return None
    return host_state.copies(model, config.model.compute_dtype, on_host=config.offload.parameters == "all")


def _split_further(config: Config, model: Llama) -> Llama:
    """Returns the weights split over `data` too, for `zero_data: 1`, and over the stages of a pipeline: layers by columns if
    the stages do not divide their number or they are of two kinds, embedding and head in any case."""
    data = DATA if config.parallel.zero_data == 1 else ()
    stages = (STAGE,) if num_stages() > 1 else ()
    split = jax.tree.map(lambda weight: weight, model)
    columns = stages if config.model.num_layers % num_stages() or config.model.dense_layers else ()
    # Layers exchange columns between stages first, and embedding and head are joined over `data` first: the innermost axis.
    split.layers, split.dense_layers = split_over(split_over((split.layers, split.dense_layers), data), columns)
    if axes_in(jax.typeof(split.embedding[...]).sharding.spec[1:]) != set(axes_of("embed")):
        stages = ()  # devices exchange parts of such a table when they gather it
    split.embedding = split_over(split_over(split.embedding, stages), data)
    split.head = None if split.head is None else split_over(split_over(split.head, stages), data)
    return split


def drawn(config: Config, key: jax.Array) -> Llama:
    """Returns random weights, without adapters, as they are stored."""
    model = Llama(config.stored_model, key)
    if config.adapters.is_quantized:
        model.layers = quantized_layers(config.adapters, model.layers, num_stacked=1)
    return model


@functools.partial(jax.jit, static_argnums=0)
def drawn_head(config: Config) -> nnx.Param:
    """Returns the head of random weights."""
    return Llama.drawn_head(config.stored_model, jax.random.split(jax.random.key(config.seed))[0])


def abstract_model(config: Config) -> Llama:
    """Returns the weights that a run may start from as `jax.ShapeDtypeStruct`, each in the memory where it waits."""
    shapes = jax.eval_shape(partial(drawn, config), jax.random.key(0))
    return concretise(shapes, host_state.places(config, [f"model.{name}" for name in named_arrays(shapes)]))


def abstract_state(config: Config) -> TrainState:
    """Returns the state of a run as `jax.ShapeDtypeStruct`, with shardings of the current mesh; no array is created."""
    shapes = jax.eval_shape(partial(init_state, config))
    return concretise(shapes, host_state.places(config, list(named_arrays(shapes))))
