"""Bad steps: skipped ones in a row, and losses that stand out; and nothing else."""

import math

import numpy as np
import pytest

from llamajax.config.data import StageConfig
from llamajax.config.recovery import RecoveryConfig
from llamajax.config.training import TrainConfig
from llamajax.errors import DivergedError
from llamajax.training.bad_steps import BadSteps, GoBack, robust_zscore
from tests.tiny import tiny_config


def watch(recent_losses=(), num_rollbacks=0, **recovery):
    config = tiny_config(recovery=RecoveryConfig(**recovery)).changed({"train.max_nonfinite_steps": 3})
    return BadSteps(config, recent_losses, num_rollbacks)


def no_checkpoint():
    return None


def record(step, loss, skipped_in_a_row=0):
    return {"step": step, "train/loss": loss, "train/skipped_in_a_row": skipped_in_a_row}


def falling_losses(num_steps, seed):
    """As of a small model: from 7 to 3.3 along a power of the step, with the noise of its batches."""
    steps = np.arange(1, num_steps + 1)
    return 3 + 4 * (1 + steps / 20) ** -0.4 + np.random.default_rng(seed).normal(0, 0.08, num_steps)


def test_the_score_is_that_of_a_normal_distribution_and_blind_to_outliers():
    window = np.random.default_rng(0).normal(2.0, 0.5, 20_000).tolist()
    assert robust_zscore(4.0, window) == pytest.approx(4.0, abs=0.1)
    window[:2000] = [1e6] * 2000
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
        bad_steps.look(record(step, loss), no_checkpoint)


@pytest.mark.parametrize("goes_on_at", [None, 380, 399, 400])
def test_a_stage_with_other_texts_is_no_spike_whenever_the_run_was_resumed(goes_on_at):
    losses, window = falling_losses(400, 0), 64
    config = tiny_config(
        recovery=RecoveryConfig(spike_zscore=8.0, spike_window=window), train=TrainConfig(num_steps=900, global_batch_size=8)
    ).changed({"data.stages": (StageConfig(from_step=400, seq_len=32),)})
    bad_steps = BadSteps(config, losses[:goes_on_at][-window:].tolist() if goes_on_at else (), 0)
    for step, loss in enumerate(losses[goes_on_at or 0 :], start=1 + (goes_on_at or 0)):
        bad_steps.look(record(step, loss), no_checkpoint)
    for step in range(401, 401 + window):
        bad_steps.look(record(step, 9.0 + 0.01 * (step % 7)), no_checkpoint)
    assert len(bad_steps.recent_losses) == window
    with pytest.raises(GoBack, match=r"step 465: loss 99\.0000 is"):
        bad_steps.look(record(401 + window, 99.0), no_checkpoint)


def test_a_spike_is_named_with_its_score():
    losses = falling_losses(400, 0)
    bad_steps = watch(spike_zscore=8.0)
    for step, loss in enumerate(losses, start=1):
        bad_steps.look(record(step, loss), no_checkpoint)
    with pytest.raises(GoBack, match=r"step 401: loss 9\.0000 is \d\d\.\d robust standard deviations above") as info:
        bad_steps.look(record(401, 9.0), lambda: 400)
    assert (info.value.first_step, info.value.last_step, info.value.pass_over) == (401, 401, True)
    assert info.value.facts["loss"] == 9.0
    assert bad_steps.recent_losses == list(losses[-128:])


def test_a_window_that_is_not_full_judges_nothing_and_one_of_a_checkpoint_does():
    losses = falling_losses(127, 0)
    watch(losses, spike_zscore=8.0).look(record(128, 90.0), no_checkpoint)
    with pytest.raises(GoBack):
        watch([7.0, *losses], spike_zscore=8.0).look(record(129, 90.0), no_checkpoint)
    watch([7.0, *losses]).look(record(129, 90.0), no_checkpoint)  # unset: no loss is a spike


def test_skipped_steps_are_bad_when_they_do_not_stop_and_never_compared():
    bad_steps = watch([3.0] * 128, spike_zscore=8.0)
    bad_steps.look(record(10, math.nan, 1), no_checkpoint)
    bad_steps.look(record(11, 900.0, 2), no_checkpoint)
    bad_steps.look(None, no_checkpoint)
    assert bad_steps.num_nonfinite == 2
    with pytest.raises(GoBack, match="step 12: gradients were not finite in 3 steps in a row") as info:
        bad_steps.look(record(12, math.nan, 3), no_checkpoint)
    assert (info.value.first_step, info.value.last_step) == (10, 12)
    bad_steps.look(record(12, 3.0), no_checkpoint)
    assert bad_steps.recent_losses == [3.0] * 128


def test_a_run_goes_back_as_often_as_it_may():
    with pytest.raises(GoBack):
        watch(num_rollbacks=1, max_rollbacks=2).look(record(5, math.nan, 3), lambda: 4)
    with pytest.raises(
        DivergedError, match=r"step 5: .* already rolled back 2 of at most 2 times \(recovery.max_rollbacks=2\); step 4 is"
    ):
        watch(num_rollbacks=2, max_rollbacks=2).look(record(5, math.nan, 3), lambda: 4)
    with pytest.raises(DivergedError, match=r"and the run does not roll back \(recovery.max_rollbacks=0\); there is no"):
        watch(max_rollbacks=0).look(record(5, math.nan, 3), no_checkpoint)
