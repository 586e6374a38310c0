"""Computes the loss on held-out documents during training."""

import math
from collections.abc import Callable

import numpy as np

from llamajax.config.run import Config
from llamajax.data.rows.dataset import Dataset
from llamajax.data.rows.loader import held_out_batches
from llamajax.model import Llama
from llamajax.step.step import eval_step, one_behind


def evaluate(
    config: Config, model: Llama, dataset: Dataset, num_rows: int, is_stopping: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Returns held-out loss in nats per token and in bits per byte of text, over the first `num_rows` rows; NaN without
    targets.

    Returns None if `is_stopping`, which is called before every batch, returns True before the end.
    """
    token_bytes = np.pad(dataset.tokenizer.token_bytes, (0, config.model.vocab_size - dataset.tokenizer.vocab_size))
    nats, num_tokens, num_bytes = 0.0, 0, 0
    batches = held_out_batches(dataset, config, num_rows)
    for result in one_behind(None if is_stopping() else eval_step(model, batch, token_bytes) for batch in batches):
        if result is None:
            return None
        sums, count = result
        nats += float(sums.cross_entropy)
        num_tokens += int(sums.count)
        num_bytes += int(count)
    return {
        "loss": nats / num_tokens if num_tokens else math.nan,
        "bits_per_byte": nats / math.log(2) / num_bytes if num_bytes else math.nan,
    }
