"""A verification as plain data, ready for JSON.

- `schema_version` (1), `llamajax`, `jax_version`, `run`; `mesh` and `verified_mesh` (sizes of the axes, as configured and on
  `num_devices` emulated devices), `parallel` (the forms), `changes` (settings that were scaled: `configured`, `verified`).
- `forms`: the run as it is trained and in each form that an `auto` may resolve to: `form`, `same_as` (another form that
  compiles to the same program, or null), `equal`, `largest_difference`. The other figures describe the first form that
  differs, or the run as it is trained; `form` names it.
- `equal`, `tolerance`, `largest_difference`; `seconds` that the verification took.
- `steps`: for each `step` the `tokens`, `loss` and `gradient_norm` of the mesh; `one_device`: the same on one device;
  `differences`: relative.
- `kinds` of arrays that were compared: `gradient`, moments (`first_moment`, `second_moment`), `weight`. `tensors`: `name`,
  `shape`, and for each kind that it has the largest relative difference over all steps and devices, in units of the largest
  entry on one device; `equal`. After a `first_difference`, later steps are left out, because all values that depend on it
  differ.
- `first_difference`: null, or the `step`, `kind`, `name` and `shape` of the first value that differs, and its `difference`;
  `clues` about its cause; `trials`: single changes (`key`, `value`) and whether they remove the difference (`cured`).

A difference is null where a number is not finite, or is not zero where one device has zeros.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import llamajax
from llamajax.config.file import config_to_dict
from llamajax.config.parallel import AXES
from llamajax.config.run import Config
from llamajax.verification.differences import (
    SCALARS,
    TOLERANCE,
    Difference,
    differences,
    first_difference,
    forward_order,
)
from llamajax.verification.reference_run import Side
from llamajax.verification.scaling import changes, configured_axes
from llamajax.verification.variants import Trial

SCHEMA_VERSION = 1


def form_figures(form: str, same_as: str | None, ours: Side, truth: Side) -> dict[str, Any]:
    """Returns a row of `forms`; see this module's docstring."""
    found = differences(ours, truth)
    return {
        "form": form,
        "same_as": same_as,
        "equal": not any(difference.differs for difference in found),
        "largest_difference": _finite(max(difference.relative for difference in found)),
    }


def figures(
    config: Config,
    verified: Config,
    forms: Sequence[Mapping[str, Any]],
    ours: Side,
    truth: Side,
    clues: Sequence[str],
    trials: Sequence[Trial],
    seconds: float,
) -> dict[str, Any]:
    """Returns all figures of a verification; see this module's docstring.

    Args:
        config: the run, in the forms that it is trained in.
        verified: the scaled-down run.
        forms: rows of `form_figures`.
        ours: the steps in the first form that differs, or in the first form.
        truth: the steps on one device.
        clues: clues about the first difference.
        trials: changes that were tried to remove it.
        seconds: time that the verification took.
    """
    found = differences(ours, truth)
    first = first_difference(ours, truth)
    until = [difference for difference in found if first is None or difference.step <= first.step]
    names = sorted({difference.name for difference in found if difference.name}, key=forward_order)
    return {
        "schema_version": SCHEMA_VERSION,
        "llamajax": llamajax.__version__,
        "jax_version": jax.__version__,
        "run": Path(config.run_dir).name,
        "mesh": configured_axes(config),
        "verified_mesh": {axis: getattr(verified.mesh, axis) for axis in AXES},
        "num_devices": verified.mesh.num_cpu_devices,
        "parallel": config_to_dict(verified.parallel),
        "changes": {
            key: {"configured": before, "verified": after} for key, (before, after) in changes(config, verified).items()
        },
        "forms": list(forms),
        "form": next((row["form"] for row in forms if not row["equal"]), forms[0]["form"]),
        "equal": first is None,
        "tolerance": TOLERANCE,
        "largest_difference": _finite(max(difference.relative for difference in found)),
        "seconds": seconds,
        "steps": [_step(step, ours, truth, found) for step in range(1, len(ours.steps))],
        "kinds": list(map(_key, truth.steps[-1].arrays)),
        "tensors": [_tensor(name, [difference for difference in until if difference.name == name]) for name in names],
        "first_difference": first and _first(first),
        "clues": list(clues),
        "trials": [vars(trial) for trial in trials],
    }


def _step(step: int, ours: Side, truth: Side, found: Sequence[Difference]) -> dict[str, Any]:
    own, true = ours.steps[step].scalars, truth.steps[step].scalars
    relative = {d.kind: _finite(d.relative) for d in found if d.step == step and d.kind in SCALARS}
    return {
        "step": step,
        **{_key(kind): _finite(own[kind]) for kind in SCALARS},
        "one_device": {_key(kind): _finite(true[kind]) for kind in SCALARS},
        "differences": {_key(kind): value for kind, value in relative.items()},
    }


def _tensor(name: str, found: Sequence[Difference]) -> dict[str, Any]:
    largest: dict[str, float] = {}
    for difference in found:
        largest[difference.kind] = max(difference.relative, largest.get(difference.kind, 0.0))
    return {
        "name": name,
        "shape": list(found[0].shape),
        **{_key(kind): _finite(value) for kind, value in largest.items()},
        "equal": not any(difference.differs for difference in found),
    }


def _first(first: Difference) -> dict[str, Any]:
    return {
        "step": first.step,
        "kind": first.kind,
        "name": first.name,
        "shape": list(first.shape),
        "difference": _finite(first.relative),
    }


def _key(kind: str) -> str:
    return kind.replace(" ", "_")


def _finite(value: float) -> float | None:
    """Returns the value, or None for infinity and NaN, which JSON does not support."""
    return value if math.isfinite(value) else None
