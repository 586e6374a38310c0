"""The speed that each domain's network sustains, by the cost model, and the layers in proportion to it."""

import dataclasses
import itertools
from dataclasses import dataclass

from llamajax.config.run import Config
from llamajax.estimates.formulas import mesh_sizes
from llamajax.estimates.machine import planned_machine
from llamajax.estimates.partition import partition
from llamajax.planning.cost.attention import scores_of_calls
from llamajax.planning.cost.experts import expert_loads
from llamajax.planning.cost.replay import replay
from llamajax.planning.plan import Schedule


@dataclass(frozen=True, kw_only=True)
class DomainSpeed:
    """Speed of the step if one domain's network joined the nodes of all domains."""

    name: str
    network: str
    nodes: int
    node_bandwidth: float
    """Bytes per second, each way, between one node and the others of the domain."""
    step_time_s: float
    layers: tuple[int, ...]
    """Layers of the domain's stages in proportion to the speeds of all domains."""


def speeds_of_domains(config: Config, schedule: Schedule) -> list[DomainSpeed]:
    """Returns the speed in every domain of `hardware.domains`, and the layers in proportion to it."""
    machine, hardware, run = planned_machine(config), config.hardware, schedule.step.run
    seconds = []
    for domain in machine.domains:
        alike = tuple(dataclasses.replace(other, node_bandwidth=domain.node_bandwidth) for other in machine.domains)
        with_its_network = dataclasses.replace(machine, domains=alike)
        scores, loads = scores_of_calls(run), expert_loads(config, run.mesh)
        seconds.append(replay(schedule.module, with_its_network, run.mesh, scores, loads).step_time_s)
    stages = [domain.nodes * mesh_sizes(config)["pipeline"] // hardware.nodes for domain in hardware.domains]
    speeds = [1 / own for own, count in zip(seconds, stages, strict=True) for _ in range(count)]
    layers = partition(config.model.num_layers, speeds) if speeds else []
    ends = list(itertools.accumulate(stages, initial=0))
    own_layers = [tuple(layers[first:end]) for first, end in itertools.pairwise(ends)]
    return [
        DomainSpeed(
            name=named.name,
            network=named.network,
            nodes=named.nodes,
            node_bandwidth=domain.node_bandwidth,
            step_time_s=own_s,
            layers=own,
        )
        for named, domain, own_s, own in zip(hardware.domains, machine.domains, seconds, own_layers, strict=True)
    ]
