"""Rotary position embedding (RoFormer, arXiv:2104.09864) with the frequency scalings of Llama 3.x and others."""

import math
from decimal import Context, Decimal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from llamajax.config.model import ModelConfig
from llamajax.parallel.sharding import spec

RopeTable = Float32[Array, "B T half"]
"""One number per token and pair of head dims."""
_EXACT = Context(prec=30)
"""Decimal context for powers before they are rounded to fp32's seven digits."""


def inverse_frequencies(config: ModelConfig) -> Float32[np.ndarray, "half"]:
    """Returns the radians per position of each pair of head dims, scaled by `config.rope_scaling`.

    Computed in fp32 step by step as published, not rounded once at the end: at position 100,000 a frequency that is off by
    its last bit rotates the head by 0.01 rad away from the values that the published weights were trained with.

    The results become constants of compiled programs, so all hosts must agree on every bit. The powers are therefore
    computed in decimals and rounded once; numpy's (and torch's) fp32 power depends on the CPU's vector instructions. IEEE
    754 rounds all other operations alike everywhere.
    """
    theta = Decimal(float(np.float32(config.rope_theta)))
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    powers = [float(_EXACT.power(theta, Decimal(float(exponent)))) for exponent in exponents]
    plain = np.float32(1.0) / np.array(powers, np.float32)
    scaling = config.rope_scaling
    match scaling.kind:
        case "none" | "dynamic":  # `dynamic` is plain for all lengths that the configuration allows
            return plain
        case "linear":
            return plain / np.float32(scaling.factor)
        case "llama3":
            # Wavelengths that fit at least high_freq_factor times into the original length stay, wavelengths that fit fewer
            # than low_freq_factor times are stretched fully, and those between are stretched partly (Llama 3,
            # arXiv:2407.21783, 3.4.2). Quotients are products with reciprocals, because torch rounds a number divided by a
            # tensor that way.
            wavelengths = np.float32(2 * math.pi) * (1 / plain)
            turns = np.float32(scaling.original_max_seq_len) * (1 / wavelengths)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
            return (1 - kept) * plain / np.float32(scaling.factor) + kept * plain
        case "yarn":
            # Like `llama3` by number of turns, but linear in the index of the pair (YaRN, arXiv:2309.00071, 3.2).
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
    """Returns the index, possibly fractional, of the pair of head dims that turns `turns` times within the original
    length."""
    wavelength = config.rope_scaling.original_max_seq_len / (turns * 2 * math.pi)
    return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))


def score_factor(config: ModelConfig) -> float:
    """Returns the factor of attention's scores that the frequency scaling adds to 1 / sqrt(H).

    It is the square of transformers' `attention_factor`, which applies to queries and to keys.
    """
    scaling = config.rope_scaling
    match scaling.kind:
        case "none" | "linear" | "llama3" | "dynamic":
            return 1.0
        case "yarn":
            return (scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1) ** 2


def rope_tables(positions: Int32[Array, "B T"], config: ModelConfig) -> tuple[RopeTable, RopeTable]:
    """Returns the cosine and sine of every position's angles."""
    angles = positions.astype(jnp.float32)[:, :, None] * inverse_frequencies(config)[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: Float[Array, "B T K C H"], cos: RopeTable, sin: RopeTable) -> Float[Array, "B T K C H"]:
    """Rotates the heads of x by their positions, in fp32; the result has x's dtype.

    Dim i is paired with dim i + H/2: the layout of Hugging Face weights, not Meta's interleaved layout.
    """
    cos, sin = cos[:, :, None, None, :], sin[:, :, None, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def positions_from_segment_ids(segment_ids: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Returns positions that restart at 0 wherever the segment id changes."""
    # A document may begin on another device's part of the row, so use whole rows; they are only integers.
    whole = jax.reshard(segment_ids, spec("batch", None))
    rows = jax.lax.broadcasted_iota(jnp.int32, whole.shape, 1, out_sharding=spec("batch", None))
    begins = jnp.pad(whole[:, 1:] != whole[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    positions = rows - jax.lax.cummax(jnp.where(begins, rows, 0), axis=1)
    return jax.reshard(positions, spec("batch", "seq"))
