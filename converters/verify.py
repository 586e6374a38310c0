"""Do transformers and we compute the same logits from two forms of one model?"""

import dataclasses
import importlib.util
from pathlib import Path

import jax
import numpy as np

from llamajax.config import ModelConfig
from llamajax.errors import CheckpointError
from llamajax.model import Llama
from llamajax.restore import restore

_TOLERANCE = 1e-3
"""Of the largest logit; fp32 rounding stays far below, and any weight in a wrong place far above."""


def compare_logits(hf_dir: Path, run_dir: Path, step: int, config: ModelConfig, dtype: str) -> str:
    """Compares on fixed prompts, in fp32 from weights rounded to `dtype` on both sides; needs a current mesh.

    Positions reach to the end of the context, where a wrong stretch of the rotary frequencies shows.

    Returns:
        What was found, or why nothing was compared, in a few words.

    Raises:
        CheckpointError: the logits differ by more than rounding.
    """
    if importlib.util.find_spec("torch") is None:
        return "skipped, because torch, which transformers computes with, is not installed"
    rng = np.random.default_rng(0)
    T = min(32, config.max_seq_len)
    tokens = rng.integers(0, config.vocab_size, (2, T), dtype=np.int32)
    far = np.sort(rng.choice(config.max_seq_len, T, replace=False))
    positions = np.stack([np.arange(T), far]).astype(np.int32)
    ours = _our_logits(run_dir, step, config, dtype, tokens, positions)
    theirs = _hf_logits(hf_dir, dtype, tokens, positions)
    difference, largest = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    if not difference <= _TOLERANCE * max(1.0, largest):
        raise CheckpointError(
            f"{hf_dir}: logits of transformers differ from ours by up to {difference:.1e} of {largest:.1f}; the converted"
            " model is wrong and was not kept; please report this, or look at it with --no-verify"
        )
    return f"logits of transformers differ by at most {difference:.1e} (the largest is {largest:.1f})"


def _our_logits(
    run_dir: Path, step: int, config: ModelConfig, dtype: str, tokens: np.ndarray, positions: np.ndarray
) -> np.ndarray:
    config = dataclasses.replace(config, compute_dtype="float32", remat="none")
    abstract = jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0))
    model = restore(run_dir, {"model": abstract}, step, partial=True).state["model"]

    @jax.jit
    def logits(model: Llama) -> jax.Array:
        rounded = jax.tree.map(lambda weight: weight.astype(dtype).astype("float32"), model)
        return rounded(tokens, None, positions)

    return np.asarray(logits(model))


def _hf_logits(hf_dir: Path, dtype: str, tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    import torch  # an optional dependency
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        hf_dir,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
    )
    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": np.ones_like(tokens)}
    with torch.no_grad():
        output = model.float().eval()(
            **{name: torch.from_numpy(array).long() for name, array in inputs.items()}, use_cache=False
        )
    return output.logits.numpy()
