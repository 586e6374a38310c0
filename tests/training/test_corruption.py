"""Runs one of whose devices flips bits: they end as those that nobody touched, or with the name of the device."""

import dataclasses
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from llamajax.checkpoint.read import restore
from llamajax.config.file import load_config
from llamajax.config.run import Config
from llamajax.errors import CorruptionError
from llamajax.step.state import abstract_state
from llamajax.training import run as train
from llamajax.training import stages
from tests import runs
from tests.faults.faulty_device import faulty
from tests.faults.flips import Flip

AXES = ["mesh.data=4", "mesh.fsdp=2", "mesh.sequence=1", "mesh.tensor=1"]
FIRST, MOMENT, LAST = (
    Flip("model.layers.mlp.w_down", place=3, bit=30),
    Flip("opt_state.0.nu.layers.attention.wo", place=5, bit=17),
    Flip("rng", place=0, bit=1),
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Trains twelve steps in four replicas, compared every three steps and saved every four, on a device that flips bits."""
    folder = tmp_path_factory.mktemp("corruption")
    path = runs.write_config(folder, num_steps=12, grad_accum_steps=1, eval_every=None)
    compile_here, compiled = stages.compile_here, []

    def compile_once(*args):
        if not compiled:
            compiled.append(compile_here(*args))
        return compiled[0]

    def start(name: str, flips: dict[int, Flip], *, once: bool = True) -> Config:
        overrides = [f"run_dir={folder / name}", "recovery.checksum_every=3", "checkpoint.save_every=4", *AXES]
        config = load_config(path, overrides)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "compile_here", faulty(compile_once, flips, once=once))
            train.run(config)
        return config

    return start


@pytest.fixture(scope="module")
def untouched(start):
    return start("untouched", {})


def corruptions(run_dir: Path) -> list[dict]:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "corruption"]


def arrays(config: Config) -> list[np.ndarray]:
    state = restore(config.run_dir, abstract_state(config)).state
    return [np.asarray(array) for array in jax.tree.leaves(dataclasses.replace(state, rng=jax.random.key_data(state.rng)))]


@pytest.mark.slow
def test_what_flips_once_changes_nothing_but_the_time(start, untouched, capsys):
    """Before the first checkpoint, between two, and just before the last."""
    touched = start("touched", {2: FIRST, 7: MOMENT, 12: LAST})
    run_dir, (out, err) = Path(touched.run_dir), capsys.readouterr()
    assert runs.losses(run_dir) == runs.losses(Path(untouched.run_dir))
    np.testing.assert_equal(arrays(touched), arrays(untouched))
    assert runs.committed_steps(run_dir) == {4, 8, 12}
    assert [(event["kind"], event["devices"], event["steps"]) for event in corruptions(run_dir)] == [
        (kind, devices, steps)
        for devices, steps in [([3], [1, 3]), ([5], [7, 8]), ([0], [10, 12])]
        for kind in ("suspected", "transient")
    ]
    assert "checksums  " in out
    assert "device 5 (process 0 on" in out
    assert err.count("recomputed, all replicas are equal") == 3
    assert not corruptions(Path(untouched.run_dir))


@pytest.mark.slow
def test_a_device_that_flips_again_and_again_ends_the_run_which_goes_on_without_it(start, untouched):
    line = rf"^step 8: device 5 \(process 0 on {socket.gethostname()}\) differs from its replicas in"
    with pytest.raises(CorruptionError, match=line):
        start("ended", {7: MOMENT}, once=False)
    run_dir = Path(untouched.run_dir).with_name("ended")
    assert runs.committed_steps(run_dir) == {4}
    assert [event["kind"] for event in corruptions(run_dir)] == ["suspected", "lasting"]
    np.testing.assert_equal(arrays(start("ended", {})), arrays(untouched))
    assert runs.losses(run_dir) == runs.losses(Path(untouched.run_dir))


@pytest.mark.long
def test_of_two_processes_that_of_the_device_is_named_by_both(tmp_path):
    config = runs.write_config(tmp_path, num_steps=12, grad_accum_steps=1, eval_every=None)
    overrides = [*AXES, "mesh.num_cpu_devices=4", "recovery.checksum_every=3", "checkpoint.save_every=4"]
    together = ["distributed.enabled=true", "distributed.num_processes=2"]
    together.append(f"distributed.coordinator_address={runs.free_address()}")
    flips = json.dumps({"once": False, "after": {"7": dataclasses.astuple(MOMENT)}})
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.faulty_device", flips, "--config", str(config)]
            + [f"--{setting}" for setting in [*overrides, *together, f"distributed.process_id={rank}"]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=runs.ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip
    for output in [runs.finish(process, expected_code=CorruptionError.exit_code) for process in processes]:
        assert re.search(
            r"^step 8: device \d+ \(process 1 on .*\) differs from.*again after a rollback", output, re.MULTILINE
        )
        assert "Traceback" not in output
    assert runs.committed_steps(tmp_path / "run") == {4}
