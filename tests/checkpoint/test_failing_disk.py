"""A disk that fills up in the middle of a file, fails now and then, or takes long: for every call, TensorStore's as well.

The faults are those of `tests/faults/disk.c`, which stands before the C library.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT

PROGRAM = """
import errno, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax import P
from llamajax import disk
from llamajax.parallel import mesh, startup
from llamajax.checkpoint.read import restore
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.training import CheckpointConfig; from llamajax.config.parallel import MeshConfig
from llamajax.errors import SaveError
run_dir, control = Path(sys.argv[1]), Path(sys.argv[2])
startup.select_platform(MeshConfig(num_cpu_devices=2))
jax.set_mesh(mesh.make_mesh(MeshConfig()))
disk._PAUSES_S = (0.01, 0.01, 0.01)
state = {f"w{i}": jnp.ones((128, 256), out_sharding=P("fsdp")) for i in range(3)}
wanted = jax.eval_shape(lambda: state)

def set_disk(latency_ms=0, write_eio=0, read_eio=0, room=-1, torn=0, error=errno.ENOSPC):
    control.write_text(f"{latency_ms} {write_eio} {read_eio} {room} {torn} {error}")

def failing(step):
    try:
        checkpointer.save(step, state, {})
        checkpointer.wait()
        print(f"step {step}: saved")
    except SaveError as error:
        print(": ".join(str(error).partition("/checkpoints: ")[2].partition(";")[0].split(": ")[:2]))
    set_disk()
    print("newest", restore(run_dir, wanted).step)

config = CheckpointConfig(save_every=100, local_every=10, local_dir=str(run_dir.parent / "local"), keep_last=2)
with Checkpointer(run_dir, config) as checkpointer:
    failing(1)
    for torn in (0, 1):
        set_disk(room=100_000, torn=torn)
        failing(2)
    for error in (errno.EDQUOT, errno.EROFS):
        set_disk(room=0, error=error)
        failing(2)
    set_disk(write_eio=7)
    failing(2)
    checkpointer.save_locally(3, state, {}, {})
    checkpointer._local.wait()
    set_disk(write_eio=5)
    checkpointer.save_locally(4, state, {}, {})
    checkpointer._local.wait()
    set_disk(latency_ms=250)
    failing(5)
    failing(6)
    failing(7)
    set_disk(read_eio=20)
    print("read", restore(run_dir, wanted).step)
    set_disk(read_eio=1)
    try:
        restore(run_dir, wanted)
    except OSError as error:
        print("unreadable", errno.errorcode[error.errno])
    set_disk()
"""


@pytest.mark.long
def test_no_fault_costs_a_good_step_or_goes_untold(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler to build the failing disk with")
    library, control, run_dir = tmp_path / "disk.so", tmp_path / "control", tmp_path / "disk" / "run"
    source = str(ROOT / "tests/faults/disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), source, "-ldl"], check=True)
    control.write_text("0 0 0 -1 0 0")
    env = os.environ | {"LD_PRELOAD": str(library), "DISK_ROOT": str(tmp_path / "disk"), "DISK_CONTROL": str(control)}
    command = [sys.executable, "-c", PROGRAM, str(run_dir), str(control)]
    process = subprocess.run(command, env=env | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines() == [
        "step 1: saved",
        "newest 1",
        *["step 2 cannot be saved: No space left on device", "newest 1"] * 2,
        *["step 2 cannot be saved: Disk quota exceeded", "newest 1"],
        *["step 2 cannot be saved: Read-only file system", "newest 1"],
        "step 2 cannot be saved: Input/output error",
        "newest 1",
        *["step 5: saved", "newest 5", "step 6: saved", "newest 6", "step 7: saved", "newest 7"],
        "read 7",
        "unreadable EIO",
    ]
    assert "step 4 cannot be saved: Input/output error; it will be tried again, and the run continues" in process.stderr
    assert "step 5: waited " in process.stderr
    assert " for the disk of " in process.stderr
    renames = [line.split("\t") for line in Path(f"{control}.renames").read_text().splitlines()]
    assert len(renames) > 10
    assert not [(old, new) for old, new in renames if Path(old).parent != Path(new).parent]
