"""Settings of the model that a run leaves out, taken from the weights that it starts from."""

import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from llamajax import disk
from llamajax.config.experts import ExpertsConfig
from llamajax.config.hf_config import CONFIG, read_hf_config
from llamajax.config.hub import find_config, hub_model, is_on_hub, is_pin_of
from llamajax.config.json_file import read_json
from llamajax.config.model import ModelConfig
from llamajax.config.peft import base_of, is_peft
from llamajax.config.yaml_text import Node, Place, Problems
from llamajax.errors import ConfigError, DiskError, show_path

T = TypeVar("T")

OF_THE_RUN = ("param_dtype", "compute_dtype", "matmul_dtype", "float8_exempt", "attention_kernel", "remat")
"""Settings that say how a run computes; they do not come from the weights."""
INHERITED = tuple(field.name for field in fields(ModelConfig) if field.name not in (*OF_THE_RUN, "preset"))
"""Settings that describe the model."""

EXPERTS = tuple(field.name for field in fields(ExpertsConfig))
"""Settings of experts, of which a run may set some and leave out others."""


def inherit(root: Node, problems: Problems) -> tuple[Place, str] | None:
    """Adds the settings that `model` of a run leaves out, if `init_from` names weights.

    A run that has started keeps the model of its checkpoints, so it resumes even if `init_from` no longer exists, and the
    commit of a model on the Hub, even if the branch that `init_from` names has moved. Of a model on the Hub, only its
    config.json is fetched, and only if `model` leaves something out.

    Args:
        root: the settings of the run; changed in place.
        problems: mistakes found before.

    Returns:
        If no weights are found: the place and the message that replace those for the missing settings.

    Raises:
        ConfigError: the weights have a config.json that cannot be read; everything in `problems`, too.
        DiskError: the disk fails, which may pass.
    """
    named, run_dir = _text(root, "init_from"), _text(root, "run_dir")
    if not named or not isinstance(root.content, dict):
        return None
    of_weights = root.content["init_from"]
    place = of_weights.place
    model = root.content.setdefault("model", Node({}, place))
    if model.is_null():  # its lines are commented out
        model.content = {}
    if not isinstance(model.content, dict):
        return None
    begun = None if run_dir is None else _of_checkpoints(Path(os.path.expanduser(run_dir)))
    if begun is not None and is_pin_of(pinned := str(begun[1].get("init_from")), named):
        of_weights.content = pinned
    own = model.content.get("experts")
    of_experts = own.content if own is not None and isinstance(own.content, dict) else None
    if all(name in model.content for name in INHERITED) and (
        of_experts is None or all(name in of_experts for name in EXPERTS)
    ):
        return None
    weights = Path(os.path.expanduser(named))
    if begun is None and is_on_hub(named):
        try:
            weights = find_config(hub_model(named)).parent
        except (ConfigError, DiskError) as error:
            return place, str(error)
    try:
        path, values = (begun[0], begun[1]["model"]) if begun is not None else _described(weights)
    except ConfigError as error:
        problems.add(place, str(error), "init_from")
        raise problems.error() from error  # or everything that it provides would be reported as missing
    above = Place(place.order, show_path(str(path)))
    for name in INHERITED:
        if name in values and name not in model.content:
            model.content[name] = node_of(values[name], above)
    if of_experts is not None:
        for name, value in values.get("experts", {}).items():
            of_experts.setdefault(name, node_of(value, above))
    return None if values else (place, _none_at(weights))


def _text(root: Node, key: str) -> str | None:
    node = root.content.get(key) if isinstance(root.content, dict) else None
    return node.content if node is not None and isinstance(node.content, str) and not node.is_null() else None


def _described(weights: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file that describes the model, and the model's settings in it; no settings if no such file exists.

    Raises:
        ConfigError: a config.json is damaged, or describes a model that is not supported.
        DiskError: the disk fails, which may pass.
    """
    if is_peft(weights):  # adapters have the settings of their base
        named = base_of(weights)
        weights = find_config(hub_model(named)).parent if is_on_hub(named) else Path(os.path.expanduser(named))
    if (found := _of_checkpoints(weights)) is not None:
        return found[0], found[1]["model"]
    path = weights / CONFIG
    status = _found(lambda: os.stat(path), path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return path, {}
    return path, asdict(read_hf_config(read_json(path), path, "float32")[0])


def _of_checkpoints(run: Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the metadata file of a run's newest checkpoint, and the settings in it; None if no checkpoint has any.

    Raises:
        DiskError: the disk fails, which may pass.
    """
    for meta in (step / "meta.json" for step in _steps(run)):
        try:
            settings = json.loads(_found(meta.read_bytes, meta) or b"")["config"]
            return meta, {**settings, "model": dict(settings["model"])}
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # a damaged step is skipped here and reported when the run opens it
    return None


def _steps(path: Path) -> list[Path]:
    """Returns the checkpoints of a run, the newest first, or `path` alone if it is a checkpoint."""
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return [path]
    folder = path / "checkpoints"
    names = _found(lambda: os.listdir(folder), folder) or ()
    return [folder / name for name in sorted(filter(str.isdecimal, names), key=int, reverse=True)]


def _found(look: Callable[[], T], path: Path) -> T | None:
    """Returns the result of `look`; None if the path is empty, or this user may not read it.

    Raises:
        DiskError: the disk fails, which may pass.
    """
    try:
        return disk.read_again(look)
    except ValueError:  # a path that contains NUL
        return None
    except OSError as error:
        if disk.may_pass(error):
            raise disk.cannot_read(error, path, "") from error
        return None


def _none_at(weights: Path) -> str:
    """Returns why no weights were found at a path, with a remedy."""
    shown, remedy = show_path(str(weights)), "correct the path, or write model out"
    if shown.startswith("~"):
        return f"{shown} is in no known home directory; {remedy}"
    if steps := _steps(weights):
        meta = steps[0] / "meta.json"
        return f"{show_path(str(meta))} is missing or damaged; name another checkpoint, or write model out"
    for look, name in ((os.stat, CONFIG), (os.listdir, "checkpoints")):
        try:
            look(weights / name)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue
        except OSError as error:
            return f"{shown} cannot be read: {error.strerror}; {remedy}"
    return f"no run and no {CONFIG} in {shown}; {remedy}"


def node_of(value: Any, place: Place) -> Node:
    """Returns a value as if somebody had written it."""
    if isinstance(value, dict):
        return Node({str(name): node_of(inner, place) for name, inner in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([node_of(item, place) for item in value], place)
    return Node(value if isinstance(value, str) else json.dumps(value), place, "argument")
