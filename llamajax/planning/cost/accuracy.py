"""The error of the cost model's predictions, compared with measured runs."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamajax.config.machine import HardwareConfig
from llamajax.estimates.calibration import read_measurement

KEPT = Path(__file__).with_name("accuracy.json")
"""Accuracy for published runs, by GPU; scripts/plan_accuracy.py writes the file."""


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Speeds of runs on one kind of GPU, compared with predictions."""

    by: Literal["published", "measured"]
    """Source of the runs; `measured`: on this very GPU, with the constants in `hardware.calibration`."""
    runs: int
    within: int
    """Number of runs between `least` and `most`: all, or of published ones all but a tenth at each end."""
    least: float
    """Relative speed minus one of the slowest of these runs, compared with its prediction."""
    most: float
    """Relative speed minus one of the fastest of these runs."""


@functools.cache
def _published() -> dict[str, Accuracy]:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    return {gpu: Accuracy(by="published", **of_gpu) for gpu, of_gpu in kept.items()}


def accuracy(hardware: HardwareConfig) -> Accuracy | None:
    """Returns the known accuracy of predictions for the GPUs of `hardware`; None: unknown.

    Runs that were measured together with the constants of `hardware.calibration` replace the published ones, which were
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
