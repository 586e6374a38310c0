"""Runs with data in host memory: killed and resumed to the same bits, continued without it and on other meshes, exported."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from llamajax.config.file import load_config
from tests import runs
from tests.training.test_resume import assert_same_end, kill_and_resume, restored_arrays

NUM_STEPS = 30
EVERYTHING = {"activations": ["input"], "optimizer": 1.0, "parameters": "all"}
ON_CARD = ("--offload.activations=none", "--offload.parameters=none", "--offload.optimizer=none")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> pathlib.Path:
    """A configuration with everything in host memory whose run went to the last step without a break."""
    config = runs.write_config(tmp_path_factory.mktemp("unbroken"), num_steps=NUM_STEPS)
    settings = json.loads(config.read_text())
    settings["offload"] = EVERYTHING
    settings["mesh"] = {"fsdp": 2, "sequence": 2, "tensor": 2, "num_cpu_devices": 8}
    config.write_text(json.dumps(settings))
    output = runs.finish(runs.start(config))
    assert "offload    input; 100% of weights and moments; copies and gradients of layers: offload says so" in output
    assert len(runs.losses(config.parent / "run")) == NUM_STEPS
    return config


@pytest.mark.long
def test_a_run_killed_again_and_again_ends_like_the_unbroken_one(unbroken, tmp_path):
    kill_and_resume(unbroken, tmp_path / "run", num_kills=3, seed=2)
    assert_same_end(unbroken, tmp_path / "run")


@pytest.mark.slow
def test_a_run_leaves_host_memory_and_comes_back_on_other_meshes(unbroken, tmp_path):
    """Checkpoints know nothing of it: the same arrays are read to the card, and the losses continue."""
    run_dir = runs.cut(unbroken.parent / "run", tmp_path / "run", NUM_STEPS // 3)
    mesh = ("--mesh.data=2", "--mesh.fsdp=4", "--mesh.sequence=1", "--mesh.tensor=1", "--train.grad_accum_steps=1")
    overrides = [option.removeprefix("--") for option in (*ON_CARD, *mesh)]
    there, here = (restored_arrays(load_config(unbroken, some), run_dir) for some in ([], overrides))
    for own, like in zip(there, here, strict=True):
        np.testing.assert_array_equal(own, like)
    alone = (f"--run_dir={run_dir}", *ON_CARD, *mesh)
    process = runs.start(unbroken, *alone)
    runs.wait_until(lambda: 2 * NUM_STEPS // 3 in runs.committed_steps(run_dir), [process])
    process.terminate()
    runs.finish(process)
    output = runs.finish(runs.start(unbroken, f"--run_dir={run_dir}"))
    assert "resuming at step" in output
    found, expected = ([float.fromhex(x) for x in runs.losses(path).values()] for path in (run_dir, unbroken.parent / "run"))
    np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.slow
def test_an_export_starts_a_run_in_host_memory_again(unbroken, tmp_path):
    """Out to Hugging Face's files, and in from there, straight to host memory: the same weights to the last bit."""
    exported = tmp_path / "exported"
    run_dir = unbroken.parent / "run"
    command = [sys.executable, "-m", "converters.hf", "export", str(run_dir), str(exported)]
    subprocess.run(command, cwd=runs.ROOT, check=True, capture_output=True)
    settings = json.loads(unbroken.read_text()) | {"run_dir": str(tmp_path / "again"), "init_from": str(exported)}
    settings["train"] |= {"num_steps": 1, "eval_every": None}
    settings["optimizer"] |= {"learning_rate": 1e-30, "warmup_steps": 0, "weight_decay": 0.0}
    settings["model"] = {}
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(settings))
    runs.finish(runs.start(again))
    config = load_config(unbroken)
    before, after = (restored_arrays(config, path) for path in (run_dir, tmp_path / "again"))
    alike = [np.array_equal(own, like) for own, like in zip(before, after, strict=True)]
    assert sum(alike) >= 9  # the weights
