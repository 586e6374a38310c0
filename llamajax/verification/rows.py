"""The training rows of both sides of a comparison: packed rows drawn from a seed, independent of the mesh."""

import numpy as np

from llamajax.config.run import Config
from llamajax.data.rows.loader import make_batch
from llamajax.data.rows.packing import Row, fill_row
from llamajax.data.rows.preferences import fill_preferences, with_fields
from llamajax.data.tokens.stores import Piece
from llamajax.step.batch import IGNORE, Batch, batch_sharding, fields


def make_rows(config: Config, step: int) -> Batch:
    """Returns the batch of a step on the current mesh. Row r of a step is the same for any number of micro-batches.

    A row contains several documents of uneven lengths and ends in padding; some rows are full, some are nothing but padding,
    and a tenth of the targets do not count. So devices and micro-batches have different numbers of counted tokens.
    """
    accumulated, rows, seq_len = config.train.grad_accum_steps, config.train.micro_batch_size, config.data.seq_len

    def row(micro_batch: int, index: int) -> Row:
        rng = np.random.default_rng((config.seed, step, micro_batch * rows + index))
        if config.objective.is_on_policy:
            return _draw_completion(rng, config)
        return _draw_preferences(rng, config) if config.objective.is_preference else _draw_row(rng, config)

    return make_batch(row, (accumulated, rows, seq_len), batch_sharding(), config.model.vocab_size, fields(config))


def _draw_row(rng: np.random.Generator, config: Config) -> Row:
    vocab_size, seq_len = config.model.vocab_size, config.data.seq_len
    free = int(rng.choice([0, seq_len, *rng.integers(1, seq_len + 1, 6)]))
    pieces: list[np.ndarray] = []
    while free:
        length = min(free, int(rng.integers(1, max(2, seq_len // 2))))
        pieces.append(rng.integers(0, vocab_size, length + 1))
        free -= length
    return fill_row(pieces, seq_len, [rng.random(len(piece) - 1) < 0.9 for piece in pieces])


def _draw_preferences(rng: np.random.Generator, config: Config) -> Row:
    """Returns a row of pairs of answers, or of single ones for KTO, and log-probabilities of a reference."""
    vocab_size, seq_len, is_single = config.model.vocab_size, config.data.seq_len, config.objective.kind == "kto"
    free = int(rng.choice([0, seq_len, *rng.integers(1, seq_len + 1, 6)]))
    pieces: list[Piece] = []
    while free > 1:
        num_chosen, num_rejected = rng.integers(2, max(3, seq_len // 4), 2).tolist()
        if is_single:
            num_chosen, num_rejected = rng.permutation([num_chosen, 0]).tolist()
        if (length := num_chosen + num_rejected) > free:
            break
        chosen = np.arange(length) < num_chosen
        pieces.append(Piece(rng.integers(0, vocab_size, length), rng.random(length - 1) < 0.9, chosen))
        free -= length
    row = with_fields(fill_preferences(pieces, seq_len), config.objective.kind)
    references = [name for name in fields(config) if name.endswith("reference")]
    return row | {name: -rng.exponential(4.0, seq_len).astype(np.float32) for name in references}


def _draw_completion(rng: np.random.Generator, config: Config) -> Row:
    """Returns a row of a prompt and a completion, or of nothing, with an advantage, and with log-probabilities about those
    of a model that knows nothing, so that some ratios are clipped."""
    vocab_size, seq_len = config.model.vocab_size, config.data.seq_len
    length = int(rng.choice([0, *rng.integers(2, seq_len + 1, 7)]))
    ids, num_read = rng.integers(0, vocab_size, length + 1), int(rng.integers(1, max(2, length)))
    row: Row = fill_row([ids], seq_len, [np.arange(1, length + 1) >= num_read]) if length else fill_row([], seq_len)
    row["advantages"] = np.where(row["targets"] != IGNORE, np.float32(rng.normal()), np.float32(0))
    guessed = -np.log(vocab_size) + rng.normal(0, 0.3, (2, seq_len))
    given = dict(zip(("old", "reference"), guessed.astype(np.float32), strict=True))
    return row | {name: values for name, values in given.items() if name in fields(config)}
