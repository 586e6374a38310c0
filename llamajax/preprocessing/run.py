"""Preprocessing from start to end: read `run` from top to bottom.

The result does not depend on the process that makes it: `python -m llamajax.train` with the same configuration finds
everything in `data.cache_dir`, and would otherwise make the same files itself.
"""

import functools
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamajax.config.run import Config
from llamajax.data.cleaning.pipeline import clean
from llamajax.data.documents.file_groups import announce_fetching, find_groups, group_files, known_group
from llamajax.data.documents.lines import Span
from llamajax.data.documents.sources import Source
from llamajax.data.progress import TokenizingProgress
from llamajax.data.rows.dataset import prepare
from llamajax.data.tokenizers.encoder_choice import choose_encoder
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.data.tokens.encoding import Tokenizing, chat_template_for, given_tokenizer, tokenizer_for
from llamajax.data.tokens.shards import is_complete
from llamajax.data.tokens.source_tokens import entries_of
from llamajax.data.tokens.tokenize_run import check_megatron, sources_of
from llamajax.errors import ConfigError, show
from llamajax.preprocessing.executors import Executor, LocalExecutor
from llamajax.preprocessing.work import Job, Task, hash_group, tokenize_group
from llamajax.processes.exit import exit_code
from llamajax.watch import console
from llamajax.weights.origin import models_tokenizer


def run(config: Config, options: Mapping[str, str]) -> None:
    """Writes everything to `data.cache_dir` that a run with `config` reads.

    Args:
        config: the run.
        options: `--part`, `--workers` and `--executor` of the command line.

    Raises:
        ConfigError: an option is wrong, or the tokenizer does not fit.
        DataError: a source, tokenizer, template or cache cannot be read.
        DiskError: the disk fails, or is full.
        EnvironmentMismatchError: Ray is missing, or workers are lost again and again.
    """
    part, num_parts = _read_part(options.get("--part", "0/1"))
    cache_dir = Path(config.data.cache_dir).expanduser()
    executor = _executor(options)
    try:
        _run(config, cache_dir, part, num_parts, executor)
    finally:
        executor.close()


def _run(config: Config, cache_dir: Path, part: int, num_parts: int, executor: Executor) -> None:
    models_own = models_tokenizer(config.init_from)
    given = given_tokenizer(config, models_own)
    check_megatron(config, cache_dir, log)
    sources = [source for source in sources_of(config.data) if not source.format.is_tokenized]
    if config.data.cleaning.steps:
        _hash(executor, _tasks(sources), part, num_parts, cache_dir)
        groups = [group_files(source, cache_dir, log) for source in sources]
        sources = clean(sources, groups, config.data.cleaning, cache_dir, log, executor.map)
    tasks = _tasks(sources)
    own = tasks[part::num_parts]
    log(f"work       {len(own):,} of {len(tasks):,} pieces, {_size(own)} of {_size(tasks)}, by {executor.num_workers}")
    if given is None:  # the files train the tokenizer, so their hashes come first
        _hash(executor, tasks, part, num_parts, cache_dir)
    by = _tokenizing(config, models_own, sources, cache_dir)
    missing = [task for task in own if not _is_made(task, by)]
    announce_fetching((task.group for task in missing), log)
    if config.data.tokenizer.gigatoken:
        choose_encoder(by.tokenizer, [task.group for task in missing], cache_dir, log)
    _work_off(executor, functools.partial(tokenize_group, Job.of(by)), own)
    num_missing = sum(not _is_made(task, by) for task in tasks) if num_parts > 1 else 0
    if num_missing:
        log(f"finished   this part; {num_missing:,} pieces of other parts are missing; the last part packs all")
        return
    dataset = prepare(config, log=log, tokenizer=models_own, run=executor.map)
    log(f"finished   all data is in {cache_dir}; fingerprint {dataset.fingerprint[:16]}")


def _tasks(sources: Sequence[Source]) -> list[Task]:
    """Returns the numbered pieces of work."""
    return [Task(*numbered) for numbered in enumerate(group for source in sources for group in find_groups(source))]


def _hash(executor: Executor, tasks: Sequence[Task], part: int, num_parts: int, cache_dir: Path) -> None:
    """Adds the hashes of all pieces to the cache, first of this part's pieces; other parts meanwhile add theirs."""
    for several in (tasks[part::num_parts], tasks):
        unknown = [task for task in several if known_group(task.group, cache_dir) is None]
        announce_fetching((task.group for task in unknown), log)
        _work_off(executor, functools.partial(hash_group, cache_dir), unknown, hashes=True)


def log(line: str) -> None:
    """Prints one line."""
    console.CONSOLE.print(line, markup=False, soft_wrap=True)


def _tokenizing(config: Config, models_own: Tokenizer | None, sources: Sequence[Source], cache_dir: Path) -> Tokenizing:
    """Returns how documents become tokens; trains a tokenizer if none is given."""
    tokenizer = given_tokenizer(config, models_own)
    if tokenizer is None:
        groups = [group for source in sources for group in group_files(source, cache_dir, log)]
        tokenizer = tokenizer_for(config, None, groups, cache_dir, log)
    return Tokenizing(tokenizer, chat_template_for(config.data, tokenizer), cache_dir, config.data.held_out_fraction, log)


def _work_off(executor: Executor, function: Any, tasks: Sequence[Task], *, hashes: bool = False) -> None:
    """Tokenizes or hashes all groups, largest first, and shows progress.

    Among equal groups, the first of each file come first, so that processes fetch different remote files.
    """
    largest_first = sorted(tasks, key=lambda task: (-task.group.num_bytes, task.group.span or Span(0, 0)))
    num_bytes, by = sum(task.group.num_bytes for task in tasks), f" by {executor.num_workers} processes"
    with TokenizingProgress(num_bytes, log, by=by, doing="hashing" if hashes else "tokenizing") as progress:

        def tell(name: str, arguments: tuple[Any, ...]) -> None:
            {"advance": progress.advance, "finish_group": progress.finish_group, "log": log}[name](*arguments)

        executor.map_telling(function, largest_first, tell)


def _executor(options: Mapping[str, str]) -> Executor:
    name, workers = options.get("--executor", "local"), options.get("--workers", str(len(os.sched_getaffinity(0))))
    if not re.fullmatch(r"[1-9]\d{0,4}", workers):
        raise ConfigError(f"--workers: must be a number of processes, not {show(workers)}; write --workers 8")
    if name == "local":
        return LocalExecutor(int(workers))
    if name != "ray":
        raise ConfigError(f"--executor: {show(name)} is unknown; write local or ray")
    from llamajax.preprocessing.ray_executor import RayExecutor  # slow to import, and optional

    return RayExecutor(int(workers))


def _read_part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})/([1-9]\d{0,5})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--part: must be I/N with I from 0 to N - 1, not {show(text)}; write --part 0/16 to --part 15/16")
    return int(match[1]), int(match[2])


def _is_made(task: Task, by: Tokenizing) -> bool:
    group = known_group(task.group, by.cache_dir)
    return group is not None and is_complete(entries_of([group], by)[0])


def _size(tasks: Sequence[Task]) -> str:
    num_bytes = sum(task.group.num_bytes for task in tasks)
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def _interrupt_once(signum: int, frame: object) -> None:
    """Handles Ctrl-C by ending the workers; a second Ctrl-C does not interrupt that, which takes no time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(config: Config, options: Mapping[str, str]) -> int:
    """Preprocesses in a process that does nothing else; returns the exit code."""
    signal.signal(signal.SIGINT, _interrupt_once)
    return exit_code(
        lambda: run(config, options),
        memory_remedy="fewer --workers",
        disk=config.data.cache_dir,
        disk_remedy="check the disk and run the same command again",
    )
