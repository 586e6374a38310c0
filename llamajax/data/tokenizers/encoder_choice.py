"""Chooses the library that encodes the documents of a run: gigatoken if its ids equal those of the tokenizer's own library.

The ids do not depend on the choice. Before the choice both libraries encode hard texts and some of the documents, and the
ids are compared. One log line reports the result.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamajax import disk
from llamajax.data import cache
from llamajax.data.documents.file_groups import FileGroup
from llamajax.data.documents.remote import RemoteFile
from llamajax.data.tokenizers.hard_texts import hard_texts, texts_of_all_characters, texts_of_tokens
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import DataError, DiskError

MIN_BYTES = 2**22
"""Minimum size of the data; for less, the comparison takes longer than it saves."""
SAMPLE_BYTES = 2**20
"""Number of bytes of documents to compare."""
SAMPLED_GROUPS = 8
"""Number of file groups, spread over all, from which the compared documents are taken."""
_DOCUMENT_CHARS = 2**16
"""Maximum number of characters of each document."""
_SHOWN_CHARS = 80

_FOLDER = "encoders"


def choose_encoder(tokenizer: Tokenizer, groups: Sequence[FileGroup], cache_dir: Path, log: Callable[[str], None]) -> None:
    """Sets `tokenizer.is_fast` if gigatoken returns the same ids and is faster, and logs the choice and its reason.

    Args:
        tokenizer: tokenizer of the documents.
        groups: the files to be tokenized. If they are small, nothing is compared or logged.
        cache_dir: the cache, which records the version of gigatoken behind its ids.
        log: receives a line.

    Raises:
        DiskError: the disk fails.
        OSError: the cache's disk fails or is full.
    """
    tokenizer.is_fast = False
    texts = [group for group in groups if not group.has_targets]
    if sum(group.num_bytes for group in texts) < MIN_BYTES:
        return
    own, fast = (f"{name} {version(name)}" for name in (tokenizer.library, "gigatoken"))
    try:
        differing = differing_text(tokenizer)
    except Exception as error:  # gigatoken raises anything for unsupported tokenizers
        log(f"encoder    {own}: {fast} does not support this tokenizer: {' '.join(str(error).split())[:_SHOWN_CHARS]}")
        return
    sample = _sample(texts)
    trial = _try(tokenizer, sample)
    if differing := differing or trial.differing:
        reason = f"returns other ids for {ascii(differing)[:_SHOWN_CHARS]}"
    elif trial.fast_rate < trial.own_rate:
        reason = f"reaches {trial.fast_rate:.1f} here"
    else:
        tokenizer.is_fast = True
        log(
            f"encoder    {fast}, {trial.fast_rate:.1f} MB/s where {own} reaches {trial.own_rate:.1f}: the same ids for hard"
            f" texts, all characters, all tokens and {len(sample):,} documents{_of_another_version(tokenizer, cache_dir)}"
        )
        return
    log(f"encoder    {own}, {trial.own_rate:.1f} MB/s: {fast} {reason}")


def differing_text(tokenizer: Tokenizer, *, quick: bool = False) -> str | None:
    """Returns a hard text for which gigatoken and the tokenizer's own library give different ids, or None.

    Args:
        tokenizer: the tokenizer to compare.
        quick: omits the texts made of all characters and of all tokens.

    Raises:
        Exception: from gigatoken, if it does not support this tokenizer.
    """
    texts = [*hard_texts()]
    for follow in (False, True):
        if differing := _try(tokenizer, texts, follow=follow).differing:
            return differing
    if quick:
        return None
    of_tokens = texts_of_tokens(tokenizer.vocab_size, tokenizer.decode, tokenizer.special_texts)
    return _try(tokenizer, [*texts_of_all_characters(), *of_tokens]).differing


class _Trial(NamedTuple):
    """Result of encoding texts with both libraries."""

    differing: str | None
    """The first text with different ids."""
    own_rate: float
    """Rate of the tokenizer's own library, in MB of text per second."""
    fast_rate: float


def _try(tokenizer: Tokenizer, texts: Sequence[str], *, follow: bool = False) -> _Trial:
    started = time.perf_counter()
    ids = tokenizer.encode_following(texts) if follow else tokenizer.encode_batch(texts)
    between = time.perf_counter()
    others = tokenizer.encode_fast(texts, follow=follow)
    ended = time.perf_counter()
    differing = (text for text, one, other in zip(texts, ids, others, strict=True) if not np.array_equal(one, other))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return _Trial(next(differing, None), megabytes / (between - started), megabytes / (ended - between))


def _sample(groups: Sequence[FileGroup]) -> list[str]:
    """Returns documents from the beginnings of some groups; errors in them are reported later, during tokenizing."""
    here = [group for group in groups if _is_here(group)] or [*groups[:1]]
    some = here[:: -(-len(here) // SAMPLED_GROUPS)]
    sample: list[str] = []
    for group in some:
        size = 0
        with contextlib.suppress(DataError, DiskError):
            for document in group.source.documents(group.files, group.span):
                sample.append(document.text[:_DOCUMENT_CHARS])
                size += len(sample[-1].encode())
                if size >= SAMPLE_BYTES // len(some):
                    break
    return sample


def _is_here(group: FileGroup) -> bool:
    return all(file.path.exists() for file in group.files if isinstance(file, RemoteFile))


def _of_another_version(tokenizer: Tokenizer, cache_dir: Path) -> str:
    """Records the version of gigatoken that encodes for the cache; returns a note if another one did before."""
    path, now = cache_dir / _FOLDER / cache.key_of(tokenizer.sha256) / "gigatoken", version("gigatoken")
    with disk.locked(path.parent):
        try:
            before = cache.read_arrays(path).info["version"]
        except cache.DamagedError:
            before = None
        if before != now:
            cache.write_arrays(path, {}, {"version": now})
    return "" if before in (None, now) else f"; {before} encoded for this cache before"
