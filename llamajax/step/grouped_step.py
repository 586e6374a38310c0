"""The training step as programs of a few layers each, whose saved values wait on a local disk (`offload.tiers.nvme_dir`).

XLA's programs cannot wait for a disk, so the step is several of them. A program of the forward pass returns what its layers
save in host memory, and threads write it to files while the next program runs; memory then holds the values of a few groups.
In the backward pass, the values of one group are read while the group above it computes. The last groups keep their values
on the card: those that a disk of `hardware.nvme_bandwidth` could not write in time (SSDTrain, arXiv:2408.10013), and always
the last one, which needs them at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from llamajax.config.offload import ON_CARD, OffloadConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.model import Llama
from llamajax.model.attention import Rows
from llamajax.model.decoder_layer import Activations, first_activations, stack_forms
from llamajax.parallel.activation_files import ActivationFiles, Value, shared_files
from llamajax.parallel.arrays import concretise
from llamajax.parallel.host_memory import HOST, KIND, added
from llamajax.parallel.layer_group import backward_group, forward_group
from llamajax.parallel.saved_values import Kept
from llamajax.parallel.sequence import laid_out
from llamajax.parallel.sharding import spec
from llamajax.parallel.stack import Layers, Stack
from llamajax.parallel.vocabulary import look_up
from llamajax.parallel.zero import PreparedWeights, gathered
from llamajax.step.batch import Batch
from llamajax.step.compile import Option, abstract_batch, compile_with, compiler_options
from llamajax.step.frozen import combine
from llamajax.step.layer_groups import IN_FLIGHT, Group, groups_of
from llamajax.step.loss import losses
from llamajax.step.pipeline import Sums, add_gradients, with_attributes
from llamajax.step.resolve import ResolvedRun
from llamajax.step.state import TrainState
from llamajax.step.step import begin, end, finish

Program = Callable[..., Any]
"""A compiled program."""
Metrics = dict[str, jax.Array]
Weights = PreparedWeights[Llama]
Total = tuple[Llama, Sums]
"""Gradients of the prepared weights, with None for a frozen weight, and sums."""


@dataclass(frozen=True)
class GroupPrograms:
    """A group with its programs, which groups of the same form share."""

    group: Group
    forward: Program
    """`_Passes.forward`."""
    backward: Program
    """`_Passes.backward`."""


@dataclass(frozen=True)
class GroupedStep:
    """Training's step, with the interface of the compiled one-program step."""

    begin: Program
    """Prepared weights as far as they are no weights of the state, see `Kept`, and zeros for gradients and sums."""
    embed: Program
    groups: Sequence[GroupPrograms]
    head: Program
    embed_back: Program
    end: jax.stages.Compiled
    """The next state and metrics; see `finish_step`."""
    micro_batches: int
    files: ActivationFiles

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Runs one optimizer step; arguments and results as of `train_step`.

        Raises:
            DiskError: the disk fails or is full.
        """
        prepared, total = self.begin(state.weights)
        weights = prepared.pull_back(state.weights)
        for number in range(self.micro_batches):
            total = self.accumulate(weights, batch, np.int32(number), total)
        return self.end(state, total)

    def memory_analysis(self) -> Any:
        """Returns the memory that the program needs at the end of the step; see `jax.stages.Compiled`."""
        return self.end.memory_analysis()

    def accumulate(self, weights: Weights, batch: Batch, number: Any, total: Total) -> Total:
        """Returns the total with the gradients and sums of a micro-batch added."""
        x, waiting = self.embed(weights, batch, number), list[_Waiting]()
        for place, own in enumerate(self.groups):
            if place > IN_FLIGHT:
                self.files.settle(waiting[place - IN_FLIGHT - 1].values)
            x, kept = own.forward(weights, batch, number, np.int32(own.group.start), x)
            waiting.append(_Waiting.of(self.files, kept, own.group.is_away))
            del kept  # the files have the only reference
        dx, total = self.head(weights, batch, number, x, total)
        del x
        for place in reversed(range(len(self.groups))):
            own, above = self.groups[place], self.groups[min(place + 1, len(self.groups) - 1)]
            own_waiting, before = waiting.pop(), dx
            back = own_waiting.taken(self.files)
            if own.group.is_away and not above.group.is_away:
                jax.block_until_ready(before)  # the card has no room for values beside those that all stayed there
            kept = own_waiting.on_card(back)
            del own_waiting, back
            dx, total = own.backward(weights, batch, number, np.int32(own.group.start), kept, before, total)
            del kept
            if place:
                # Reads that run ahead of the devices would fill host memory.
                jax.block_until_ready(before)
                self.files.load(waiting[-1].values)
        return self.embed_back(weights, batch, number, dx, total)


@dataclass
class _Waiting:
    """Saved values of a group between its passes."""

    leaves: list[Any]
    """Those on the card, and None for those in files."""
    values: list[Value]
    tree: Any

    num_first: int
    """Number of the last leaves, those of the layer whose backward pass is first."""

    @staticmethod
    def of(files: ActivationFiles, kept: Sequence[Any], is_away: bool) -> "_Waiting":
        leaves, tree = jax.tree.flatten(kept)
        places = [place for place, leaf in enumerate(leaves) if is_away and _is_on_host(leaf)]
        values = files.store([leaves[place] for place in places])
        staying = [None if place in places else leaf for place, leaf in enumerate(leaves)]
        return _Waiting(staying, values, tree, len(jax.tree.leaves(kept[-1])))

    def taken(self, files: ActivationFiles) -> list[jax.Array]:
        """Returns the saved values, once they are read."""
        back = iter(files.take(self.values))
        return [next(back) if leaf is None else leaf for leaf in self.leaves]

    def on_card(self, leaves: Sequence[jax.Array]) -> Any:
        """Returns the saved values with those of the last layer on the card, or on their way while other programs run; the
        group's own program brings the others while it computes."""
        rest = len(leaves) - self.num_first
        return jax.tree.unflatten(self.tree, [*leaves[:rest], *map(_on_card, leaves[rest:])])


def _on_card(x: jax.Array) -> jax.Array:
    """Returns an array on its way to the card, from every device's part: a process may have some of them only."""
    if not _is_on_host(x):
        return x
    parts = [
        jax.device_put(shard.data, jax.sharding.SingleDeviceSharding(shard.device, memory_kind="device"))
        for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding.with_memory_kind("device"), parts)


def _is_on_host(x: jax.Array) -> bool:
    return x.sharding.memory_kind == KIND


def described(step: GroupedStep, nvme_dir: str) -> str:
    """Returns the groups of a step in one line."""
    groups = [own.group for own in step.groups]
    away = sum(group.is_away for group in groups)
    return f"{len(groups)} of up to {groups[0].count} layers; saved values of {away} of them wait in {nvme_dir}"


def compile_grouped(
    run: ResolvedRun,
    state: TrainState,
    finish: Callable[[Config, TrainState, Total], Any] | None = None,
    compile_program: Callable[[jax.stages.Lowered, dict[str, Option]], Any] = compile_with,
    *,
    note: Callable[[str], None] = lambda line: None,
    size: int | None = None,
) -> tuple[GroupedStep, dict[str, Option]]:
    """Compiles the step of a run with `offload.tiers.nvme_dir` on the current mesh and opens its files. All processes call
    this together.

    Args:
        run: the run.
        state: its `abstract_state`.
        finish: results of the step from its state, and gradients and sums, `finish_step` if None; the state is donated.
        compile_program: makes a program of a lowered one and options for the compiler.
        note: takes a line about a disk without direct I/O.
        size: layers of a group, see `groups_of`.

    Returns:
        The step, and the options that the compiler received.

    Raises:
        ConfigError: weights of layers are in host memory, or this jaxlib does not support a setting of `xla`.
        DiskError: no file can be opened in the folder.
    """
    if run.config.offload.parameters == "all":
        raise ConfigError(
            "offload.tiers.nvme_dir: offload.parameters moves the weights off the card, and a step with it needs them there;"
            " remove it, or set offload.parameters: none"
        )
    groups, config = groups_of(run.config, run.mesh, size), _written_out(run.config)
    run = dataclasses.replace(run, config=config)
    options = compiler_options(run) if jax.default_backend() == "gpu" else {}
    index, batch, tiers = jax.ShapeDtypeStruct((), jnp.int32), abstract_batch(config), config.offload.tiers

    def compiled(traced: Any) -> Any:
        return compile_program(traced.lower(), options)

    model = state.weights
    begins = jax.jit(partial(_begin, config)).trace(model)
    prepared, total = concretise(begins.out_info)
    weights = prepared.pull_back(model)
    ends = jax.jit(partial(finish or finish_step, config), donate_argnums=0).trace(state, total)
    embeds = jax.jit(partial(_embed, config)).trace(weights, batch, index)
    x = concretise(embeds.out_info)
    programs, made = list[GroupPrograms](), dict[Any, tuple[Program, Program]]()
    for group in groups:
        passes = _Passes.of(config, group, has_own_first=model_has_first(weights) and group.start == 0)
        if passes not in made:
            forward = jax.jit(passes.forward, donate_argnums=4).trace(weights, batch, index, index, x)
            on_host = [aval.memory_space == HOST for aval in forward.jaxpr.out_avals]
            num_first = len(jax.tree.leaves(forward.out_info[1][-1]))
            on_host[-num_first:] = [False] * num_first  # see `_Waiting.on_card`
            kept = concretise(forward.out_info, on_host)[1]
            backward = jax.jit(passes.backward, donate_argnums=6)
            backward = backward.trace(weights, batch, index, index, kept, x, total)
            made[passes] = compiled(forward), compiled(backward)
        programs.append(GroupPrograms(group, *made[passes]))
    heads = jax.jit(partial(_head, config), donate_argnums=(3, 4)).trace(weights, batch, index, x, total)
    embeds_back = jax.jit(partial(_embed_back, config), donate_argnums=4).trace(weights, batch, index, x, total)
    devices = [device for device in jax.sharding.get_mesh().devices.flat if device.process_index == jax.process_index()]
    assert tiers.nvme_dir is not None
    own_share = min(1.0, len(devices) / config.hardware.gpus_per_node)
    room = None if tiers.nvme_bytes is None else own_share * tiers.nvme_bytes
    step = GroupedStep(
        begin=compiled(begins),
        embed=compiled(embeds),
        groups=programs,
        head=compiled(heads),
        embed_back=compiled(embeds_back),
        end=compiled(ends),
        micro_batches=config.train.grad_accum_steps,
        files=shared_files(tiers.nvme_dir, devices, room, note),
    )
    return step, options


def finish_step(config: Config, state: TrainState, total: Total) -> tuple[TrainState, Metrics]:
    """Returns the results of `train_step` from the gradients and sums of all micro-batches."""
    metrics, sums = end(begin(config, state.weights), *total)
    return finish(config, state, metrics, sums, divisor=jnp.maximum(metrics["tokens"], 1))


def model_has_first(weights: Weights) -> bool:
    """Returns whether the first layer is gathered once per step, see `prepare`."""
    return weights.trained.whole_first is not None


def _written_out(config: Config) -> Config:
    """Returns the run with the layers of a program written out: they are few."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, stack="unrolled"))


def _begin(config: Config, model: Llama) -> tuple[Kept, Total]:
    prepared = begin(config, model)
    weights = PreparedWeights(combine(prepared.own, prepared.fixed), prepared.copies)
    return Kept.of(weights, model), prepared.zeros


@dataclass(frozen=True)
class _Passes:
    """Both passes of a group, for all groups of the same form."""

    config: Config
    """The run, with all forms chosen."""
    offload: OffloadConfig
    count: int
    """Number of layers."""
    kind: int
    """Kind of the first layer, see `ModelConfig.windows`."""
    has_own_first: bool
    """Whether the first layer of all is in the group, and gathered once per step."""

    @staticmethod
    def of(config: Config, group: Group, *, has_own_first: bool) -> "_Passes":
        kind = group.start % len(config.model.windows)
        return _Passes(config, config.offload if group.is_away else ON_CARD, group.count, kind, has_own_first)

    def forward(
        self, weights: Weights, batch: Batch, number: jax.Array, start: jax.Array, x: Activations
    ) -> tuple[Activations, Any]:
        """Returns the activations after the group, and the values that its backward pass needs.

        Args:
            weights: the prepared weights.
            batch: all micro-batches, each field int32 [A, B, T].
            number: index of the micro-batch, int32.
            start: index of the first layer, int32.
            x: input of the first layer.
        """
        stack = self._stack(x)
        return forward_group(
            stack, self._weights(stack, weights), self._shared(weights, batch, number), x, start, self.count
        )

    def backward(
        self,
        weights: Weights,
        batch: Batch,
        number: jax.Array,
        start: jax.Array,
        kept: Sequence[Any],
        dy: Activations,
        total: Total,
    ) -> tuple[Activations, Total]:
        """Returns the gradient of the group's input, and the total with the gradients of its layers added; arguments as for
        `forward`, with the values that it returned, the gradient of its activations, and the total so far."""
        stack, (grads, sums) = self._stack(dy), total
        own, shared = self._weights(stack, weights), self._shared(weights, batch, number)
        first = grads.whole_first
        so_far = stack.grouped(grads.layers.by_parts()), None if first is None else stack.grouped(first.by_parts())
        dx, (stacked, of_first) = backward_group(stack, own, shared, kept, dy, so_far, start)
        grads = with_attributes(grads, layers=grads.layers.with_parts(stack.ungrouped(stacked)))
        if first is not None and of_first is not None:
            grads = with_attributes(grads, whole_first=first.with_parts(stack.ungrouped(of_first)))
        return dx, (grads, sums)

    def _stack(self, x: Activations) -> Stack:
        return Stack.of(**stack_forms(self.config.parallel, self.config.model.remat, x.residual, self.offload))

    def _weights(self, stack: Stack, weights: Weights) -> PreparedWeights[Layers]:
        def grouped(model: Llama) -> Layers:
            first = model.whole_first if self.has_own_first else None
            return stack.grouped(model.layers.by_parts()), None if first is None else stack.grouped(first.by_parts())

        return weights.part(grouped)

    def _shared(self, weights: Weights, batch: Batch, number: jax.Array) -> tuple[Rows, ...]:
        """Returns the rows' data for each kind of layer, from the first layer's on."""
        ids, form = _pick(batch, number), self.config.parallel.sequence
        rows = weights.trained.rows(ids["tokens"], ids["segment_ids"], ids["positions"], ids.get("seeds"), sequence=form)
        return *rows[self.kind :], *rows[: self.kind]


def _embed(config: Config, weights: Weights, batch: Batch, number: jax.Array) -> Activations:
    """Returns the input of the first layer."""
    with jax.named_scope("embed"):
        x = _looked_up(config, weights, weights.trained.embedding, _pick(batch, number))
        return first_activations(x, weights.trained.auxiliary)


def _embed_back(config: Config, weights: Weights, batch: Batch, number: jax.Array, dx: Activations, total: Total) -> Total:
    """Returns the total with the embedding's gradient added."""
    (grads, sums), ids = total, _pick(batch, number)
    if grads.embedding is None:
        return total
    with jax.named_scope("embed"):
        _, pull_back = jax.vjp(lambda table: _looked_up(config, weights, table, ids), weights.trained.embedding)
        return with_attributes(grads, embedding=add_gradients(grads.embedding, pull_back(dx.residual)[0], added)), sums


def _looked_up(config: Config, weights: Weights, table: Any, ids: Batch) -> jax.Array:
    copy = None if weights.copies is None else weights.copies.embedding
    return look_up(gathered(table, config.model.compute_dtype, copy)[...], laid_out(ids["tokens"], config.parallel.sequence))


def _head(
    config: Config, weights: Weights, batch: Batch, number: jax.Array, y: Activations, total: Total
) -> tuple[Activations, Total]:
    """Returns the gradient of the last layer's output, and the total with the gradients of final norm and head, and the
    sums, added."""
    model, output = weights.trained, weights.part(Llama.output_weight)
    targets = laid_out(_pick(batch, number)["targets"], config.parallel.sequence)

    def loss(norm: Any, trained: Any, y: Activations) -> tuple[jax.Array, Sums]:
        with jax.named_scope("final_norm"):
            hidden = norm(y.residual)
        with jax.named_scope("loss"):
            head = gathered(trained, hidden.dtype, output.copies)
            return losses(model, hidden, y.auxiliary, head, targets, config.train.z_loss_weight)

    _, pull_back, own = jax.vjp(loss, model.final_norm, output.trained, y, has_aux=True)
    d_norm, d_head, dy = pull_back(jnp.ones(()))
    (grads, sums), name = total, "embedding" if model.head is None else "head"
    d_norm, d_head = (
        add_gradients(total, own, added) for total, own in ((grads.final_norm, d_norm), (getattr(grads, name), d_head))
    )
    return dy, (with_attributes(grads, **{"final_norm": d_norm, name: d_head}), jax.tree.map(jnp.add, sums, own))


def _pick(batch: Batch, number: jax.Array) -> Batch:
    """Returns one micro-batch, each field int32 [B, T]."""
    return {name: jax.reshard(ids[number], spec("batch", "seq")) for name, ids in batch.items()}
