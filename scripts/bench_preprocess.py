"""Measures how fast `python -m llamajax.preprocess` tokenizes, per process. The same run measures the tokenizer's library
alone, gigatoken alone, and the flows of Megatron-LM's `preprocess_data.py` (a process per processor: `json.loads`, encode,
write) and `preprocess_data_fast.py` (whole files through gigatoken, written at once).

    python scripts/bench_preprocess.py --toy
    python scripts/bench_preprocess.py --gigabytes 20 --kills 20 --directory /scratch --json figures.json
    python scripts/bench_preprocess.py --gigabytes 0.5 --compare --tokenizer tokenizer.json

The script generates the corpus from a seed, out of stretches of the standard library's sources and help texts. The others
process a sample of it before and after, since a shared machine's speed varies. All encode with the same number of processes,
each with one thread. The peak memory is that of the largest worker. `--kills` tokenizes the corpus once more while all
processes of the run are killed (SIGKILL) repeatedly; every file must be the same as without kills. `--compare` tokenizes it
once more without gigatoken; every file must be the same. `work of a process` is one process's share of the work: hashing,
parsing, encoding and writing, without the start of Python and the comparison of ids. On a shared machine, compare the rates
per second of processor time. The directory is left unchanged.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import hashlib
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the work, not threads
_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from scripts.checkout import commit  # noqa: E402  (importable through the path above)
from scripts.preprocessing_rivals import (  # noqa: E402  (as above)
    Measured,
    encode_alone,
    encode_as_megatron,
    encode_as_megatron_fast,
    encode_by_gigatoken,
    measuring,
    text_bytes,
)

_FILE_BYTES = 256 << 20
_MEAN_CHARS = 4000
_LOOK_EVERY_S = 0.5


def write_corpus(folder: Path, num_bytes: int) -> list[Path]:
    """Writes JSONL files of `num_bytes` in total: numbered stretches of the library's texts, of log-normal length."""
    from llamajax.config.data import SourceConfig
    from llamajax.data.documents.sources import Source

    source = Source(SourceConfig(kind="stdlib"), "stdlib")
    text = "\n".join(document.text for document in source.documents(source.files()))
    rng, paths, number = random.Random(0), [], 0
    while num_bytes > 0:
        paths.append(folder / f"corpus-{len(paths):04d}.jsonl")
        size = min(_FILE_BYTES, num_bytes)
        num_bytes -= size
        print(f"  {paths[-1].name}, {num_bytes / 1e9:,.2f} GB after it", file=sys.stderr, flush=True)
        with paths[-1].open("w") as file:
            while file.tell() < size:
                lines = []
                for _ in range(1000):
                    length = int(rng.lognormvariate(0, 1.2) * _MEAN_CHARS / 2)
                    start = rng.randrange(len(text))
                    lines.append(json.dumps({"text": f"{number} {text[start : start + length]}", "id": number}))
                    number += 1
                file.write("\n".join(lines) + "\n")
    return paths


def sample_of(paths: list[Path], num_bytes: int) -> list[bytes]:
    """Returns the first lines of the first file."""
    with paths[0].open("rb") as file:
        return file.readlines(num_bytes)


def work_of_process(tokenizer: Path, lines: list[bytes], out: Path) -> Measured:
    """Does the work of one process of llamajax: hashes, parses, encodes, frames, hashes for the split, writes and
    flushes."""
    from llamajax.config.data import SourceConfig
    from llamajax.data.documents.file_groups import group_files
    from llamajax.data.documents.sources import Source
    from llamajax.data.tokenizers.encoder_choice import differing_text
    from llamajax.data.tokenizers.tokenizer import load_tokenizer
    from llamajax.data.tokens.shards import tokenize
    from llamajax.preprocessing.executors import compute_in_one_thread

    compute_in_one_thread()
    out.mkdir()
    (out / "lines.jsonl").write_bytes(b"".join(lines))
    source = Source(SourceConfig(kind="jsonl", paths=(str(out / "lines.jsonl"),)), "data.sources[0]")
    library = load_tokenizer(tokenizer)
    library.is_fast = differing_text(library, quick=True) is None
    with measuring(text_bytes(lines)) as taken:
        groups = group_files(source, out / "cache", lambda line: None)
        tokenize(groups, library, out / "cache", lambda line: None, gigatoken=False)  # makes the choice of encoder
    return taken[0]


def rate_per_process(function: Any, tokenizer: Path, lines: list[bytes], workers: int, *rest: Path) -> tuple[float, float]:
    """Returns MB of text per second and process, by the clock and by processor time. The processes run at once, each on a
    part of the lines."""
    with concurrent.futures.ProcessPoolExecutor(workers) as pool:
        parts = [lines[number::workers] for number in range(workers)]
        outs = [[Path(tempfile.mkdtemp(dir=path)) / "out" for path in rest] for _ in range(workers)]
        futures = [pool.submit(function, tokenizer, part, *out) for part, out in zip(parts, outs, strict=True)]
        found = [future.result() for future in futures]
    clock, processor = (
        statistics.mean(one.num_bytes / seconds / 1e6 for one, seconds in zip(found, some, strict=True))
        for some in ([one.wall for one in found], [one.processor for one in found])
    )
    return clock, processor


@contextlib.contextmanager
def peak_of_children(pid: int) -> Iterator[list[int]]:
    """Yields a list with one number: the peak memory so far, in bytes, of the largest descendant of process `pid`."""
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(_LOOK_EVERY_S):
            for status in Path("/proc").glob("[0-9]*/status"):
                with contextlib.suppress(OSError):
                    text = status.read_text()
                    parent, size = (re.search(rf"^{name}:\s+(\d+)", text, re.M) for name in ("PPid", "VmHWM"))
                    if parent and size and int(parent[1]) == pid:
                        peak[0] = max(peak[0], 1024 * int(size[1]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def _command(folder: Path, tokenizer: Path, workers: int, cache: str) -> list[str]:
    return [
        sys.executable, "-u", "-m", "llamajax.preprocess", "--config", str(_ROOT / "configs/quickstart.yaml"),
        "--workers", str(workers),
        "--data.sources", json.dumps([{"kind": "jsonl", "paths": [f"{folder}/corpus-*.jsonl"]}]),
        "--data.tokenizer.path", str(tokenizer), "--model.vocab_size", "1000000", "--data.cache_dir", str(folder / cache),
    ]  # fmt: skip


def preprocess(folder: Path, tokenizer: Path, workers: int) -> dict[str, float]:
    """Times `python -m llamajax.preprocess` on the corpus in the folder, and describes its result."""
    command, lines = _command(folder, tokenizer, workers, "cache"), []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (
        subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process,
        peak_of_children(process.pid) as peak,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {line.rstrip()}", file=sys.stderr, flush=True)
            lines.append(line)
    if process.returncode:
        raise SystemExit(f"preprocess ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, rate = _numbers(r"^tokenized .* in ([\d.,]+) s, .*?([\d.,]+) MB/s", lines)
    documents, megabytes, tokens = _numbers(r"^data .*: ([\d,]+) documents.*?, ([\d.,]+) MB, ([\d,]+) tokens", lines)
    return {
        "seconds": seconds, "mb_per_s": rate, "documents": documents, "text_megabytes": megabytes, "tokens": tokens,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_worker_bytes": float(peak[0]), "files": float(len(_digests(folder / "cache"))),
    }  # fmt: skip


def _numbers(pattern: str, lines: list[str]) -> list[float]:
    """Returns the numbers in the first line that matches the pattern."""
    found = next(match for line in lines if (match := re.search(pattern, line)))
    return [float(number.replace(",", "")) for number in found.groups()]


def preprocess_killed(folder: Path, tokenizer: Path, workers: int, kills: int, seconds: float) -> dict[str, float]:
    """Tokenizes the corpus, which takes `seconds`, into another cache, and kills it `kills` times at random moments.

    Returns:
        The number of files, all identical to those of the undisturbed run, and the seconds of all tries.

    Raises:
        SystemExit: A file differs, or the last try fails.
    """
    command = _command(folder, tokenizer, workers, "killed")
    rng, started, done = random.Random(0), time.perf_counter(), 0
    while done < kills:
        with subprocess.Popen(command, cwd=_ROOT, stdout=sys.stderr, start_new_session=True) as process:
            try:
                process.wait(seconds / (kills + 1) * rng.uniform(0.5, 1.5))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                done += 1
                print(f"  kill {done} of {kills} at {time.perf_counter() - started:,.0f} s", file=sys.stderr, flush=True)
                continue
        raise SystemExit(f"preprocess ended with {process.returncode} before kill {done + 1}")
    subprocess.run(command, cwd=_ROOT, stdout=sys.stderr, check=True)
    seconds = time.perf_counter() - started
    return {"kills": kills, "killed_seconds": seconds, "same_files": _same_files(folder, "killed")}


def preprocess_otherwise(folder: Path, tokenizer: Path, workers: int) -> dict[str, float]:
    """Tokenizes without gigatoken. Returns the number of files; raises `SystemExit` if one differs."""
    command = [*_command(folder, tokenizer, workers, "otherwise"), "--data.tokenizer.gigatoken", "false"]
    subprocess.run(command, cwd=_ROOT, stdout=sys.stderr, check=True)
    return {"compared_files": _same_files(folder, "otherwise")}


def _same_files(folder: Path, other: str) -> int:
    """Compares and removes the other cache. Returns its number of files; raises `SystemExit` if one differs."""
    one, another = _digests(folder / "cache"), _digests(folder / other)
    if one != another:
        differing = sorted(str(path) for path in one.keys() | another.keys() if one.get(path) != another.get(path))
        raise SystemExit(f"{other}: not the same: {', '.join(differing)}")
    shutil.rmtree(folder / other)
    return len(one)


def _digests(cache: Path) -> dict[Path, str]:
    """Returns digests of all files except those that name the encoding library."""
    digests = {}
    files = (path for path in cache.rglob("*") if path.is_file() and path.relative_to(cache).parts[0] != "encoders")
    for path in sorted(files):
        with path.open("rb") as file:
            digests[path.relative_to(cache)] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the corpus")
    parser.add_argument("--toy", action="store_true", help="a corpus of 20 MB")
    parser.add_argument("--sample_megabytes", type=float, default=64.0, help="the others' sample, before and after")
    parser.add_argument(
        "--tokenizer", type=Path, help="a tokenizer.json or tokenizer.model; default: one of 32,000 pieces, trained here"
    )
    parser.add_argument("--kills", type=int, default=0, help="tokenize once more, with this many kills")
    parser.add_argument("--compare", action="store_true", help="tokenize once more, without gigatoken")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument(
        "--directory", type=Path, default=Path(tempfile.gettempdir()), help="directory for the corpus and the cache"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    num_bytes, code = int(20e6 if arguments.toy else arguments.gigabytes * 1e9), commit()
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="bench-preprocess-") as name:
        folder = Path(name)
        print(f"writing {num_bytes / 1e9:.2f} GB", file=sys.stderr, flush=True)
        paths = write_corpus(folder, num_bytes)
        tokenizer = arguments.tokenizer or _train(paths, folder)
        lines = sample_of(paths, min(num_bytes // 2, int(arguments.sample_megabytes * 1e6)))
        measured = {
            "library alone": (encode_alone, ()),
            "Megatron-LM's flow": (encode_as_megatron, (folder,)),
            "gigatoken alone": (encode_by_gigatoken, ()),
            "Megatron-LM's fast flow": (encode_as_megatron_fast, (folder,)),
            "work of a process": (work_of_process, (folder,)),
        }
        others: dict[str, list[tuple[float, float]]] = {name: [] for name in measured}
        figures: dict[str, Any] = {}
        for turn in ("before", "after"):
            print(f"the others, {turn}", file=sys.stderr, flush=True)
            for name, (function, rest) in measured.items():
                others[name].append(rate_per_process(function, tokenizer, lines, arguments.workers, *rest))
            if turn == "before":
                figures = preprocess(folder, tokenizer, arguments.workers)
        if arguments.kills:
            print(f"once more, with {arguments.kills} kills", file=sys.stderr, flush=True)
            figures |= preprocess_killed(folder, tokenizer, arguments.workers, arguments.kills, figures["seconds"])
        if arguments.compare:
            print("once more, without gigatoken", file=sys.stderr, flush=True)
            figures |= preprocess_otherwise(folder, tokenizer, arguments.workers)
        rates = {name: statistics.mean(clock for clock, _ in of_both) for name, of_both in others.items()}
        rates["llamajax.preprocess"] = figures["mb_per_s"] / arguments.workers
    machine = platform.processor() or platform.machine()
    libraries = {name: version(name) for name in ("gigatoken", "sentencepiece", "tokenizers")}
    print(f"{datetime.date.today()}, commit {code}, {machine}, {arguments.workers} processes, {libraries}")
    print(
        f"corpus {num_bytes / 1e9:.2f} GB, tokenizer {tokenizer.name}, {figures['seconds']:,.0f} s,"
        f" {figures['documents']:,.0f} documents, {figures['tokens']:,.0f} tokens, {figures['files']:,.0f} files"
    )
    for name, rate in rates.items():
        both = others.get(name, [])
        spread = f" ({', '.join(f'{clock:.2f}' for clock, _ in both)})" if both else ""
        whole = figures["text_megabytes"] / figures["processor_seconds"]  # with hashing, the encoder's choice and packing
        processor = statistics.mean(one for _, one in both) if both else whole
        print(
            f"{name:23} {rate:6.2f} MB/s per process, {rate / rates['library alone']:.2f} of the library{spread};"
            f" {processor:6.2f} MB per second of processor time"
        )
    print(f"largest worker         {figures['peak_worker_bytes'] / 1e6:,.0f} MB at its peak")
    if arguments.kills:
        print(
            f"killed {arguments.kills} times: {figures['same_files']} files as without, {figures['killed_seconds']:,.0f} s"
        )
    if arguments.compare:
        print(f"without gigatoken: {figures['compared_files']} files, all the same")
    if arguments.json:
        of = {"bytes": num_bytes, "tokenizer": str(arguments.tokenizer), "workers": arguments.workers}
        by = {"commit": code, "date": str(datetime.date.today()), "machine": machine, "libraries": libraries}
        record = figures | of | by | {"rates": rates, "others": others}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def _train(paths: list[Path], folder: Path) -> Path:
    from llamajax.data.tokenizers.tokenizer import sample_texts, train_sentencepiece

    texts = (json.loads(line)["text"] for line in sample_of(paths, 20_000_000))
    path = folder / "tokenizer.model"
    path.write_bytes(train_sentencepiece(sample_texts(texts, 10_000_000), vocab_size=32_000))
    return path


if __name__ == "__main__":
    main()
