"""Tokenizes each document once, into shards of the cache.

The documents of a group of files are cut into shards of about `SHARD_BYTES` of text. The shards of a group form one cache
entry, addressed by the content of its files, the tokenizer and the format. They are written in order: a killed process loses
only its current shard, and the next process continues from there. Damaged shards are rebuilt.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64

from llamajax import disk
from llamajax.data import cache
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.chat.chat_tokens import encode_conversation
from llamajax.data.chat.preference_tokens import encode_preference
from llamajax.data.chat.prompt_tokens import BYTES, encode_prompt
from llamajax.data.documents.file_groups import GROUP_BYTES, HashedGroup, announce_fetching
from llamajax.data.documents.formats import Document, utf8_length
from llamajax.data.documents.split import plain_hash
from llamajax.data.documents.token_records import Encoded
from llamajax.data.progress import Progress, TokenizingProgress
from llamajax.data.tokenizers.encoder_choice import choose_encoder
from llamajax.data.tokenizers.long_documents import Spool, encode_long
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import DataError

SHARD_BYTES = GROUP_BYTES
"""Number of bytes of text per shard: about ten seconds of work, the most that a killed process loses."""
SHARD_TOKENS = 2**25
"""A shard ends with the batch that reaches this number of tokens, however much text it has."""
BATCH_BYTES = 2**23
"""Number of bytes of text passed to the tokenizer at a time, to be shared by its threads."""
DOCUMENT_BYTES = 64
"""Number of bytes added to the size of each document and message, because short ones need memory as well."""

FOLDER = "shards-2"
"""Folder name with the version of the format; the name of an entry identifies its documents."""
_DOCUMENTS = "shard-1"
_LONG = "whole"
"""Key for groups that may contain documents which earlier versions cut."""
_CONVERSATIONS = "chat-4"
_PREFERENCES = "preference-1"
_PROMPTS = "prompt-1"
_TOKENS = "tokens-1"


@dataclass(frozen=True)
class Shard:
    """Tokenized documents, read on access. Document d is `tokens[offsets[d]:offsets[d + 1]]`, with its bos and eos."""

    tokens: cache.CheckedArray
    """Token ids, uint16 or uint32 [num_tokens]."""
    offsets: cache.CheckedArray
    """Bounds of the documents, int64 [num_documents + 1]."""
    hashes: cache.CheckedArray
    """`split_hash` of each text, uint64 [num_documents]."""
    plain_hashes: cache.CheckedArray
    """`plain_hash` of each text or piece, uint64 [num_documents]."""
    text_bytes: int
    """Number of UTF-8 bytes of all texts."""
    first: int
    """Number of documents that the source yielded for earlier shards."""
    num_space_signs: int
    """Number of documents with U+2581, which SentencePiece writes for a space and reads as one."""
    num_empty: int
    """Number of documents without text, which are left out."""
    num_bad: int
    """Number of records that are left out because they are invalid."""
    first_bad: str
    """Error of the first invalid record, with its place."""
    last: bool
    """Whether this is the last shard of its group."""
    sha256: str
    """Hash that identifies the content."""
    learnt: cache.CheckedArray | None = None
    """For documents that say so, whether each token is trained on, as bits, highest first: uint8 [ceil(num_tokens / 8)]."""
    num_more: int = 0
    """Number of additional documents of conversations that become several, because one cannot train on all answers."""
    num_split: int = 0
    """Number of these conversations."""
    chosen: cache.CheckedArray | None = None
    """For preferences, whether each token belongs to a chosen or desirable sequence, as bits like those of `learnt`. The
    chosen sequence of a document comes first. For prompts, whether it belongs to the prompt; the bytes of the record, one
    per token, follow it."""
    num_desirable: int = 0
    """Number of documents with a desirable answer alone."""
    num_undesirable: int = 0
    """Number of documents with an undesirable answer alone."""
    num_record_bytes: int = 0
    """Number of ids in `tokens` that are bytes of the records of prompts."""

    @property
    def num_read(self) -> int:
        """Number of documents that the source yielded for this shard."""
        return len(self.hashes) - self.num_more + self.num_empty + self.num_bad

    def is_learnt(self, start: int, end: int) -> Bool[np.ndarray, "{end}-{start}"]:
        """Returns which of these tokens of conversations are trained on."""
        assert self.learnt is not None
        return _bits(self.learnt, start, end)

    def is_chosen(self, start: int, end: int) -> Bool[np.ndarray, "{end}-{start}"]:
        """Returns which of these tokens belong to a chosen or desirable sequence of a preference, or to a prompt."""
        assert self.chosen is not None
        return _bits(self.chosen, start, end)

    def first_learnt(self) -> Int64[np.ndarray, "documents"]:
        """Returns the index within each document of the first token that is trained on; past its end if there is none.

        A document's first token never counts, because nothing precedes it.
        """
        if self.learnt is None:
            return np.ones(len(self.hashes), np.int64)
        starts = self.offsets[:-1]
        places = np.append(np.flatnonzero(self.is_learnt(0, len(self.tokens))), len(self.tokens))
        return places[np.searchsorted(places, starts + 1)] - starts


def _bits(packed: cache.CheckedArray, start: int, end: int) -> Bool[np.ndarray, "{end}-{start}"]:
    return np.unpackbits(packed[start // 8 : -(-end // 8)])[start % 8 :][: end - start].astype(bool)


def shards_entry(group: HashedGroup, tokenizer: Tokenizer, cache_dir: Path, template: ChatTemplate | None = None) -> Path:
    """Returns the directory of the group's shards; `template` is needed only for conversations and ignored otherwise."""
    key = [_DOCUMENTS, SHARD_BYTES, tokenizer.sha256, group.content]
    if group.may_be_long and not group.has_targets:
        key.append(_LONG)
    if group.has_prompts:
        key += [_PROMPTS, None if template is None else template.sha256]
    elif group.source.config.is_rendered:
        assert template is not None
        key += [_PREFERENCES if group.has_preferences else _CONVERSATIONS, template.sha256]
    elif group.has_targets:
        key.append(_TOKENS)
    return cache_dir / FOLDER / cache.key_of(*key)


def tokenize(
    groups: Sequence[HashedGroup],
    tokenizer: Tokenizer,
    cache_dir: Path,
    log: Callable[[str], None],
    template: ChatTemplate | None = None,
    *,
    log_waiting: Callable[[str], None] | None = None,
    gigatoken: bool = True,
) -> None:
    """Makes every missing shard. Groups that another process works on are left to it and waited for.

    Args:
        groups: the files to tokenize.
        tokenizer: tokenizer of the documents.
        cache_dir: directory of the shards.
        log: receives a line.
        template: chat template, needed for conversations.
        log_waiting: receives the line about waiting for another process; default: `log`.
        gigatoken: whether documents may be encoded by gigatoken if its ids are proven to be the same.

    Raises:
        DataError: a file cannot be read or has changed since it was hashed, or the template refuses a conversation.
        DiskError: the disk fails.
    """
    is_missing = [not is_complete(shards_entry(group, tokenizer, cache_dir, template)) for group in groups]
    missing = list(itertools.compress(groups, is_missing))
    if missing and not disk.has_locks(cache_dir):
        log(f"note       {cache_dir} has no file locks: every process tokenizes separately")
    announce_fetching(missing, log)
    if gigatoken:
        choose_encoder(tokenizer, missing, cache_dir, log)
    with TokenizingProgress(sum(group.num_bytes for group in missing), log) as progress:

        def completed(group: HashedGroup, *, wait: bool) -> bool:
            return complete(group, tokenizer, template, cache_dir, progress, log, wait=wait)

        others = [group for group in missing if not completed(group, wait=False)]
        if others:
            say = log_waiting or log
            say(f"waiting    for another process to tokenize {len(others)} of {len(groups)} groups of files")
        for group in others:
            completed(group, wait=True)


def remake(
    damaged: Path,
    group: HashedGroup,
    tokenizer: Tokenizer,
    cache_dir: Path,
    log: Callable[[str], None],
    template: ChatTemplate | None = None,
) -> None:
    """Rebuilds the group's damaged shard, unless another process did; has the arguments and errors of `tokenize`."""
    with TokenizingProgress(group.num_bytes, log, animate=False) as progress:  # the training has its own bar
        complete(group, tokenizer, template, cache_dir, progress, log, wait=True, suspect=damaged)


def shard_paths(entry: Path) -> list[Path]:
    """Returns the paths of existing shards, in order, up to the first that is missing."""
    return list(itertools.takewhile(Path.exists, (shard_path(entry, number) for number in itertools.count())))


def read_shard(path: Path) -> Shard:
    """Returns a shard, reading only its head.

    Raises:
        DamagedError: it is missing or damaged; reading a damaged part of an array raises it later.
        OSError: the disk fails, after several attempts.
    """
    file = cache.read_arrays(path)
    return Shard(**file.arrays, **file.info, sha256=file.sha256)


def is_complete(entry: Path) -> bool:
    """Returns whether the entry has all of its group's shards; checks only the last one."""
    paths = shard_paths(entry)
    try:
        return bool(paths) and read_shard(paths[-1]).last
    except cache.DamagedError:
        return False


def shard_path(entry: Path, number: int) -> Path:
    """Returns the path of the entry's shard with this number, which may not exist."""
    return entry / f"{number:06d}.shard"


def complete(
    group: HashedGroup,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    cache_dir: Path,
    progress: Progress,
    log: Callable[[str], None],
    *,
    wait: bool,
    suspect: Path | None = None,
) -> bool:
    """Writes the group's missing or damaged shards; returns False if another process does so and `wait` is not set.

    Only the heads of existing shards are read, but `suspect` is read completely. Other arguments and errors are the ones of
    `tokenize`.
    """
    entry = shards_entry(group, tokenizer, cache_dir, template)
    with disk.locked(entry, wait=wait) as mine:
        if not mine:
            return False
        documents = group.documents()
        num_documents = num_passed = 0  # documents in the shards so far; the iterator's share of them
        last = False
        for number in itertools.count():
            path = shard_path(entry, number)
            is_new = not path.exists()
            shard = _intact(path, log, wholly=path == suspect)
            if shard is not None and shard.first == num_documents:
                num_documents, last = num_documents + shard.num_read, shard.last
            else:
                unread = num_documents - num_passed
                _pass_over(documents, unread)
                arrays, info = _next_shard(documents, num_documents, group, tokenizer, template, entry, progress, log)
                group.check_unchanged()
                cache.write_arrays(path, arrays, info, keep=is_new)
                num_documents += len(arrays["hashes"]) - info.get("num_more", 0) + info["num_empty"] + info["num_bad"]
                num_passed, last = num_documents, info["last"]
            if last:
                break
        progress.finish_group(group.num_bytes)
    return True


def _intact(path: Path, log: Callable[[str], None], *, wholly: bool) -> Shard | None:
    """Returns the shard if it exists and no damage is found."""
    if not path.exists():
        if wholly:
            log(f"damaged    {path}: is missing; rebuilding it")
        return None
    try:
        if wholly:
            cache.check_arrays(path)
        return read_shard(path)
    except cache.DamagedError as error:
        log(f"damaged    {path}: {error.reason}; rebuilding it")
        return None


def _next_shard(
    documents: Iterator[Document],
    first: int,
    group: HashedGroup,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    entry: Path,
    progress: Progress,
    log: Callable[[str], None],
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tokenizes documents until the shard is full or they end, conversations with a template; returns `Shard`'s fields."""
    tokens = Spool(np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32), entry)
    lengths = [np.zeros(1, np.int64)]
    hashes, plain_hashes = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    learnt, chosen = [np.zeros(0, bool)], [np.zeros(0, bool)]
    num_empty = num_bad = num_more = num_split = num_space_signs = text_bytes = size = num_desirable = num_undesirable = 0
    num_record_bytes, has_two = 0, group.has_preferences or group.has_prompts
    first_bad = ""
    last = False

    def leave_out(error: str) -> None:
        nonlocal num_bad, first_bad
        num_bad, first_bad = num_bad + 1, first_bad or error
        if num_bad > group.source.config.max_bad_records:
            raise group.source.too_many_bad(error)

    while not last and size < SHARD_BYTES and len(tokens) < SHARD_TOKENS:
        batch: list[Document] = []
        long = None
        batch_size = bytes_read = 0
        last = True
        for document in documents:
            bytes_read = document.bytes_read
            if document.error:
                leave_out(document.error)
            elif not document.text:
                num_empty += 1
            elif document.goes_on:
                long, last = document, False
                break
            else:
                batch.append(document)
                batch_size += _size(document)
                if batch_size >= min(BATCH_BYTES, SHARD_BYTES - size):
                    last = False
                    break
        size += batch_size
        of_records = 0
        if group.has_targets:
            encoded = _encode_marked(batch, group, tokenizer, template, leave_out)
            if has_two:
                sides = [tuple(len(side.ids) for side in both) for _, both in encoded]
                chosen += [np.repeat([True, False], lengths) for lengths in sides]
                if group.has_prompts:
                    of_records = sum(num_bytes for _, num_bytes in sides)
                    num_record_bytes += of_records
                num_desirable += sum(not num_rejected for _, num_rejected in sides)
                num_undesirable += sum(not num_chosen for num_chosen, _ in sides)
                encoded = [(document, [_joined(both)]) for document, both in encoded]
            num_more += sum(len(samples) - 1 for _, samples in encoded)
            num_split += sum(len(samples) > 1 for _, samples in encoded)
            batch = [document for document, samples in encoded for _ in samples]
            ids = [sample.ids for _, samples in encoded for sample in samples]
            learnt += [sample.learnt for _, samples in encoded for sample in samples]
            before = behind = np.zeros(0, np.int32)
        else:
            ids = tokenizer.encode_documents([document.text for document in batch])
            before, behind = np.array([tokenizer.bos_id], np.int32), np.array([tokenizer.eos_id], np.int32)
        of_batch = np.concatenate([np.zeros(0, np.int32), *(part for some in ids for part in (before, some, behind))])
        assert (of_batch < (max(tokenizer.vocab_size, BYTES) if group.has_prompts else tokenizer.vocab_size)).all()
        tokens.append(of_batch)
        lengths.append(np.array([len(of_document) for of_document in ids], np.int64) + len(before) + len(behind))
        hashes.append(np.array([document.split_hash for document in batch], np.uint64))
        plain_hashes.append(np.array([plain_hash(document.text) for document in batch], np.uint64))
        num_space_signs += sum("\u2581" in document.text for document in batch)
        batch_bytes = sum(utf8_length(document.text) for document in batch if document.encoded is None)
        text_bytes += batch_bytes
        progress.advance(len(batch), batch_bytes, bytes_read, len(of_batch) - of_records)
        if long is not None:
            found = encode_long(long, documents, tokenizer, tokens, progress)
            lengths.append(np.array([found.num_tokens], np.int64))
            hashes.append(np.array([long.split_hash], np.uint64))
            plain_hashes.append(np.array([found.plain_hash], np.uint64))
            num_space_signs += found.has_space_sign
            text_bytes += found.text_bytes
            size += found.text_bytes + DOCUMENT_BYTES
            if found.num_unknown:
                log(
                    f"note       {group.source.key}: of the {found.num_pieces} pieces in which a document of"
                    f" {found.text_bytes:,} bytes is encoded, {found.num_unknown} do not end at a word, so some ids may"
                    " differ from the whole document's; it remains one document"
                )
    arrays = {
        "tokens": tokens.array(),
        "offsets": np.cumsum(np.concatenate(lengths)),
        "hashes": np.concatenate(hashes),
        "plain_hashes": np.concatenate(plain_hashes),
    }
    if group.has_targets:
        arrays["learnt"] = np.packbits(np.concatenate(learnt))
    if has_two:
        arrays["chosen"] = np.packbits(np.concatenate(chosen))
    return arrays, {
        "text_bytes": text_bytes, "first": first, "num_space_signs": num_space_signs, "num_empty": num_empty,
        "num_bad": num_bad, "first_bad": first_bad, "last": last,
        **({"num_more": num_more, "num_split": num_split} if group.has_targets else {}),
        **({"num_desirable": num_desirable, "num_undesirable": num_undesirable} if group.has_preferences else {}),
        **({"num_record_bytes": num_record_bytes} if group.has_prompts else {}),
    }  # fmt: skip


def _joined(samples: Sequence[Encoded]) -> Encoded:
    return Encoded(*map(np.concatenate, zip(*samples, strict=True)))


def _size(document: Document) -> int:
    """Returns the approximate memory that a document takes, in bytes."""
    sides = document.preference.sides if document.preference else filter(None, [document.conversation])
    num_messages = sum(len(side.messages) for side in sides)
    num_record_bytes = len(document.prompt.record) if document.prompt else 0
    return utf8_length(document.text) + num_record_bytes + DOCUMENT_BYTES * (1 + num_messages)


def _pass_over(documents: Iterator[Document], number: int) -> None:
    """Skips this many documents, including all pieces of long ones."""
    for _ in range(number):
        while (document := next(documents, None)) is not None and document.goes_on:
            pass


def _encode_marked(
    documents: Sequence[Document],
    group: HashedGroup,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    leave_out: Callable[[str], None],
) -> list[tuple[Document, list[Encoded]]]:
    """Returns the documents that say what is trained on, as tokens, each preference as its two sides, each prompt as its
    tokens and its record; `leave_out` receives the errors of the others."""
    encoded = []
    for document in documents:
        if (own := document.encoded) is not None:
            if (largest := own.ids.max(initial=0)) < tokenizer.vocab_size:
                encoded.append((document, [own]))
            else:
                leave_out(
                    f"{document.where}: {group.source.key}.fields: {largest} is no id of the {tokenizer.vocab_size} tokens"
                    f" of {tokenizer.source}; name the tokenizer that made them"
                )
            continue
        try:
            if document.prompt is not None:
                encoded.append((document, encode_prompt(template, tokenizer, document.prompt)))
                continue
            assert template is not None
            if document.preference is not None:
                encoded.append((document, encode_preference(template, tokenizer, document.preference)))
            else:
                assert document.conversation is not None
                encoded.append((document, encode_conversation(template, tokenizer, document.conversation)))
        except DataError as error:
            leave_out(f"{document.where}: {error}")
    return encoded
