"""Real runs of the command line, small enough for tests: a YAML file, a process, and what it left behind."""

import contextlib
import ipaddress
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).parent.parent
WORDS = ["the", "model", "reads", "a", "row", "of", "tokens", "and", "learns", "which", "one", "comes", "next"]


def write_config(directory: pathlib.Path, **train_settings: object) -> pathlib.Path:
    """A complete run on made-up sentences: 20 steps of a tiny model on a mesh of eight devices, saved every five."""
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(3, 30))) + ".\n" for _ in range(300)]
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))
    train = {"num_steps": 20, "global_batch_size": 8, "grad_accum_steps": 2, "eval_every": 10, "eval_batches": 1}
    config = {
        "run_dir": str(directory / "run"),
        "seed": 1,
        "model": {
            "vocab_size": 320, "embed_dim": 16, "mlp_dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
            "head_dim": 8, "compute_dtype": "float32",
        },
        "mesh": {"fsdp": 2, "sequence": 2, "tensor": 2, "num_cpu_devices": 8},
        "data": {
            "sources": [{"kind": "jsonl", "paths": [str(directory / "text.jsonl")]}], "seq_len": 32,
            "held_out_fraction": 0.1, "cache_dir": str(directory / "cache"),
        },
        "train": train | train_settings,
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
        "checkpoint": {"save_every": 5, "keep_last": 1000},
    }  # fmt: skip
    path = directory / "run.yaml"
    path.write_text(json.dumps(config))
    return path


def command(config: pathlib.Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "llamajax.train", "--config", str(config), *overrides]


def environment(directory: pathlib.Path) -> dict[str, str]:
    """This process's, with compiled steps kept in `directory`: a test that starts a run often compiles it once."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | cache


def free_address() -> str:
    """`host:port` on loopback where nobody listens."""
    return free_addresses(1)[0]


def free_addresses(number: int) -> list[str]:
    """So many of them, no two alike."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{free.getsockname()[1]}" for free in sockets]


def listening(pid: int) -> set[str]:
    """The addresses on which a process listens for connections, by any protocol of the internet."""
    links = (link for link in pathlib.Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    own = {os.readlink(link) for link in links}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                words = bytes.fromhex(address.partition(":")[0])  # each of four bytes, as they lie in memory
                host = ipaddress.ip_address(b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4)))
                found.add(str(getattr(host, "ipv4_mapped", None) or host))
    return found


def start(config: pathlib.Path, *overrides: str, directory: pathlib.Path | None = None) -> subprocess.Popen[str]:
    """The command, running, in another working `directory` if that is given; a step that was compiled before is loaded."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    told = command(config, f"--xla.compilation_cache={config.parent / 'programs'}", *overrides)
    return subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=directory)


def finish(process: subprocess.Popen[str], expected_code: int = 0) -> str:
    """Waits for the process to end with this code; returns its output."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == expected_code, output
    return output


def losses(run_dir: pathlib.Path) -> dict[int, str]:
    """Training loss of every step on record, to the last bit; fails unless each step stands there once, in order."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "train/loss" in record]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return {record["step"]: float(record["train/loss"]).hex() for record in records}


def steps_on_record(run_dir: pathlib.Path) -> int:
    """Steps whose line is complete, also while the run is writing."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b'"train/loss"') if path.exists() else 0


def committed_steps(run_dir: pathlib.Path) -> set[int]:
    return {int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal()}


def cut(run_dir: pathlib.Path, copy: pathlib.Path, step: int) -> pathlib.Path:
    """Copies a run to `copy`, which it returns, as a kill after this step would have left it."""
    shutil.copytree(run_dir, copy)
    for later in committed_steps(copy):
        if later > step:
            shutil.rmtree(copy / "checkpoints" / str(later))
    return copy


def wait_until(reached: Callable[[], bool], processes: Sequence[subprocess.Popen[str]]) -> None:
    """Returns once `reached()`, or once a process has ended."""
    deadline = time.monotonic() + 600
    while not reached() and all(process.poll() is None for process in processes):
        assert time.monotonic() < deadline, "nothing happened for ten minutes"
        time.sleep(0.005)


def time_with(sleep: Callable[[float], object]) -> types.SimpleNamespace:
    """The module `time` with another `sleep`, for one module alone: threads that others have started sleep as before."""
    return types.SimpleNamespace(**{**vars(time), "sleep": sleep})
