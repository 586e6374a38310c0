"""Domains of unlike networks in one cluster."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llamajax.config.rules import PositiveFloatOrUnset, PositiveInt, Section

Network = Literal["infiniband", "roce", "ethernet"]


@dataclass(frozen=True, kw_only=True)
class DomainConfig(Section):
    """Nodes joined by one network."""

    name: str
    """Name of the domain. Every host sets `LLAMAJAX_DOMAIN` to the name of its domain."""
    network: Network
    """Kind of the network. NICs of two kinds reach each other only through sockets."""
    nodes: PositiveInt
    """Number of nodes."""
    node_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one node and the others of the domain; unset: `hardware.node_bandwidth`."""
    env: tuple[str, ...] = ()
    """NCCL's settings on the hosts of the domain, each `NCCL_NAME=VALUE`; for example [NCCL_IB_HCA=mlx5,
    NCCL_IB_GID_INDEX=3]. Variables that a host already has are unchanged. The settings apply to all communicators of a
    process, also to those that cross domains."""

    def broken_rules(self) -> Iterator[str]:
        if not re.fullmatch(r"[\w.-]+", self.name):
            yield f"name: {self.name!r} must be letters, digits, `_`, `-` and `.`; choose another name"
        for setting in self.env:
            if not re.fullmatch(r"NCCL_[A-Z0-9_]+=.+", setting):
                yield f"env: {setting!r} must be written NCCL_NAME=VALUE"
        names = [setting.partition("=")[0] for setting in self.env]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield f"env: {name} is set twice; remove one of them"
