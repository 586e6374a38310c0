"""The micro-batches of a step on the stages of a pipeline.

One program runs on all devices. In a tick every stage does the same, with its own layers and micro-batches (see
`llamajax.parallel.pipeline_schedule`); activations and their gradients travel by one permute each. A stage without a
micro-batch computes on finite leftovers, which are cut off before they reach a gradient or the loss.

The forward pass of a tick and its backward pass belong to different micro-batches, so each hides the communication of the
other: barriers pair the layers of the two. The loss takes the tick after the forward pass that it ends, and its gradient the
one after that: `DELAY`. Embeddings are looked up in the tick before the forward pass, whose last layers hide their
reduce-scatter.

Weights are whole within a stage for the whole step (`parallel.zero: 1`). Their gradients are summed on every device in
`train.grad_accum_dtype` and reduced once, at the end of the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

from llamajax.config.model import Remat
from llamajax.config.parallel import PLAIN, ParallelConfig
from llamajax.config.stages import EMPTY, layers_of_stages
from llamajax.model import Llama
from llamajax.model.attention import Rows
from llamajax.model.decoder_layer import Activations, first_activations, stack_forms
from llamajax.model.experts import Experts
from llamajax.parallel.pipeline_schedule import PipelineSchedule, Unit
from llamajax.parallel.sequence import in_order, laid_out
from llamajax.parallel.sharding import spec
from llamajax.parallel.stack import Part, Stack
from llamajax.parallel.stages import by_stage, num_stages, share_tokens, shared_ids, shift, specs
from llamajax.parallel.tensor import residual_spec, shared_axes
from llamajax.parallel.vocabulary import look_up
from llamajax.step.batch import IGNORE, Batch
from llamajax.step.loss import LossSums, losses

UnitOf = Callable[[Any, Any], Unit]
"""`PipelineSchedule.forward` or `backward`: the unit of a stage in a tick."""
Sums = tuple[LossSums, dict[str, jax.Array]]
"""Summed losses, and auxiliary values by name."""
Leaves = list[list[jax.Array]]
"""Arrays that each layer of a chunk keeps for its backward pass."""


def accumulate(
    model: Llama,
    copies: Llama | None,
    batch: Batch,
    zeros: tuple[Llama, Sums],
    *,
    parallel: ParallelConfig,
    remat: Remat,
    z_loss_weight: float,
    counts: Sequence[int] = (),
) -> tuple[Llama, Sums]:
    """Returns the gradients of all micro-batches, which are left to be reduced, and their summed losses.

    Args:
        model: prepared weights, see `llamajax.step.prepared_weights.prepare`.
        copies: copies to compute with in their place, see `llamajax.step.prepared_weights.copies`.
        batch: the same on all stages.
        zeros: gradients, with None for a frozen weight, and sums, to start from.
        parallel: the forms in which devices share the work.
        remat: see `Llama.hidden`.
        z_loss_weight: see `llamajax.step.loss.loss_fn`.
        counts: see `layers_of_stages`.
    """
    stages = _Stages.of(model, copies, batch, parallel, remat, z_loss_weight, counts)
    schedule, nothing, num_slots = stages.schedule, stages.no_activations(), len(stages.slots)
    like = jax.eval_shape(stages.forward_all, jnp.int32(0), nothing)[1]
    trees = [jax.tree.structure(own) for own in like]
    room = [[_room(leaf, schedule.slots) for leaf in jax.tree.leaves(own)] for own in like]

    def write(kept: Leaves, own: Leaves, tick: jax.Array) -> Leaves:
        put = partial(jax.lax.dynamic_update_index_in_dim, index=schedule.slot(tick), axis=0)
        return jax.tree.map(lambda slots, own: put(slots, own), kept, own)

    def fill(carry: Any, tick: jax.Array) -> tuple[Any, None]:
        x, kept = jax.lax.optimization_barrier(carry)
        y, own = stages.forward_all(tick, x)
        return (stages.inputs(tick + 1, shift(y, 1)), write(kept, list(map(jax.tree.leaves, own)), tick)), None

    def both(carry: Any, tick: jax.Array) -> tuple[Any, None]:
        (x, y), (sent_back, of_last), kept, grads, sums = jax.lax.optimization_barrier(carry)
        forward = stages.forward(tick)
        read, dx, backward = stages.backward(tick, kept, trees, stages.last_or(tick, of_last, shift(sent_back, -1)))
        own: Leaves = []
        for turn in range(num_slots):
            if 0 < turn < num_slots - 1:
                x, dx = jax.lax.optimization_barrier((x, dx))
            # Forward passes are one layer ahead: two of them hide the permute before the first backward pass, and the last
            # backward pass hides the permute after them.
            while len(own) < min(num_slots, turn + 2):
                x, of_layer = forward(len(own), x)
                own.append(jax.tree.leaves(of_layer))
            dx, grads = backward(num_slots - 1 - turn, dx, grads)
        # A slot is written after it is read, so that it is written in place.
        own = jax.tree.map(lambda own, read: jax.lax.optimization_barrier((own, read))[0], own, read)
        of_last, grads, sums = stages.end(tick - 1, y, grads, sums)
        grads = stages.embed_back(tick, dx, grads)
        carry = (stages.inputs(tick + 1, shift(x, 1)), x), (dx, of_last), write(kept, own, tick), grads, sums
        return carry, None

    def drain(carry: Any, tick: jax.Array) -> tuple[Any, None]:
        (sent_back, of_last, later), kept, grads = jax.lax.optimization_barrier(carry)
        _, dx, backward = stages.backward(tick, kept, trees, stages.last_or(tick, of_last, shift(sent_back, -1)))
        for slot in reversed(range(num_slots)):
            dx, grads = backward(slot, dx, grads)
        return ((dx, later, nothing), kept, stages.embed_back(tick, dx, grads)), None

    filled, drained = schedule.fill, schedule.units + schedule.stages - 1
    (x, kept), _ = jax.lax.scan(fill, (stages.inputs(jnp.int32(0), nothing), room), jnp.arange(filled))
    carry = (x, nothing), (nothing, nothing), kept, *zeros
    ((_, y), back, kept, grads, sums), _ = jax.lax.scan(both, carry, jnp.arange(filled, drained))
    later, grads, sums = stages.end(jnp.int32(drained - 1), y, grads, sums)
    (_, _, grads), _ = jax.lax.scan(drain, ((*back, later), kept, grads), jnp.arange(drained, schedule.ticks))
    return grads, sums


def forward_losses(model: Llama, batch: Batch, zeros: Sums) -> Sums:
    """Returns the summed losses of all micro-batches without gradients; arguments as for `accumulate`."""
    stages = _Stages.of(model, None, batch, PLAIN, "none", 0.0)
    schedule = stages.schedule

    def run(carry: tuple[Activations, Sums], tick: jax.Array) -> tuple[tuple[Activations, Sums], None]:
        came, total = carry
        y, _ = stages.forward_all(tick, stages.inputs(tick, came))
        _, sums = stages.loss(stages.model.final_norm, stages.model.output_weight(), tick, y)
        return (shift(y, 1), jax.tree.map(jnp.add, total, sums)), None

    ticks = jnp.arange(schedule.units + schedule.stages - 1)
    return jax.lax.scan(run, (stages.no_activations(), zeros), ticks)[0][1]


@dataclass(frozen=True)
class _Stages:
    """The stages of a pipeline, and the micro-batches that they work on."""

    model: Llama
    """Prepared weights."""
    slots: tuple[Any, ...]
    """Weights to compute with of the layer in each slot, by parts of a layer: [p, ...], or [p, chunks, ...]."""
    layers: np.ndarray
    """See `layers_of_stages`."""
    schedule: PipelineSchedule
    stack: Stack
    batch: Batch
    """Every field int32 [m, B, T]; tokens and targets in the order of `parallel.sequence`."""
    targets: jax.Array | None
    """Each stage's part of the targets where the stages share the head's tokens, int32 [m, B, T / p]; None: the last stage
    has them all."""
    parallel: ParallelConfig
    z_loss_weight: float

    @staticmethod
    def of(
        model: Llama,
        copies: Llama | None,
        batch: Batch,
        parallel: ParallelConfig,
        remat: Remat,
        z_loss_weight: float,
        counts: Sequence[int] = (),
    ) -> "_Stages":
        num_micro_batches, B, T = batch["tokens"].shape
        schedule = PipelineSchedule(num_stages(), num_micro_batches, parallel.pipeline_chunks or 1)
        batch = {name: jax.reshard(ids, spec(None, "micro_batch", "seq")) for name, ids in batch.items()}
        batch |= {name: in_order(batch[name], parallel.sequence) for name in ("tokens", "targets")}
        lies = residual_spec((schedule.stages * B, T), spec("batch", "seq"))
        shape = (schedule.stages * B, T, model.config.embed_dim)
        forms = stack_forms(parallel, remat, jnp.zeros(shape, model.config.compute_dtype, out_sharding=lies))
        forms["parts"] = [_skipping(part) for part in forms["parts"]]
        forms["whole"] = None if forms["whole"] is None else _skipping(forms["whole"])
        used: Any = (model if copies is None else copies).layers
        targets = None
        if parallel.pipeline_head == "shared":
            sizes = jax.sharding.get_abstract_mesh().shape
            parts = int(np.prod([sizes[axis] for axis in shared_axes(lies)]))
            targets = shared_ids(batch["targets"], parts, IGNORE)
        config = model.config
        table = layers_of_stages(config.num_layers, schedule.stages, schedule.chunks, counts, config.dense_layers)
        return _Stages(
            model=model,
            slots=tuple(layer.by_parts() for layer in used),
            layers=np.array(table),
            schedule=schedule,
            stack=Stack.of(**forms),
            batch=batch,
            targets=targets,
            parallel=parallel,
            z_loss_weight=z_loss_weight,
        )

    def no_activations(self) -> Activations:
        """Returns zeros in place of the activations that a stage receives."""
        like = jax.eval_shape(self._embedded, self._ids(jnp.int32(0), self.schedule.forward))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding.spec), like)

    def inputs(self, tick: jax.Array, came: Activations) -> Activations:
        """Returns the input of every stage's chunk: embeddings where the model begins, and elsewhere what came from the
        stage before."""
        unit_of = self.schedule.forward

        def first(stage: jax.Array, tick: jax.Array, embedded: Any, came: Any) -> Any:
            is_first = (stage == 0) & (unit_of(tick, stage).chunk == 0)
            return jax.tree.map(lambda own, other: jnp.where(is_first, own, other), embedded, came)

        return by_stage(first, tick, self._embedded(self._ids(tick, unit_of)), came, out_specs=specs(came))

    def forward(self, tick: jax.Array) -> Callable[[int, Activations], tuple[Activations, Any]]:
        """Returns a function from a slot and the input of its layer to the output and the values that the layer's backward
        pass needs."""
        unit_of = self.schedule.forward
        rows = self._rows(self._ids(tick, unit_of))

        @jax.named_scope("layers")
        def run(slot: int, x: Activations) -> tuple[Activations, Any]:
            return self.stack.layer(self._weights(slot, tick, unit_of), self._shared(slot, tick, unit_of, rows), x)

        return run

    def forward_all(self, tick: jax.Array, x: Activations) -> tuple[Activations, list[Any]]:
        """Returns the output of every stage's chunk, and the values that the backward passes of its layers need."""
        run, kept = self.forward(tick), []
        for slot in range(len(self.slots)):
            x, own = run(slot, x)
            kept.append(own)
        return x, kept

    def backward(
        self, tick: jax.Array, kept: Leaves, trees: list[Any], dy: Activations
    ) -> tuple[Leaves, Activations, Callable[[int, Activations, Llama], tuple[Activations, Llama]]]:
        """Returns the values that the backward passes of every stage's chunk need, and the gradient of its output; and a
        function from a slot, the gradient of its layer's output and all gradients to the gradient of the input and the
        gradients with the layer's added.

        Args:
            tick: the tick.
            kept: leaves of the values that `forward_all` returns, in slots of the schedule.
            trees: structure of the values of each layer.
            dy: gradient of the chunk's output, also where there is none.
        """
        schedule, unit_of = self.schedule, self.schedule.backward

        def own(stage: jax.Array, tick: jax.Array, kept: Any, dy: Any) -> Any:
            unit = unit_of(tick, stage)
            # A stage without a unit runs a backward pass of zeros, with values of the first slot: all stages write it in the
            # first tick. A slot that nobody wrote has zeros, which gives gradients of 0 / 0.
            slot = jnp.where(unit.is_valid, schedule.slot_of(unit, stage), 0)
            read = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), kept)
            return read, jax.tree.map(lambda x: jnp.where(unit.is_valid, x, 0), dy)

        in_slot = jax.tree.map(lambda lies: lies.update(partitions=lies.partitions[1:]), specs(kept))
        read, dx = by_stage(own, tick, kept, dy, out_specs=(in_slot, specs(dy)))
        rows = self._rows(self._ids(tick, unit_of))

        @jax.named_scope("layers")
        def run(slot: int, dx: Activations, grads: Llama) -> tuple[Activations, Llama]:
            # Recompute nothing before the gradient arrives.
            own_kept, dx = jax.lax.optimization_barrier((jax.tree.unflatten(trees[slot], read[slot]), dx))
            weights, shared = self._weights(slot, tick, unit_of), self._shared(slot, tick, unit_of, rows)
            d_weights, dx, _ = self.stack.layer_back(weights, shared, own_kept, dx, ())
            slots: Any = grads.layers
            layers = list(slots)
            of_layer = self._of_units(slot, tick, self.stack.ungrouped(d_weights))
            layers[slot] = self._plus(layers[slot], of_layer, tick)
            return dx, with_attributes(grads, layers=nnx.data(tuple(layers)))

        return read, dx, run

    def embed_back(self, tick: jax.Array, dx: Activations, grads: Llama) -> Llama:
        """Returns the gradients with the embedding's added, from the gradient of every chunk's input."""
        if grads.embedding is None:
            return grads
        unit_of = self.schedule.backward

        def first(stage: jax.Array, tick: jax.Array, dx: jax.Array) -> jax.Array:
            return jnp.where((stage == 0) & (unit_of(tick, stage).chunk == 0), dx, 0)

        with jax.named_scope("embed"):
            d_first = by_stage(first, tick, dx.residual, out_specs=jax.typeof(dx.residual).sharding.spec)
            tokens = laid_out(self._ids(tick, unit_of)["tokens"], "gather")
            _, pull_back = jax.vjp(lambda table: look_up(table[...], tokens), self.model.embedding)
            return with_attributes(grads, embedding=add_gradients(grads.embedding, pull_back(d_first)[0]))

    def end(self, tick: jax.Array, y: Activations, grads: Llama, sums: Sums) -> tuple[Activations, Llama, Sums]:
        """Returns the gradient of every chunk's output, zero where the model does not end there; the gradients with those
        of final norm and head added; and the sums with those of the last stage's micro-batch."""
        name = "embedding" if self.model.head is None else "head"

        def add(y: Activations, d_norm: Any, d_head: Any, sums: Sums) -> Any:
            loss = jax.vjp(
                lambda norm, head, y: self.loss(norm, head, tick, y), self.model.final_norm, self.model.output_weight(), y,
                has_aux=True,
            )  # fmt: skip
            _, pull_back, own = loss
            of_norm, of_head, dy = pull_back(jnp.ones(()))
            return dy, add_gradients(d_norm, of_norm), add_gradients(d_head, of_head), jax.tree.map(jnp.add, sums, own)

        given = y, grads.final_norm, getattr(grads, name), sums
        if self.schedule.chunks == 1:
            dy, d_norm, d_head, sums = add(*given)
        else:
            is_end = self._ends(tick, self.schedule.stages - 1)
            dy, d_norm, d_head, sums = jax.lax.cond(is_end, add, lambda *given: given, *given)
        return dy, with_attributes(grads, **{"final_norm": d_norm, name: d_head}), sums

    def loss(self, norm: Any, head: nnx.Param, tick: jax.Array, y: Activations) -> tuple[jax.Array, Sums]:
        """Returns the loss of the last stage's micro-batch and its sums, from the activations of all stages."""
        last = self.schedule.stages - 1

        def pick(stage: jax.Array, tick: jax.Array, targets: jax.Array) -> jax.Array:
            return jnp.where((stage == last) & self._ends(tick, stage), self._pick(targets, tick, stage), IGNORE)

        targets = by_stage(pick, tick, self.batch["targets"], out_specs=spec("batch", "seq"))
        hidden, own_targets = y.residual, targets
        if self.targets is not None:
            hidden = share_tokens(hidden, last)
            own_targets = jnp.where(self._ends(tick, last), self._pick(self.targets, tick, last), IGNORE)
        with jax.named_scope("final_norm"):
            hidden = norm(hidden)
        with jax.named_scope("loss"):
            return losses(self.model, hidden, y.auxiliary, head, own_targets, self.z_loss_weight, auxiliary_targets=targets)

    def last_or(self, tick: jax.Array, of_last: Activations, others: Activations) -> Activations:
        """Returns the gradients of the chunks' outputs: `of_last` at the end of the model, `others` elsewhere."""

        def choose(stage: jax.Array, tick: jax.Array, of_last: Any, others: Any) -> Any:
            chunk = self.schedule.backward(tick, stage).chunk
            is_last = (stage == self.schedule.stages - 1) & (chunk == self.schedule.chunks - 1)
            return jax.tree.map(lambda own, other: jnp.where(is_last, own, other), of_last, others)

        return by_stage(choose, tick, of_last, others, out_specs=specs(others))

    def _ends(self, tick: Any, stage: Any) -> jax.Array:
        """Returns whether a stage's forward pass in a tick is valid and through its last chunk."""
        unit = self.schedule.forward(tick, stage)
        return unit.is_valid & (unit.chunk == self.schedule.chunks - 1)

    def _pick(self, ids: jax.Array, tick: Any, stage: Any) -> jax.Array:
        index = self.schedule.forward(tick, stage).micro_batch
        return jax.lax.dynamic_index_in_dim(ids, index, keepdims=False)

    def _ids(self, tick: jax.Array, unit_of: UnitOf) -> Batch:
        """Returns every stage's micro-batch, each field int32 [p B, T]."""

        def pick(stage: jax.Array, tick: jax.Array, batch: Any) -> Any:
            index = unit_of(tick, stage).micro_batch
            return jax.tree.map(lambda ids: jax.lax.dynamic_index_in_dim(ids, index, keepdims=False), batch)

        return by_stage(pick, tick, self.batch, out_specs=dict.fromkeys(self.batch, spec("batch", "seq")))

    def _rows(self, ids: Batch) -> tuple[Rows, ...]:
        return self.model.rows(
            ids["tokens"], ids["segment_ids"], ids["positions"], ids.get("seeds"), sequence=self.parallel.sequence
        )

    def _embedded(self, ids: Batch) -> Activations:
        """Returns the first layer's input. All stages look their tokens up, and only the first one uses them: a lookup takes
        less time than sending the embeddings of one stage to all others."""
        with jax.named_scope("embed"):
            x = look_up(self.model.embedding[...], laid_out(ids["tokens"], "gather"))
            return first_activations(x, self.model.auxiliary)

    def _weights(self, slot: int, tick: jax.Array, unit_of: UnitOf) -> tuple[Any, ...]:
        """Returns the weights [p, ...] of the layer in a slot, grouped as the stack's parts."""
        weights = self.slots[slot]
        if self.schedule.chunks > 1:

            def pick(stage: jax.Array, tick: jax.Array, weights: Any) -> Any:
                chunk = unit_of(tick, stage).chunk
                return jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, chunk, 1, keepdims=False), weights)

            of_chunk = jax.tree.map(_without_chunk, specs(weights))
            weights = by_stage(pick, tick, weights, out_specs=of_chunk)
        return self.stack.grouped(weights)

    def _of_units(self, slot: int, tick: jax.Array, d_weights: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a slot's gradients without the statistics of experts (`llamajax.step.balance`) that a stage measured
        without a unit, or without a layer: a gradient of zero does not make them zero."""
        of_attention, (norm, mlp) = d_weights
        if not isinstance(mlp, Experts) or mlp.statistics is None:
            return d_weights

        def measured(stage: jax.Array, tick: jax.Array, own: jax.Array) -> jax.Array:
            unit = self.schedule.backward(tick, stage)
            has_layer = jnp.asarray(self.layers[:, :, slot] != EMPTY)[stage, unit.chunk]
            return jnp.where(unit.is_valid & has_layer, own, 0)

        own = mlp.statistics[...]
        changed = jax.tree.map(lambda weight: weight, mlp)
        changed.statistics[...] = by_stage(measured, tick, own, out_specs=jax.typeof(own).sharding.spec)
        return of_attention, (norm, changed)

    def _plus(self, layer: Any, d_weights: tuple[Any, ...], tick: jax.Array) -> Any:
        """Returns a slot's gradients with those of one unit of every stage added."""

        def add(total: jax.Array, own: jax.Array) -> jax.Array:
            if self.schedule.chunks == 1:
                return total + own.astype(total.dtype)

            def put(stage: jax.Array, tick: jax.Array, total: jax.Array, own: jax.Array) -> jax.Array:
                chunk = self.schedule.backward(tick, stage).chunk
                old = jax.lax.dynamic_index_in_dim(total, chunk, 1, keepdims=False)
                return jax.lax.dynamic_update_index_in_dim(total, old + own.astype(total.dtype), chunk, 1)

            return by_stage(put, tick, total, own, out_specs=jax.typeof(total).sharding.spec)

        return layer.with_parts(add_gradients(layer.by_parts(), d_weights, add))

    def _shared(self, slot: int, tick: jax.Array, unit_of: UnitOf, rows: tuple[Rows, ...]) -> tuple[Rows, jax.Array | None]:
        """Returns the data that the layer in a slot needs besides its weights, for `_skipping`."""
        layers = self.layers[:, :, slot]
        own_rows = rows[int(layers.max()) % len(rows)]  # all stages have layers of one kind in a slot
        if (layers != EMPTY).all():
            return own_rows, None

        def has_layer(stage: jax.Array, tick: jax.Array, ids: jax.Array) -> jax.Array:
            own = jnp.asarray(layers != EMPTY)[stage, unit_of(tick, stage).chunk]
            return jnp.broadcast_to(own, ids.shape[1:2])

        return own_rows, by_stage(has_layer, tick, self.batch["tokens"], out_specs=spec("batch"))


def _skipping(part: Part) -> Part:
    """Returns the part of a layer, which leaves rows as they are where the slot is empty."""

    def run(weights: Any, x: Any, shared: tuple[Rows, jax.Array | None]) -> Any:
        rows, has_layer = shared
        y = part(weights, x, rows)
        if has_layer is None:
            return y
        return jax.tree.map(lambda y, x: jnp.where(jnp.expand_dims(has_layer, range(1, x.ndim)), y, x), y, x)

    return run


def add_gradients(total: Any, own: Any, how: Callable[[jax.Array, jax.Array], jax.Array] | None = None) -> Any:
    """Adds gradients; a frozen weight's total stays None."""
    how = how or (lambda total, own: total + own.astype(total.dtype))

    def add(total: Any, own: Any) -> Any:
        return None if total is None else jax.tree.map(how, total, own)

    return jax.tree.map(add, total, own, is_leaf=lambda x: x is None or isinstance(x, nnx.Param))


def with_attributes(model: Llama, **attributes: Any) -> Llama:
    """Returns a copy of a tree of gradients with other attributes."""
    changed = jax.tree.map(lambda x: x, model)
    for name, value in attributes.items():
        setattr(changed, name, value)
    return changed


def _room(like: jax.ShapeDtypeStruct, count: int) -> jax.Array:
    """Returns zeros for `count` arrays."""
    lies = like.sharding.spec
    return jnp.zeros((count, *like.shape), like.dtype, out_sharding=lies.update(partitions=(None, *lies.partitions)))


def _without_chunk(lies: P) -> P:
    return lies.update(partitions=(lies.partitions[0], *lies.partitions[2:]))
