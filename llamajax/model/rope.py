"""Rotary position embedding (RoFormer, arXiv:2104.09864) with the stretches that Llama 3.x and others use."""

import math
from decimal import Context, Decimal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.model import ModelConfig
from llamajax.parallel.sharding import spec

RopeTable = Float32[Array, "B T half"]
"""Of every token, a number for each pair of head dims."""
_EXACT = Context(prec=30)
"""Digits of a power before it is rounded to fp32's seven."""


def inverse_frequencies(config: ModelConfig) -> Float32[np.ndarray, "half"]:
    """Radians per position of each pair of head dims, stretched by `config.rope_scaling`.

    fp32 step by step as published, not rounded once at the end: at position 100,000 a frequency that is off by its last
    bit turns the head by 0.01 rad away from what the published weights were trained with.

    These become constants of compiled programs, so all hosts must agree on every bit. The powers are therefore computed
    in decimals and rounded once; numpy's (and torch's) fp32 power depends on the CPU's vector instructions. All else is
    what IEEE 754 rounds alike everywhere.
    """
    theta = Decimal(float(np.float32(config.rope_theta)))
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = [float(_EXACT.power(theta, Decimal(float(exponent)))) for exponent in exponents]
    plain = np.float32(1.0) / np.array(powers, np.float32)
    scaling = config.rope_scaling
    match scaling.kind:
        case "none" | "dynamic":  # which is plain in all sequences that the configuration allows
            return plain
        case "linear":
            return plain / np.float32(scaling.factor)
        case "llama3":
            # Wavelengths that fit high_freq_factor times into the original length stay, those that fit fewer than
            # low_freq_factor times are stretched wholly, those between partly (Llama 3, arXiv:2407.21783, 3.4.2).
            # Quotients as products with reciprocals, which is how torch rounds a number divided by a tensor.
            wavelengths = np.float32(2 * math.pi) * (1 / plain)
            turns = np.float32(scaling.original_max_seq_len) * (1 / wavelengths)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
            return (1 - kept) * plain / np.float32(scaling.factor) + kept * plain
        case "yarn":
            # As `llama3` by numbers of turns, but linearly in the number of the pair (YaRN, arXiv:2309.00071, 3.2).
            first, last = (_pair_that_turns(beta, config) for beta in (scaling.beta_fast, scaling.beta_slow))
            if scaling.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, config.head_dim - 1)
            width = last - first or 0.001
            pairs = np.arange(config.head_dim // 2, dtype=np.float32)
            kept = 1 - np.clip((pairs - np.float32(first)) / np.float32(width), 0, 1)
            stretched = np.float32(1.0) / (np.float32(scaling.factor) * np.array(powers, np.float32))
            return stretched * (1 - kept) + plain * kept


def _pair_that_turns(turns: float, config: ModelConfig) -> float:
    """The pair of head dims, fractions between two included, that turns so often within the original length."""
    wavelength = config.rope_scaling.original_max_seq_len / (turns * 2 * math.pi)
    return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))


def score_factor(config: ModelConfig) -> float:
    """What attention's scores are multiplied by because frequencies are stretched, beside 1 / sqrt(H).

    The square of transformers' `attention_factor`, which is put on queries and on keys there.
    """
    scaling = config.rope_scaling
    match scaling.kind:
        case "none" | "linear" | "llama3" | "dynamic":
            return 1.0
        case "yarn":
            return (scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1) ** 2


def rope_tables(positions: Int32[Array, "B T"], config: ModelConfig) -> tuple[RopeTable, RopeTable]:
    """Cosine and sine of every position's angles."""
    angles = positions.astype(jnp.float32)[:, :, None] * inverse_frequencies(config)[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: Float[Array, "B T K C H"], cos: RopeTable, sin: RopeTable) -> Float[Array, "B T K C H"]:
    """Turns the heads of x by their positions, in fp32; the result has x's dtype.

    Dim i is paired with dim i + H/2: the layout of Hugging Face weights, not Meta's interleaved one.
    """
    cos, sin = cos[:, :, None, None, :], sin[:, :, None, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def positions_from_segment_ids(segment_ids: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Positions that restart at 0 wherever the segment id changes."""
    # A document may begin on another device's part of the row, so look at whole rows; they are only integers.
    whole = jax.reshard(segment_ids, spec("batch", None))
    rows = jax.lax.broadcasted_iota(jnp.int32, whole.shape, 1, out_sharding=spec("batch", None))
    begins = jnp.pad(whole[:, 1:] != whole[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    positions = rows - jax.lax.cummax(jnp.where(begins, rows, 0), axis=1)
    return jax.reshard(positions, spec("batch", "seq"))
