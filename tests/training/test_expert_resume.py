"""Runs with experts that are cut off or killed continue on other numbers of expert shards as if nothing had happened."""

import json
import pathlib
import signal

import jax
import numpy as np
import pytest

from llamajax.checkpoint.read import restore
from llamajax.config.file import load_config
from llamajax.config.run import Config
from llamajax.parallel.mesh import make_mesh
from llamajax.step.state import abstract_state
from llamajax.training.run import run
from tests import runs

EXPERTS = {
    "num_experts": 8, "top_k": 2, "mlp_dim": 16, "scores": "sigmoid", "bias_update_rate": 0.02, "balance_loss": 0.05,
    "balance_over": "row", "shared_mlp_dim": 16,
}  # fmt: skip
"""`row`: the number of micro-batches follows the devices, and the shares of choices must not follow it."""
NUM_STEPS, SAVE_EVERY = 20, 3
REPORTED = {"train/expert_max_load", "train/expert_min_load", "train/expert_entropy", "train/expert_max_load_by_layer/0"}
"""Metrics of every tenth step."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> pathlib.Path:
    """A configuration whose run went from the first step to the last on expert 4 x fsdp 2 without a break."""
    train = {"grad_accum_steps": 1, "eval_every": None, "eval_batches": 0}
    path = runs.write_config(tmp_path_factory.mktemp("experts"), num_steps=NUM_STEPS, **train)
    settings = json.loads(path.read_text())
    settings["data"]["held_out_fraction"] = 0.0
    settings["model"] |= {"num_layers": 1, "remat": "none", "experts": EXPERTS}
    settings["parallel"] = {"stack": "unrolled"}
    settings["mesh"] = {"expert": 4, "fsdp": 2, "num_cpu_devices": 8}
    # Adam divides by the gradients: without a larger eps it would make rounding errors of the smallest ones large.
    settings["optimizer"] = {"learning_rate": 0.003, "warmup_steps": 2, "eps": 1e-5}
    settings["checkpoint"] = {"save_every": SAVE_EVERY, "keep_last": 1000}
    path.write_text(json.dumps(settings))
    run(load_config(path))
    return path


def final_bias(config: Config, run_dir: pathlib.Path) -> np.ndarray:
    """The experts' biases [L, E] of the run's last step."""
    jax.set_mesh(make_mesh(config.mesh))
    restored = restore(run_dir, abstract_state(config).as_saved(), NUM_STEPS)
    return np.asarray(restored.state.model.layers.mlp.bias[...])


def assert_same_run(config: pathlib.Path, run_dir: pathlib.Path) -> None:
    """The run in `run_dir` has the losses of the unbroken one, and its biases, and reports its experts' loads."""
    unbroken_dir = config.parent / "run"
    ours, theirs = ([float.fromhex(x) for x in runs.losses(path).values()] for path in (run_dir, unbroken_dir))
    assert len(theirs) == NUM_STEPS
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    ours, theirs = (final_bias(load_config(config), path) for path in (run_dir, unbroken_dir))
    np.testing.assert_array_equal(ours, theirs)
    assert np.ptp(theirs) >= EXPERTS["bias_update_rate"]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert next(record.keys() for record in records if "train/loss" in record and record["step"] == NUM_STEPS) >= REPORTED


def test_other_expert_shards_another_stack_and_zero_stage_continue(unbroken, tmp_path):
    run_dir = runs.cut(unbroken.parent / "run", tmp_path / "run", 9)
    changes = ["mesh.expert=2", "mesh.fsdp=2", "mesh.tensor=2", "parallel.stack=scan", "parallel.zero=1"]
    run(load_config(unbroken, [f"run_dir={run_dir}", *changes]))
    assert_same_run(unbroken, run_dir)


@pytest.mark.slow
def test_a_run_killed_on_one_number_of_expert_shards_after_another_ends_like_the_unbroken_one(unbroken, tmp_path):
    run_dir, killed_at = tmp_path / "run", 0
    for mesh in (
        {"expert": 4, "fsdp": 1, "num_cpu_devices": 4},
        {"expert": 2, "fsdp": 2, "num_cpu_devices": 4},
        {"expert": 1, "fsdp": 1, "num_cpu_devices": 1},
    ):
        process = runs.start(unbroken, f"--run_dir={run_dir}", *(f"--mesh.{axis}={size}" for axis, size in mesh.items()))
        if mesh["num_cpu_devices"] == 1:
            runs.finish(process)
            continue
        wanted = killed_at + SAVE_EVERY
        runs.wait_until(lambda wanted=wanted: max(runs.committed_steps(run_dir), default=0) >= wanted, [process])
        process.kill()
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, output
        killed_at = max(runs.committed_steps(run_dir))
        assert killed_at < NUM_STEPS
    assert_same_run(unbroken, run_dir)
