"""The error that plans state."""

import dataclasses

import pytest

from llamajax.config.file import dump_config
from llamajax.config.machine import HardwareConfig
from llamajax.estimates.calibration import MeasuredRun, read_measurement
from llamajax.planning.cost.accuracy import accuracy
from llamajax.planning.report import figures, picture, text
from tests.estimates.test_calibration import MEASUREMENT
from tests.planning import plans


def told(**changes) -> dict:
    config = plans.CONFIG.changed({f"hardware.{key}": value for key, value in changes.items()})
    return figures.figures(plans.plan(config=config))


@pytest.mark.parametrize("gpu", ["a100-40gb", "a100-80gb", "h100", "h200"])
def test_gpus_with_published_runs_tell_their_range(gpu):
    known = accuracy(HardwareConfig(gpu=gpu))
    assert known is not None
    assert known.by == "published"
    assert 5 <= known.within <= known.runs <= 1.25 * known.within
    assert -0.15 < known.least < known.most < 0.25


def test_every_verdict_carries_its_error():
    """In text, figures and picture."""
    found = told()
    known = accuracy(plans.CONFIG.hardware)
    assert known is not None
    assert found["accuracy"] == dataclasses.asdict(known)
    count = f"{known.within} of {known.runs}"
    words = f"{count} published runs on such GPUs came out {known.most:.0%} faster to {-known.least:.0%} slower than"
    assert text.verdict(found).endswith(f"; {words} predicted")
    assert words in " ".join(picture.page(plans.plan(), found).split())


def test_a_measured_calibration_narrows_it(tmp_path):
    file = tmp_path / "h100.yaml"
    runs = tuple(MeasuredRun(name="1B", measured_s=1.0, predicted_s=p) for p in (0.98, 1.03, 1.0))
    file.write_text(dump_config(dataclasses.replace(MEASUREMENT, runs=runs)))
    found = told(calibration=str(file))
    known = accuracy(HardwareConfig(gpu="h100", calibration=str(file)))
    assert known is not None
    assert (known.by, known.runs, known.within) == ("measured", 3, 3)
    assert (known.least, known.most) == pytest.approx((-0.02, 0.03))
    words = "3 runs measured with these constants came out 3% faster to 2% slower than predicted"
    assert text.verdict(found).endswith(f"; {words}")
    read = read_measurement(HardwareConfig(gpu="h100", calibration=str(file)))
    assert read is not None
    assert read.runs == runs


def test_what_is_not_known_is_said(tmp_path):
    """Constants without runs say nothing of the error, nor do published runs of a plan with other constants."""
    file = tmp_path / "h100.yaml"
    file.write_text(dump_config(MEASUREMENT))
    assert text.verdict(told(calibration=str(file))).endswith(f"; the error of plans with {file} is unknown")
    assert accuracy(HardwareConfig(gpu="l4")) is None
    unknown = told() | {"accuracy": None}
    assert text.verdict(unknown).endswith("; no published run shows the error of plans for such GPUs")


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [(-0.14, 0.03, "3% faster to 14% slower"), (0.02, 0.09, "2% to 9% faster"), (-0.09, -0.02, "2% to 9% slower")],
)
def test_ranges_of_one_sign_have_one_word(least, most, words):
    known = {"by": "published", "runs": 7, "within": 7, "least": least, "most": most}
    expected = f"7 published runs on such GPUs came out {words} than predicted"
    assert text.known_error({"accuracy": known, "calibration": None}) == expected
