"""Reports what cleaning left of the documents: counts per step, source and reason, with examples.

The report contains no times, so it is identical whenever and wherever it is made.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from llamajax.config.cleaning import CleaningConfig
from llamajax.config.file import config_to_dict
from llamajax.data import cache
from llamajax.data.cleaning import page
from llamajax.data.cleaning.alike import EXACT, NEAR
from llamajax.data.cleaning.document_rules import Work
from llamajax.data.cleaning.scan import Part
from llamajax.data.cleaning.survivors import DECISIONS_FILE, Survivors
from llamajax.data.cleaning.write import WriteTask
from llamajax.disk import write_atomically

FILE, PAGE = "report.json", "report.html"

Told = dict[str, Any]
"""The report as JSON values; counts are pairs of documents and bytes."""


def read(entry: Path) -> Told | None:
    """Returns the report of an entry; None if it is unfinished or damaged."""
    path = entry / FILE
    return json.loads(path.read_bytes()) if cache.is_whole(path) else None


def write(entry: Path, told: Told) -> None:
    """Writes the page and then the report, which completes the entry; its lock must be held."""
    write_atomically(entry / PAGE, page.page(told).encode())
    cache.write_hashed(entry / FILE, json.dumps(told, indent=1).encode())


def make(
    parts: Sequence[Part],
    written: Sequence[WriteTask],
    keys: Sequence[str],
    config: CleaningConfig,
    versions: Mapping[str, str],
    held_out: Path,
) -> Told:
    """Builds the report from the files of the three passes.

    Args:
        parts: the parts of all sources, in order.
        written: the third pass's task for each part.
        keys: configuration keys of the sources.
        config: the steps and their settings.
        versions: versions that the decisions depend on.
        held_out: the file of held-out texts, if that step is on.

    Raises:
        DamagedError: a file of the entry is missing or damaged.
    """
    entry, survivors = parts[0].entry, Survivors(parts[0].entry)
    decisions = cache.read_arrays(entry / DECISIONS_FILE)
    sources = [_Source(key, config.steps) for key in keys]
    removed: dict[str, list[int]] = {}
    languages: dict[str, list[int]] = {}
    examples: dict[str, list[list[str]]] = {}
    cut: list[list[Any]] = []
    snippets: dict[int, list[str]] = {}
    files = {}
    for part, task in zip(parts, written, strict=True):
        key = keys[part.source]
        for info in (cache.read_arrays(path).info for path in part.chunk_paths()):
            sources[part.source].add_scanned(info)
            _add_to(removed, info["removed"])
            _add_to(languages, info["languages"])
            of_chunk = [[_where(part, key, position), *texts] for position, *texts in info["cut_examples"]]
            cut += of_chunk[: max(config.max_examples - len(cut), 0)]
            for reason, found in info["examples"].items():
                of_reason = examples.setdefault(reason, [])
                shown = [[_where(part, key, position), text, why] for position, text, why in found]
                of_reason += shown[: max(config.max_examples - len(of_reason), 0)]
        for start, end, sizes in survivors.sizes_of(part):
            reasons = decisions.arrays["reasons"][start:end]
            _add_to(removed, sources[part.source].add_decided(sizes, reasons))
        info = cache.read_arrays(task.path).info
        sources[part.source].add_written(info)
        files |= {name: [size, sha256] for name, size, sha256 in info["files"]}
        snippets |= {document: [_where(part, key, position), text] for document, position, text in info["snippets"]}
    pairs = {
        name: [[similarity, *snippets[one], *snippets[other]] for one, other, similarity in decisions.info.get(name, [])]
        for name in ("copies", "alike")
    } | {"cut": [[1.0, where, before, "what stays", after] for where, before, after in cut]}
    near = {name: decisions.info[name] for name in ("candidates", "clusters", "histogram") if name in decisions.info}
    by_source = [vars(source) for source in sources]
    return {
        "steps": list(config.steps),
        "settings": {step: config_to_dict(config)[step] for step in config.steps},
        "versions": dict(versions),
        "before": _sum(source.before for source in sources),
        "left": _sum(source.left for source in sources),
        "after": {step: _sum(source.after[step] for source in sources) for step in config.steps},
        "sources": by_source,
        "removed": dict(sorted(removed.items(), key=lambda item: (-item[1][0], item[0]))),
        "languages": dict(sorted(languages.items(), key=lambda item: (-item[1][0], item[0]))),
        "held_out": cache.read_arrays(held_out).info if "decontamination" in config.steps else {},
        "near": near,
        "examples": dict(sorted(examples.items())),
        **pairs,
        "files": files,
    }


class _Source:
    """Counts of one source's documents."""

    def __init__(self, key: str, steps: Sequence[str]) -> None:
        self.key = key
        self.empty = self.bad = self.long = 0
        self.first_bad = ""
        self.before, self.left, self.cut = [0, 0], [0, 0], [0, 0]
        self.after = {step: [0, 0] for step in steps}

    def add_scanned(self, info: dict[str, Any]) -> None:
        self.empty += info["empty"]
        self.bad += info["bad"]
        self.long += info.get("long", 0)  # absent in files of older versions
        self.first_bad = self.first_bad or info["first_bad"]
        self.before, self.cut = _sum([self.before, info["before"]]), _sum([self.cut, info["cut"]])
        _add_to(self.after, info["after"])

    def add_decided(self, sizes: np.ndarray, reasons: np.ndarray) -> dict[str, list[int]]:
        """Counts documents by the second pass's decisions; returns what each step removed."""
        taken = {}
        staying = np.ones(len(sizes), bool)
        for step, reason in (("exact_duplicates", EXACT), ("near_duplicates", NEAR)):
            if step in self.after:
                staying &= reasons != reason
                _add_to(self.after, {step: [int(staying.sum()), int(sizes[staying].sum())]})
                taken[step] = [int((reasons == reason).sum()), int(sizes[reasons == reason].sum())]
        return taken

    def add_written(self, info: dict[str, Any]) -> None:
        self.left = _sum([self.left, [info["documents"], info["bytes"]]])


def _sum(counts: Any) -> list[int]:
    return [sum(several) for several in zip(*counts, strict=True)]


def _add_to(counts: dict[str, list[int]], more: Mapping[str, Sequence[int]]) -> None:
    for name, added in more.items():
        counts[name] = _sum([counts.get(name, [0, 0]), added])


def _where(part: Part, key: str, position: int) -> str:
    first, *others = part.group.files
    more = f" and {len(others):,} files more" if others else ""
    if part.group.span is not None:
        more = f" behind byte {part.group.span.start:,}"
    return f"{key}, document {position + 1:,} of {PurePath(str(first)).name}{more}"


def lines(told: Told, work: Mapping[str, Work]) -> Iterator[str]:
    """Yields a line for every step and one for all: documents and bytes that stay, and the speed."""
    before = told["before"]
    for step in told["steps"]:
        after = told["after"][step]
        yield f"cleaned    {step}: {_left(after, before)}{_speed(work.get(step))}"
        before = after
    if told["held_out"].get("too_short"):
        short, ngram = told["held_out"]["too_short"], told["settings"]["decontamination"]["ngram"]
        texts = told["held_out"]["texts"]
        yield f"note       {short:,} of {texts:,} held-out texts have fewer than {ngram} words, and cannot be found"
    yield f"cleaned    all: {_left(told['left'], told['before'])}"


def _left(after: Sequence[int], before: Sequence[int]) -> str:
    share = after[0] / max(before[0], 1)
    return f"{after[0]:,} of {before[0]:,} documents stay ({share:.1%}), {after[1] / 1e6:,.1f} of {before[1] / 1e6:,.1f} MB"


def _speed(work: Work | None) -> str:
    if work is None or not work.documents:
        return ""
    return f"; {work.documents / max(work.seconds, 1e-9):,.0f} documents/s per core"
