"""A model whose layers tell more than their activations, put together as one with experts would be."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from llamajax.config.parallel import PLAIN, ParallelConfig
from llamajax.config.run import Config
from llamajax.model import Llama
from llamajax.model.layers import MLP, Auxiliary
from llamajax.parallel.sharding import spec
from llamajax.parallel.zero import gathered
from llamajax.step.batch import IGNORE

WEIGHT = 2.0


class PenalizedMLP(MLP):
    """An MLP whose outputs are to stay small, and which counts tokens by what it makes of them."""

    auxiliary: ClassVar[Mapping[str, float]] = {"penalty": WEIGHT, "positive": 0.0}

    def __init__(self, mlp: MLP):
        self.mlp = mlp

    def __call__(
        self,
        x: jax.Array,
        parallel: ParallelConfig = PLAIN,
        *,
        gates_in_stack: bool = False,
        is_saved: bool = True,
        seeds: jax.Array | None = None,
    ) -> tuple[jax.Array, Auxiliary]:
        out, _ = self.mlp(x, parallel, gates_in_stack=gates_in_stack, is_saved=is_saved, seeds=seeds)
        return out, auxiliary_of(out)


def auxiliary_of(out: jax.Array) -> Auxiliary:
    """The mean square of a token's outputs, and whether their mean is positive."""
    wide = out.astype(jnp.float32)
    return {"penalty": jnp.mean(jnp.square(wide), -1), "positive": (jnp.mean(wide, -1) > 0).astype(jnp.float32)}


def penalized(config: Config) -> Llama:
    """The model of `config` with such MLPs, the same on every mesh."""
    model = Llama(config.model, jax.random.key(config.seed))
    model.layers.mlp = PenalizedMLP(model.layers.mlp)
    return model


def by_definition(config: Config, model: Llama, batch: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, Any]]:
    """The loss to differentiate, and the metrics, of rows [B, T] on one device: layer by layer, all logits at once."""
    counted = jax.reshard(batch["targets"] != IGNORE, spec("batch", "seq"))
    layers = [gathered(jax.tree.map(lambda w, i=i: w[i], model.layers), "float32") for i in range(config.model.num_layers)]
    embedding, head = (jax.reshard(table[...], jax.P(None, None)) for table in (model.embedding, model.output_weight()))
    (rows,) = model._by_layer(*model._tables_and_masks(batch["tokens"], batch["segment_ids"], batch["positions"]))
    x = jax.reshard(embedding[batch["tokens"]], spec("batch", "seq", None))
    sums = {"penalty": 0.0, "positive": 0.0}
    for layer in layers:
        x += layer.attention(layer.attention_norm(x), rows)[0]
        out, _ = layer.mlp.mlp(layer.mlp_norm(x))
        x += out
        sums = {name: sums[name] + jnp.sum(counted * values) for name, values in auxiliary_of(out).items()}
    x, counted = jax.reshard((model.final_norm(x), counted), (jax.P(None, None, None), jax.P(None, None)))
    logits, targets = jnp.einsum("BTD,VD->BTV", x, head), jnp.where(counted, batch["targets"], 0)[:, :, None]
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets, -1)[:, :, 0]
    metrics = {"loss": -jnp.sum(counted * log_probs)} | sums
    metrics = {name: value / jnp.sum(counted) for name, value in metrics.items()}
    return metrics["loss"] + WEIGHT * metrics["penalty"], metrics
