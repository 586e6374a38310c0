"""Documents tokenized once, into shards that are never made twice.

The documents of a group of files are cut into shards of about `SHARD_BYTES` of text. The shards of a group belong to one
cache entry, addressed by the content of its files, the tokenizer and the format; they are written in order, so a process
that is killed loses the shard it was at, and the next one goes on from there.
"""

import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import rich.progress

from llamajax.data import cache
from llamajax.data.chat import ChatTemplate, Encoded, encode_conversation
from llamajax.data.groups import GROUP_BYTES, FileGroup
from llamajax.data.sources import Document
from llamajax.data.tokenizer import Tokenizer
from llamajax.errors import DataError

SHARD_BYTES = GROUP_BYTES
"""Text per shard: some ten seconds of work, which is what a kill can lose."""
BATCH_BYTES = 2**23
"""Text handed to the tokenizer at once, for its threads to share."""
REPORT_EVERY_S = 10.0
"""Seconds between progress lines where there is no terminal to animate."""

_FORMAT = "shard-2"
_CHAT_FORMAT = "chat-1"


@dataclass(frozen=True)
class Shard:
    """Tokenized documents, memory-mapped. Document d is `tokens[offsets[d]:offsets[d + 1]]`, its ends included."""

    tokens: np.ndarray
    """uint16 or uint32 [num_tokens]."""
    offsets: np.ndarray
    """int64 [num_documents + 1]."""
    hashes: np.ndarray
    """uint64 [num_documents], of the text: equal texts have equal hashes."""
    num_bytes: np.ndarray
    """int64 [num_documents], of the text in UTF-8."""
    num_empty: int
    """Documents without text, which are left out."""
    last: bool
    """Whether no shard of its group comes after it."""
    learnt: np.ndarray | None = None
    """Of conversations: uint8 [ceil(num_tokens / 8)], a bit per token, set if it is learnt, the highest bit first."""

    @property
    def num_read(self) -> int:
        """Documents that the source gave for this shard."""
        return len(self.hashes) + self.num_empty

    def is_learnt(self, start: int, end: int) -> np.ndarray:
        """bool [end - start]: which of these tokens of conversations are learnt."""
        assert self.learnt is not None
        return np.unpackbits(self.learnt[start // 8 : -(-end // 8)])[start % 8 :][: end - start].astype(bool)

    def first_learnt(self) -> np.ndarray:
        """int64 [num_documents]: which of a document's tokens is the first that is learnt; past its end if none is.

        That is never the one that begins it, which follows nothing.
        """
        if self.learnt is None:
            return np.ones(len(self.hashes), np.int64)
        places = np.append(np.flatnonzero(self.is_learnt(0, len(self.tokens))), len(self.tokens))
        return places[np.searchsorted(places, self.offsets[:-1] + 1)] - self.offsets[:-1]


def document_hash(text: bytes) -> int:
    """64 bits that decide on which side of the held-out split a text lies, wherever it occurs."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def is_held_out(hashes: np.ndarray | int, fraction: float) -> np.ndarray | bool:
    """Whether documents with these hashes are held out, when `fraction` of all documents is."""
    return hashes < int(fraction * 2.0**64)


def shards_entry(group: FileGroup, tokenizer: Tokenizer, cache_dir: Path, template: ChatTemplate | None = None) -> Path:
    """The directory of the group's shards; `template` is needed for those of conversations, and only for them matters."""
    key = [_FORMAT, SHARD_BYTES, tokenizer.sha256, group.content]
    if group.is_chat:
        assert template is not None
        key += [_CHAT_FORMAT, template.sha256]
    return cache_dir / "shards" / cache.digest(*key)


def tokenize(
    groups: Sequence[FileGroup],
    tokenizer: Tokenizer,
    cache_dir: Path,
    log: Callable[[str], None],
    template: ChatTemplate | None = None,
) -> None:
    """Makes every shard that is not there yet; groups that another process works on are left to it, and waited for.

    Args:
        groups: what to tokenize.
        tokenizer: text to ids.
        cache_dir: where the shards are kept.
        log: takes a line for people to read.
        template: conversations to text; needed if there are any.

    Raises:
        DataError: a file cannot be read, or has changed since it was hashed, or the template refuses a conversation.
    """
    is_missing = [not _is_complete(shard_paths(shards_entry(group, tokenizer, cache_dir, template))) for group in groups]
    missing = list(itertools.compress(groups, is_missing))
    with Progress(sum(group.num_bytes for group in missing), log) as progress:
        others = [group for group in missing if not _complete(group, tokenizer, template, cache_dir, progress, wait=False)]
        if others:
            log(f"waiting    for another process that tokenizes {len(others)} of {len(groups)} groups of files")
        for group in others:
            _complete(group, tokenizer, template, cache_dir, progress, wait=True)


def shard_paths(entry: Path) -> list[Path]:
    """The shards that are there, in order, up to the first that is missing."""
    return list(itertools.takewhile(Path.exists, (_shard_path(entry, number) for number in itertools.count())))


def read_shard(path: Path) -> Shard:
    """Maps a shard; there may be more of them than a process can have mapped.

    Raises:
        DataError: it is gone or damaged.
    """
    arrays, info = cache.read_arrays(path)
    return Shard(**arrays, **info)


def _is_complete(paths: Sequence[Path]) -> bool:
    return bool(paths) and read_shard(paths[-1]).last


def _shard_path(entry: Path, number: int) -> Path:
    return entry / f"{number:06d}.shard"


def _complete(
    group: FileGroup,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    cache_dir: Path,
    progress: "Progress",
    *,
    wait: bool,
) -> bool:
    """Writes the group's missing shards; False if another process is at it and `wait` is not set."""
    entry = shards_entry(group, tokenizer, cache_dir, template)
    with cache.locked(entry, wait=wait) as mine:
        if not mine:
            return False
        paths = shard_paths(entry)
        if not _is_complete(paths):
            documents = itertools.islice(group.documents(), sum(read_shard(path).num_read for path in paths), None)
            for number in itertools.count(len(paths)):
                arrays, info = _next_shard(documents, tokenizer, template if group.is_chat else None, progress)
                group.check_unchanged()
                cache.write_arrays(_shard_path(entry, number), arrays, info)
                if info["last"]:
                    break
        progress.finish_group(group.num_bytes)
    return True


def _next_shard(
    documents: Iterator[Document], tokenizer: Tokenizer, template: ChatTemplate | None, progress: "Progress"
) -> tuple[dict[str, np.ndarray], dict[str, int | bool]]:
    """Tokenizes documents until the shard is full or they end, conversations with their template; the fields of `Shard`."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    pieces: list[np.ndarray] = [np.zeros(0, dtype)]
    learnt: list[np.ndarray] = []
    hashes, num_bytes, batch = [], [], []
    num_empty = batch_bytes = shard_bytes = 0
    last = True

    def encode_batch() -> None:
        if template is not None:
            for ids, is_learnt in (_encode_conversation(document, tokenizer, template) for document in batch):
                pieces.append(ids.astype(dtype))
                learnt.append(is_learnt)
            return
        for ids in tokenizer.encode_batch([document.text for document in batch]):
            framed = np.empty(len(ids) + 2, dtype)
            framed[0], framed[1:-1], framed[-1] = tokenizer.bos_id, ids, tokenizer.eos_id
            pieces.append(framed)

    for document in documents:
        text = document.text.encode()
        if not text:
            num_empty += 1
            continue
        batch.append(document)
        hashes.append(document_hash(text))
        num_bytes.append(len(text))
        batch_bytes += len(text)
        shard_bytes += len(text)
        if batch_bytes >= BATCH_BYTES:
            encode_batch()
            progress.advance(len(batch), batch_bytes, document.bytes_read)
            batch, batch_bytes = [], 0
        if shard_bytes >= SHARD_BYTES:
            last = False
            break
    encode_batch()
    progress.advance(len(batch), batch_bytes, None)
    arrays = {
        "tokens": np.concatenate(pieces),
        "offsets": np.cumsum([len(piece) for piece in pieces], dtype=np.int64),
        "hashes": np.array(hashes, np.uint64),
        "num_bytes": np.array(num_bytes, np.int64),
    }
    if template is not None:
        arrays["learnt"] = np.packbits(np.concatenate([np.zeros(0, bool), *learnt]))
    return arrays, {"num_empty": num_empty, "last": last}


def _encode_conversation(document: Document, tokenizer: Tokenizer, template: ChatTemplate) -> Encoded:
    assert document.conversation is not None
    messages, where = document.conversation
    try:
        return encode_conversation(template, tokenizer, messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


class Progress:
    """Shows how tokenizing goes: a moving bar on a terminal, now and then a line where there is none."""

    def __init__(self, total_bytes: int, log: Callable[[str], None]) -> None:
        self._total_bytes = total_bytes
        self._log = log
        self._finished_bytes = self._read_bytes = self._text_bytes = self._documents = 0
        self._started = self._reported = time.monotonic()
        self._bar = rich.progress.Progress(
            "tokenizing",
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            "{task.fields[speed]}",
            rich.progress.TimeRemainingColumn(),
            disable=not sys.stdout.isatty() or not total_bytes,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total_bytes, speed="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()
        if self._documents and error is None:
            self._log(
                f"tokenized  {self._documents:,} documents in {time.monotonic() - self._started:.1f} s, {self._speed()}"
            )

    def advance(self, num_documents: int, text_bytes: int, group_bytes_read: int | None) -> None:
        """Counts documents that were tokenized, and how far into the group's files they reach, if known."""
        self._documents += num_documents
        self._text_bytes += text_bytes
        if group_bytes_read is not None:
            self._read_bytes = self._finished_bytes + group_bytes_read
        self._show()

    def finish_group(self, group_bytes: int) -> None:
        """Counts a whole group as done, whoever did it."""
        self._finished_bytes += group_bytes
        self._read_bytes = self._finished_bytes
        self._show()

    def _show(self) -> None:
        self._bar.update(self._task, completed=self._read_bytes, speed=self._speed())
        now = time.monotonic()
        if self._bar.disable and now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            done = self._read_bytes / self._total_bytes
            left = (now - self._started) * (1 / done - 1) if done else float("inf")
            self._log(f"tokenizing {done:.0%}, {self._speed()}, {left:.0f} s left")

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self._documents / seconds:,.0f} documents/s, {self._text_bytes / seconds / 1e6:.1f} MB/s"
