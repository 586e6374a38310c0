"""Cleans the documents of sources in three passes. All runs with the same data and settings share the result.

All files are in `<cache_dir>/cleaned-1/<key>/`. The key is a hash of the files' contents, the settings of the steps that are
on, and the versions that the decisions depend on. Every file there is complete or missing, and is made from complete files
in an order that does not depend on the process: whichever process is killed and whichever continue, the bytes are the same.
"""

import contextlib
import glob
import hashlib
import time
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from llamajax import disk
from llamajax.config.cleaning import CleaningConfig
from llamajax.config.data import SourceConfig
from llamajax.config.file import config_to_dict
from llamajax.data import cache, progress
from llamajax.data.cleaning import report
from llamajax.data.cleaning.alike import BandTask, SetsTask, decide, find_candidates, gather_candidates, write_sets
from llamajax.data.cleaning.contamination import held_out_groups, write_runs
from llamajax.data.cleaning.document_rules import Rules, Work
from llamajax.data.cleaning.duplicates import bands_of
from llamajax.data.cleaning.language import known_languages
from llamajax.data.cleaning.scan import Part, ScanTask, scan
from llamajax.data.cleaning.survivors import CANDIDATES_FILE, COPIES_FILE, DECISIONS_FILE, write_copies
from llamajax.data.cleaning.texts import MAX_TEXT_CHARS
from llamajax.data.cleaning.write import WriteTask, write
from llamajax.data.documents.file_groups import FileGroup, HashedGroup, content_hashes, file_identity
from llamajax.data.documents.sources import Source
from llamajax.data.tasks import MapTasks
from llamajax.errors import ConfigError, DataError, EnvironmentMismatchError

POLL_S = 1.0
"""Seconds between checks of a lock that another process holds."""

_FOLDER = "cleaned-1"
"""Folder name with the version of the format; the name of an entry identifies its content."""
_HELD_OUT_FILE = "held_out"
_PASSING = (
    "*.scan", "*.pairs", "*.sets", "*.written", _HELD_OUT_FILE, COPIES_FILE, CANDIDATES_FILE, DECISIONS_FILE,
)  # fmt: skip
"""Intermediate files, deleted once the report exists."""


def clean(
    sources: Sequence[Source],
    groups: Sequence[Sequence[HashedGroup]],
    config: CleaningConfig,
    cache_dir: Path,
    log: Callable[[str], None],
    run: MapTasks = map,
    *,
    log_work: Callable[[str], None] | None = None,
) -> list[Source]:
    """Leaves out of the sources what the steps reject; all processes of a run may call this at once.

    Args:
        sources: the sources; those of kind `chat`, `preference`, `tokenized` and `megatron` remain unchanged.
        groups: the files of each source.
        config: the steps and their settings.
        cache_dir: directory for the cleaned documents, with `report.json` and `report.html`.
        log: receives a line.
        run: calls a function for every task, here or on other machines with the same files.
        log_work: receives lines about work that only this process of the run may do; default: `log`.

    Returns:
        For each source, a source with the documents that stay, under the same key and weight.

    Raises:
        ConfigError: py3langid does not support a language.
        DataError: a file cannot be read or has changed since it was hashed, or no document of a source stays.
        DiskError: the disk fails.
        EnvironmentMismatchError: a package is missing.
    """
    if missing := config.missing_packages():
        raise EnvironmentMismatchError("\n".join(f"data.cleaning.{problem}" for problem in missing))
    chosen = [index for index, source in enumerate(sources) if not (source.format.has_targets or source.format.is_tokenized)]
    if not config.steps or not chosen:
        return list(sources)
    _check_languages(config)
    log_work = log_work or log
    held_out = held_out_groups(config.decontamination, cache_dir, log_work) if "decontamination" in config.steps else []
    bad_words = _bad_words(config)
    contents = [[group.content for group in groups[index]] for index in chosen]
    key = cache.key_of(contents, [group.content for group in held_out], bad_words, _settings(config), _versions(config))
    entry = cache_dir / _FOLDER / key

    numbered = [(number, group) for number, index in enumerate(chosen) for group in groups[index]]
    parts = [Part(entry, source, number, group) for number, (source, group) in enumerate(numbered)]
    rules = Rules(config, bad_words, entry / _HELD_OUT_FILE)
    keys = [sources[index].key for index in chosen]
    told, work = _told(parts, rules, held_out, keys, cache_dir, log_work, run)
    for line in report.lines(told, work):
        log(line)
    log(f"cleaned    report: {entry / report.PAGE}")

    cleaned = list(sources)
    for number, index in enumerate(chosen):
        _check(told["sources"][number], sources[index], entry / report.PAGE, log)
        pattern = f"{glob.escape(str(entry))}/source-{number:03d}.*.jsonl.zst"
        of_source = SourceConfig(kind="jsonl", paths=(pattern,), weight=sources[index].config.weight)
        cleaned[index] = Source(of_source, sources[index].key, cache_dir)
    return cleaned


def _check_languages(config: CleaningConfig) -> None:
    if unknown := set(config.languages.keep) - set(known_languages() if config.languages.keep else ()):
        raise ConfigError(
            f"data.cleaning.languages.keep: py3langid does not support {', '.join(sorted(unknown))}; choose from"
            f" {', '.join(known_languages())}"
        )


def _bad_words(config: CleaningConfig) -> tuple[str, ...]:
    path = config.filters.bad_words
    if path is None:
        return ()
    try:
        return tuple(Path(path).expanduser().read_text(encoding="utf-8-sig").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        error = error if isinstance(error, OSError) else OSError("is not UTF-8")
        where = f"data.cleaning.filters.bad_words: {path}: cannot be read"
        raise disk.cannot_read(error, where, "correct or remove it") from error


def _settings(config: CleaningConfig) -> dict[str, Any]:
    """Returns all settings of the steps that are on, without file paths, because the files' contents count instead."""
    settings = {name: value for name, value in config_to_dict(config).items() if name in (*config.steps, "max_examples")}
    for section, name in (("filters", "bad_words"), ("decontamination", "paths")):
        if section in settings:
            del settings[section][name]
    return settings


def _versions(config: CleaningConfig) -> dict[str, str]:
    """Returns the versions that the decisions depend on: Unicode tables (letters), zlib (compression) and packages."""
    versions = {"unicode": unicodedata.unidata_version}
    if config.filters.min_compression is not None or config.filters.max_compression is not None:
        versions["zlib"] = zlib.ZLIB_RUNTIME_VERSION
    packages = {"languages": "py3langid", "near_duplicates": "rensa"}
    return versions | {name: metadata.version(name) for step, name in packages.items() if step in config.steps}


def _told(
    parts: Sequence[Part],
    rules: Rules,
    held_out: Sequence[HashedGroup],
    keys: Sequence[str],
    cache_dir: Path,
    log: Callable[[str], None],
    run: MapTasks,
) -> tuple[report.Told, dict[str, Work]]:
    """Returns the report once everything it covers is complete, and the work done for it now."""
    entry, work = parts[0].entry, {}
    remade: set[Path] = set()
    with _locked(entry, log):
        while True:
            try:
                told = report.read(entry)
                if told is None:
                    told, work = _made(parts, rules, held_out, keys, log, run)
                damaged = _damaged(parts[0].group.source, entry, told, cache_dir, log)
                if not damaged:
                    for path in (path for pattern in _PASSING for path in entry.glob(pattern)):
                        path.unlink(missing_ok=True)
                    return told, work
                (entry / report.FILE).unlink(missing_ok=True)
            except cache.DamagedError as error:
                damaged = [error.path]
            if again := remade.intersection(damaged):
                raise cache.DamagedError(again.pop(), "is damaged again")
            remade.update(damaged)
            for path in damaged:
                log(f"damaged    {path}; rebuilding it")
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(entry: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Holds the entry's lock; while another process holds it, what that process writes counts as progress."""
    seen = None
    while True:
        with disk.locked(entry, wait=False) as mine:
            if mine:
                yield
                return
        if seen is None:
            log("waiting    for another process to clean the same documents")
        changed = entry.stat().st_mtime_ns
        if changed != seen:
            progress.gets_on()
        seen = changed
        time.sleep(POLL_S)


def _made(
    parts: Sequence[Part],
    rules: Rules,
    held_out: Sequence[HashedGroup],
    keys: Sequence[str],
    log: Callable[[str], None],
    run: MapTasks,
) -> tuple[report.Told, dict[str, Work]]:
    """Makes everything that is missing, the report last."""
    config, entry, started = rules.config, parts[0].entry, time.perf_counter()
    work = {step: Work() for step in config.steps}
    num_bytes = sum(part.group.num_bytes for part in parts)
    log(f"cleaning   {len(parts):,} groups of files, {num_bytes / 1e6:,.1f} MB: {', '.join(config.steps)}")

    if "decontamination" in config.steps and not rules.held_out.exists():
        write_runs(rules.held_out, held_out, config.decontamination.ngram)
    for of_part in _each(run, scan, [ScanTask(part, rules) for part in parts], "reading", log):
        for step, done in of_part.items():
            work[step].documents += done.documents
            work[step].seconds += done.seconds
    if not (entry / COPIES_FILE).exists():
        write_copies(entry, parts, look=config.exact_duplicates)
    if config.near_duplicates.enabled:
        bands = [BandTask(entry, band, config) for band in range(bands_of(config.near_duplicates)[0])]
        for of_band in _each(run, find_candidates, bands, "comparing", log):
            work["near_duplicates"].seconds += of_band.seconds
        if not (entry / CANDIDATES_FILE).exists():
            gather_candidates(entry, bands)
        for of_part in _each(run, write_sets, [SetsTask(part, config) for part in parts], "reading candidates", log):
            work["near_duplicates"].seconds += of_part.seconds
    deciding = time.process_time()
    if not (entry / DECISIONS_FILE).exists():
        decide(entry, parts, config)
    if config.near_duplicates.enabled:
        work["near_duplicates"].add(0, deciding)
    writing = [WriteTask(part, config) for part in parts]
    list(_each(run, write, writing, "writing", log))

    told = report.make(parts, writing, keys, config, _versions(config), rules.held_out)
    report.write(entry, told)
    before, seconds = told["before"][0], time.perf_counter() - started
    log(f"cleaned    {before:,} documents in {seconds:.1f} s, {before / max(seconds, 1e-9):,.0f} documents/s")
    return told, work


def _each(
    run: MapTasks, function: Callable[[Any], Any], tasks: Sequence[Any], what: str, log: Callable[[str], None]
) -> Iterator[Any]:
    """Yields the results of `run` and reports progress."""
    reported = time.monotonic()
    for done, result in enumerate(run(function, tasks), start=1):
        progress.gets_on()
        if time.monotonic() - reported >= progress.REPORT_EVERY_S:
            reported = time.monotonic()
            log(f"cleaning   {what}: {done:,} of {len(tasks):,}")
        yield result


def _damaged(source: Source, entry: Path, told: report.Told, cache_dir: Path, log: Callable[[str], None]) -> list[Path]:
    """Returns the document files that differ from what was written; unchanged ones are not read again."""
    paths = [entry / name for name in told["files"]]
    if missing := [path for path in paths if not path.exists()]:
        return missing
    contents = content_hashes([FileGroup(source, (path,), (file_identity(path),)) for path in paths], cache_dir, log)
    expected = [hashlib.sha256(bytes.fromhex(sha256)).hexdigest() for _, sha256 in told["files"].values()]
    return [path for path, content, other in zip(paths, contents, expected, strict=True) if content != other]


def _check(of_source: dict[str, Any], source: Source, page: Path, log: Callable[[str], None]) -> None:
    """Logs which broken records of a source are left out, and how many documents are cut for their length.

    Raises `DataError` if too many records are broken or no document stays.
    """
    if of_source["bad"] > source.config.max_bad_records:
        raise source.too_many_bad(of_source["first_bad"])
    if of_source["bad"]:
        log(f"left out   {source.key}: {of_source['bad']:,} bad records, the first one {of_source['first_bad']}")
    if num_long := of_source.get("long", 0):
        log(
            f"note       {source.key}: {num_long:,} documents are longer than {MAX_TEXT_CHARS:,} characters; data.cleaning"
            " splits them"
        )
    if of_source["before"][0] and not of_source["left"][0]:
        raise DataError(
            f"{source.key}.paths: data.cleaning leaves none of its {of_source['before'][0]:,} documents; see {page} and"
            " loosen the rule that removed most of them"
        )
