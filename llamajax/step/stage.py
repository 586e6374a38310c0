"""The passes of one micro-batch through one stage of a pipeline, for stages that run their own programs.

The stage's mesh has one device along `pipeline`. Its weights are prepared as for the one-program form: the weights of a
layer have a leading dim of stages, here 1.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from llamajax.config.run import Config
from llamajax.config.stages import EMPTY
from llamajax.model import Llama
from llamajax.model.attention import Rows
from llamajax.model.decoder_layer import Activations, first_activations, stack_forms
from llamajax.parallel.sequence import laid_out
from llamajax.parallel.sharding import spec
from llamajax.parallel.stack import Stack
from llamajax.parallel.vocabulary import look_up
from llamajax.parallel.zero import PreparedWeights
from llamajax.step.batch import Batch
from llamajax.step.loss import losses
from llamajax.step.pipeline import Sums, add_gradients, with_attributes

Weights = PreparedWeights[Llama]
Total = tuple[Llama, Sums]
"""Gradients of a stage's weights, with None for a frozen weight, and sums [1]."""


@dataclass(frozen=True)
class Stage:
    """A stage that runs its own programs."""

    config: Config
    """The run, with all forms chosen."""
    layers: tuple[int, ...]
    """Index of the layer in each slot; `EMPTY` where it has none."""
    is_first: bool
    """Whether it has the embedding."""

    def forward(self, weights: Weights, batch: Batch, index: jax.Array, came: Activations | None) -> tuple[Activations, Any]:
        """Returns the activations after the stage's layers, and the values that its backward pass needs.

        Args:
            weights: the stage's weights.
            batch: all micro-batches, each field int32 [m, B, T].
            index: index of the micro-batch, int32.
            came: activations of the previous stage; None: this is the first one.
        """
        ids = _pick(batch, index)
        x = self._embedded(weights.trained, ids) if came is None else came
        stack, rows, kept = self._stack(x), self._rows(weights.trained, ids), []
        with jax.named_scope("layers"):
            for slot in self._slots:
                x, own = stack.layer(self._weights(stack, weights, slot), self._shared(rows, slot), x)
                kept.append(own)
        return x, kept

    def backward(
        self, weights: Weights, batch: Batch, index: jax.Array, kept: Any, dy: Activations, total: Total
    ) -> tuple[Activations | None, Total]:
        """Returns the gradient of the stage's input, None on the first stage; and the total with the gradients of the
        stage's weights added.

        Args:
            weights: as for `forward`, and `batch` and `index` too.
            batch: see `forward`.
            index: see `forward`.
            kept: values that `forward` returned.
            dy: gradient of the activations that `forward` returned.
            total: gradients and sums so far.
        """
        ids, (grads, sums), dx = _pick(batch, index), total, dy
        stack, rows = self._stack(dy), self._rows(weights.trained, ids)
        of_slots: Any = grads.layers
        layers = list(of_slots)
        with jax.named_scope("layers"):
            for slot, own_kept in reversed(list(zip(self._slots, kept, strict=True))):
                own_kept, dx = jax.lax.optimization_barrier((own_kept, dx))
                own, shared = self._weights(stack, weights, slot), self._shared(rows, slot)
                d_weights, dx, _ = stack.layer_back(own, shared, own_kept, dx, ())
                added = add_gradients(layers[slot].by_parts(), stack.ungrouped(d_weights))
                layers[slot] = layers[slot].with_parts(added)
        if not self.is_first:
            return dx, (with_attributes(grads, layers=nnx.data(tuple(layers))), sums)
        embedding = grads.embedding
        if embedding is not None:
            _, pull_back = jax.vjp(lambda table: self._looked_up(table, ids), weights.trained.embedding)
            embedding = add_gradients(embedding, pull_back(dx.residual)[0])
        return None, (with_attributes(grads, layers=nnx.data(tuple(layers)), embedding=embedding), sums)

    def both(
        self, weights: Weights, batch: Batch, index: jax.Array, came: Activations, total: Total
    ) -> tuple[Activations | None, Total]:
        """Runs the forward pass, the loss and the backward pass of the last stage; returns what `backward` does."""
        model, targets = weights.trained, laid_out(_pick(batch, index)["targets"], self.config.parallel.sequence)
        y, kept = self.forward(weights, batch, index, came)

        def loss(norm: Any, head: Any, y: Activations) -> tuple[jax.Array, Sums]:
            with jax.named_scope("final_norm"):
                hidden = norm(y.residual)
            with jax.named_scope("loss"):
                return losses(model, hidden, y.auxiliary, head, targets, self.config.train.z_loss_weight)

        _, pull_back, own = jax.vjp(loss, model.final_norm, model.output_weight(), y, has_aux=True)
        d_norm, d_head, dy = pull_back(jnp.ones(()))
        (grads, sums), name = total, "embedding" if model.head is None else "head"
        d_norm = add_gradients(grads.final_norm, d_norm)
        grads = with_attributes(grads, **{"final_norm": d_norm, name: add_gradients(getattr(grads, name), d_head)})
        return self.backward(weights, batch, index, kept, dy, (grads, jax.tree.map(jnp.add, sums, own)))

    @property
    def _slots(self) -> list[int]:
        return [slot for slot, layer in enumerate(self.layers) if layer != EMPTY]

    def _embedded(self, model: Llama, ids: Batch) -> Activations:
        with jax.named_scope("embed"):
            return first_activations(self._looked_up(model.embedding, ids), model.auxiliary)

    def _looked_up(self, table: Any, ids: Batch) -> jax.Array:
        return look_up(table[...], laid_out(ids["tokens"], self.config.parallel.sequence))

    def _stack(self, x: Activations) -> Stack:
        return Stack.of(**stack_forms(self.config.parallel, self.config.model.remat, x.residual))

    def _rows(self, model: Llama, ids: Batch) -> tuple[Rows, ...]:
        form = self.config.parallel.sequence
        return model.rows(ids["tokens"], ids["segment_ids"], ids["positions"], ids.get("seeds"), sequence=form)

    def _weights(self, stack: Stack, weights: Weights, slot: int) -> tuple[Any, ...]:
        layers: Any = weights.used.layers
        return stack.grouped(layers[slot].by_parts())

    def _shared(self, rows: tuple[Rows, ...], slot: int) -> Rows:
        return rows[self.layers[slot] % len(rows)]


def _pick(batch: Batch, index: jax.Array) -> Batch:
    """Returns one micro-batch, each field int32 [B, T]."""
    return {name: jax.reshard(ids[index], spec("batch", "seq")) for name, ids in batch.items()}
