"""Which library encodes the documents of a run: gigatoken wherever its ids are those of the tokenizer's own.

The ids do not depend on the choice. Before it is made they are compared, on texts that are hard to read and on some of the
documents themselves; one line tells what came of it.
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
"""Of less, the proof would take longer than it saves."""
SAMPLE_BYTES = 2**20
"""Of the documents, for the proof."""
SAMPLED_GROUPS = 8
"""From the beginnings of so many groups of files, spread over all."""
_DOCUMENT_CHARS = 2**16
"""Of each document, at most."""
_SHOWN_CHARS = 80

_FOLDER = "encoders"


def choose_encoder(tokenizer: Tokenizer, groups: Sequence[FileGroup], cache_dir: Path, log: Callable[[str], None]) -> None:
    """Sets `tokenizer.is_fast` if gigatoken gives its very ids and is faster; says which way documents go, and why.

    Args:
        tokenizer: of the documents.
        groups: what is to be tokenized; nothing is tried, nor said, where that is little.
        cache_dir: the cache, which remembers by which version of gigatoken its ids were made.
        log: takes a line for people to read.

    Raises:
        DiskError: the disk fails.
        OSError: the cache's disk fails, or is full.
    """
    tokenizer.is_fast = False
    texts = [group for group in groups if not group.is_chat]
    if sum(group.num_bytes for group in texts) < MIN_BYTES:
        return
    own, fast = (f"{name} {version(name)}" for name in (tokenizer.library, "gigatoken"))
    try:
        differing = differing_text(tokenizer)
    except Exception as error:  # whatever gigatoken raises for a tokenizer that it does not know
        log(f"encoder    {own}: {fast} does not take this tokenizer: {' '.join(str(error).split())[:_SHOWN_CHARS]}")
        return
    sample = _sample(texts)
    trial = _try(tokenizer, sample)
    if differing := differing or trial.differing:
        reason = f"gives other ids for {ascii(differing)[:_SHOWN_CHARS]}"
    elif trial.fast_rate < trial.own_rate:
        reason = f"makes {trial.fast_rate:.1f} here"
    else:
        tokenizer.is_fast = True
        log(
            f"encoder    {fast}, {trial.fast_rate:.1f} MB/s where {own} makes {trial.own_rate:.1f}: the same ids for hard"
            f" texts, all characters, all tokens and {len(sample):,} documents{_of_another_version(tokenizer, cache_dir)}"
        )
        return
    log(f"encoder    {own}, {trial.own_rate:.1f} MB/s: {fast} {reason}")


def differing_text(tokenizer: Tokenizer, *, quick: bool = False) -> str | None:
    """A hard text that gigatoken gives other ids than the tokenizer does; None if there is none.

    Args:
        tokenizer: the one to compare with.
        quick: leaves out the texts that are made of all characters, and of all its tokens.

    Raises:
        Exception: of gigatoken, which does not know such a tokenizer.
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
    """What came of texts that were encoded both ways."""

    differing: str | None
    """The first of other ids."""
    own_rate: float
    """MB of text per second."""
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
    """Documents from the beginnings of some of the groups; what is wrong with these is told when they are tokenized."""
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
    """Keeps which version of gigatoken encodes for the cache, and tells that another one did before."""
    path, now = cache_dir / _FOLDER / cache.key_of(tokenizer.sha256) / "gigatoken", version("gigatoken")
    with disk.locked(path.parent):
        try:
            before = cache.read_arrays(path).info["version"]
        except cache.DamagedError:
            before = None
        if before != now:
            cache.write_arrays(path, {}, {"version": now})
    return "" if before in (None, now) else f"; {before} encoded for this cache before"
