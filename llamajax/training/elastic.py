"""Continues a run on a different number of devices: same global batch and rows, different gradient accumulation."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from llamajax.checkpoint.meta import newest_meta
from llamajax.config.keys import with_values
from llamajax.config.parallel import AXES, axes_of, num_parts
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.processes.peers import of_first

_TOLD = 6  # numbers of suitable devices that a message names


@dataclass(frozen=True)
class Fitted:
    """A run fitted to the available devices."""

    config: Config
    """Settings of the run, with `train.grad_accum_steps` for this mesh; `hardware` names the number of available GPUs."""
    began: dict[str, Any]
    """Initial `mesh` (axis to size) and `grad_accum_steps`, or their values when the user last changed the latter."""
    line: str | None
    """Differences from the beginning, for people, or None."""


def fit(config: Config, run_dir: Path) -> Fitted:
    """Chooses gradient accumulation again if the run in `run_dir` continues on another mesh. All processes call this
    together.

    Each device then holds at most as many rows per micro-batch as when the run started, in as few micro-batches as possible.
    On the initial mesh the result is the configuration's own value. A user who changes `train.grad_accum_steps` gets the
    value that they ask for, and so does a new run.

    Args:
        config: configuration of the run, as the user wrote it.
        run_dir: directory of the run, which may not exist yet.

    Raises:
        ConfigError: the rows cannot be divided over these devices; the message names numbers of devices that work.
        OSError: the disk fails, so it is unknown whether the run is new.
    """
    meta = of_first(newest_meta(run_dir) if jax.process_index() == 0 else None)
    num_devices, asked = jax.device_count(), config.train.grad_accum_steps
    before = {} if meta is None else meta["config"].get("train", {})
    of_batch = ("grad_accum_steps", "global_batch_size")
    if meta is None or any(before.get(name) != getattr(config.train, name) for name in of_batch):
        return Fitted(config, {"mesh": config.mesh.axis_sizes(num_devices), "grad_accum_steps": asked}, None)
    began = meta.get("began", {"mesh": meta["mesh"], "grad_accum_steps": asked})
    began["mesh"] = dict.fromkeys(AXES, 1) | began["mesh"]  # a checkpoint of an older version names fewer axes
    try:
        fitted = for_devices(config, num_devices, began)
    except ConfigError as error:
        others = _numbers_that_do(config, num_devices, began)
        raise ConfigError(
            f"{str(error).splitlines()[0]}; the run in {run_dir} began on {_num_devices(began)} devices and cannot continue"
            f" on {num_devices}; continue on {others or 'another mesh'}"
        ) from error
    return Fitted(fitted, began, _line(fitted, num_devices, began))


def for_devices(config: Config, num_devices: int, began: Mapping[str, Any]) -> Config:
    """Returns the configuration with which the run continues on this number of devices.

    Args:
        config: configuration of the run, as the user wrote it.
        num_devices: number of devices over all processes.
        began: initial `mesh` and `grad_accum_steps`.

    Raises:
        ConfigError: the model or the rows cannot be divided over the devices; one `key: rule` line per problem.
    """
    mesh, train = config.mesh.axis_sizes(num_devices), config.train
    if mesh == began["mesh"]:
        return config
    shards, rows = num_parts("micro_batch", mesh), train.smallest_batch
    if rows % shards:
        over = " x ".join(f"{axis}({mesh[axis]})" for axis in axes_of("micro_batch") if mesh[axis] > 1)
        key = "global_batch_size" if rows == train.global_batch_size else "global_batch_ramp"
        raise ConfigError(f"train.{key}: {rows} rows cannot be divided over {over}")
    most, per_device = rows_per_device(train.global_batch_size, began), rows // shards
    parts = next(n for n in range(1, per_device + 1) if per_device % n == 0 and per_device // n <= most)
    steps = parts * (train.global_batch_size // rows)
    changes: dict[str, Any] = {"train.grad_accum_steps": steps}
    if steps == 1:
        changes["train.grad_accum_dtype"] = "float32"  # the only dtype allowed without accumulation
    if config.hardware.gpu != "none" and not config.hardware.domains:  # forms are chosen for this hardware
        per_node = math.gcd(num_devices, config.hardware.gpus_per_node)
        changes |= {"hardware.gpus_per_node": per_node, "hardware.nodes": num_devices // per_node}
    fitted = with_values(config, changes, Config)  # rules between sections also check other numbers of devices
    if problems := fitted.undivided(mesh):
        raise ConfigError("\n".join(problems))
    return fitted


def rows_per_device(global_batch_size: int, began: Mapping[str, Any]) -> int:
    """Returns the number of rows per micro-batch that a device held when the run started."""
    return global_batch_size // began["grad_accum_steps"] // num_parts("micro_batch", began["mesh"])


def _numbers_that_do(config: Config, num_devices: int, began: Mapping[str, Any]) -> str:
    """Returns the nearest numbers of devices on which the run can continue, for people."""

    def does(number: int) -> bool:
        try:
            for_devices(config, number, began)
        except ConfigError:
            return False
        return True

    fewer = itertools.islice(filter(does, range(num_devices - 1, 0, -1)), _TOLD // 2)
    more = itertools.islice(filter(does, range(num_devices + 1, 2 * max(num_devices, _num_devices(began)) + 1)), _TOLD // 2)
    *all_but_last, last = ["", *map(str, sorted([*fewer, *more]))]
    return f"{', '.join(all_but_last[1:])} or {last}" if all_but_last[1:] else last


def _line(config: Config, num_devices: int, began: Mapping[str, Any]) -> str | None:
    train, mesh, before = config.train, config.mesh.axis_sizes(num_devices), _num_devices(began)
    if num_devices == before and train.grad_accum_steps == began["grad_accum_steps"]:
        return None
    devices = "1 device" if num_devices == 1 else f"{num_devices} devices"
    instead = f"{devices} instead of {before}" if num_devices != before else "a mesh other than the initial one"
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "of one device"
    now, then = train.grad_accum_steps, began["grad_accum_steps"]
    steps = f"{now} accumulation step{'s' if now > 1 else ''} of {train.global_batch_size // now} rows"
    same = "same global batch and rows"
    if now != then and train.grad_accum_dtype != "float32":
        same += f", but different rounding: train.grad_accum_dtype={train.grad_accum_dtype}"
    experts = config.model.experts
    if now != then and experts.counts_micro_batches:
        same += ", but a balance loss over other micro-batches: model.experts.balance_over=batch"
    return f"{instead}: mesh {axes}, {steps} (was {then} of {train.global_batch_size // then}), {same}"


def _num_devices(began: Mapping[str, Any]) -> int:
    return math.prod(began["mesh"].values())
