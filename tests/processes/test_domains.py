"""Tests of llamajax.processes.domains."""

from dataclasses import dataclass

import pytest

from llamajax.config.domains import DomainConfig
from llamajax.config.machine import HardwareConfig
from llamajax.errors import EnvironmentMismatchError
from llamajax.processes import domains, peers

HARDWARE = HardwareConfig(
    nodes=4,
    domains=(
        DomainConfig(name="ib", network="infiniband", nodes=2, env=("NCCL_IB_HCA=mlx5", "NCCL_SOCKET_IFNAME==bond0")),
        DomainConfig(name="roce", network="roce", nodes=2, env=("NCCL_IB_GID_INDEX=3",)),
    ),
)


@dataclass
class Everyone:
    """Other processes, with the names of their domains."""

    names: list[str | None]

    def everyones(self, value: str | None, about: str) -> list[str | None]:
        assert (value, about) == (self.names[0], "")
        return self.names


def exchanged(names: list[str | None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(peers, "_peers", Everyone(names))
    if names[0] is None:
        monkeypatch.delenv(domains.VARIABLE, raising=False)
    else:
        monkeypatch.setenv(domains.VARIABLE, names[0])
    return domains.domains_of_processes(HARDWARE)


def test_processes_exchange_their_domains(monkeypatch):
    assert exchanged(["roce", "ib", "ib", "roce"], monkeypatch) == [1, 0, 0, 1]
    assert domains.domains_of_processes(HardwareConfig()) == []


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([None, "ib"], "process 0: LLAMAJAX_DOMAIN is not set, but hardware.domains has ib, roce; set it"),
        (["ib", "RoCE"], "process 1: LLAMAJAX_DOMAIN is 'RoCE', but hardware.domains has ib, roce; set it"),
    ],
)
def test_a_process_in_no_domain_is_named_by_all(names, problem, monkeypatch):
    with pytest.raises(EnvironmentMismatchError) as error:
        exchanged(names, monkeypatch)
    assert str(error.value) == f"{problem} to the domain of the host"


def test_one_process_needs_no_domain(monkeypatch):
    monkeypatch.delenv(domains.VARIABLE, raising=False)
    assert domains.domains_of_processes(HARDWARE) == []


def test_nccl_has_the_settings_of_the_domain_and_what_the_host_sets_stays():
    assert domains.nccl_settings(HARDWARE, {"LLAMAJAX_DOMAIN": "ib"}) == {
        "NCCL_IB_HCA": "mlx5",
        "NCCL_SOCKET_IFNAME": "=bond0",
    }
    own = {"LLAMAJAX_DOMAIN": "ib", "NCCL_IB_HCA": "mlx4"}
    assert domains.nccl_settings(HARDWARE, own) == {"NCCL_SOCKET_IFNAME": "=bond0"}
    assert domains.nccl_settings(HARDWARE, {"LLAMAJAX_DOMAIN": "roce"}) == {"NCCL_IB_GID_INDEX": "3"}
    assert domains.nccl_settings(HARDWARE, {}) == {}
