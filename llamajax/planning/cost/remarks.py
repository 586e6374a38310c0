"""Remarks of a plan on figures of its GPUs that are assumed, not measured."""

from llamajax.config.run import Config
from llamajax.estimates.machine import planned_machine
from llamajax.estimates.rollouts import cache_bytes, held_reference_bytes
from llamajax.planning.cost.accuracy import accuracy

_NETWORK = "a network's share of its line rate (assumed as on H100)"
_OF_CARDS = f"attention's share of the peak, and how much collectives slow kernels down (assumed as on A100); {_NETWORK}"
NOT_KNOWN = {
    "B200": "NVLink's share of its peak, and attention's backward pass (assumed as on H100)",
    "RTX-4090": _OF_CARDS,
    "RTX-5090": f"{_OF_CARDS}; products' share of the peak (assumed as on RTX-4090)",
    "L40S": f"attention's share under its power limit (assumed as half of A100's share); {_NETWORK}",
}
"""Constants that nobody has published, by `Gpu.family`."""

NVL72 = 72
"""GPUs that NVLink connects in a rack of GB200."""


def remarks(config: Config) -> list[str]:
    """Returns the assumptions of a plan for such GPUs, one line each."""
    hardware, machine = config.hardware, planned_machine(config)
    found = []
    if machine.gpu.family in NOT_KNOWN and hardware.calibration is None:
        family = machine.gpu.family
        products = "" if accuracy(hardware) else f"; products' share of the peak (assumed as on {family})"
        found.append(f"unknown for {machine.gpu.name}: {NOT_KNOWN[family]}{products}")
    if config.model.experts.enabled and machine.measured.grouped_efficiency is None:
        found.append(
            f"products with experts' matrices are assumed to reach {machine.calibration.grouped_efficiency:.0%} of the peak;"
            f" nobody has measured them. The busiest GPU gets {hardware.expert_imbalance:g} times the mean number of tokens"
            " (hardware.expert_imbalance)"
        )
    if machine.gpu.link != "NVLink" and hardware.gpus_per_node > 1:
        found.append(
            f"the GPUs of a node are connected by {machine.gpu.link}, {machine.gpu.gpu_bandwidth / 1e9:g} GB/s each way, of"
            f" which NCCL is assumed to reach {machine.calibration.gpu_link_efficiency:.0%}: boards with fewer lanes are"
            " slower; measure with nccl-tests and set hardware.gpu_bandwidth"
        )
    if hardware.gpu == "gb200" and hardware.nodes > 1 and hardware.gpus_per_node < NVL72:
        found.append(f"NVLink connects {NVL72} GB200 of a rack, but hardware.gpus_per_node is {hardware.gpus_per_node}")
    if len(kinds := dict.fromkeys(domain.network for domain in hardware.domains)) > 1:
        found.append(
            f"NCCL connects {' and '.join(kinds)} only through sockets, and XLA offers no such choice for some groups only:"
            " see docs/how-to/unequal-networks.md"
        )
    if config.objective.is_on_policy:
        axes = config.mesh.axis_sizes(hardware.num_devices)
        caches, held = cache_bytes(config, axes) / 2**30, held_reference_bytes(config, axes) / 2**30
        found.append(
            "the step that trains is planned; the time to write and reward completions is not. Between steps, their keys and"
            f" values take {caches:,.1f} GiB per GPU where the step's activations are"
            + (f"; the reference takes {held:,.1f} GiB, counted with the parameters" if held else "")
        )
    return found
