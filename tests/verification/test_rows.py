"""The rows of both sides: packed, uneven, and the same however a step is divided."""

import jax
import numpy as np

from llamajax.step.batch import IGNORE
from llamajax.verification.rows import make_rows
from tests.tiny import tiny_config


def batch(step: int = 1, accumulated: int = 1, **changed) -> dict[str, np.ndarray]:
    config = tiny_config().changed({"train.grad_accum_steps": accumulated, "data.seq_len": 32} | changed)
    return {name: np.asarray(x).reshape(-1, 32) for name, x in make_rows(config, step).items()}


def test_rows_do_not_depend_on_micro_batches_but_on_the_step_and_the_seed():
    jax.tree.map(np.testing.assert_array_equal, batch(), batch(accumulated=4))
    for other in (batch(step=2), batch(seed=1)):
        assert not np.array_equal(batch()["tokens"], other["tokens"])


def test_rows_are_packed_and_uneven():
    rows = batch()
    counted = (rows["targets"] != IGNORE).sum(axis=1)
    padding = (rows["segment_ids"] == 0).sum(axis=1)
    assert {0, 32} <= set(padding.tolist())
    assert len(set(counted.tolist())) > 8
    assert (rows["segment_ids"].max(axis=1) > 2).any()
    assert (rows["positions"].max(axis=1) < rows["positions"].shape[1] - 1).any()
    inner_ignored = (rows["targets"] == IGNORE) & (rows["segment_ids"] > 0)
    assert 0.02 < inner_ignored.mean() < 0.2
    assert rows["tokens"].max() < 64
