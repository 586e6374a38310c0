"""The device mesh."""

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from llamajax.config.parallel import AXES, MeshConfig
from llamajax.errors import EnvironmentMismatchError

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


def order_of_devices(devices: Sequence[Any], domains: Sequence[int] = ()) -> list[Any]:
    """Returns the devices in the order of the mesh: domain after domain, node after node, so that inner axes stay within
    both.

    Args:
        devices: devices of all processes, in any order.
        domains: index of the domain of every process, by rank; empty: all are in one domain.
    """

    def place(device: Any) -> tuple[int, int, int]:
        return domains[device.process_index] if domains else 0, getattr(device, "slice_index", 0), device.id

    return sorted(devices, key=place)


def groups_across_domains(domains: Sequence[int], sizes: Mapping[str, int], axes: Collection[str]) -> int:
    """Returns the number of groups along `axes` with devices of several domains.

    Args:
        domains: index of the domain of every device, in the order of the mesh.
        sizes: sizes of the mesh axes, outer to inner.
        axes: axes along which the devices of a group differ.
    """
    inner = [place for place, axis in enumerate(sizes) if axis in axes]
    by_axis = np.moveaxis(np.array(domains).reshape(list(sizes.values())), inner, range(-len(inner), 0))
    groups = by_axis.reshape(-1, int(np.prod([size for axis, size in sizes.items() if axis in axes])))
    return int((groups != groups[:, :1]).any(axis=1).sum())


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None, domains: Sequence[int] = ()) -> Mesh:
    """Returns the mesh over all devices of all processes, or over `devices`; every axis is Explicit.

    Args:
        config: sizes of the axes.
        devices: devices to use; None: all.
        domains: see `order_of_devices`.

    Raises:
        ConfigError: the axis sizes do not multiply to the number of devices.
        EnvironmentMismatchError: a domain's devices are not a whole number of stages.
    """
    # Not jax.make_mesh: it refuses GPUs of several nodes, which XLA treats as separate slices.
    ordered = order_of_devices(jax.devices() if devices is None else devices, domains)
    sizes = config.axis_sizes(len(ordered))
    if domains:
        of_devices = [domains[device.process_index] for device in ordered]
        if groups_across_domains(of_devices, sizes, [axis for axis in AXES if axis != "pipeline"]):
            counts = " and ".join(str(len(list(of_domain))) for _, of_domain in itertools.groupby(of_devices))
            raise EnvironmentMismatchError(
                f"hardware.domains: {counts} devices are not whole numbers of stages of {len(ordered) // sizes['pipeline']}"
                f" devices, and a stage must be within one domain; choose another mesh.pipeline, or other hosts"
            )
    return Mesh(np.array(ordered).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
