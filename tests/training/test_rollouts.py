"""On-policy runs: they learn what is rewarded, resume exactly, and lose nothing when a reward function fails."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

import llamajax
from llamajax.config.objective import ObjectiveConfig, RolloutConfig
from llamajax.config.run import Config
from llamajax.data.rows.prompts import Prompt
from llamajax.errors import CheckpointError, ConfigError, DataError
from llamajax.generation.completion import Completer, Completion
from llamajax.training.rollouts import Rewarded, advantages, rows_of
from tests.test_library import load

GROUP = 8


def share_of_e(completions: list[str]) -> list[float]:
    """The toy task rewards the share of one letter in a completion."""
    return [text.count("e") / max(1, len(text)) for text in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Prompts, and a run of ordinary training that GRPO starts from."""
    folder = tmp_path_factory.mktemp("grpo")
    prompts = [{"prompt": f"{number} bottles of", "number": number} for number in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    llamajax.train(load(folder, "first"))
    return folder


def grpo(folder: Path, run: str, **changes: object) -> Config:
    return load(folder, run, **{
        "data.sources": [{"kind": "prompt", "paths": [folder / "prompts.jsonl"]}], "objective.kind": "grpo",
        "objective.rollout.group_size": GROUP, "objective.rollout.max_tokens": 12, "init_from": folder / "first",
        "data.seq_len": 32, "model.max_seq_len": 32, "train.global_batch_size": 32, "data.held_out_fraction": 0.2,
        "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 0, "train.num_steps": 4, "train.eval_every": None,
        "train.eval_batches": 0, "checkpoint.save_every": 2,
    } | changes)  # fmt: skip


def records(config: Config) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]


def told(config: Config) -> list[dict[str, float]]:
    """Metrics of the run without times."""
    return [{name: x for name, x in record.items() if name.startswith(("train/", "eval/"))} for record in records(config)]


def test_it_learns_what_is_rewarded(folder):
    """The toy task: within 15 steps, completions have several times as many of a letter, on held-out prompts too."""
    config = grpo(folder, "learns", **{
        "train.num_steps": 15, "train.eval_batches": 1, "optimizer.learning_rate": 5e-2, "optimizer.grad_clip_norm": None,
    })  # fmt: skip
    llamajax.train(config, rewards=share_of_e)
    steps = [record for record in records(config) if "train/reward" in record]
    first, last = (np.mean([step["train/reward"] for step in some]) for some in (steps[:3], steps[-3:]))
    assert last > 3 * first
    held_out = [record["eval/reward"] for record in records(config) if "eval/reward" in record]
    assert held_out[-1] > 3 * first
    assert {"train/divergence", "train/completion_tokens", "train/truncated", "train/reward_std"} <= steps[0].keys()
    assert steps[0]["train/divergence"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["train/divergence"] > 0.01


def test_advantages_compare_the_completions_of_a_prompt():
    objective = ObjectiveConfig(kind="grpo", rollout=RolloutConfig(group_size=4))
    rewards = np.array([1, 0, 0, 0, 5, 5, 5, 5], np.float32)
    found = advantages(objective, rewards)
    np.testing.assert_allclose(found[:4], (rewards[:4] - 0.25) / 0.5, atol=1e-3)
    np.testing.assert_array_equal(found[4:], 0)
    unscaled = advantages(ObjectiveConfig(kind="grpo", scale_rewards=False, rollout=RolloutConfig(group_size=4)), rewards)
    np.testing.assert_allclose(unscaled, [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0])


def test_a_row_learns_its_completion_from_the_first_token_to_the_end():
    objective = ObjectiveConfig(kind="grpo", rollout=RolloutConfig(group_size=2))
    prompts = [Prompt((1, 5, 6), "ab", {}), Prompt((1, 7), "c", {})]
    completions = [Completion("x", tokens, "stop", 0.0) for tokens in ((8, 9, 2), (8, 2), (4, 2), (3, 3, 3, 3))]
    rewards = np.array([1, 0, 0, 2], np.float32)
    rows = rows_of(objective, Rewarded(prompts, completions, rewards[:, None], rewards), 8)
    assert [row["targets"].tolist() for row in rows] == [
        [-1, -1, 8, 9, 2, -1, -1, -1], [-1, -1, 8, 2, -1, -1, -1, -1], [-1, 4, 2, -1, -1, -1, -1, -1],
        [-1, 3, 3, 3, 3, -1, -1, -1],
    ]  # fmt: skip
    assert rows[1]["tokens"].tolist() == [1, 5, 6, 8, 0, 0, 0, 0]
    for row, advantage in zip(rows, advantages(objective, rewards), strict=True):
        np.testing.assert_array_equal(row["advantages"], np.where(row["targets"] != -1, advantage, np.float32(0)))


@pytest.mark.slow
def test_a_run_resumes_exactly_amid_a_rollout(folder):
    """Checkpoint 2 lies within the completions of steps 1 to 3, which step 3 trains on after the resume."""
    changes = {"objective.rollout.steps": 3, "optimizer.learning_rate": 5e-2, "optimizer.grad_clip_norm": None}
    config = grpo(folder, "unbroken", **changes)
    llamajax.train(config, rewards=share_of_e)
    assert (folder / "unbroken" / "checkpoints" / "2" / "files" / "rollout.npz").exists()
    shutil.copytree(folder / "unbroken", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / "4")
    again = grpo(folder, "resumed", **changes)
    llamajax.train(again, rewards=share_of_e)
    assert told(again) == told(config)
    assert sum(record["train/clipped"] > 0 for record in told(config)) > 0
    rollouts = [json.loads(line) for line in (folder / "unbroken" / "events.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "rollout" for event in rollouts) == 2


@pytest.mark.slow
def test_a_signal_while_completions_are_written_stops_at_once(folder, monkeypatch):
    """The run saves the steps before, and goes on as if nothing had been."""
    calls, whole = [], Completer.complete

    def interrupted(self, *arguments, **settings):
        calls.append(0)
        for piece in whole(self, *arguments, **settings):
            if len(calls) == 2:
                signal.raise_signal(signal.SIGTERM)
                calls.append(0)
            calls[-1] += 1
            yield piece

    monkeypatch.setattr(Completer, "complete", interrupted)
    config = grpo(folder, "interrupted")
    result = llamajax.train(config, rewards=share_of_e)
    assert (result.steps, result.stop_reason) == (1, "stopped")
    assert calls[-1] < calls[0] / 4
    monkeypatch.undo()
    llamajax.train(config, rewards=share_of_e)
    plain = grpo(folder, "plain")
    llamajax.train(plain, rewards=share_of_e)
    assert told(config) == told(plain)


@pytest.mark.slow
def test_a_function_that_fails_loses_nothing(folder, capsys):
    """The state before the rollout is saved; the same command goes on once the function is right."""
    calls = []

    def fails_once(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 4:
            raise ZeroDivisionError("division by zero")
        return share_of_e(completions)

    config = grpo(folder, "fails")
    with pytest.raises(DataError, match=r"fails_once failed: ZeroDivisionError: division by zero; correct it"):
        llamajax.train(config, rewards=fails_once)
    capsys.readouterr()
    llamajax.train(config, rewards=fails_once)
    assert "resuming at step 3" in capsys.readouterr().out
    assert [record["step"] for record in records(config)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_equal_prompts_of_a_rollout_draw_apart(folder):
    """A data set of one prompt has as many different completions as a step has rows."""
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "9 bottles of"}) + "\n")
    seen = []

    def remember(completion_ids: list[list[int]]) -> list[float]:
        seen.append({tuple(ids) for ids in completion_ids})
        return [float(len(ids)) for ids in completion_ids]

    one = {"data.sources": [{"kind": "prompt", "paths": [folder / "one.jsonl"]}], "data.held_out_fraction": 0.0}
    llamajax.train(grpo(folder, "one_prompt", **one, **{"train.num_steps": 1}), rewards=remember)
    assert len(seen[0]) == 32


@pytest.mark.slow
def test_a_function_that_fails_in_an_evaluation_loses_nothing(folder):
    def fails_on_held_out(completions: list[str]) -> list[float]:
        assert len(completions) == 32, "held out"
        return share_of_e(completions)

    config = grpo(folder, "held_out", **{"train.eval_every": 1, "train.eval_batches": 1})
    with pytest.raises(DataError, match=r"fails_on_held_out failed: AssertionError: held out"):
        llamajax.train(config, rewards=fails_on_held_out)
    assert (folder / "held_out" / "checkpoints" / "1").exists()


@pytest.mark.slow
def test_adapters_train_on_every_mesh_with_the_base_as_the_reference(folder):
    """The completions, and so the rewards, of eight devices are those of one."""
    adapted = {
        "adapters.kind": "lora", "adapters.rank": 4, "adapters.base": "float32", "objective.kl_weight": 0.1,
        "optimizer.learning_rate": 5e-3,
    }  # fmt: skip
    one = grpo(folder, "one", **adapted)
    many = grpo(folder, "many", **adapted, mesh={"num_cpu_devices": 8, "data": 2, "fsdp": 4})
    for config in (one, many):
        llamajax.train(config, rewards={share_of_e: 0.5})
    for ours, theirs in zip(told(many), told(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert told(one)[-1]["train/divergence"] > 0


@pytest.mark.slow
def test_other_weights_at_the_start_are_refused(folder):
    """The reference is held beside the model: a resumed run needs the same weights again."""
    config = grpo(folder, "moved", **{"train.num_steps": 2})
    llamajax.train(config, rewards=share_of_e)
    shutil.copytree(folder / "moved", folder / "trained")
    other = grpo(folder, "moved", **{
        "train.num_steps": 4, "init_from": folder / "trained", "checkpoint.allow_changes": ["train", "init_from"],
    })  # fmt: skip
    with pytest.raises(CheckpointError, match=r"holds other weights than those that the run in .* started from"):
        llamajax.train(other, rewards=share_of_e)


def test_rewards_are_asked_for(folder):
    with pytest.raises(
        ConfigError, match=r"objective\.kind: grpo needs reward functions; name a Python file .*--rewards FILE"
    ):
        llamajax.train(grpo(folder, "none"))
    with pytest.raises(ConfigError, match=r"--rewards: has no effect with objective\.kind=next_token"):
        llamajax.train(load(folder, "other"), rewards=share_of_e)
