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
    """Those of `llamajax.planning.cost.gpu.Calibration` that were measured, by the same names; unset: not measured."""

    matmul_efficiency: PositiveShare | None = None
    attention_efficiency: PositiveShare | None = None
    attention_backward_efficiency: PositiveShare | None = None
    attention_64_efficiency: PositiveShare | None = None
    attention_64_backward_efficiency: PositiveShare | None = None
    pallas_efficiency: PositiveShare | None = None
    pallas_backward_efficiency: PositiveShare | None = None
    tokamax_efficiency: PositiveShare | None = None
    tokamax_backward_efficiency: PositiveShare | None = None
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
    """The programs that measured."""

    llamajax: str
    python: str
    jax: str
    jaxlib: str
    platform: str
    """What jax tells of the device's own libraries."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Section):
    """A training step that was measured together with the constants, and what they predict of it."""

    name: str
    measured_s: PositiveFloat
    predicted_s: PositiveFloat


@dataclass(frozen=True, kw_only=True)
class MeasuredGrid(Section):
    """The rate of llamajax's own attention in a grid of few programs, as a share of its rate in a large grid."""

    name: str
    measured: PositiveFloat
    predicted: PositiveFloat
    """The share that the cost model predicts: `llamajax.planning.cost.attention.busy_share`."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Settings):
    """A file of measured constants: on what, when and by what they were measured."""

    gpu: Literal["cpu", PlannedGpu]
    """As `hardware.gpu` names it; `cpu`: a trial of the program that measures, and good for no plan."""
    device: str
    """What jax calls it."""
    date: str
    command: str
    commit: str
    versions: Versions
    constants: Constants = field(default_factory=Constants)
    runs: tuple[MeasuredRun, ...] = ()
    """What a plan by these constants says of its error; none: it says that nothing is known."""
    small_grids: tuple[MeasuredGrid, ...] = ()
    """For people: plans go by the prediction."""


def read_measurement(hardware: HardwareConfig) -> Measurement | None:
    """What the file holds that `hardware.calibration` names; None: it names none.

    Raises:
        ConfigError: the file cannot be read, breaks a rule, or is of another GPU than `hardware.gpu`: one
            `file:line: key: rule; remedy` line for every mistake.
    """
    if hardware.calibration is None:
        return None

    def check(measurement: Measurement) -> list[str]:
        if measurement.gpu == hardware.gpu:
            return []
        remedy = "name a file of that one, or leave hardware.calibration out"
        return [f"gpu: measured on {measurement.gpu}, but hardware.gpu is {hardware.gpu}; {remedy}"]

    return read_config(Measurement, find_file(hardware.calibration), (), Problems(), check)
