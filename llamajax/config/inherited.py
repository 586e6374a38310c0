"""The settings of a model that a run leaves out: those of the weights that it starts from."""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from llamajax.config.hf_config import CONFIG, read_hf_config
from llamajax.config.json_file import read_json
from llamajax.config.model import ModelConfig
from llamajax.config.yaml_text import Node, Place, Problems
from llamajax.errors import ConfigError, show_path

OF_THE_RUN = ("param_dtype", "compute_dtype", "matmul_dtype", "float8_exempt", "attention_kernel", "remat")
"""Settings that say how a run computes; weights do not bring them along."""
_INHERITED = tuple(field.name for field in fields(ModelConfig) if field.name not in OF_THE_RUN)


def inherit(root: Node, problems: Problems) -> None:
    """Adds to `model` of a run what it leaves out, where `init_from` names weights on this machine.

    A run that was begun keeps the model of its checkpoints, so it goes on where `init_from` is gone.

    Args:
        root: the settings of the run; changed in place.
        problems: what is wrong already.

    Raises:
        ConfigError: the weights have a config.json that cannot be read; everything in `problems`, too.
    """
    named = _text(root, "init_from")
    if not named or not isinstance(root.content, dict):
        return
    of_weights = root.content["init_from"].place
    model = root.content.setdefault("model", Node({}, of_weights))
    if not isinstance(model.content, dict):
        return
    try:
        path, values = _described(named, _text(root, "run_dir"))
    except ConfigError as error:
        problems.add(of_weights, str(error), "init_from")
        raise problems.error() from error  # or all that it would have given were missing, too
    place = Place(of_weights.order, show_path(str(path)))
    for name in _INHERITED:
        if name in values and name not in model.content:
            model.content[name] = _node(values[name], place)


def _text(root: Node, key: str) -> str | None:
    node = root.content.get(key) if isinstance(root.content, dict) else None
    return node.content if node is not None and isinstance(node.content, str) and not node.is_null() else None


def _described(init_from: str, run_dir: str | None) -> tuple[Path, dict[str, Any]]:
    """The file that describes the model, and the model's settings in it; none if there is no such file.

    Raises:
        ConfigError: a config.json is damaged, or of a model that is none of ours.
    """
    weights = Path(init_from).expanduser()
    runs = [weights] if run_dir is None else [Path(run_dir).expanduser(), weights]
    for meta in (meta for run in runs for meta in _metas(run)):
        try:
            return meta, dict(json.loads(meta.read_bytes())["config"]["model"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # a damaged step is passed over here and named when the run opens it
    path = weights / CONFIG
    if not path.is_file():
        return path, {}
    return path, asdict(read_hf_config(read_json(path), path, "float32")[0])


def _metas(path: Path) -> Iterator[Path]:
    """What steps say about themselves: of a run the newest first, or of a step alone."""
    is_step = path.parent.name == "checkpoints" and path.name.isdecimal()
    steps = [path] if is_step else [step for step in path.glob("checkpoints/*") if step.name.isdecimal()]
    return (step / "meta.json" for step in sorted(steps, key=lambda step: int(step.name), reverse=True))


def _node(value: Any, place: Place) -> Node:
    """A value as somebody would have written it."""
    if isinstance(value, dict):
        return Node({str(name): _node(inner, place) for name, inner in value.items()}, place)
    if isinstance(value, list | tuple):
        return Node([_node(item, place) for item in value], place)
    return Node(value if isinstance(value, str) else json.dumps(value), place, "argument")
