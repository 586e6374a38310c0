"""XLA's notations for which devices communicate with each other."""

import functools
import itertools
import math
import re

import numpy as np


@functools.lru_cache(maxsize=1000)
def replica_groups(text: str, num_devices: int) -> np.ndarray:
    """The devices of each group, int [groups, devices per group], of an attribute's text; `{}` is one group of all.

    Raises:
        ValueError: the notation is unknown.
    """
    if text == "{}":
        return np.arange(num_devices)[None, :]
    if text.startswith("{"):
        return np.array([[int(device) for device in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)])
    if text.startswith("["):
        return _iota(text)
    if text.startswith("mesh["):
        return _mesh_groups(text)
    raise ValueError(f"unknown notation of replica groups: {text[:80]}")


def _iota(text: str) -> np.ndarray:
    """`[4,2]<=[2,4]T(1,0)`: counts the devices in a [2,4] grid, transposes it, reads it as [4,2]."""
    found = re.fullmatch(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text)
    if not found:
        raise ValueError(f"unknown notation of devices: {text[:80]}")
    dims, grid, permutation = ([int(number) for number in re.findall(r"\d+", part or "")] for part in found.groups())
    devices = np.arange(math.prod(dims)).reshape(grid or dims)
    return devices.transpose(permutation or range(devices.ndim)).reshape(dims)


def _mesh_groups(text: str) -> np.ndarray:
    """`mesh['data'=2,'fsdp'=8] {'fsdp'}`: devices in a grid, grouped along the named axes.

    A member may be a part of an axis: `'fsdp':(2)4` is the four-fold middle of `fsdp` inside of its outer two.
    """
    found = re.fullmatch(r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}", text)
    if not found:
        raise ValueError(f"unknown notation of replica groups: {text[:80]}")
    sizes = {name: int(size) for name, size in re.findall(r"([^,=]+)=(\d+)", found[1])}
    parts = [
        (name, int(outer or 1), int(size or sizes[name]))
        for name, outer, size in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?(?:,|$)", found[3])
    ]
    # Every axis is cut wherever one of its parts begins or ends; each piece is a dim of the grid.
    pieces: list[tuple[str, int]] = []
    dims: list[int] = []
    for name, size in sizes.items():
        ends = {end for part, outer, inner in parts if part == name for end in (outer, outer * inner)}
        cuts = sorted({1, size} | ends)
        pieces += [(name, cut) for cut in cuts[:-1]]
        dims += [high // low for low, high in itertools.pairwise(cuts)]
    grouped = [
        pieces.index(piece) for name, outer, size in parts for piece in pieces if _is_within(piece, name, outer, size)
    ]
    rest = [dim for dim in range(len(dims)) if dim not in grouped]
    devices = _device_ids(found[2], math.prod(dims)).reshape(dims)
    return devices.transpose(rest + grouped).reshape(-1, math.prod(dims[dim] for dim in grouped))


def _is_within(piece: tuple[str, int], name: str, outer: int, size: int) -> bool:
    return piece[0] == name and outer <= piece[1] < outer * size


def _device_ids(text: str | None, count: int) -> np.ndarray:
    if text is None:
        return np.arange(count)
    if text.startswith("["):
        return _iota(text).reshape(-1)
    return np.array([int(device) for device in re.findall(r"\d+", text)])
