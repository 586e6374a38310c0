"""Writes a run's documents as Megatron-LM's token files, and checks such files; `python -m converters.megatron` calls it."""

import argparse
import itertools
import math
import time
from pathlib import Path

import numpy as np

from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.data.progress import TokenizingProgress
from llamajax.data.rows.rows import cache_error
from llamajax.data.tokens.encoding import Tokenizing
from llamajax.data.tokens.megatron import CHUNK, IndexedDataset, paths_of
from llamajax.data.tokens.megatron_writer import token_dtype, write_indexed
from llamajax.data.tokens.source_tokens import ShardedTokens, SourceTokens
from llamajax.data.tokens.tokenize_run import tokenized
from llamajax.disk import make_folder
from llamajax.errors import ConfigError, DataError
from llamajax.processes.exit import exit_code
from llamajax.watch.console import log, track
from llamajax.weights.origin import models_tokenizer


def export(config: Config, out: str, *, with_bos: bool = True) -> None:
    """Writes a pair of files for each source; each file appears complete and synced to disk, or not at all.

    The files hold the documents that training would pack, in the order of the source's files. Empty documents are left out.
    Held-out documents are included, because Megatron-LM splits documents by position. The files do not record which tokens
    of a conversation are learnt.

    Args:
        config: configuration of the run.
        out: prefix of the file names; with several sources, the source's number follows.
        with_bos: start documents with the tokenizer's bos, as in training; all end with its eos.

    Raises:
        UserError: one of `llamajax.errors`.
        OSError: writing failed.
    """
    for index, source in enumerate(config.data.sources):
        if source.kind == "preference":
            rule = "Megatron-LM's files do not record which answer is chosen"
            raise ConfigError(f"data.sources[{index}].kind: {rule}; remove the source")
        if source.kind == "prompt":
            raise ConfigError(f"data.sources[{index}].kind: prompts have nothing to train on; remove the source")
    prefix = str(paths_of(out)[0]).removesuffix(".bin")
    several = len(config.data.sources) > 1
    prefixes = [f"{prefix}_{number}" if several else prefix for number in range(len(config.data.sources))]
    for path in itertools.chain.from_iterable(map(paths_of, prefixes)):
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path}: exists already; choose another prefix, or remove it")
    make_folder(Path(prefix).absolute().parent)
    cache_dir = Path(config.data.cache_dir).expanduser()
    try:
        found = tokenized(config, cache_dir, log, log, models_tokenizer(config.init_from))
    except OSError as error:  # sources and tokenizers report their own
        raise cache_error(error, cache_dir) from error
    for tokens, path in zip(found.sources, prefixes, strict=True):
        _write(tokens, found.by, path, with_bos=with_bos)
    tokenizer = found.by.tokenizer
    ends = f"texts {'begin with bos and ' if with_bos else ''}end with eos"
    log(f"ids        bos {tokenizer.bos_id}, eos {tokenizer.eos_id} of {tokenizer.vocab_size:,} tokens; {ends}")
    blend = [
        f"{source.weight:g} {path}" for source, path in zip(config.data.sources, prefixes, strict=True) if source.weight
    ]
    log(f"megatron   --data-path {' '.join(blend) if several else prefix}")
    if len(blend) < len(prefixes):  # Megatron-LM refuses a weight of 0
        log("note       --data-path leaves out written sources that get a weight only in a later one of data.stages")


def _write(tokens: SourceTokens, by: Tokenizing, prefix: str, *, with_bos: bool) -> None:
    """Writes the pair of files of one source.

    Raises:
        ConfigError: the source already is Megatron-LM's files.
        DataError: the source has no documents, or more bad records than it allows.
    """
    started = time.monotonic()
    source, counts = tokens.source, tokens.counts
    if not isinstance(tokens, ShardedTokens):
        raise ConfigError(f"{source.key}.kind: {source.config.kind} already is Megatron-LM's format; remove the source")
    if counts.bad > source.config.max_bad_records:
        raise source.too_many_bad(counts.first_bad)
    if not counts.documents:
        raise DataError(f"{source.key}.paths: has no document to write; add documents with text")
    num_tokens = 0
    dtype = token_dtype(by.tokenizer.vocab_size)
    with write_indexed(prefix, dtype) as writer:
        for part in track(range(len(tokens.store.tokens_of_part)), len(tokens.store.tokens_of_part), "writing"):
            ids, offsets = _read(tokens, part, by.cache_dir)
            lengths = np.diff(offsets)
            if not with_bos:
                starts = offsets[:-1][lengths > 0]
                has_bos = ids[starts] == by.tokenizer.bos_id  # a conversation may have none
                lengths[lengths > 0] -= has_bos
                ids = np.delete(ids, starts[has_bos])
            writer.add_documents(ids, lengths)
            num_tokens += len(ids)
    if counts.bad:
        log(f"left out   {source.key}: {counts.bad:,} bad records, the first one {counts.first_bad}")
    if source.format.has_targets:
        log(f"note       {source.key}: Megatron-LM's files do not record which tokens are learnt")
    log(
        f"wrote      {prefix}.bin and .idx: {counts.documents:,} documents, {num_tokens:,} tokens of {dtype.name},"
        f" {num_tokens * dtype.itemsize / 1e6:,.1f} MB in {time.monotonic() - started:.1f} s"
    )


def _read(tokens: ShardedTokens, part: int, cache_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns a shard's tokens and offsets; rebuilds a damaged shard first."""

    def read() -> tuple[np.ndarray, np.ndarray]:
        shard = tokens.store.shard(part)
        return shard.tokens[:], shard.offsets[:]

    try:
        return cache.repaired(read, tokens.remake)
    except OSError as error:
        raise cache_error(error, cache_dir) from error


def info(prefix: str, vocab_size: int | None = None) -> None:
    """Checks the index, sizes and all ids of a pair of files, and reports their contents.

    Args:
        prefix: prefix of the pair; see `paths_of`.
        vocab_size: every id must be below it; None: ids only must not be negative.

    Raises:
        DataError: a check failed.
        DiskError: the disk fails.
    """
    dataset = IndexedDataset(prefix)
    with TokenizingProgress(dataset.tokens.nbytes, log, doing="checking") as shown:
        smallest, largest = dataset.id_range(shown.finish_group) or (0, -1)
    if smallest < 0 or largest >= (vocab_size or math.inf):
        known = "not negative" if smallest < 0 else f"below the {vocab_size} of --vocab_size"
        wrong = dataset.first_outside(vocab_size or largest + 1)
        which = "ids" if wrong is None else f"id {wrong[0]} in document {wrong[1]}"
        raise DataError(
            f"{dataset.bin_path}: token {which} must be {known}; write the files again with the model's tokenizer"
        )
    longest = 0
    for first in range(0, dataset.num_documents, CHUNK):
        offsets = dataset.document_offsets(first, min(first + CHUNK, dataset.num_documents))
        longest = max(longest, int(np.diff(offsets).max()))
    modes = "" if dataset.modes is None else ", with modes"
    mean = dataset.num_tokens / max(dataset.num_documents, 1)
    log(f"files      {dataset.bin_path} and {dataset.idx_path}: index, sizes and ids are valid")
    log(f"documents  {dataset.num_documents:,} of {dataset.num_sequences:,} sequences{modes}")
    log(f"tokens     {dataset.num_tokens:,} of {dataset.dtype.name}, {dataset.tokens.nbytes / 1e6:,.1f} MB")
    log(f"ids        {smallest:,} to {largest:,}" if dataset.num_tokens else "ids        none")
    log(f"lengths    {mean:,.0f} tokens per document, {longest:,} in the longest")


def main(arguments: argparse.Namespace) -> int:
    """Runs one command and returns the exit code."""

    def run() -> None:
        if arguments.command == "info":
            info(arguments.prefix, arguments.vocab_size)
        else:
            export(arguments.config, arguments.out, with_bos=not arguments.without_bos)

    return exit_code(
        run,
        memory_remedy="a machine with more memory",
        disk=arguments.prefix if arguments.command == "info" else arguments.out,
        disk_remedy="check the disk and run the same command again",
    )
