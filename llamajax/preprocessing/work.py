"""Does one process's part of preprocessing: turns a group of files into shards in the cache."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llamajax.data import cache
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.documents.file_groups import FileGroup, hashed
from llamajax.data.tokenizers.encoder_choice import differing_text
from llamajax.data.tokenizers.tokenizer import tokenizer_of
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.data.tokenizers.tokenizer_files import TokenizerFiles
from llamajax.data.tokens.encoding import Tokenizing
from llamajax.data.tokens.shards import complete

Tell = Callable[[str, tuple[Any, ...]], None]
"""Takes an event of a worker: the name of a method of `Progress`, or `log`, and its arguments."""


class Task(NamedTuple):
    """A group of files, and its number among all groups."""

    number: int
    group: FileGroup


@dataclass(frozen=True)
class Job:
    """The part that all tasks share; it can be sent to other processes."""

    tokenizer_files: TokenizerFiles
    template: tuple[str, str] | None
    """Text and origin of the chat template, or None."""
    cache_dir: Path
    is_fast: bool
    """Whether gigatoken encodes documents; it does not in a process where its ids differ because of the processor."""

    @classmethod
    def of(cls, by: Tokenizing) -> "Job":
        """Creates the job for the settings in `by`."""
        template = None if by.template is None else (by.template.text, by.template.where)
        return cls(by.tokenizer.read_from, template, by.cache_dir, by.tokenizer.is_fast)

    def made(self) -> tuple[Tokenizer, ChatTemplate | None]:
        """Returns the tokenizer and the template, which are created once per process."""
        key = cache.key_of(
            {name: hashlib.sha256(content).hexdigest() for name, content in self.tokenizer_files.contents.items()},
            self.template,
            self.is_fast,
        )
        if key not in _made:
            tokenizer = tokenizer_of(self.tokenizer_files)
            tokenizer.is_fast = self.is_fast and differing_text(tokenizer, quick=True) is None
            _made[key] = (
                tokenizer,
                None if self.template is None else ChatTemplate(self.template[0], tokenizer, self.template[1]),
            )
        return _made[key]


_made: dict[str, tuple[Tokenizer, ChatTemplate | None]] = {}


def hash_group(cache_dir: Path, task: Task, tell: Tell) -> None:
    """Ensures that the cache has the group's hash; raises the errors of `hashed`."""
    hashed(task.group, cache_dir)
    tell("finish_group", (task.group.num_bytes, task.number))


def tokenize_group(job: Job, task: Task, tell: Tell) -> None:
    """Ensures that the cache has the group's shards.

    Raises:
        DataError: a file cannot be read, or changes meanwhile, or the template rejects a conversation.
        DiskError: the disk fails.
    """
    group = hashed(task.group, job.cache_dir)
    tokenizer, template = job.made()
    progress = _Told(task.number, tell)
    complete(group, tokenizer, template, job.cache_dir, progress, lambda line: tell("log", (line,)), wait=True)


@dataclass(frozen=True)
class _Told:
    """Reports the progress of one task to the process that shows the progress of all."""

    group: int
    tell: Tell

    def advance(self, num_documents: int, text_bytes: int, bytes_read: int, num_tokens: int = 0, group: int = 0) -> None:
        self.tell("advance", (num_documents, text_bytes, bytes_read, num_tokens, self.group))

    def finish_group(self, num_bytes: int, group: int = 0) -> None:
        self.tell("finish_group", (num_bytes, self.group))
