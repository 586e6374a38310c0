"""Converts rotary positions between a Hugging Face `config.json` and `ModelConfig`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llamajax.config.model import ModelConfig, RopeScalingConfig
from llamajax.errors import ConfigError, show


class _Kind(NamedTuple):
    """A rope_type: its settings in `config.json`, and ours."""

    ours: Any
    """Value of `RopeScalingConfig.kind`."""
    needed: Mapping[str, str] = {}
    optional: Mapping[str, str] = {}
    """Settings with the defaults of `RopeScalingConfig`, written where they differ."""


_ORIGINAL = "original_max_position_embeddings"
"""Sequence length of the pretraining. As in transformers, a value at the top level of `config.json` wins over one in the
rope settings; the default is `max_position_embeddings`."""
_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_FACTOR = {"factor": "factor"}
_KINDS = {
    "default": _Kind("none"),
    "linear": _Kind("linear", _FACTOR),
    "dynamic": _Kind("dynamic", _FACTOR),
    "llama3": _Kind(
        "llama3",
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            _ORIGINAL: "original_max_seq_len",
        },
    ),
    "yarn": _Kind(
        "yarn",
        _FACTOR | {_ORIGINAL: "original_max_seq_len"},
        {name: name for name in ("beta_fast", "beta_slow", "attention_factor", "truncate")},
    ),
}
_MSCALES = {name: name for name in ("mscale", "mscale_all_dim")}
"""Settings from which yarn's attention_factor follows if it is left out."""


def read_rope(
    body: Mapping[str, Any], max_seq_len: int, path: Path, default: float = 10000.0
) -> tuple[float, RopeScalingConfig]:
    """Returns rope_theta and the scaling, from the fields of transformers 5 (`rope_parameters`), of 4, or of both.

    Args:
        body: content of the `config.json`.
        max_seq_len: its `max_position_embeddings`.
        path: the file, for messages.
        default: rope_theta where it is left out.

    Raises:
        ConfigError: the fields contradict each other, or a setting is missing, wrong or not supported.
    """
    new, old = body.get("rope_parameters"), body.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{path}: {key}: must be an object or null, not {show(str(value))}; correct it")
    old_theta = body.get("rope_theta")
    new_theta = old_theta if new is None else new.get("rope_theta", old_theta)
    if old_theta is not None and new_theta != old_theta:
        raise ConfigError(
            f"{path}: rope_theta: {show(str(old_theta))} contradicts rope_parameters.rope_theta, {show(str(new_theta))};"
            " keep the right one"
        )
    theta = default if new_theta is None else _positive(new_theta, "rope_theta", path)
    scaling = _read_scaling(old or {}, "rope_scaling", body, max_seq_len, path)
    if new is not None:
        from_old, scaling = scaling, _read_scaling(new, "rope_parameters", body, max_seq_len, path)
        if "rope_scaling" in body and from_old != scaling:
            raise ConfigError(f"{path}: rope_scaling: contradicts rope_parameters; keep the right one")
    return theta, scaling


def _read_scaling(
    rope: dict[str, Any], key: str, body: Mapping[str, Any], max_seq_len: int, path: Path
) -> RopeScalingConfig:
    name = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(name, str) or name not in _KINDS or rope.get("type", name) != name:
        raise ConfigError(f"{path}: {key}.rope_type: {show(str(name))} is not one of {', '.join(_KINDS)}")
    kind, where = _KINDS[name], f"{path}: {key}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        value = show(str(rope["partial_rotary_factor"]))
        raise ConfigError(f"{where}.partial_rotary_factor: {value} is not supported; it must be 1.0, for whole heads")
    rope = {theirs: value for theirs, value in rope.items() if theirs not in _OF_ALL}
    if _ORIGINAL in kind.needed:
        rope = {_ORIGINAL: max_seq_len} | rope | ({_ORIGINAL: body[_ORIGINAL]} if _ORIGINAL in body else {})
    known = {**kind.needed, **kind.optional, **(_MSCALES if name == "yarn" else {})}
    if unknown := sorted(rope.keys() - known.keys()):
        raise ConfigError(f"{where}.{show(unknown[0])}: has no meaning with rope_type={name}; remove it")
    if missing := [theirs for theirs in kind.needed if theirs not in rope]:
        raise ConfigError(f"{where}.{missing[0]}: is missing, but rope_type={name} needs it; add it")
    values: dict[str, Any] = {}
    for theirs, value in rope.items():
        if theirs == "truncate":
            if type(value) is not bool:
                raise ConfigError(f"{where}.truncate: must be true or false, not {show(str(value))}; correct it")
            values[theirs] = value
        elif value is not None or theirs in kind.needed:
            values[theirs] = _positive(value, f"{key}.{theirs}", path)
    scales = [values.pop(name, None) for name in _MSCALES]
    if None not in scales:
        numerator, denominator = (0.1 * scale * math.log(values["factor"]) + 1 for scale in scales)
        values.setdefault("attention_factor", numerator / denominator)
    ours = {known[theirs]: value for theirs, value in values.items()}
    if kind.ours in ("dynamic", "llama3", "yarn"):
        ours["original_max_seq_len"] = int(ours.get("original_max_seq_len", max_seq_len))
    try:
        return RopeScalingConfig(kind=kind.ours, **ours)
    except ConfigError as error:
        raise ConfigError(f"{where}: {'; '.join(str(error).splitlines())}") from error


def _positive(value: Any, key: str, path: Path) -> float:
    if type(value) not in (int, float) or not 0 < value < 1e12:
        raise ConfigError(f"{path}: {key}: must be a positive number, not {show(str(value))}; correct it")
    return float(value)


def rope_fields(config: ModelConfig) -> dict[str, Any]:
    """Returns the rotary positions of a `config.json`, in the fields of transformers 4 and of transformers 5."""
    scaling, plain = config.rope_scaling, RopeScalingConfig()
    name, kind = next((name, kind) for name, kind in _KINDS.items() if kind.ours == scaling.kind)
    stretch = {theirs: getattr(scaling, ours) for theirs, ours in kind.needed.items()}
    optional = {theirs: (getattr(scaling, ours), getattr(plain, ours)) for theirs, ours in kind.optional.items()}
    stretch |= {theirs: value for theirs, (value, default) in optional.items() if value != default}
    stretch = {"rope_type": name} | stretch
    return {
        # Dynamic frequencies follow from it.
        "max_position_embeddings": scaling.original_max_seq_len if scaling.kind == "dynamic" else config.max_seq_len,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if name == "default" else stretch,
        "rope_parameters": stretch | {"rope_theta": config.rope_theta},
    }
