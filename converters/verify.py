"""Do transformers and we compute the same logits from two forms of one model?"""

import dataclasses
import importlib.util
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from llamajax.checkpoint.read import restore
from llamajax.config.model import ModelConfig
from llamajax.errors import CheckpointError, ConfigError
from llamajax.model import Llama
from llamajax.weights.hf_files import open_model

_ALLOWED = 16
"""Times what nudging every weight by its last fp32 bit does to the logits (root mean squares). Right conversions stay below
4, even where torch's fp32 power, which depends on the CPU, is a bit off in the rotary frequencies and positions are far; one
wrong setting or a few weights in a wrong place were found from 59 on, and mostly are in the thousands (LOG.md)."""


def compare_logits(hf_dir: Path, run_dir: Path, step: int, config: ModelConfig, dtype: str) -> str:
    """Compares on fixed prompts, in fp32 from weights rounded to `dtype` on both sides; needs a current mesh.

    Positions reach to the end of the context, where a wrong stretch of the rotary frequencies shows.

    Returns:
        What was found, or why nothing was compared, in a few words.

    Raises:
        CheckpointError: the logits differ by more than rounding, or weights are no finite numbers.
        ConfigError: transformers cannot read the directory.
    """
    if importlib.util.find_spec("torch") is None:
        return "skipped, because torch, which transformers computes with, is not installed"
    rng = np.random.default_rng(0)
    T = min(32, config.max_seq_len)
    tokens = rng.integers(0, config.vocab_size, (2, T), dtype=np.int32)
    far = np.sort(rng.choice(config.max_seq_len, T, replace=False))
    positions = np.stack([np.arange(T), far]).astype(np.int32)
    ours, nudged = _our_logits(run_dir, step, config, dtype, tokens, positions)
    theirs = _hf_logits(hf_dir, dtype, tokens, positions)
    if not np.isfinite(theirs).all() and not np.isfinite(ours).all():
        raise CheckpointError(
            f"{hf_dir}: {_not_finite(hf_dir)}, so there is nothing to compare; take weights from before that, or keep these"
            " with --no-verify"
        )
    difference, largest = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    if not _rms(ours - theirs) <= _ALLOWED * _rms(ours - nudged):
        raise CheckpointError(
            f"{hf_dir}: logits of transformers differ from ours by up to {difference:.1e} of {largest:.2g}; the converted"
            " model is wrong and was not kept; please report this, or look at it with --no-verify"
        )
    return f"logits of transformers differ by at most {difference:.1e} (the largest is {largest:.2g})"


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _not_finite(hf_dir: Path) -> str:
    """What makes the logits infinite or no numbers."""
    for name, stored in open_model(hf_dir).items():
        if not np.isfinite(stored.read().astype(np.float32)).all():
            return f"{name} holds values that are no finite numbers"
    return "logits are no finite numbers, though all weights are"


def _our_logits(
    run_dir: Path,
    step: int,
    config: ModelConfig,
    dtype: str,
    tokens: Int32[np.ndarray, "B T"],
    positions: Int32[np.ndarray, "B T"],
) -> tuple[Float32[np.ndarray, "B T V"], Float32[np.ndarray, "B T V"]]:
    """The logits, and those after every weight was moved up or down by about its last fp32 bit."""
    config = dataclasses.replace(config, compute_dtype="float32", remat="none")
    abstract = jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0))
    model = restore(run_dir, {"model": abstract}, step, partial=True).state["model"]

    whole, moved = (_logits(model, tokens, positions, by, dtype=dtype) for by in (0.0, 2.0**-23))
    return np.asarray(whole), np.asarray(moved)


@partial(jax.jit, static_argnames="dtype")
def _logits(
    model: Llama, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], by: float, *, dtype: str
) -> Float32[Array, "B T V"]:
    """Of weights rounded to `dtype`, each then moved up or down by the share `by` of itself."""
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    signs = [jax.random.rademacher(key, weight.shape, "float32") for key, weight in zip(keys, leaves, strict=True)]
    moved = [weight.astype(dtype).astype("float32") * (1 + by * sign) for weight, sign in zip(leaves, signs, strict=True)]
    return jax.tree.unflatten(structure, moved)(tokens, None, positions)


def _hf_logits(
    hf_dir: Path, dtype: str, tokens: Int32[np.ndarray, "B T"], positions: Int32[np.ndarray, "B T"]
) -> Float32[np.ndarray, "B T V"]:
    import torch  # an optional dependency
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            hf_dir,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # it checks config.json by rules of its own, which change with its version
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{hf_dir}: transformers {transformers.__version__} cannot read it, and nothing was compared: {reason}; correct"
            " that, or convert with --no-verify"
        ) from error
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": np.ones_like(tokens)}
    with torch.no_grad():
        output = model.float().eval()(
            **{name: torch.from_numpy(array).long() for name, array in inputs.items()}, use_cache=False
        )
    return output.logits.numpy()
