"""Checkpoints under fire, each time in processes of their own: failing disks, kill -9, two writers, two hosts."""

import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from llamajax.checkpoint import manifest
from llamajax.checkpoint.read import restore
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import CheckpointConfig
from llamajax.errors import CheckpointError
from llamajax.parallel import mesh
from llamajax.parallel.arrays import concretise
from tests import runs


@pytest.fixture(autouse=True)
def _fsdp_mesh():
    jax.set_mesh(mesh.make_mesh(MeshConfig()))


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


FULL_DISK = """
import resource, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax import P
from llamajax.parallel import mesh, startup; from llamajax.parallel.arrays import concretise
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.training import CheckpointConfig; from llamajax.config.parallel import MeshConfig
from llamajax.errors import SaveError
startup.select_platform(MeshConfig(num_cpu_devices=2))
jax.set_mesh(mesh.make_mesh(MeshConfig()))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
state = {f"w{i}": jnp.ones((256, 256), out_sharding=P("fsdp")) for i in range(4)}
with Checkpointer(Path(sys.argv[1]), CheckpointConfig(async_save=sys.argv[2] == "async")) as checkpointer:
    checkpointer.save(1, state, {})
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        checkpointer.save(2, state, {})
        checkpointer.wait()
    except SaveError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    checkpointer.save(2, jax.tree.map(lambda x: 2 * x, state), {})
"""


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_a_failing_write_is_one_line_and_harms_nothing(tmp_path, mode):
    process = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path), mode], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == (
        f"{tmp_path}/checkpoints: step 2 cannot be saved: File too large; check the disk and run the same command again;"
        " step 1 is the newest checkpoint\n"
    )
    assert process.stderr == ""
    assert names_in(tmp_path) == ["1", "2"]
    wanted = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(4)}
    for step in (1, 2):
        assert all(np.all(np.asarray(array) == step) for array in restore(tmp_path, wanted, step).state.values())


WRITER = """
import sys
from pathlib import Path
from functools import partial
import jax, jax.numpy as jnp
from jax import P
from llamajax.parallel import mesh, startup; from llamajax.parallel.arrays import concretise
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.training import CheckpointConfig; from llamajax.config.parallel import MeshConfig
startup.select_platform(MeshConfig(num_cpu_devices=2))
jax.set_mesh(mesh.make_mesh(MeshConfig()))
@partial(jax.jit, donate_argnums=0)
def train_step(state):
    return jax.tree.map(lambda x: x + 1, state)
@jax.jit
def init():
    return {"w": jnp.zeros((64, 256), out_sharding=P("fsdp")), "step": jnp.int32(0)}
with Checkpointer(Path(sys.argv[1]), CheckpointConfig(keep_last=2)) as checkpointer:
    restored = checkpointer.restore(concretise(jax.eval_shape(init)))
    state = init() if restored is None else restored.state
    while True:
        state = train_step(state)
        step = int(state["step"])
        checkpointer.save(step, state, {"step": step})
        print(step, flush=True)
"""


def kill_a_writer(run_dir: Path, rng: random.Random) -> int:
    """Runs a process that saves without pause, kills it at a random moment; returns the last step it surely committed."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    committed = [int(writer.stdout.readline()) for _ in range(rng.randrange(2, 12))]
    with pytest.raises(CheckpointError, match=rf"is being written by process {writer.pid} on \S+; stop it"):
        Checkpointer(run_dir, CheckpointConfig())
    try:
        writer.wait(rng.uniform(0, 0.1))
    except subprocess.TimeoutExpired:
        writer.send_signal(signal.SIGKILL)
    committed += [int(line) for line in writer.stdout]
    assert writer.wait() == -signal.SIGKILL
    writer.stdout.close()
    return committed[-1] - 1  # a save begins when the one before it is committed


def assert_a_killed_writer_loses_nothing(run_dir: Path, rng: random.Random) -> None:
    committed = kill_a_writer(run_dir, rng)
    wanted = jax.eval_shape(lambda: {"w": jnp.zeros((64, 256), out_sharding=P("fsdp")), "step": jnp.zeros((), jnp.int32)})
    with Checkpointer(run_dir, CheckpointConfig(keep_last=2)) as checkpointer:
        restored = checkpointer.restore(concretise(wanted))
        assert restored is not None
        assert restored.step >= committed
        assert restored.meta == {"step": restored.step}
        assert int(restored.state["step"]) == restored.step
        assert np.all(np.asarray(restored.state["w"]) == restored.step)
    assert all(name.isdecimal() for name in names_in(run_dir))


def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path):
    assert_a_killed_writer_loses_nothing(tmp_path, random.Random(0))


@pytest.mark.parametrize("num_kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.long)])
def test_kills_lose_nothing(tmp_path, num_kills):
    rng = random.Random(1)
    for _ in range(num_kills):
        assert_a_killed_writer_loses_nothing(tmp_path, rng)


TWO_PROCESSES = """
import resource, shutil, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import P
from jax.experimental import multihost_utils
from llamajax.parallel import mesh, startup; from llamajax.parallel.arrays import concretise
from llamajax.checkpoint.write import Checkpointer
from llamajax.checkpoint.read import restore
from llamajax.config.training import CheckpointConfig; from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.errors import CheckpointError, SaveError
run_dir, port, process_id = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
startup.select_platform(MeshConfig(num_cpu_devices=2))
startup.join_run(DistributedConfig(
    enabled=True, coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=process_id))
jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=4)))

def init(value):
    w = jnp.arange(4096, dtype=jnp.float32, out_sharding=P("fsdp")).reshape(64, 64, out_sharding=P("fsdp", "tensor"))
    return {"w": w + value, "step": jnp.int32(value), "key": jax.random.key(value)}

def expect_error(action):
    try:
        action()
    except (CheckpointError, SaveError) as error:
        print("error:", error)

with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
    assert checkpointer.restore(concretise(jax.eval_shape(init, 0))) is None
    for step in (1, 2):
        checkpointer.save(step, jax.jit(init)(step), {"step": step})
    checkpointer.wait()
    expect_error(lambda: Checkpointer(run_dir, CheckpointConfig()))
    state = jax.jit(init)(3)
    for failing in (0, 1):  # each has a disk of its own, and one of them is full
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        if process_id == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        checkpointer.save(3, state, {})
        print("tried again after", next(step for step in range(4, 10**9) if checkpointer.retry_due(step)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        expect_error(checkpointer.wait)
    checkpointer.save(3, state, {})
if process_id == 0:
    shutil.rmtree(run_dir / "checkpoints" / "3")
if process_id == 0:
    (run_dir / "checkpoints" / "2" / "state" / "manifest.ocdbt").unlink()
multihost_utils.sync_global_devices("damaged")
multihost_utils.sync_global_devices = None  # of the devices, which wait for half a minute only, for whoever reads longer
jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, tensor=2)))
with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
    restored = checkpointer.restore(concretise(jax.eval_shape(init, 0)))
    checkpointer.save(2, restored.state, {})
restored = restore(run_dir, jax.eval_shape(init, 0))
for shard in restored.state["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, (1 + np.arange(4096, dtype=np.float32)).reshape(64, 64)[shard.index])
np.testing.assert_array_equal(jax.random.key_data(restored.state["key"]), jax.random.key_data(jax.random.key(1)))
print("restored", restored.step, int(restored.state["step"]))
jax.distributed.shutdown()
"""


def run_two(program: str, run_dirs: list[Path]) -> tuple[list[subprocess.Popen[str]], list[tuple[str, str]]]:
    """Runs `program` in two processes, each with its own view of the run directory; what they print."""
    port, pipe = runs.free_address().rpartition(":")[2], subprocess.PIPE
    commands = [[sys.executable, "-c", program, str(path), port, str(rank)] for rank, path in enumerate(run_dirs)]
    processes = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for command in commands]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return processes, outputs


def test_two_processes_save_agree_and_restore(tmp_path):
    processes, outputs = run_two(TWO_PROCESSES, [tmp_path, tmp_path])
    lines, others = ([line for line in out.splitlines() if "peer ranks" not in line] for out, _ in outputs)
    assert lines == others
    assert re.fullmatch(rf"error: {tmp_path} is being written by process {processes[0].pid} on .*", lines[0])
    remedy = "check the disk and run the same command again; step 2 is the newest checkpoint"
    failed = f"error: {tmp_path}/checkpoints: step 3 cannot be saved: process {{}}: File too large; {remedy}"
    assert lines[2:] == [failed.format(0), lines[3], failed.format(1), "restored 2 1"]
    assert "state/manifest.ocdbt is missing; moved to 2.damaged, continuing from step 1" in outputs[0][1]
    assert "damaged" not in outputs[1][1]
    newest = tmp_path / "checkpoints" / "2"
    assert {path.parts[-1] for path in (newest / "state").glob("ocdbt.process_*")} == {"ocdbt.process_0", "ocdbt.process_1"}
    assert set(manifest.read(newest)) == set(manifest.list_files(newest))
    assert not [name for name in manifest.list_files(newest) if name.startswith("hashes")]


TWO_VIEWS = """
import sys
from pathlib import Path
import jax
from llamajax.parallel import mesh, startup; from llamajax.parallel.arrays import concretise
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.training import CheckpointConfig; from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.errors import EnvironmentMismatchError
from llamajax.checkpoint import run_lock
from llamajax.checkpoint.steps import newest_good
run_lock._SEEN_S = 3
run_dir, port, process_id = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
startup.select_platform(MeshConfig(num_cpu_devices=1))
startup.join_run(DistributedConfig(
    enabled=True, coordinator_address=f"127.0.0.1:{port}", num_processes=2, process_id=process_id))
for look in (lambda: Checkpointer(run_dir, CheckpointConfig()), lambda: newest_good(run_dir / "checkpoints")):
    try:
        look()
    except EnvironmentMismatchError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A run directory with two good steps."""
    run_dir = tmp_path_factory.mktemp("views") / "run"
    jax.set_mesh(mesh.make_mesh(MeshConfig()))
    with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": jnp.full((8, 8), step, jnp.float32, out_sharding=P("fsdp"))}, {})
            checkpointer.wait()
    return run_dir


@pytest.mark.slow
def test_two_directories_are_not_taken_for_one_run(two_steps, tmp_path):
    """Nothing is set aside although one process lacks the newest step, or a file of it."""
    shutil.copytree(two_steps, tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "2" / "state")
    before = names_in(two_steps)
    _, outputs = run_two(TWO_VIEWS, [two_steps, tmp_path / "other"])
    (sees, finds), (also_sees, also_finds) = (out.splitlines() for out, _ in outputs)
    assert sees == also_sees
    assert "is missing for process 1" in also_finds
    assert sees.startswith(f"run_dir: process 1 sees different contents in {tmp_path / 'other' / 'checkpoints'} (pid ")
    assert f"than process 0 in {two_steps / 'checkpoints'}; put it on a file system that all processes share" in sees
    assert re.fullmatch(r".*/2: state/.* is missing for process 1, but not for process 0; nothing was changed; .*", finds)
    assert names_in(two_steps) == before
    assert names_in(tmp_path / "other") == before
