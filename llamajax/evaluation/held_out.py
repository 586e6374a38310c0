"""Computes the loss on held-out documents during training."""

import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.loader import held_out_batches
from llamajax.model import Llama
from llamajax.step.batch import Batch
from llamajax.step.preferences import eval_sums, no_sums, preference_metrics
from llamajax.step.step import eval_step, one_behind


def evaluate(
    config: Config, model: Llama, dataset: Dataset, num_rows: int, is_stopping: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Returns held-out loss in nats per token and in bits per byte of text, over the first `num_rows` rows; NaN without
    targets.

    Preferences have the metrics of `preference_metrics` instead. Returns None if `is_stopping`, which is called before every
    batch, returns True before the end.
    """
    if config.objective.is_preference:
        return _evaluate_preferences(config, model, held_out_batches(dataset, config, num_rows), is_stopping)
    token_bytes = np.pad(dataset.tokenizer.token_bytes, (0, config.model.vocab_size - dataset.tokenizer.vocab_size))
    nats, num_tokens, num_bytes = 0.0, 0, 0
    batches = held_out_batches(dataset, config, num_rows)
    for result in one_behind(None if is_stopping() else eval_step(model, batch, token_bytes) for batch in batches):
        if result is None:
            return None
        sums, count = result
        nats += float(sums.cross_entropy)
        num_tokens += int(sums.num_counted)
        num_bytes += int(count)
    return {
        "loss": nats / num_tokens if num_tokens else math.nan,
        "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else math.nan,
    }


def _evaluate_preferences(
    config: Config, model: Llama, batches: Iterator[Batch], is_stopping: Callable[[], bool]
) -> dict[str, float] | None:
    total = no_sums()
    for result in one_behind(None if is_stopping() else eval_sums(config, model, batch) for batch in batches):
        if result is None:
            return None
        total = jax.tree.map(jnp.add, total, result)
    sums, totals = total
    means = {name: value / sums.num_counted for name, value in ({"loss": sums.cross_entropy} | totals).items()}
    return {name: float(value) for name, value in preference_metrics(config.objective, means).items()}
