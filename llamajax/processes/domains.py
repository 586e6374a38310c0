"""The domain of every host, from its environment, and NCCL's settings for it."""

import os
from collections.abc import Mapping

from llamajax.config.machine import HardwareConfig
from llamajax.errors import EnvironmentMismatchError
from llamajax.processes import peers

VARIABLE = "LLAMAJAX_DOMAIN"
"""Environment variable with the name of this host's domain."""


def domains_of_processes(hardware: HardwareConfig) -> list[int]:
    """Returns the index in `hardware.domains` of the domain of every process, by rank; empty if one process runs alone or
    the hardware has no domains. All processes call this together.

    Raises:
        EnvironmentMismatchError: a process is in no domain.
    """
    if not hardware.domains or peers.current() is None:
        return []
    names, indices = [domain.name for domain in hardware.domains], []
    for rank, name in enumerate(peers.everyones(os.environ.get(VARIABLE))):
        if name not in names:
            raise EnvironmentMismatchError(f"process {rank}: {_not_in(name, names)}")
        indices.append(names.index(name))
    return indices


def check_domain(hardware: HardwareConfig, environment: Mapping[str, str]) -> None:
    """Checks the domain of this host.

    Raises:
        EnvironmentMismatchError: it is in no domain.
    """
    names = [domain.name for domain in hardware.domains]
    if names and environment.get(VARIABLE) not in names:
        raise EnvironmentMismatchError(_not_in(environment.get(VARIABLE), names))


def _not_in(name: str | None, names: list[str]) -> str:
    found = "is not set" if name is None else f"is {name!r}"
    return f"{VARIABLE} {found}, but hardware.domains has {', '.join(names)}; set it to the domain of the host"


def nccl_settings(hardware: HardwareConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the domain of this host sets for NCCL, without those that the environment already has."""
    own = next((domain.env for domain in hardware.domains if domain.name == environment.get(VARIABLE)), ())
    pairs = (setting.partition("=") for setting in own)
    return {name: value for name, _, value in pairs if name not in environment}
