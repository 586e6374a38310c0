"""The cost of experts: the rows that a device multiplies by its experts' matrices, and the time of the kernels that do."""

from collections.abc import Mapping
from dataclasses import dataclass

from llamajax.config.run import Config
from llamajax.estimates.experts import Dispatch
from llamajax.estimates.machine import Machine

KERNELS = ("grouped_rows", "grouped_rows_gated", "grouped_rows_gradient", "grouped_weights")
"""Names of the kernels of `llamajax.kernels.grouped_pallas` and `grouped_gated`: rows times matrices, two of which apply the
activation or its derivative, and the matrices' gradients."""
FURTHER_ROUNDS = "further_rounds"
"""Scope of the loop over rounds beyond the first."""
_WASTE = dict.fromkeys(KERNELS, 127) | {"grouped_weights": 63}
"""Rows that a kernel computes in vain for each expert with rows, on average: its tiles have 128 rows, or 64, and an expert's
rows may begin and end within a tile."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Rows of a round over the places that it has, in each round of a layer."""

    mean: tuple[float, ...]
    """Loads of all devices with equally loaded experts; zeros in rounds that these do not need."""
    busiest: tuple[float, ...]
    """Loads of the device with `hardware.expert_imbalance` times the mean, which all devices wait for."""
    header: float
    """Rows of a block's header over all rows of the block."""

    @property
    def further_rounds(self) -> int:
        return len(self.busiest) - 1

    def filled(self, *, is_further: bool) -> tuple[float, float]:
        """Returns the shares of blocks that are filled, headers included, with the loads of `of`."""
        mean, busiest = self.of(is_further=is_further)
        return self.header + (1 - self.header) * mean, self.header + (1 - self.header) * busiest

    def of(self, *, is_further: bool) -> tuple[float, float]:
        """Returns mean and busiest load of the first round, or averaged over the further ones."""
        if not is_further:
            return self.mean[0], self.busiest[0]
        count = max(1, self.further_rounds)
        return sum(self.mean[1:]) / count, sum(self.busiest[1:]) / count


def expert_loads(config: Config, mesh: Mapping[str, int]) -> Loads | None:
    """Returns the loads of a run on the cluster of its `hardware`; None: it has no experts."""
    if not config.model.experts.enabled:
        return None
    way = Dispatch.of(config, mesh)
    busiest, mean = (
        [rows / way.places for rows in way.loads(imbalance)] for imbalance in (config.hardware.expert_imbalance, 1.0)
    )
    header = way.header_rows / way.block_rows
    return Loads(mean=(*mean, *[0.0] * (len(busiest) - len(mean))), busiest=tuple(busiest), header=header)


def grouped_seconds(kernel: str, flops_per_row: int, rows: float, experts: int, machine: Machine) -> float:
    """Returns the time in which a kernel of `KERNELS` multiplies rows that are spread evenly over experts: in whole tiles,
    at the rate of large groups."""
    computed = rows + _WASTE[kernel] * min(rows, experts)
    return flops_per_row * computed / (machine.gpu.peak_flops * machine.calibration.grouped_efficiency)
