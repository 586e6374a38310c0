"""Checks that transformers and llamajax compute the same logits from two forms of one model."""

import dataclasses
import importlib.util
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from llamajax.checkpoint.read import restore
from llamajax.config.architectures import ARCHITECTURES
from llamajax.config.hf_config import CONFIG
from llamajax.config.json_file import read_json
from llamajax.config.model import Head, ModelConfig
from llamajax.errors import CheckpointError, ConfigError
from llamajax.model import Llama
from llamajax.model.rope import inverse_frequencies, score_factor
from llamajax.weights.float8 import quantization_of, with_scales
from llamajax.weights.hf_files import open_model
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_directory
from llamajax.weights.pretrained import Pretrained

_ALLOWED = 16
"""Allowed difference of logits, as a multiple of the change from nudging every weight by its last fp32 bit (root mean
squares). Correct conversions stay below 4. One wrong setting or a few misplaced weights give 59 or more, mostly thousands
(LOG.md)."""
_FREQUENCY_BITS = 2.0**-22
"""Largest allowed relative difference of rotary frequencies: two last bits, since torch's fp32 power depends on the CPU."""
_NEAR = 1024
"""Only positions below this are compared. At 131,072 the last bit of one frequency turns a head by 0.008 rad, which moves
logits by hundreds of times their rounding; below this limit, by no more than their rounding."""
_WRONG = "the converted model is wrong and was not kept; please report this, or look at it with --no-verify"


def compare_logits(hf_dir: Path, run_dir: Path, step: int, config: ModelConfig, dtype: str) -> str:
    """Compares logits of fixed prompts, in fp32 from weights rounded to `dtype` on both sides; needs a current mesh.

    All far positions depend on the rotary frequencies, so these are compared directly. Their effect on logits grows with the
    position until a last bit looks like a wrong weight.

    Returns:
        A short summary of the comparison, or the reason for skipping it.

    Raises:
        CheckpointError: frequencies or logits differ by more than rounding, or weights are not finite.
        ConfigError: transformers cannot read the directory.
    """
    if (missing := _missing("torch") or _without_class(hf_dir)) is not None:
        return missing
    return _compare(hf_dir, _stored_model(run_dir, step, config), dtype)


def compare_merged(hf_dir: Path, found: Pretrained, dtype: str) -> str:
    """Compares logits of adapters with those of a directory into which they are merged; see `compare_logits`.

    In `dtype` float32, merging changes logits by no more than their rounding. Other types are rounded after merging: then
    transformers is compared with our reading of the directory, and the change is reported.
    """
    if (missing := _missing("torch") or _without_class(hf_dir)) is not None:
        return missing
    adapted = _opened_model(found)
    if dtype == "float32":
        return _compare(hf_dir, adapted, dtype)
    written = _opened_model(open_directory(hf_dir))
    tokens, positions = _prompts(written.config)
    before, after = (np.asarray(_logits(model, tokens, positions, 0.0, dtype="float32")) for model in (adapted, written))
    change = f"; merging in {dtype} changed them by at most {np.max(np.abs(before - after)):.1e}"
    return _compare(hf_dir, written, dtype) + change


def compare_directories(hf_dir: Path, found: Pretrained, dtype: str) -> str:
    """Compares logits of another model that computes the same with those of a directory; see `compare_logits`."""
    if (missing := _missing("torch") or _without_class(hf_dir)) is not None:
        return missing
    return _compare(hf_dir, _opened_model(found), dtype)


def compare_adapters(base_dir: Path, found: Pretrained, dtype: str, peft_dir: Path) -> str:
    """Compares logits of adapters beside their base with those of peft; see `compare_logits`.

    Args:
        base_dir: Hugging Face directory of the base.
        found: the adapters.
        dtype: type to which both sides round weights.
        peft_dir: PEFT directory with the same adapters.
    """
    if (missing := _missing("torch") or _missing("peft") or _without_class(base_dir)) is not None:
        return missing
    return _compare(base_dir, _opened_model(found), dtype, peft_dir)


def _missing(package: str) -> str | None:
    """Returns the reason for skipping a comparison that needs a package; None if it is installed."""
    if importlib.util.find_spec(package) is not None:
        return None
    return f"skipped: {'transformers needs torch, which' if package == 'torch' else package} is not installed"


def _without_class(hf_dir: Path) -> str | None:
    """Returns the reason for skipping a comparison with a model of which transformers has no class; None if it has one."""
    model_type = read_json(hf_dir / CONFIG).get("model_type")
    known = {architecture.model_type: architecture for architecture in ARCHITECTURES}.get(str(model_type))
    if known is None or known.in_transformers:
        return None
    return f"skipped: transformers has no class of its own for {known.name}"


def _prompts(config: ModelConfig) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]:
    """Returns tokens and their positions."""
    rng = np.random.default_rng(0)
    T, near = min(32, config.max_seq_len), min(_NEAR, config.max_seq_len)
    tokens = rng.integers(0, config.vocab_size, (2, T), dtype=np.int32)
    apart = np.sort(rng.choice(near, T, replace=False))
    return tokens, np.stack([np.arange(T), apart]).astype(np.int32)


def _compare(hf_dir: Path, ours_of: Llama, dtype: str, peft_dir: Path | None = None) -> str:
    tokens, positions = _prompts(ours_of.config)
    # The second ones are after moving every weight up or down by about its last fp32 bit.
    ours, nudged = (np.asarray(_logits(ours_of, tokens, positions, by, dtype=dtype)) for by in (0.0, 2.0**-23))
    model, of_what = _hf_model(hf_dir, dtype, ours_of.config.head)
    _compare_frequencies(hf_dir, ours_of.config, model)
    if peft_dir is not None:
        model, of_what = _peft_model(model, peft_dir), " with adapters of peft"
    theirs = _hf_logits(model, tokens, positions)
    if not np.isfinite(theirs).all() and not np.isfinite(ours).all():
        raise CheckpointError(
            f"{hf_dir}: {_not_finite(hf_dir)}, so nothing can be compared; use weights from before that, or keep these with"
            " --no-verify"
        )
    difference, largest = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    if not _rms(ours - theirs) <= _ALLOWED * _rms(ours - nudged):
        rule = f"differ from ours by up to {difference:.1e} of {largest:.2g}"
        raise CheckpointError(f"{hf_dir}: logits of transformers {rule}; {_WRONG}")
    return f"logits of transformers{of_what} differ by at most {difference:.1e} (the largest is {largest:.2g})"


def _compare_frequencies(hf_dir: Path, config: ModelConfig, model: Any) -> None:
    rotary = model.get_decoder().rotary_emb
    theirs, ours = rotary.inv_freq.numpy().astype(np.float64), inverse_frequencies(config).astype(np.float64)
    if theirs.shape != ours.shape or not np.max(np.abs(theirs / ours - 1)) <= _FREQUENCY_BITS:
        raise CheckpointError(f"{hf_dir}: rotary frequencies of transformers differ from ours; {_WRONG}")
    factors = rotary.attention_scaling**2, score_factor(config)
    if abs(factors[0] / factors[1] - 1) > _FREQUENCY_BITS:
        rule = f"multiplies attention scores by {factors[0]:.6g}, llamajax by {factors[1]:.6g}"
        raise CheckpointError(f"{hf_dir}: transformers {rule}; {_WRONG}")


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _not_finite(hf_dir: Path) -> str:
    """Explains infinite or NaN logits."""
    for name, stored in open_model(hf_dir).items():
        if not np.isfinite(stored.read().astype(np.float32)).all():
            return f"{name} holds values that are not finite"
    return "logits are not finite, though all weights are"


def _stored_model(run_dir: Path, step: int, config: ModelConfig) -> Llama:
    """Returns the model of a checkpoint, to compute in fp32."""
    config = dataclasses.replace(config, compute_dtype="float32", remat="none")
    abstract = jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0))
    return restore(run_dir, {"model": abstract}, step, partial=True).state["model"]


def _opened_model(found: Pretrained) -> Llama:
    """Returns the model, with adapters if it has some, in fp32."""
    return load_model(found, dataclasses.replace(found.config, param_dtype="float32", compute_dtype="float32", remat="none"))


@partial(jax.jit, static_argnames="dtype")
def _logits(
    model: Llama, tokens: Int32[Array, "B T"], positions: Int32[Array, "B T"], by: float, *, dtype: str
) -> Float32[Array, "B T V"]:
    """Returns the logits of weights rounded to `dtype` and then each moved up or down by the fraction `by`."""
    leaves, structure = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    signs = [jax.random.rademacher(key, weight.shape, "float32") for key, weight in zip(keys, leaves, strict=True)]
    moved = [weight.astype(dtype).astype("float32") * (1 + by * sign) for weight, sign in zip(leaves, signs, strict=True)]
    return jax.tree.unflatten(structure, moved)(tokens, None, positions)


def _hf_model(hf_dir: Path, dtype: str, head: Head) -> tuple[Any, str]:
    """Returns transformers' model in fp32, with weights rounded to `dtype`, and a note if transformers did not read them.

    llamajax reads float8 weights itself: transformers rounds them to bfloat16, or reads them only on GPUs.
    """
    import torch  # an optional dependency
    import transformers

    transformers.utils.logging.disable_progress_bar()
    names: dict[Head, str] = {"vocabulary": "AutoModelForCausalLM", "score": "AutoModelForSequenceClassification"}
    auto_class = getattr(transformers, names[head])
    wide, options = getattr(torch, dtype), {"attn_implementation": "eager", "trust_remote_code": False}
    body = read_json(hf_dir / CONFIG)
    try:
        if (quantization := quantization_of(body, hf_dir / CONFIG)) is None:
            model = auto_class.from_pretrained(hf_dir, dtype=wide, use_safetensors=True, local_files_only=True, **options)
            return model.float().eval(), ""
        plain = {key: value for key, value in body.items() if key != "quantization_config"}
        known = transformers.AutoConfig.for_model(**plain)
        model = auto_class.from_config(known, dtype=torch.float32, **options)
    except MemoryError:
        raise
    except Exception as error:  # transformers checks config.json by its own rules, which change with its version
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{hf_dir}: transformers {transformers.__version__} cannot read it, and nothing was compared: {reason};"
            " correct that, or convert with --no-verify"
        ) from error
    found = with_scales(open_model(hf_dir), quantization)
    weights = {name: torch.from_numpy(stored.read().astype(np.float32)).to(wide).float() for name, stored in found.items()}
    wide_config = {"config": known, "state_dict": weights, "dtype": torch.float32, "output_loading_info": True}
    model, told = type(model).from_pretrained(None, **wide_config, **options)
    odd = {*told["unexpected_keys"], *told["missing_keys"]}
    assert odd <= {"lm_head.weight"}, "all names were checked before"
    return model.eval(), " (with float8 weights that llamajax dequantized)"


def _peft_model(base: Any, peft_dir: Path) -> Any:
    """Returns transformers' model with the adapters in a PEFT directory."""
    import peft  # an optional dependency

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in a way that will be removed
        return peft.PeftModel.from_pretrained(base, str(peft_dir)).float().eval()


def _hf_logits(
    model: Any, tokens: Int32[np.ndarray, "B T"], positions: Int32[np.ndarray, "B T"]
) -> Float32[np.ndarray, "B T V"]:
    import torch

    inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": np.ones_like(tokens)}
    given = {name: torch.from_numpy(array).long() for name, array in inputs.items()}
    with torch.no_grad():
        if hasattr(model, "score"):  # called as a whole, it would give the score of the last token alone
            return model.score(model.model(**given, use_cache=False).last_hidden_state).numpy()
        return model(**given, use_cache=False).logits.numpy()
