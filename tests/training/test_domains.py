"""Processes in domains of unlike networks: in any order they train as one process does, and wrong domains end every one."""

import os
import subprocess

import numpy as np
import pytest

from tests import runs

DOMAINS = "[{name: ib, network: infiniband, nodes: 1, env: [NCCL_IB_HCA=mlx5]}, {name: roce, network: roce, nodes: 1}]"
FORM = (
    "--mesh={pipeline: 2, data: 2, num_cpu_devices: 1}", "--parallel.zero=1", "--hardware.nodes=2",
    f"--hardware.domains={DOMAINS}", "--checkpoint.save_every=1000",
)  # fmt: skip
STAGED = (*FORM, "--mesh.stages=[2, 1]", "--model.num_layers=3", "--train.grad_accum_steps=2")


@pytest.fixture
def config(tmp_path):
    return runs.write_config(tmp_path, num_steps=3, eval_every=None, eval_batches=0)


def start(config, run_dir, domains: list[str], form: tuple[str, ...] = FORM) -> list["subprocess.Popen[str]"]:
    """Starts a process in each domain."""
    together = ["--distributed.enabled=true", f"--distributed.num_processes={len(domains)}"]
    together.append(f"--distributed.coordinator_address={runs.free_address()}")
    return [
        subprocess.Popen(
            runs.command(config, *form, f"--run_dir={run_dir}", *together, f"--distributed.process_id={rank}"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"LLAMAJAX_DOMAIN": domain},
        )
        for rank, domain in enumerate(domains)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "form",
    [pytest.param(FORM, marks=pytest.mark.slow), pytest.param(STAGED, marks=pytest.mark.long)],
    ids=["one program", "programs of stages"],
)
def test_processes_of_two_domains_in_any_order_train_as_one_process(config, tmp_path, form):
    alone = runs.command(config, *form, "--mesh.num_cpu_devices=4", f"--run_dir={tmp_path / 'alone'}")
    subprocess.run(alone, check=True, timeout=600, capture_output=True)
    for process in start(config, tmp_path / "together", ["roce", "ib", "ib", "roce"], form):
        runs.finish(process)
    losses = [[float.fromhex(loss) for loss in runs.losses(tmp_path / name).values()] for name in ("alone", "together")]
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("domains", "problem"),
    [
        (["ib", "eth", "ib", "roce"], "process 1: LLAMAJAX_DOMAIN is 'eth', but hardware.domains has ib, roce; set it to"),
        (
            ["ib", "roce", "ib", "ib"],
            "hardware.domains: 3 and 1 devices are not whole numbers of stages of 2 devices,",
        ),
    ],
)
def test_wrong_domains_end_every_process_with_one_line(config, tmp_path, domains, problem):
    for output in [runs.finish(process, 4) for process in start(config, tmp_path / "run", domains)]:
        assert problem in output
        assert "Traceback" not in output
