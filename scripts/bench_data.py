"""Measures the cost of large data before the first step: packing a hundred million documents, and starting several
processes on fifty thousand shards.

    python scripts/bench_data.py packing --documents 1e8 --directory /scratch
    python scripts/bench_data.py start --shards 50000 --processes 4 --directory /scratch

`packing` draws seeded document lengths (log-normal, a mean of about 800 tokens) and packs them as `prepare` does, in this
process and without tokens. `start` creates a source of that many tiny shards and starts processes that connect by
jax.distributed and prepare the source, as training does. It reports the seconds from the connection to the data and to the
rows of the first two batches, and the data files that each process has opened by then.
"""

import argparse
import datetime
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from scripts.checkout import commit  # noqa: E402  (importable through the path above)

_PART_DOCUMENTS = 16_000  # as in a shard of 64 MB
_SHARDS_PER_FILE = 16
_LINES_PER_SHARD = 4


@dataclass(frozen=True)
class MadeUp:
    """Store of documents with random lengths and no tokens; a hundredth is held out."""

    num_documents: int

    @property
    def tokens_of_part(self) -> np.ndarray:
        """Number of tokens of each part, as if all were equally long."""
        return np.full(-(-self.num_documents // _PART_DOCUMENTS), 2**25, np.int64)

    def documents(self, part: int, seq_len: int) -> Any:
        """See `TokenStore`."""
        from llamajax.data.tokens.stores import Documents

        rng = np.random.default_rng(part)
        count = min(_PART_DOCUMENTS, self.num_documents - part * _PART_DOCUMENTS)
        lengths = np.clip(rng.lognormal(6, 1.2, count), 2, None).astype(np.int64)
        nothing = np.zeros(count, bool)
        sides = (rng.random(count) < 0.01).astype(np.uint8)
        return Documents(np.cumsum(lengths) - lengths, lengths, sides, nothing, nothing, nothing)

    def piece(self, part: int, start: int, length: int) -> Any:
        """Raises, because the store has no tokens."""
        raise NotImplementedError


def packing(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Packs; reports the speed, the memory and how full rows are."""
    from llamajax.data.rows.packing_cache import Packings

    packings = Packings(MadeUp(int(arguments.documents)), arguments.seq_len, "key", folder)
    before = _peak()
    started = time.monotonic()
    packings.make()
    seconds = time.monotonic() - started
    index = packings.read()
    fill = index.num_targets(0) / (index.num_rows(0) * arguments.seq_len)
    return {
        "documents": int(arguments.documents), "seq_len": arguments.seq_len, "seconds": round(seconds, 1),
        "documents_per_s": round(arguments.documents / seconds), "fill": round(fill, 5), "rows": index.num_rows(0),
        "peak_bytes": _peak(), "peak_bytes_before": before,
    }  # fmt: skip


def start(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Starts processes on a source of many shards, after a first process has made the shards."""
    config = _write_source(arguments, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "process", "--config", str(config), "--port", str(port)]
    print("making the shards", file=sys.stderr, flush=True)
    time.sleep(3)  # files changed within the last two seconds are hashed again
    subprocess.run([*command, "--processes", "1", "--rank", "0"], check=True, stdout=subprocess.DEVNULL)
    print("starting", file=sys.stderr, flush=True)
    several = [*command, "--processes", str(arguments.processes), "--rank"]
    started = [subprocess.Popen([*several, str(n)], stdout=subprocess.PIPE, text=True) for n in range(arguments.processes)]
    told = [process.communicate()[0].splitlines()[-1] for process in started]
    return {"shards": arguments.shards, "processes": [json.loads(line) for line in told]}


def _write_source(arguments: argparse.Namespace, folder: Path) -> Path:
    """Writes files of short lines, and returns a run on them in which each shard has some lines."""
    from llamajax.data.tokenizers.tokenizer import train_sentencepiece

    rng, words = np.random.default_rng(0), np.array(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"])
    num_files = -(-arguments.shards // _SHARDS_PER_FILE)
    for number in range(num_files):
        shards = min(_SHARDS_PER_FILE, arguments.shards - number * _SHARDS_PER_FILE)
        texts = [" ".join(words[rng.integers(0, 6, 20)])[:60].ljust(60, "x") for _ in range(shards * _LINES_PER_SHARD)]
        (folder / f"{number:05d}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "tokenizer.model").write_bytes(train_sentencepiece([" ".join(words)] * 50, vocab_size=320))
    record = {
        "run_dir": str(folder / "run"), "seed": 1,
        "model": {"vocab_size": 320, "embed_dim": 16, "mlp_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2,
                  "head_dim": 8},
        "data": {"sources": [{"kind": "jsonl", "paths": [f"{folder}/*.jsonl"]}], "seq_len": 64,
                 "cache_dir": str(folder / "cache"), "tokenizer": {"path": str(folder / "tokenizer.model")}},
        "train": {"num_steps": 10, "global_batch_size": 16}, "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
        "mesh": {"num_cpu_devices": 1},
    }  # fmt: skip
    config = folder / "run.yaml"
    config.write_text(json.dumps(record))
    return config


def process(arguments: argparse.Namespace) -> None:
    """Runs in each process; prints as JSON the data's time from the connection on, and the files opened."""
    import jax

    from llamajax.config.file import load_config
    from llamajax.data.documents import file_groups
    from llamajax.data.rows.dataset import prepare
    from llamajax.parallel import startup
    from llamajax.processes.peers import everyones

    # A shard for every few lines, as if each of them were megabytes long.
    bytes_per_line = len(json.dumps({"text": "x" * 60})) + 1
    file_groups.SPAN_BYTES = file_groups.GROUP_BYTES = bytes_per_line * _LINES_PER_SHARD
    config = load_config(arguments.config)
    if arguments.processes > 1:
        changes = {
            "distributed.enabled": True, "distributed.coordinator_address": f"127.0.0.1:{arguments.port}",
            "distributed.num_processes": arguments.processes, "distributed.process_id": arguments.rank,
        }  # fmt: skip
        config = config.changed(changes)
    startup.start(config)
    opened: list[str] = []
    below = str(Path(arguments.config).parent)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and args[0].startswith(below):
            opened.append(args[0])

    sys.addaudithook(hook)
    everyones("ready")
    started = time.monotonic()
    dataset = prepare(config, log=lambda line: None)
    prepared_s = time.monotonic() - started
    rows = config.train.global_batch_size // arguments.processes
    for step in range(config.data.prefetch_steps):
        for row in range(rows):
            dataset.train_row(step * config.train.global_batch_size + arguments.rank * rows + row)
    dataset.mean_keys(None)
    seconds = time.monotonic() - started
    figures = {"rank": arguments.rank, "prepared_s": round(prepared_s, 2), "first_rows_s": round(seconds, 2),
               "opened": len(opened), "of_them_shards": sum(name.endswith(".shard") for name in opened)}  # fmt: skip
    print(json.dumps(figures), flush=True)
    everyones("done")
    jax.distributed.shutdown()
    os._exit(0)


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Measures and prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["packing", "start", "process"], help="`process` is a process of `start`")
    parser.add_argument("--documents", type=float, default=1e6, help="packing: number of documents")
    parser.add_argument("--seq_len", type=int, default=4096, help="packing: tokens per row")
    parser.add_argument("--shards", type=int, default=500, help="start: number of shards")
    parser.add_argument("--processes", type=int, default=2, help="start: number of processes")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="directory for all files")
    parser.add_argument("--config", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.what == "process":
        process(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-data-") as name:
        figures = {"packing": packing, "start": start}[arguments.what](arguments, Path(name))
    print(json.dumps({"date": str(datetime.date.today()), "commit": commit()} | figures, indent=2))


if __name__ == "__main__":
    main()
