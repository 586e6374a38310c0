"""Provides the documents of a run as tokens, before packing; all processes together make what is missing."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.file import config_to_dict, settings_of
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.data.chat.chat_tokens import end_problem
from llamajax.data.cleaning.pipeline import clean
from llamajax.data.documents.file_groups import HashedGroup, group_files, known_groups
from llamajax.data.documents.sources import Source
from llamajax.data.tasks import MapTasks
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.data.tokens.encoding import (
    Tokenizing,
    chat_template_for,
    given_tokenizer,
    tokenizer_for,
    trained_path,
)
from llamajax.data.tokens.megatron_tokens import MegatronTokens, parts_path
from llamajax.data.tokens.shard_index import index_path
from llamajax.data.tokens.shards import tokenize
from llamajax.data.tokens.source_tokens import ShardedTokens, SourceTokens, entries_of
from llamajax.processes import peers


class Tokenized(NamedTuple):
    """Tokens of a run's sources, and what they are made with."""

    sources: tuple[SourceTokens, ...]
    by: Tokenizing


def tokenized(
    config: Config,
    cache_dir: Path,
    log: Callable[[str], None],
    log_work: Callable[[str], None],
    models_tokenizer: Tokenizer | None,
    run: MapTasks = map,
) -> Tokenized:
    """Returns the tokens of all sources, making the missing ones.

    Arguments and errors are the ones of `llamajax.data.rows.dataset.prepare`, except that errors of the cache stay
    `OSError`s.
    """
    sources = sources_of(config.data)
    for source in sources:
        log(f"source     {source}")

    def by_of(tokenizer: Tokenizer) -> Tokenizing:
        template = chat_template_for(config.data, tokenizer)
        return Tokenizing(tokenizer, template, cache_dir, config.data.held_out_fraction, log_work)

    told = peers.of_first(_made(config, sources, models_tokenizer, by_of, log_work)) if peers.current() is not None else None
    if told is not None and not _is_here(told["files"], cache_dir):
        told = None  # this host does not share the disk
    if told is None and peers.rank() == 0:
        for source in sources[1:]:  # find errors before hours of work on earlier sources
            if not source.format.is_tokenized and known_groups(source, cache_dir, lambda line: None) is None:
                look_at(source)
    if told is not None:
        for line in told["lines"]:
            log(line)
        configs = (settings_of(SourceConfig, of) for of in told["sources"])
        sources = [replace(source, config=own) for source, own in zip(sources, configs, strict=True)]
    elif config.data.cleaning.steps:
        groups = [_groups(source, cache_dir, log_work) for source in sources]
        sources = clean(sources, groups, config.data.cleaning, cache_dir, log, run, log_work=log_work)
    groups_of = [functools.cache(functools.partial(_groups, source, cache_dir, log_work)) for source in sources]
    if told is not None:
        trained, *indexes = [cache_dir / name for name in told["files"]]
        by = by_of(given_tokenizer(config, models_tokenizer) or load_tokenizer(trained))
    else:
        all_groups = [group for of_source in groups_of for group in of_source()]
        by = by_of(tokenizer_for(config, models_tokenizer, all_groups, cache_dir, log_work))
        check_megatron(config, cache_dir, log_work)  # before hours of tokenizing other sources
        indexes = [_index(source, of_source(), by) for source, of_source in zip(sources, groups_of, strict=True)]
        missing = [of_source() for of_source, index in zip(groups_of, indexes, strict=True) if not index.exists()]
        new = list(itertools.chain.from_iterable(missing))
        may = config.data.tokenizer.gigatoken
        tokenize(new, by.tokenizer, cache_dir, log_work, by.template, log_waiting=log, gigatoken=may)

    def tokens_of(source: Source, index: Path, of_source: Callable[[], Sequence[HashedGroup]]) -> SourceTokens:
        if source.format.is_tokenized:
            return _megatron_tokens(config, source, index, log_work)
        return ShardedTokens(source, index, of_source, by)

    learns_ends = any(source.config.needs_template for source in sources)  # prompts have no answers
    if learns_ends and by.template is not None and (problem := end_problem(by.template, by.tokenizer)) is not None:
        log(f"warning    {problem}")
    return Tokenized(tuple(map(tokens_of, sources, indexes, groups_of)), by)


def look_at_data(config: Config, models_tokenizer: Tokenizer | None, log: Callable[[str], None]) -> None:
    """Checks what `tokenized` starts from, without making anything: one record per source, tokenizer, chat template.

    Arguments and errors are the ones of `llamajax.data.rows.dataset.prepare`.
    """
    for source in sources_of(config.data):
        log(f"source     {source}")
        if not source.format.is_tokenized:
            look_at(source)
    if (tokenizer := given_tokenizer(config, models_tokenizer)) is not None:
        chat_template_for(config.data, tokenizer)
    check_megatron(config, Path(config.data.cache_dir).expanduser(), log)


def look_at(source: Source) -> None:
    """Reads the first valid record of a source; raises the errors of `Source.look` and `Source.documents`."""
    next((document for document in source.documents(source.look().files) if not document.error), None)


def check_megatron(config: Config, cache_dir: Path, log: Callable[[str], None]) -> None:
    """Checks the sources that are already tokenized, and keeps the results in the cache.

    Raises:
        DataError: a source is invalid or has ids outside the model's vocabulary.
        DiskError: the disk fails.
    """
    for source in sources_of(config.data):
        if source.format.is_tokenized:
            _megatron_tokens(config, source, parts_path(source, cache_dir), log)


def _megatron_tokens(config: Config, source: Source, parts: Path, log: Callable[[str], None]) -> MegatronTokens:
    return MegatronTokens(source, parts, config.data.held_out_fraction, config.model.vocab_size, log)


def sources_of(data: DataConfig) -> list[Source]:
    """Returns the sources of the run, with their keys."""
    cache_dir = Path(data.cache_dir).expanduser()
    return [Source(source, f"data.sources[{index}]", cache_dir) for index, source in enumerate(data.sources)]


def _groups(source: Source, cache_dir: Path, log: Callable[[str], None]) -> Sequence[HashedGroup]:
    """Returns the source's groups of files to tokenize."""
    return [] if source.format.is_tokenized else group_files(source, cache_dir, log)


def _index(source: Source, groups: Sequence[HashedGroup], by: Tokenizing) -> Path:
    """Returns the path of the totals of the source's tokens, which may not exist."""
    if source.format.is_tokenized:
        return parts_path(source, by.cache_dir)
    return index_path(entries_of(groups, by), by.cache_dir)


def _is_here(names: Sequence[str], cache_dir: Path) -> bool:
    """Returns whether this host's cache has the files that process 0 names; a trained tokenizer must also be intact."""
    trained, *indexes = [cache_dir / name for name in names]
    return (trained == cache_dir or cache.is_whole(trained)) and all(index.exists() for index in indexes)


def _made(
    config: Config,
    sources: Sequence[Source],
    models_tokenizer: Tokenizer | None,
    by_of: Callable[[Tokenizer], Tokenizing],
    log: Callable[[str], None],
) -> dict[str, Any] | None:
    """Returns what process 0 sends to the others, which then need not open thousands of files; None unless all of it exists.

    `files` are the names in the cache of the trained tokenizer, if there is one, and of the totals of all sources. `sources`
    are the sources, cleaned or not. `lines` are the log lines about them.
    """
    if peers.rank() > 0:
        return None
    cache_dir = Path(config.data.cache_dir).expanduser()
    lines: list[str] = []
    groups = _known_groups(sources, cache_dir, lines.append)
    if groups is None:
        return None
    if config.data.cleaning.steps:
        sources = clean(sources, groups, config.data.cleaning, cache_dir, lines.append, log_work=log)
        groups = _known_groups(sources, cache_dir, lines.append)
        if groups is None:
            return None
    tokenizer, trained = given_tokenizer(config, models_tokenizer), cache_dir
    if tokenizer is None:
        trained = trained_path(config, [group for of_source in groups for group in of_source], cache_dir)
        if not cache.is_whole(trained):
            return None
        tokenizer = load_tokenizer(trained)
    by = by_of(tokenizer)
    found = [trained, *(_index(source, of_source, by) for source, of_source in zip(sources, groups, strict=True))]
    if not all(path.exists() for path in found):
        return None
    return {
        "files": [str(path.relative_to(cache_dir)) for path in found],
        "sources": [config_to_dict(source.config) for source in sources],
        "lines": lines,
    }


def _known_groups(
    sources: Sequence[Source], cache_dir: Path, log: Callable[[str], None]
) -> list[Sequence[HashedGroup]] | None:
    """Returns the groups of every source if the cache has the hashes of all of them."""
    found: list[Sequence[HashedGroup]] = []
    for source in sources:
        known = [] if source.format.is_tokenized else known_groups(source, cache_dir, log)
        if known is None:
            return None
        found.append(known)
    return found
