"""One side of a comparison: the first steps of a run, and all their visible results."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.step.batch import Batch
from llamajax.step.compile import abstract_batch
from llamajax.step.grouped_step import compile_grouped
from llamajax.step.layer_groups import uses_files
from llamajax.step.optim import moments
from llamajax.step.resolve import ResolvedRun, resolve
from llamajax.step.stage import Total
from llamajax.step.staged_step import compile_staged, reduced
from llamajax.step.state import TrainState, abstract_state, init_state
from llamajax.step.step import apply_gradients, loss_and_grads
from llamajax.verification.rows import make_rows

Place = tuple[int, ...]
"""Position of a device: its index along each mesh axis."""


@dataclass(frozen=True)
class Part:
    """One device's part of an array."""

    index: tuple[slice, ...]
    """Position in the whole array."""
    value: np.ndarray


@dataclass(frozen=True)
class Seen:
    """An array as its devices hold it."""

    whole: np.ndarray
    parts: Mapping[Place, Part]


@dataclass(frozen=True)
class Step:
    """Results of one optimizer step; the first one of a side is the initial state, without scalars."""

    scalars: Mapping[str, float]
    """`tokens`, `loss` and `gradient norm`."""
    arrays: Mapping[str, Mapping[str, Seen]]
    """`gradient`, moments (`first moment`, `second moment`) and `weight` of every parameter, by kind and name."""


@dataclass(frozen=True)
class Side:
    """The same first steps, on one mesh and in one form."""

    axes: Mapping[str, int]
    """Sizes of the mesh axes."""
    num_micro_batches: int
    """Number of micro-batches that each step is summed over."""
    steps: tuple[Step, ...]


# Fast code for five steps of a tiny model is not worth its compilation. The command sets the same for all programs of its
# process; a caller of the library keeps its own flags.
_QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1, compiler_options=_QUICKLY)
def step_with_gradients(run: ResolvedRun, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array], Any]:
    """Runs `llamajax.step.step.train_step` and also returns the gradients."""
    metrics, grads = loss_and_grads(run, state.weights, batch)
    state, update_metrics = apply_gradients(run.config, state, grads, metrics["tokens"])
    return state, metrics | update_metrics, grads


def _step(run: ResolvedRun) -> Callable[[TrainState, Batch], Any]:
    if (compile_programs := _several(run.config)) is None:
        return functools.partial(step_with_gradients, run)
    state = abstract_state(run.config)
    return compile_programs(run, state, _results, lambda lowered, _: lowered.compile(compiler_options=_QUICKLY))[0]


def _several(config: Config) -> Callable[..., Any] | None:
    """Returns the compiler of a step that is several programs; None: it is one."""
    return compile_staged if config.mesh.stages else compile_grouped if uses_files(config) else None


def _results(config: Config, state: TrainState, total: Total) -> tuple[TrainState, dict[str, jax.Array], Any]:
    metrics, grads = reduced(config, state.weights, total)
    state, update_metrics = apply_gradients(config, state, grads, metrics["tokens"])
    return state, metrics | update_metrics, grads


def program(config: Config) -> str:
    """Returns the programs that `run_side` compiles for a step; forms without a difference on a mesh have the same ones."""
    mesh = _mesh(config.mesh)
    jax.set_mesh(mesh)
    batch = abstract_batch(config)
    run = resolve(config, mesh.shape)
    state = abstract_state(run.config)
    if (compile_programs := _several(run.config)) is None:
        return step_with_gradients.lower(run, state, batch).as_text()
    texts = list[str]()
    compile_programs(run, state, _results, lambda lowered, _: texts.append(lowered.as_text()))
    return "\n".join(texts)


def run_side(config: Config, num_steps: int, doing: Callable[[str], None]) -> Side:
    """Trains `num_steps` steps on the first devices, from weights that it draws itself.

    Args:
        config: the run; its mesh names all sizes.
        num_steps: number of steps.
        doing: takes a line of progress.
    """
    mesh = _mesh(config.mesh)
    jax.set_mesh(mesh)
    places = {device: tuple(map(int, place)) for place, device in np.ndenumerate(mesh.devices)}

    def seen(tree: Any) -> dict[str, Seen]:
        return {name: _seen(array, places) for name, array in named_arrays(tree).items()}

    def kept(state: TrainState) -> dict[str, dict[str, Seen]]:
        of_optimizer = dict(zip(_MOMENTS, moments(state.opt_state, state.model), strict=False))
        return {kind: seen(tree) for kind, tree in (of_optimizer | {"weight": state.model}).items()}

    doing("making the state")
    run = resolve(config, mesh.shape)
    state = init_state(run.config)
    steps = [Step({}, kept(state))]
    doing("compiling")
    do_step = _step(run)
    for step in range(1, num_steps + 1):
        if step > 1:
            doing(f"step {step} of {num_steps}")
        state, metrics, grads = do_step(state, make_rows(config, step))
        scalars = {name: float(metrics[metric]) for name, metric in _SCALARS.items()}
        steps.append(Step(scalars, {"gradient": seen(grads)} | kept(state)))
    return Side(dict(mesh.shape), config.train.grad_accum_steps, tuple(steps))


def _mesh(mesh: MeshConfig) -> jax.sharding.Mesh:
    return make_mesh(mesh, jax.devices()[: mesh.num_cpu_devices])


_SCALARS = {"tokens": "tokens", "loss": "loss", "gradient norm": "grad_norm"}
_MOMENTS = tuple(f"{place} moment" for place in ("first", "second", "third", "fourth", "fifth"))


def _seen(array: jax.Array, places: Mapping[Any, Place]) -> Seen:
    parts = {places[shard.device]: Part(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards}
    return Seen(np.asarray(array), parts)
