"""Two and four processes on loopback have the losses of one process on the same mesh, in every form."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests import runs

NUM_DEVICES = 4
FORMS: dict[str, dict[str, object]] = {
    "scan, two micro-batches": {
        "mesh.data": 2,
        "mesh.fsdp": 2,
        "parallel.stack": "scan",
        "train.grad_accum_steps": 2,
    },
    "prefetch": {"mesh.fsdp": 4, "parallel.stack": "prefetch"},
    "ZeRO 1, over data too": {"mesh.data": 2, "mesh.fsdp": 2, "parallel.zero": 1, "parallel.zero_data": 1},
    "ZeRO 2": {"mesh.fsdp": 4, "parallel.zero": 2},
    "tensor": {"mesh.tensor": 4, "parallel.tensor": "collective"},
    "tensor, in a ring": {"mesh.tensor": 4, "parallel.tensor": "ring"},
    "sequence, gathered": {"mesh.sequence": 4, "parallel.sequence": "gather"},
    "sequence, in a ring": {"mesh.sequence": 4, "parallel.sequence": "ring"},
    "sequence, by Ulysses": {"mesh.sequence": 4, "parallel.sequence": "ulysses"},
}
"""A mesh of four devices and what differs from the defaults; the axis that is split lies across processes."""
BY_FOUR = ("prefetch", "tensor, in a ring", "sequence, by Ulysses")
"""Forms that `long` runs by four processes too, one of each axis. CI runs the others by two."""
STAGED: dict[str, dict[str, object]] = {
    "stages of unequal speed": {
        "model.num_layers": 3,
        "mesh.pipeline": 2,
        "mesh.stages": [1, 2],
        "mesh.fsdp": 2,
        "parallel.zero": 1,
        "train.grad_accum_steps": 2,
    }
}
"""A form by processes of its own: jax opens its connections between CPUs when it starts."""
OTHERS = tuple(form for form in FORMS if form not in BY_FOUR)

PROGRAM = """
import json, sys
from llamajax.config.file import load_config
from llamajax.processes.exit import end_process, exit_code
from llamajax.training.run import run

path, forms, *together = sys.argv[1:]
def work():
    for name, overrides in json.loads(forms).items():
        run(load_config(path, [*overrides, *together]))
end_process(exit_code(work, memory_remedy="", disk="", disk_remedy=""), distributed=bool(together))
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return runs.write_config(tmp_path_factory.mktemp("processes"), num_steps=4, eval_every=None, eval_batches=0)


@pytest.fixture(scope="module")
def losses(config):
    """Finds the losses of forms by a number of processes, each of which goes through all of them."""
    return functools.cache(functools.partial(_losses, config))


def _losses(config: pathlib.Path, count: int, names: tuple[str, ...]) -> dict[str, list[float]]:
    run_dirs = {name: config.parent / f"{count}" / name for name in names}
    one = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.sequence": 1, "mesh.tensor": 1, "checkpoint.save_every": 1000}
    one |= {"mesh.num_cpu_devices": NUM_DEVICES // count, "train.grad_accum_steps": 1}
    forms = {
        name: [f"{key}={value}" for key, value in (one | form | {"run_dir": run_dirs[name]}).items()]
        for name, form in (FORMS | STAGED).items()
        if name in names
    }
    together = ["distributed.enabled=true", f"distributed.num_processes={count}"]
    together.append(f"distributed.coordinator_address={runs.free_address()}")
    environment = os.environ | {"PYTHONPATH": str(runs.ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(config), json.dumps(forms)]
            + ([*together, f"distributed.process_id={rank}"] if count > 1 else []),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for rank in range(count)
    ]  # fmt: skip
    outputs = [runs.finish(process) for process in processes]
    assert outputs[0].count(f"{NUM_DEVICES} x cpu in {count} process") == len(names)
    return {name: [float.fromhex(loss) for loss in runs.losses(run_dirs[name]).values()] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("form", OTHERS)
def test_two_processes_train_as_one(losses, form):
    check(losses(2, OTHERS)[form], losses(1, OTHERS)[form])


@pytest.mark.long
@pytest.mark.parametrize("form", BY_FOUR)
def test_four_processes_train_as_one(losses, form):
    check(losses(4, BY_FOUR)[form], losses(1, BY_FOUR)[form])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_with_a_stage_each_or_half_a_stage_train_as_one(losses, count):
    (form,) = names = tuple(STAGED)
    check(losses(count, names)[form], losses(1, names)[form])


@pytest.mark.long
@pytest.mark.parametrize(("count", "form"), [*((2, form) for form in BY_FOUR), *((4, form) for form in OTHERS)])
def test_the_other_number_of_processes_trains_as_one(losses, count, form):
    names = BY_FOUR if count == 2 else OTHERS
    check(losses(count, names)[form], losses(1, names)[form])


def check(together: list[float], alone: list[float]) -> None:
    assert len(alone) == 4
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)
