"""Third pass, over one part at a time: writes the documents that stay as JSONL, which is an ordinary source."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from jaxtyping import Bool

from llamajax.config.cleaning import CleaningConfig
from llamajax.data import cache
from llamajax.data.cleaning.alike import STAYS
from llamajax.data.cleaning.document_rules import kept_text
from llamajax.data.cleaning.scan import PAIR_CHARS, Part
from llamajax.data.cleaning.survivors import DECISIONS_FILE, Survivors
from llamajax.data.cleaning.texts import whole_texts
from llamajax.disk import write_atomically

FILE_BYTES = 2**26
"""Number of bytes of text per file; this much is held in memory, and lost if the process is killed."""
_ZSTD_LEVEL = 3


@dataclass(frozen=True)
class WriteTask:
    """One part to write."""

    part: Part
    config: CleaningConfig

    @property
    def path(self) -> Path:
        """Path of the list of written files; it exists once they do."""
        return self.part.entry / f"{self.part.name}.written"


def write(task: WriteTask) -> None:
    """Writes the documents of a part that stay, in files of about `FILE_BYTES`, unless already done.

    Raises:
        DataError: a file cannot be read or has changed since it was hashed.
        DiskError: the disk fails.
    """
    if task.path.exists():
        return
    part = task.part
    stays, shown = _chosen(part)
    info: dict[str, Any] = {"files": [], "documents": 0, "bytes": 0, "snippets": []}
    lines: list[bytes] = []
    size = 0
    for position, found in enumerate(whole_texts(part.group.documents())):
        is_kept = position < len(stays) and stays[position]
        if not is_kept and position not in shown:
            continue
        text = kept_text(found.text, task.config)
        if position in shown:
            info["snippets"].append([shown[position], position, text[:PAIR_CHARS]])
        if is_kept:
            lines.append(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
            num_bytes = len(text.encode())
            size += num_bytes
            info["documents"] += 1
            info["bytes"] += num_bytes
        if size >= FILE_BYTES:
            info["files"].append(_write_file(part, len(info["files"]), lines))
            lines, size = [], 0
    if lines or not info["files"]:
        info["files"].append(_write_file(part, len(info["files"]), lines))
    part.group.check_unchanged()
    cache.write_arrays(task.path, {}, info)


def _chosen(part: Part) -> tuple[Bool[np.ndarray, "positions"], dict[int, int]]:
    """Returns which of the part's texts stay, up to the last that may, and the numbers of the report's example texts, by
    position."""
    survivors, decisions = Survivors(part.entry), cache.read_arrays(part.entry / DECISIONS_FILE)
    pairs = [*decisions.info["copies"], *decisions.info.get("alike", [])]
    to_show = {document for one, other, _ in pairs for document in (one, other)}
    staying = [np.zeros(0, np.int64)]
    shown = {}
    for start, end, positions in survivors.positions_of(part):
        staying.append(positions[decisions.arrays["reasons"][start:end] == STAYS])
        shown |= {int(positions[document - start]): document for document in to_show if start <= document < end}
    chosen = np.concatenate(staying)
    stays = np.zeros(chosen.max(initial=-1) + 1, bool)
    stays[chosen] = True
    return stays, shown


def _write_file(part: Part, number: int, lines: list[bytes]) -> list[Any]:
    """Writes the lines as one zstd frame; returns the name, size and SHA-256 of the file."""
    text = b"".join(lines)
    content = pyarrow.Codec("zstd", _ZSTD_LEVEL).compress(text, asbytes=True)
    path = part.entry / f"{part.name}-{number:06d}.jsonl.zst"
    write_atomically(path, content, keep=True)  # a run may be reading the previous file
    return [path.name, len(content), hashlib.sha256(content).hexdigest()]
