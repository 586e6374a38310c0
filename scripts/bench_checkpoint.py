"""What checkpoints cost: how long training waits, and how fast they are written, verified and read, beside `dd` and
`sha256sum` of the same number of bytes in the same directory, in the same run.

    python scripts/bench_checkpoint.py --toy
    python scripts/bench_checkpoint.py --gigabytes 20 --directory /scratch

The state is of arrays as a run has them, over several processes on loopback. To save 20 GB from less memory, each array in
memory is saved under several names (`--names`): all bytes are copied, written, hashed and read back, but those in memory are
fewer. They are read back name by name. The directory is left as it was. The kernel keeps what was just written in its memory
where it can: `sha256sum`, verifying and reading profit alike.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ARRAY_BYTES = 128 << 20  # of the largest arrays, on each process
_ROOT = Path(__file__).resolve().parent.parent


def measure(directory: Path, port: int, rank: int, num_processes: int, num_bytes: int, num_names: int) -> dict[str, Any]:
    """In every process of the run: saves, verifies and restores a state of `num_bytes`; seconds, by what they went to."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import P

    from llamajax.checkpoint import manifest
    from llamajax.checkpoint.read import read_step
    from llamajax.checkpoint.write import Checkpointer
    from llamajax.config.parallel import DistributedConfig, MeshConfig
    from llamajax.config.training import CheckpointConfig
    from llamajax.parallel import mesh, startup
    from llamajax.parallel.processes import everyones

    startup.select_platform(MeshConfig(num_cpu_devices=1))
    address = f"127.0.0.1:{port}"
    startup.join_run(
        DistributedConfig(enabled=True, coordinator_address=address, num_processes=num_processes, process_id=rank)
    )
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=num_processes)))
    in_memory = num_bytes // num_names
    num_arrays = max(1, in_memory // (num_processes * _ARRAY_BYTES))
    shape = (num_processes * max(1, in_memory // num_arrays // num_processes // 4096), 1024)
    make = jax.jit(lambda value: jnp.full(shape, value, jnp.float32, out_sharding=P("fsdp")))
    arrays = [make(float(i)) for i in range(num_arrays)]
    state = {f"a{name}": {f"w{i}": array for i, array in enumerate(arrays)} for name in range(num_names)}
    jax.block_until_ready(state)
    before = _memory()
    everyones("ready")
    with Checkpointer(directory, CheckpointConfig()) as checkpointer:
        began = time.monotonic()
        checkpointer.save(1, state, {})
        stall_s = time.monotonic() - began
        checkpointer.wait()
        everyones("written")
        write_s = time.monotonic() - began
    save_memory = _memory()
    step = directory / "checkpoints" / "1"
    began = time.monotonic()
    found = manifest.damage(step)
    verify_s = time.monotonic() - began
    assert not found, found
    del state, arrays
    like = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(jax.sharding.get_mesh(), P("fsdp")))
    began = time.monotonic()
    for name in range(num_names):
        part = {f"a{name}": {f"w{i}": like for i in range(num_arrays)}}
        restored: Any = read_step(step, part, partial=True)
        jax.block_until_ready(restored.state)
        for i in (0, num_arrays - 1):
            shard = np.asarray(restored.state[f"a{name}"][f"w{i}"].addressable_shards[0].data)
            assert float(shard[0, 0]) == float(shard[-1, -1]) == float(i)
        del restored
    everyones("read")
    read_s = time.monotonic() - began
    jax.distributed.shutdown()
    return {
        "bytes": 4 * shape[0] * shape[1] * num_arrays * num_names,
        "stall_s": stall_s, "write_s": write_s, "verify_s": verify_s, "read_s": read_s,
        "memory_before": before, "memory": save_memory,
    }  # fmt: skip


def _memory() -> int:
    """The most bytes that this process has had in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _timed(command: Sequence[str], **options: Any) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)
    return time.monotonic() - began


def _run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All processes, then the yardsticks; the figures of the first process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(_ROOT)}
    num_bytes = int(arguments.gigabytes * 1e9)
    own = [sys.executable, __file__, "--directory", str(directory / "run"), "--names", str(arguments.names)]
    own += ["--gigabytes", str(arguments.gigabytes), "--processes", str(arguments.processes), "--port", str(port)]
    workers = [
        subprocess.Popen([*own, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=env)
        for rank in range(arguments.processes)
    ]
    try:
        outputs = [worker.communicate()[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.returncode for worker in workers):
        sys.exit(f"a process ended with {[worker.returncode for worker in workers]}")
    of_all = [json.loads(output.splitlines()[-1]) for output in outputs]
    figures = of_all[0] | {key: max(each[key] for each in of_all) for key in ("stall_s", "memory", "memory_before")}
    step = directory / "run/checkpoints/1"
    files = sorted(str(path) for path in step.rglob("*") if path.is_file())
    figures["num_files"], figures["largest_file"] = len(files), max(Path(file).stat().st_size for file in files)
    figures["sha256sum_s"] = _timed(["sha256sum", *files])
    threads = str(os.cpu_count() or 1)
    figures["parallel_sha256sum_s"] = _timed(
        ["xargs", "-0", "-P", threads, "-n", "1", "sha256sum"], input="\0".join(files).encode()
    )
    shutil.rmtree(directory / "run")
    block = 4 << 20
    dd = ["dd", "if=/dev/zero", f"of={directory / 'dd'}", f"bs={block}", f"count={num_bytes // block}", "conv=fsync"]
    figures["dd_s"] = _timed(dd)
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures for people: each rate, and what it is of its yardstick's."""
    size = figures["bytes"]
    rows = [
        ("training waits", "stall_s", None),
        ("write and commit", "write_s", "dd_s"),
        ("verify", "verify_s", "parallel_sha256sum_s"),
        ("read", "read_s", None),
        ("dd conv=fsync", "dd_s", None),
        ("sha256sum, one", "sha256sum_s", None),
        ("sha256sum, all cores", "parallel_sha256sum_s", None),
    ]
    lines = [f"{'':20} {'seconds':>9} {'MB/s':>9}  of its yardstick"]
    for what, key, yardstick in rows:
        ratio = f"{figures[yardstick] / figures[key]:8.2f} x {yardstick.removesuffix('_s')}" if yardstick else ""
        lines.append(f"{what:20} {figures[key]:9.2f} {size / 1e6 / figures[key]:9.0f}  {ratio}".rstrip())
    added = (figures["memory"] - figures["memory_before"]) / 1e9
    lines.append(
        f"{size / 1e9:.2f} GB in {figures['num_files']} files of at most {figures['largest_file'] / 1e6:.0f} MB; saving took"
        f" {added:.2f} GB more memory in the process that took most, of {figures['memory'] / 1e9:.2f} GB"
    )
    return "\n".join(lines)


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state, in units of 1e9 bytes")
    parser.add_argument("--processes", type=int, default=4, help="processes that save it together")
    parser.add_argument("--names", type=int, default=1, help="names under which each array in memory is saved")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where it is saved")
    parser.add_argument("--json", type=Path, help="also writes the figures to this file")
    parser.add_argument("--toy", action="store_true", help="a small state of two processes, to see that it works")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.gigabytes, arguments.processes, arguments.names = 0.032, 2, 2
    if arguments.rank is not None:
        num_bytes = int(arguments.gigabytes * 1e9)
        own = (arguments.port, arguments.rank, arguments.processes, num_bytes, arguments.names)
        print(json.dumps(measure(arguments.directory, *own)))
        return
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint.", dir=arguments.directory) as directory:
        figures = _run(arguments, Path(directory))
    print(table(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
