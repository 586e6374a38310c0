"""The training step of stages that run their own programs (`mesh.stages`), driven in 1F1B order from one loop.

The state stays one state on the whole mesh. At the start of a step, one program on all devices prepares the weights, so that
every stage has the weights of its layers; at the end, another one reduces the gradients and applies them. In between, each
process runs the passes of the stages that have devices here, and activations and their gradients travel from stage to stage.
jax runs programs asynchronously, so all stages work at once although one loop drives them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import Mesh

from llamajax.config.run import Config
from llamajax.config.stages import layers_of_stages
from llamajax.model import Llama
from llamajax.parallel.arrays import concretise
from llamajax.parallel.stage_meshes import (
    absent,
    is_here,
    join_stages,
    on_stage,
    send,
    split_by_stage,
    stage_meshes,
)
from llamajax.parallel.stage_order import Pass, order_1f1b
from llamajax.parallel.stages import STAGE
from llamajax.parallel.zero import PreparedWeights
from llamajax.step.batch import Batch
from llamajax.step.compile import Option, abstract_batch, compile_with, compiler_options
from llamajax.step.frozen import combine
from llamajax.step.resolve import ResolvedRun
from llamajax.step.stage import Stage, Total, Weights
from llamajax.step.state import TrainState
from llamajax.step.step import begin, end, finish

Program = Callable[..., Any]
"""A compiled program."""
Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StagePrograms:
    """The programs of one stage."""

    forward: Program | None
    """`Stage.forward`; None: the last stage has none, or the stage is not in this process."""
    backward: Program | None
    """`Stage.backward`, for the last stage `Stage.both`; None: the stage is not in this process."""


@dataclass(frozen=True)
class StagedStep:
    """Training's step, with the interface of the compiled one-program step."""

    meshes: Sequence[Mesh]
    """Mesh of each stage."""
    stages: Sequence[StagePrograms]
    """Programs of each stage."""
    begin: Program
    """Weights, and zeros for gradients and sums, on the whole mesh; see `_begin`."""
    end: jax.stages.Compiled
    """The next state and metrics; see `finish_step`."""
    total: Total
    """Shapes of gradients and sums on the whole mesh."""
    activations: Sequence[Any]
    """Shapes of the activations after each stage."""
    order: Sequence[Pass]
    """All passes of the step."""

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Runs one optimizer step; arguments and results as of `train_step`."""
        weights, zeros = self.begin(state.model)
        totals = self.accumulate(
            split_by_stage(weights, self.meshes), split_by_stage(batch, self.meshes), split_by_stage(zeros, self.meshes)
        )
        return self.end(state, join_stages(totals, self.total))

    def memory_analysis(self) -> Any:
        """Returns the memory that the program of the whole mesh needs at the end of the step; see `jax.stages.Compiled`."""
        return self.end.memory_analysis()

    def accumulate(self, weights: list[Weights], batches: list[Batch], totals: list[Total]) -> list[Total]:
        """Returns the totals of all stages, from zeros, after all passes of the step."""
        last, came, kept = len(self.meshes) - 1, dict[Any, Any](), dict[Any, Any]()
        for stage, number, is_backward in self.order:
            mesh, programs = self.meshes[stage], self.stages[stage]
            own, index = (weights[stage], batches[stage]), np.int32(number)
            if stage == last and not is_backward:
                continue  # one program runs both passes
            given = came.pop((stage, number, is_backward and stage < last), None)
            to = stage - 1 if is_backward else stage + 1
            result = absent(self.activations[stage]) if to >= 0 and not is_here(mesh) else None
            if is_here(mesh) and is_backward:
                values = (given,) if stage == last else (kept.pop((stage, number)), given)
                assert programs.backward is not None
                result, totals[stage] = programs.backward(*own, index, *values, totals[stage])
            elif is_here(mesh):
                assert programs.forward is not None
                result, kept[stage, number] = programs.forward(*own, index, given)
            if to >= 0:
                came[to, number, is_backward] = send(result, mesh, self.meshes[to])
        return totals


def finish_step(config: Config, state: TrainState, total: Total) -> tuple[TrainState, Metrics]:
    """Returns the results of `train_step` from the gradients and sums of all stages."""
    metrics, grads = reduced(config, state.model, total)
    return finish(config, state, metrics, grads)


def reduced(config: Config, model: Llama, total: Total) -> tuple[Metrics, Llama]:
    """Returns the results of `loss_and_grads` from the gradients and sums of all stages."""
    grads, sums = total
    means, grads = end(begin(config, model), grads, jax.tree.map(jnp.sum, sums))
    tokens = jnp.maximum(means["tokens"], 1)
    return means, jax.tree.map(lambda grad: grad / tokens, grads)


def compile_staged(
    run: ResolvedRun,
    state: TrainState,
    finish: Callable[[Config, TrainState, Total], Any] = finish_step,
    compile_program: Callable[[jax.stages.Lowered, dict[str, Option]], Any] = compile_with,
) -> tuple[StagedStep, dict[str, Option]]:
    """Compiles the step of a run with `mesh.stages` on the current mesh, in each process the programs of its own stages. All
    processes call this together.

    Args:
        run: the run.
        state: its `abstract_state`.
        finish: results of the step from its state, and gradients and sums of all stages; the state is donated.
        compile_program: makes a program of a lowered one and options for the compiler.

    Returns:
        The step, and the options that the compiler received for programs of stages.

    Raises:
        ConfigError: this jaxlib does not support a setting of `xla`.
    """
    config, is_gpu = run.config, jax.default_backend() == "gpu"
    meshes, batch = stage_meshes(jax.sharding.get_mesh()), abstract_batch(config)
    options = compiler_options(run) if is_gpu else {}
    own_options = compiler_options(replace(run, mesh=dict(meshes[0].shape))) if is_gpu else {}
    model: Llama = state.model
    traced = jax.jit(partial(_begin, config)).trace(model)
    weights, total = concretise(traced.out_info)
    ends = jax.jit(partial(finish, config), donate_argnums=0).lower(state, total)
    layers = [slots for (slots,) in _table(config)]
    stages, activations = [], []
    for number, mesh in enumerate(meshes):
        stage = Stage(config, tuple(layers[number]), is_first=number == 0)
        own = jax.tree.map(partial(on_stage, mesh=mesh), (weights, batch))
        like = activations[-1] if activations else None
        came = jax.tree.map(partial(on_stage, mesh=mesh), like)
        with jax.set_mesh(mesh):
            programs, after = _compile_stage(
                stage, own, came, total, number == len(meshes) - 1, lambda lowered: compile_program(lowered, own_options)
            )
        stages.append(programs)
        activations.append(after)
    step = StagedStep(
        meshes=meshes,
        stages=stages,
        begin=compile_program(traced.lower(), options),
        end=compile_program(ends, options),
        total=total,
        activations=activations,
        order=order_1f1b(len(meshes), config.train.grad_accum_steps),
    )
    return step, own_options


def _compile_stage(
    stage: Stage,
    own: tuple[Weights, Batch],
    came: Any,
    total: Total,
    is_last: bool,
    compile_program: Callable[[jax.stages.Lowered], Any],
) -> tuple[StagePrograms, Any]:
    """Compiles a stage's programs for the current mesh, if this process has devices of it.

    Args:
        stage: the stage.
        own: its weights and all micro-batches.
        came: activations of the previous stage, None for the first one.
        total: gradients and sums on the whole mesh.
        is_last: whether no stage follows.
        compile_program: makes a program of a lowered one.

    Returns:
        The programs, and the activations after the stage.
    """
    mesh, index = jax.sharding.get_mesh(), jax.ShapeDtypeStruct((), jnp.int32)
    total = jax.tree.map(partial(on_stage, mesh=mesh), total)
    forward = jax.jit(stage.forward).trace(*own, index, came)
    after, kept = concretise(forward.out_info)
    if not is_here(mesh):
        return StagePrograms(None, None), after
    if is_last:
        both = jax.jit(stage.both, donate_argnums=4).lower(*own, index, came, total)
        return StagePrograms(None, compile_program(both)), after
    backward = jax.jit(stage.backward, donate_argnums=5).lower(*own, index, kept, after, total)
    return StagePrograms(compile_program(forward.lower()), compile_program(backward)), after


def _begin(config: Config, model: Llama) -> tuple[Weights, Total]:
    """Returns the weights of all stages, prepared for the step, and zeros for their gradients and sums."""
    prepared = begin(config, model)
    grads, sums = prepared.zeros
    stages = len(config.mesh.stages)
    sums = jax.tree.map(lambda x: jnp.zeros(stages, x.dtype, out_sharding=P(STAGE)), sums)
    return PreparedWeights(combine(prepared.own, prepared.fixed), prepared.copies), (grads, sums)


def _table(config: Config) -> list[list[list[int]]]:
    counts, model = config.mesh.stages, config.model
    return layers_of_stages(model.num_layers, len(counts), 1, counts, model.dense_layers)
