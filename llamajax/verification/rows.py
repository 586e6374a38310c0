"""The training rows of both sides of a comparison: packed rows drawn from a seed, independent of the mesh."""

import numpy as np

from llamajax.config.run import Config
from llamajax.data.rows.loader import make_batch
from llamajax.data.rows.packing import Row, fill_row
from llamajax.step.batch import Batch, batch_sharding


def make_rows(config: Config, step: int) -> Batch:
    """Returns the batch of a step on the current mesh. Row r of a step is the same for any number of micro-batches.

    A row contains several documents of uneven lengths and ends in padding; some rows are full, some are nothing but padding,
    and a tenth of the targets do not count. So devices and micro-batches have different numbers of counted tokens.
    """
    accumulated, rows, seq_len = config.train.grad_accum_steps, config.train.micro_batch_size, config.data.seq_len

    def row(micro_batch: int, index: int) -> Row:
        return _draw_row(np.random.default_rng((config.seed, step, micro_batch * rows + index)), config)

    return make_batch(row, (accumulated, rows, seq_len), batch_sharding(), config.model.vocab_size)


def _draw_row(rng: np.random.Generator, config: Config) -> Row:
    vocab_size, seq_len = config.model.vocab_size, config.data.seq_len
    free = int(rng.choice([0, seq_len, *rng.integers(1, seq_len + 1, 6)]))
    pieces: list[np.ndarray] = []
    while free:
        length = min(free, int(rng.integers(1, max(2, seq_len // 2))))
        pieces.append(rng.integers(0, vocab_size, length + 1))
        free -= length
    return fill_row(pieces, seq_len, [rng.random(len(piece) - 1) < 0.9 for piece in pieces])
