"""The device mesh."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from llamajax.config.parallel import AXES, MeshConfig

_DRIVER = Path("/proc/driver/nvidia")


def _is_news(record: logging.LogRecord) -> bool:
    return _DRIVER.exists() or not (record.exc_info and "plugin" in record.getMessage())


# Plans use jax's GPU plugin on any machine; without a GPU it logs a stack trace.
logging.getLogger("jax._src.xla_bridge").addFilter(_is_news)


def without_stages(mesh: Mesh, axis: str) -> Mesh:
    """Returns a mesh over the same devices without stages: `axis` is longer by as many times."""
    sizes, place = dict(mesh.shape), AXES.index(axis)
    devices = np.moveaxis(mesh.devices, AXES.index("pipeline"), place - 1)
    sizes |= {axis: sizes[axis] * sizes["pipeline"], "pipeline": 1}
    return Mesh(devices.reshape(tuple(sizes.values())), AXES, axis_types=mesh.axis_types)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh over all devices of all processes, or over `devices`; every axis is Explicit.

    Raises:
        ConfigError: the axis sizes do not multiply to the number of devices.
    """
    # Not jax.make_mesh: it refuses GPUs of several nodes, which XLA treats as separate slices. Node after node in the order
    # of the ids, so that the inner axes stay within a node.
    ordered = sorted(jax.devices() if devices is None else devices, key=lambda d: (getattr(d, "slice_index", 0), d.id))
    shape = tuple(config.axis_sizes(len(ordered)).values())
    return Mesh(np.array(ordered).reshape(shape), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
