"""Measures the cost of checkpoints: how long training waits, and how fast checkpoints are written, verified and read.
The same run measures `dd` and `sha256sum` on as many bytes in the same directory, for comparison.

    python scripts/bench_checkpoint.py --toy
    python scripts/bench_checkpoint.py --gigabytes 20 --directory /scratch

The state has arrays like a run's, sharded over several processes on loopback. To save 20 GB from less memory, each array in
memory is saved under several names (`--names`): all bytes are copied, written, hashed and read back, but fewer are in
memory. They are read back name by name. Progress goes to standard error. The directory is left unchanged, even if this
script is killed. The kernel caches recent writes where it can, from which `sha256sum`, verifying and reading profit alike.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_ARRAY_BYTES = 128 << 20  # size of the largest arrays on each process
_COPIES = 2  # largest number of copies of the state in memory during a save
_PROCESS_BYTES = 700 << 20  # memory of a process without a state
_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from scripts.checkout import commit  # noqa: E402  (found by the path above)


def measure(directory: Path, port: int, rank: int, num_processes: int, num_bytes: int, num_names: int) -> dict[str, Any]:
    """Saves, verifies and restores a state of `num_bytes` in every process of the run. Returns the seconds of each phase."""
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
    from llamajax.processes.peers import everyones

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
    _say(f"saving {num_arrays} arrays under {num_names} names", rank)
    with Checkpointer(directory, CheckpointConfig()) as checkpointer:
        began = time.monotonic()
        checkpointer.save(1, state, {})
        stall_s = time.monotonic() - began
        checkpointer.wait()
        everyones("written")
        write_s = time.monotonic() - began
    save_memory = _memory()
    _say("verifying", rank)
    step = directory / "checkpoints" / "1"
    began = time.monotonic()
    found = manifest.damage(step)
    verify_s = time.monotonic() - began
    assert not found, found
    del state, arrays
    like = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(jax.sharding.get_mesh(), P("fsdp")))
    began = time.monotonic()
    for name in range(num_names):
        _say(f"reading {name + 1} of {num_names}", rank)
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
    """Returns the peak memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _say(what: str, rank: int = 0) -> None:
    if rank == 0:
        print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    """Runs in a thread; ends this process once its parent has ended for any reason."""
    sys.stdin.read()
    os._exit(1)


@contextlib.contextmanager
def _folder(parent: Path) -> Iterator[Path]:
    """Yields a temporary directory. Another process removes it at the end, even if this process is killed."""
    folder = tempfile.mkdtemp(prefix="bench_checkpoint.", dir=parent)
    remover = ["sh", "-c", 'cat && sleep 1 && rm -rf "$0"', folder]  # by then the other processes have ended
    with subprocess.Popen(remover, stdin=subprocess.PIPE, start_new_session=True):
        yield Path(folder)


def _tell_size(directory: Path, done: threading.Event) -> None:
    """Runs in a thread; prints how much of the checkpoint is on the disk."""
    while not done.wait(10):
        with contextlib.suppress(FileNotFoundError):
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            if size:
                _say(f"{size / 1e9:.1f} GB are on the disk")


def _fit(arguments: argparse.Namespace) -> None:
    """Sets `names` from the free memory unless given; exits if memory or the disk is too small."""
    num_bytes = int(arguments.gigabytes * 1e9)
    found = re.search(r"^MemAvailable: *(\d+) kB$", Path("/proc/meminfo").read_text(), flags=re.MULTILINE)
    available = int(found[1]) * 1024 if found else num_bytes
    of_state = available // 2 - arguments.processes * _PROCESS_BYTES
    least = -(-_COPIES * num_bytes // of_state) if of_state > 0 else sys.maxsize
    arguments.names = arguments.names or least
    if arguments.names < least:
        sys.exit(
            f"--gigabytes {arguments.gigabytes:g} does not fit into half of the {available / 1e9:.1f} GB of free"
            f" memory; raise --names {arguments.names}, leave it out, or use fewer --processes"
        )
    free = shutil.disk_usage(arguments.directory).free
    if 1.05 * num_bytes > free:
        sys.exit(f"{arguments.directory}: {free / 1e9:.1f} GB are free; choose another --directory, or fewer --gigabytes")


def _about() -> dict[str, Any]:
    """Returns the date, command, commit and machine of the measurement."""
    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": str(datetime.date.today()),
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "machine": f"{os.cpu_count()} x {processor[1] if processor else platform.machine()}, {memory:.0f} GiB",
    }


def _timed(command: Sequence[str], **options: Any) -> float:
    _say(command[0] if command[0] != "xargs" else "sha256sum, on all cores")
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)
    return time.monotonic() - began


def _run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Runs all processes, then the yardsticks. Returns the figures of the first process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(_ROOT)}
    num_bytes = int(arguments.gigabytes * 1e9)
    own = [sys.executable, __file__, "--directory", str(directory / "run"), "--names", str(arguments.names)]
    own += ["--gigabytes", str(arguments.gigabytes), "--processes", str(arguments.processes), "--port", str(port)]
    workers = [
        subprocess.Popen([*own, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        for rank in range(arguments.processes)
    ]
    done = threading.Event()
    threading.Thread(target=_tell_size, args=(directory / "run", done), daemon=True).start()
    try:
        outputs = [worker.stdout.read() for worker in workers if worker.stdout is not None]
        for worker in workers:
            worker.wait()
    finally:
        done.set()
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
    """Formats the figures: each rate, also as a multiple of its yardstick's."""
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
        f" {added:.2f} GB more memory, in the process with the highest peak, {figures['memory'] / 1e9:.2f} GB"
    )
    return "\n".join(lines)


def main() -> None:
    """Parses the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state, in GB (1e9 bytes)")
    parser.add_argument("--processes", type=int, default=4, help="number of processes that save the state together")
    parser.add_argument(
        "--names", type=int, help="number of names under which each array is saved; default: as many as memory needs"
    )
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="directory to save in")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--toy", action="store_true", help="try the script with a small state and two processes")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.toy:
        arguments.gigabytes, arguments.processes, arguments.names = 0.032, 2, 2
    if arguments.rank is not None:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        num_bytes = int(arguments.gigabytes * 1e9)
        own = (arguments.port, arguments.rank, arguments.processes, num_bytes, arguments.names)
        print(json.dumps(measure(arguments.directory, *own)))
        return
    _fit(arguments)
    about = _about()
    with _folder(arguments.directory) as directory:
        figures = about | _run(arguments, directory)
    print(f"{about['date']}, {about['commit']}, {about['machine']}: {about['command']}")
    print(table(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
