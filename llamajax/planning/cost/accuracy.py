"""How far the cost model's predictions are from runs that somebody measured."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamajax.config.machine import HardwareConfig
from llamajax.estimates.calibration import read_measurement

KEPT = Path(__file__).with_name("accuracy.json")
"""Of published runs, by GPU: written by scripts/plan_accuracy.py."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How runs on one kind of GPU came out."""

    by: Literal["published", "measured"]
    """`measured`: on this very GPU, with the constants in `hardware.calibration`."""
    runs: int
    within: int
    """How many of them: all, or of published ones all but a tenth at each end."""
    least: float
    """Speed over the predicted one, less one: of the slowest of those."""
    most: float
    """Of the fastest."""


@functools.cache
def _published() -> dict[str, Accuracy]:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    return {gpu: Accuracy(by="published", **of_gpu) for gpu, of_gpu in kept.items()}


def accuracy(hardware: HardwareConfig) -> Accuracy | None:
    """What is known of predictions for the GPUs of `hardware`; None: nothing.

    Runs that were measured together with the constants of `hardware.calibration` stand in for published ones, which were
    compared with the built-in constants.

    Raises:
        ConfigError: see `read_measurement`.
    """
    measurement = read_measurement(hardware)
    if measurement is None:
        return _published().get(hardware.gpu)
    ratios = [run.predicted_s / run.measured_s - 1 for run in measurement.runs]
    if not ratios:
        return None
    return Accuracy(by="measured", runs=len(ratios), within=len(ratios), least=min(ratios), most=max(ratios))
