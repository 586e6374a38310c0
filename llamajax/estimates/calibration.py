"""Measured constants of the cost model, in a file that `hardware.calibration` names."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from llamajax.config.file import read_config
from llamajax.config.machine import HardwareConfig, PlannedGpu
from llamajax.config.rules import Bound, NonNegativeFloat, PositiveFloat, PositiveShare, Section, Settings
from llamajax.config.shipped import find_file
from llamajax.config.yaml_text import Problems

KernelSeconds = Annotated[float, Bound(lambda value: 0 < value < 1e-3, "must be above 0 and below 1e-3; it is in seconds")]


@dataclass(frozen=True, kw_only=True)
class Constants(Section):
    """Measured values for `llamajax.estimates.machine.Calibration`, under the same names; unset: not measured."""

    matmul_efficiency: PositiveShare | None = None
    attention_efficiency: PositiveShare | None = None
    attention_backward_efficiency: PositiveShare | None = None
    attention_64_efficiency: PositiveShare | None = None
    attention_64_backward_efficiency: PositiveShare | None = None
    pallas_efficiency: PositiveShare | None = None
    pallas_backward_efficiency: PositiveShare | None = None
    tokamax_efficiency: PositiveShare | None = None
    tokamax_backward_efficiency: PositiveShare | None = None
    grouped_efficiency: PositiveShare | None = None
    memory_efficiency: PositiveShare | None = None
    host_bandwidth: PositiveFloat | None = None
    node_link_efficiency: PositiveShare | None = None
    kernel_s: KernelSeconds | None = None
    float8_share: PositiveShare | None = None
    matmul_start_s: NonNegativeFloat | None = None
    gpu_link_efficiency: PositiveShare | None = None
    compute_slowdown: NonNegativeFloat | None = None


@dataclass(frozen=True, kw_only=True)
class Versions(Section):
    """Versions of the programs that took the measurement."""

    llamajax: str
    python: str
    jax: str
    jaxlib: str
    platform: str
    """Version of the device's own libraries as jax reports it."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Section):
    """A training step that was measured together with the constants, and its predicted time."""

    name: str
    measured_s: PositiveFloat
    predicted_s: PositiveFloat


@dataclass(frozen=True, kw_only=True)
class MeasuredGrid(Section):
    """The rate of llamajax's own attention in a grid of few programs, as a share of its rate in a large grid."""

    name: str
    measured: PositiveFloat
    predicted: PositiveFloat
    """Share that the cost model predicts: `llamajax.planning.cost.attention.busy_share`."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Settings):
    """Contents of a file of measured constants, with the GPU, the date and the program of the measurement."""

    gpu: Literal["cpu", PlannedGpu]
    """Name as in `hardware.gpu`; `cpu`: a trial of the measuring program that no plan can use."""
    device: str
    """Device name as jax reports it."""
    date: str
    command: str
    commit: str
    versions: Versions
    constants: Constants = field(default_factory=Constants)
    runs: tuple[MeasuredRun, ...] = ()
    """Runs from which a plan with these constants reports its error; empty: the plan reports that its error is unknown."""
    small_grids: tuple[MeasuredGrid, ...] = ()
    """Measured shares for readers; plans use the predicted share."""


def read_measurement(hardware: HardwareConfig) -> Measurement | None:
    """Reads the file that `hardware.calibration` names; None: it names none.

    Raises:
        ConfigError: the file cannot be read, breaks a rule, or belongs to another GPU than `hardware.gpu`: one line
            `file:line: key: rule; remedy` per mistake.
    """
    if hardware.calibration is None:
        return None

    def check(measurement: Measurement) -> list[str]:
        if measurement.gpu == hardware.gpu:
            return []
        remedy = "name a file for that GPU, or leave hardware.calibration out"
        return [f"gpu: measured on {measurement.gpu}, but hardware.gpu is {hardware.gpu}; {remedy}"]

    return read_config(Measurement, find_file(hardware.calibration), (), Problems(), check)
