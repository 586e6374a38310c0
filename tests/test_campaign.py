"""The campaign of faults itself, in its short form; `python -m tests.faults` is the whole."""

import json
import random
import subprocess
import sys

import pytest

from tests import runs
from tests.faults.groups import GROUPS
from tests.faults.results import Try, attempt
from tests.faults.scene import End


@pytest.mark.long
def test_the_short_campaign_passes(tmp_path):
    """Limits of time are not what is tried here: the machine may have much else to do."""
    told = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.faults", "--short", "--slowness", "10", "--json", str(told)]
    outcome = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, check=False, timeout=800)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    passed = {group["name"]: group["passed"] for group in json.loads(told.read_text())["groups"]}
    assert passed == {group.name: group.short for group in GROUPS if group.short}


def test_what_fails_is_counted_and_can_be_tried_again():
    """A try draws the same whichever tries come before it."""
    draws: dict[int, float] = {}

    def one(a_try: Try) -> dict[str, float]:
        draws[a_try.seed] = a_try.rng.random()
        assert a_try.seed != 6, "this one"
        return {"s": 1.0}

    result = attempt("X", ["a", "b"], count=8, seed=4, one=one, weight=2)
    assert (result.tries, result.passed, result.good) == (8, 6, False)
    (failure,) = result.failures
    assert (failure.seed, failure.kind) == (6, "a")
    assert "this one" in failure.what
    assert draws[6] == random.Random("X 6").random()
    assert draws.keys() == {4, 5, 6, 7}


@pytest.mark.parametrize("differs", ["losses", "arrays", "step"])
def test_an_end_that_differs_in_one_bit_is_no_equal_one(differs):
    def end(loss: str = "0x1.8p+0", sha256: str = "00", step: int = 2) -> End:
        made = End.__new__(End)
        made.losses, made.arrays, made.step = {1: "0x1.0p+1", 2: loss}, {"model.head": sha256}, step
        return made

    other = {"losses": end(loss="0x1.8000000000001p+0"), "arrays": end(sha256="01"), "step": end(step=1)}[differs]
    end().must_equal(end())
    with pytest.raises(AssertionError):
        other.must_equal(end())
