"""Completes a configuration: the directory of the run, and the settings of its model from a preset or from its weights."""

import os
import re
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from llamajax.config.bases import merged, read_file
from llamajax.config.inherited import INHERITED, inherit, node_of
from llamajax.config.model import ModelConfig, Preset
from llamajax.config.scalars import read_scalar
from llamajax.config.shipped import FOLDER, names
from llamajax.config.yaml_text import Node, Place, Problems
from llamajax.errors import ConfigError, show_path


def complete(root: Node, path: str | None, problems: Problems) -> tuple[Place, str] | None:
    """Adds to the settings of a run what they leave out: its directory, and the settings of its model.

    Args:
        root: the settings of the run; changed in place.
        path: the configuration file; None: there is none.
        problems: mistakes found before.

    Returns:
        See `inherit`.

    Raises:
        ConfigError: the preset does not exist, or see `inherit`; everything in `problems`, too.
        DiskError: see `inherit`.
    """
    stem, suffix = os.path.splitext(os.path.basename(path or ""))
    is_file = suffix in (".yaml", ".yml") or stem in names()
    if is_file and isinstance(root.content, dict) and "run_dir" not in root.content:
        root.content["run_dir"] = Node(os.path.join("runs", stem), Place(0, show_path(path or "")), "quoted")
    add_head(root)
    add_preset(root, problems)
    return inherit(root, problems)


def add_head(root: Node) -> None:
    """Sets the head that `objective.kind: reward` needs if `model` names none; changes `root` in place."""
    settings = root.content
    if not isinstance(settings, dict) or settings.keys().isdisjoint(("model", "init_from")):
        return
    objective = settings.get("objective")
    kind = objective.content.get("kind") if objective is not None and isinstance(objective.content, dict) else None
    if kind is None or kind.content != "reward":
        return
    model = settings.setdefault("model", Node({}, kind.place))
    if model.is_null():  # its lines are commented out
        model.content = {}
    if isinstance(model.content, dict):
        model.content.setdefault("head", Node("score", kind.place))


def preset_file(name: str) -> Path:
    """Returns the file of a preset in `configs/models`: the one called by the same letters and digits."""
    return next(path for path in (FOLDER / "models").glob("*.yaml") if _letters(path.stem) == _letters(name))


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name)


def add_preset(root: Node, problems: Problems) -> None:
    """Replaces `preset` in `model` by all settings that describe the model, under those that `model` sets.

    Args:
        root: the settings of the run; changed in place.
        problems: mistakes found before.

    Raises:
        ConfigError: no preset has this name; everything in `problems`, too.
    """
    settings = root.content
    model = settings.get("model") if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or model is None or not isinstance(model.content, dict):
        return
    named = model.content.pop("preset", None)
    if named is None or named.is_null():
        return
    try:
        name = read_scalar(Preset, named)
    except ConfigError as error:
        problems.add(named.place, str(error), "model.preset")
        raise problems.error() from error  # or everything that it provides would be reported as missing
    preset = read_file(str(preset_file(name)), problems).content
    assert isinstance(preset, dict)
    described = Node({key: node_of(value, named.place) for key, value in _defaults().items()}, named.place)
    settings["model"] = merged(merged(described, preset["model"]), model)


def _defaults() -> dict[str, Any]:
    """Returns the defaults of the settings that describe a model; the sizes have none."""
    of_model = [field for field in fields(ModelConfig) if field.name in INHERITED]
    values = {field.name: field.default for field in of_model if field.default is not MISSING}
    sections = {field.name: asdict(field.default_factory()) for field in of_model if field.default_factory is not MISSING}
    return values | sections
