"""What counts as a bad step: skipped ones in a row, and losses that stand out; and nothing else."""

import math

import numpy as np
import pytest

from llamajax.config.recovery import RecoveryConfig
from llamajax.errors import DivergedError
from llamajax.training.bad_steps import BadSteps, GoBack
from llamajax.training.spike import robust_zscore
from tests.tiny import tiny_config


def watch(recent_losses=(), num_rollbacks=0, **recovery):
    config = tiny_config(recovery=RecoveryConfig(**recovery)).changed({"train.max_nonfinite_steps": 3})
    return BadSteps(config, recent_losses, num_rollbacks)


def record(step, loss, skipped_in_a_row=0):
    return {"step": step, "train/loss": loss, "train/skipped_in_a_row": skipped_in_a_row}


def falling_losses(num_steps, seed):
    """As of a small model: from 7 to 3.3 along a power of the step, with the noise of its batches."""
    steps = np.arange(1, num_steps + 1)
    return 3 + 4 * (1 + steps / 20) ** -0.4 + np.random.default_rng(seed).normal(0, 0.08, num_steps)


def test_the_score_is_that_of_a_normal_distribution_and_blind_to_outliers():
    window = np.random.default_rng(0).normal(2.0, 0.5, 20_000)
    assert robust_zscore(4.0, window) == pytest.approx(4.0, abs=0.1)
    window[:2000] = 1e6
    assert robust_zscore(4.0, window) > 3
    assert robust_zscore(1.0, window) < 0


def test_losses_without_any_spread_make_no_spike_of_a_rounding():
    assert robust_zscore(2.001, [2.0] * 16) == pytest.approx(0.5)
    assert robust_zscore(3.0, [2.0] * 16) == pytest.approx(500)
    assert robust_zscore(0.0, [0.0] * 16) == 0
    assert robust_zscore(0.1, [0.0] * 16) == math.inf


def test_ten_thousand_steps_of_a_noisy_falling_loss_raise_no_alarm():
    bad_steps = watch(spike_zscore=8.0)
    for step, loss in enumerate(falling_losses(10_000, 0), start=1):
        bad_steps.look(record(step, loss), None)


def test_a_spike_is_named_with_its_score():
    losses = falling_losses(400, 0)
    bad_steps = watch(spike_zscore=8.0)
    for step, loss in enumerate(losses, start=1):
        bad_steps.look(record(step, loss), None)
    with pytest.raises(GoBack, match=r"step 401: loss 9\.0000 is \d\d\.\d robust standard deviations above") as info:
        bad_steps.look(record(401, 9.0), 400)
    assert (info.value.first_step, info.value.last_step, info.value.pass_over) == (401, 401, True)
    assert info.value.facts["loss"] == 9.0
    assert bad_steps.recent_losses == list(losses[-128:])


def test_a_window_that_is_not_full_judges_nothing_and_one_of_a_checkpoint_does():
    losses = falling_losses(127, 0)
    watch(losses, spike_zscore=8.0).look(record(128, 90.0), None)
    with pytest.raises(GoBack):
        watch([7.0, *losses], spike_zscore=8.0).look(record(129, 90.0), None)
    watch([7.0, *losses]).look(record(129, 90.0), None)  # unset: no loss is a spike


def test_skipped_steps_are_bad_when_they_do_not_stop_and_never_compared():
    bad_steps = watch([3.0] * 128, spike_zscore=8.0)
    bad_steps.look(record(10, math.nan, 1), None)
    bad_steps.look(record(11, 900.0, 2), None)
    bad_steps.look(None, None)
    assert bad_steps.num_nonfinite == 2
    with pytest.raises(GoBack, match="step 12: gradients were not finite in 3 steps in a row") as info:
        bad_steps.look(record(12, math.nan, 3), None)
    assert (info.value.first_step, info.value.last_step) == (10, 12)
    bad_steps.look(record(12, 3.0), None)
    assert bad_steps.recent_losses == [3.0] * 128


def test_a_run_goes_back_as_often_as_it_may():
    with pytest.raises(GoBack):
        watch(num_rollbacks=1, max_rollbacks=2).look(record(5, math.nan, 3), 4)
    with pytest.raises(DivergedError, match=r"step 5: .* gone back 2 times already \(recovery.max_rollbacks=2\); step 4 is"):
        watch(num_rollbacks=2, max_rollbacks=2).look(record(5, math.nan, 3), 4)
    with pytest.raises(DivergedError, match=r"and the run does not go back \(recovery.max_rollbacks=0\); there is no"):
        watch(max_rollbacks=0).look(record(5, math.nan, 3), None)
