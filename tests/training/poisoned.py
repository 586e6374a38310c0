"""Training as `python -m llamajax.train`, but with rows that spoil a step, and with a kill where it is asked for.

    python -m tests.training.poisoned POISON [train's own arguments]

POISON is JSON: `nan`, positions of rows whose gradients are not finite; `spike`, of those that add 50 nats to a loss;
`kill`, when the process ends by SIGKILL: `before` a rollback is recorded, `after` that, or not at all; `rows`, a file that
gets a line for every batch that is loaded: its step, the position of its first row.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from llamajax.data.rows import loader
from llamajax.data.rows.dataset import Dataset
from llamajax.step import step
from llamajax.train import main as train
from llamajax.training import rollback

_NAN, _SPIKE = 77_777, 88_888
"""Segments that a poisoned row consists of."""


def poison(nan=(), spike=(), kill=None, rows=None):
    """Patches what this process trains with."""
    clean_row, clean_loss, next_row = Dataset.train_row, step.summed_gradients, loader.next_row
    write = rollback.write_atomically

    def train_row(self, position):
        row, segment = clean_row(self, position), _NAN if position in nan else _SPIKE if position in spike else None
        return row if segment is None else row | {"segment_ids": np.full_like(row["segment_ids"], segment)}

    def summed_gradients(run, model, batch):
        metrics, grads = clean_loss(run, model, batch)
        is_nan, is_spike = (jnp.any(batch["segment_ids"] == segment) for segment in (_NAN, _SPIKE))
        factor = jnp.where(is_nan, jnp.nan, 1.0)
        metrics["loss"] += jnp.where(is_spike, 50.0, 0.0)
        return metrics, jax.tree.map(lambda grad: grad * factor.astype(grad.dtype), grads)

    def note_next_row(of_step, *args):
        first = next_row(of_step, *args)
        with Path(rows or os.devnull).open("a") as file:
            file.write(f"{of_step + 1} {first}\n")
        return first

    def write_and_die(path, *chunks):
        if kill == "after":
            write(path, *chunks)
        if kill is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, *chunks)

    Dataset.train_row, step.summed_gradients, loader.next_row = train_row, summed_gradients, note_next_row
    rollback.write_atomically = write_and_die


if __name__ == "__main__":
    poison(**json.loads(sys.argv[1]))
    sys.argv[1:] = sys.argv[2:]
    train()
