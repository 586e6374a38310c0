"""Adapters beside a base that is there already, and the proof that they were trained beside that one."""

from pathlib import Path

import jax
import jax.numpy as jnp

from llamajax.checkpoint.steps import find_step
from llamajax.config.adapters import AdaptersConfig
from llamajax.config.hub import hub_model, is_on_hub
from llamajax.config.model import DType
from llamajax.config.peft import base_of
from llamajax.errors import ConfigError
from llamajax.model import Llama
from llamajax.model.adapters import quantized_layers
from llamajax.parallel.zero import as_frozen, frozen_only
from llamajax.step.checksum import fingerprint
from llamajax.weights.hf_files import hub_name
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.pretrained import Pretrained


def open_beside(path: str, base: Pretrained, dtype: DType) -> Pretrained:
    """Opens adapters of a base. Where its values in `dtype` cannot prove that it is the right one, as `check_base` does
    later, they must name it.

    Args:
        path: a run that trains adapters, one of its checkpoints, or a PEFT directory.
        base: the model that they add to.
        dtype: type in which its weights are kept.

    Raises:
        UserError: see `open_pretrained`.
        ConfigError: there are no adapters, or they do not fit the base.
    """
    if base.adapters is not None:
        rule = "holds adapters itself"
        raise ConfigError(f"model: {base.source} {rule}; name its base with --model, and these with --adapter")
    found = open_pretrained(path, base=base)
    if found.adapters is None:
        raise ConfigError(f"adapter: {found.source} holds a whole model; name it with --model")
    if _is_proven(found, dtype):
        return found
    named = base_of(found.source) if found.tensors is not None else str(found.meta["config"].get("init_from"))
    if not _is(base, named):
        remedy = f"serve {named}" if found.tensors is None else "serve that, or correct base_model_name_or_path"
        raise ConfigError(f"adapter: {found.source} adds to {named}, but the server has {base.shown}; {remedy}")
    return found


def check_base(found: Pretrained, weights: Llama, dtype: DType) -> None:
    """Checks that the adapters of a run were trained beside these weights, kept in `dtype`.

    Raises:
        ConfigError: they were trained beside others.
    """
    assert found.adapters is not None
    if _is_proven(found, dtype) and found.meta["base"] != _fingerprint(found.adapters, weights):
        assert found.base is not None
        named = found.meta["config"].get("init_from")
        raise ConfigError(
            f"adapter: {found.source} was trained beside other weights than those of {found.base.shown}; serve {named}"
        )


def _is_proven(found: Pretrained, dtype: DType) -> bool:
    """Whether the checkpoint has a fingerprint of its base, which follows from weights in this type."""
    assert found.adapters is not None
    assert found.base is not None
    loses_nothing = dtype == "float32" or "bfloat16" in (found.adapters.base_dtype, found.base.config.param_dtype)
    return loses_nothing and isinstance(found.meta.get("base"), str)


def _fingerprint(adapters: AdaptersConfig, weights: Llama) -> str:
    """Returns the fingerprint of a base in the form that it has beside these adapters in training."""

    def as_trained(weights: Llama) -> Llama:
        model = jax.tree.map(_in_bfloat16 if adapters.base_dtype == "bfloat16" else _in_float32, as_frozen(weights))
        if adapters.is_quantized:
            model.layers = quantized_layers(adapters, model.layers, num_stacked=1)
        return frozen_only(model.with_adapters(adapters, "float32", jax.random.key(0)))

    return fingerprint(weights, as_trained)


def _in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _in_bfloat16(x: jax.Array) -> jax.Array:
    # Rounded in a step of its own: XLA may leave out conversions to bfloat16 and back, before the weights are quantized.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _is(base: Pretrained, named: str) -> bool:
    """Whether a name in the settings of adapters is that of the base."""
    if is_on_hub(named):
        model, own = hub_model(named), hub_name(base.source)
        return own is not None and model.repository == own[0] and model.commit in (None, own[1])
    path = Path(named).expanduser()
    place = find_step(path) if path.is_dir() else None
    return (place or path).absolute().resolve() == base.source.resolve()
