"""File formats of records, such as conversations, and the table that maps a source's `kind` to its format.

A record is a JSON object: a line or an element of a file, or a row of a parquet or Arrow file. The name of the file decides.
"""

import abc
import functools
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from llamajax.config.conversations import ChatForm
from llamajax.data.documents.columns import NoSuchKeyError, RecordRow, arrow_records, parquet_records
from llamajax.data.documents.conversations import conversation_of, fields_read
from llamajax.data.documents.formats import Arrow, Document, Format, Jsonl, Megatron, Parquet, Stdlib, Text
from llamajax.data.documents.lines import Span
from llamajax.data.documents.preferences import fields_read as preference_fields_read
from llamajax.data.documents.preferences import preference_of
from llamajax.data.documents.prompts import prompt_of
from llamajax.data.documents.remote import File
from llamajax.data.documents.split import split_hash
from llamajax.data.documents.text_files import JSON_SUFFIXES
from llamajax.data.documents.token_records import tokens_of
from llamajax.errors import DataError

_PARQUET, _ARROW = ".parquet", ".arrow"


class Records(Jsonl, abc.ABC):
    """One document per record."""

    suffixes = (*JSON_SUFFIXES, _PARQUET, _ARROW)
    max_line_bytes = 2**22
    """About a million tokens. Training uses at most one row of a record."""
    has_targets = True
    setting: ClassVar[str]
    """Setting of the source that messages about a record name."""

    @abc.abstractmethod
    def document(self, record: Mapping[str, Any], where: object, bytes_read: int) -> Document:
        """Returns the document of a record; raises `ValueError` with a line `field: rule; remedy` if it has none."""

    @property
    @abc.abstractmethod
    def columns(self) -> Container[str]:
        """Columns of a table that records are read from."""

    def is_dataset(self, folder: Path) -> bool:
        return any((folder / name).exists() for name in ("state.json", "dataset_dict.json"))

    def has_spans(self, file: File) -> bool:
        suffix = file.suffix.lower()
        return suffix == _PARQUET or (suffix != _ARROW and super().has_spans(file))

    def extent(self, path: Path, span: Span) -> tuple[int, int, bytes]:
        if path.suffix.lower() == _PARQUET:
            return Parquet(self.config, self.key).extent(path, span)
        return super().extent(path, span)

    def mark(self, path: Path) -> bytes:
        return b"" if path.suffix.lower() in (_PARQUET, _ARROW) else super().mark(path)

    def documents(self, path: Path, span: Span | None) -> Iterator[Document]:
        match path.suffix.lower():
            case ".parquet":
                yield from self._of_rows(path, parquet_records(path, self.columns, span))
            case ".arrow":
                yield from self._of_rows(path, arrow_records(path, self.columns))
            case _:
                yield from super().documents(path, span)

    def _of_rows(self, path: Path, rows: Iterator[RecordRow]) -> Iterator[Document]:
        try:
            for row in rows:
                where = f"{path}:{row.number}"
                try:
                    yield self._document(row.record(), where, row.bytes_read)
                except UnicodeDecodeError:
                    message = "has text that is not UTF-8; correct or remove the row"
                    yield Document("", row.bytes_read, error=str(self.error(where, message, self.setting)))
                except DataError as error:
                    yield Document("", row.bytes_read, error=str(error))
        except NoSuchKeyError as error:
            raise self.error(path, f"{error}; rename one", self.setting) from error

    def _of_line(self, line: bytes, where: object, bytes_read: int) -> Iterable[Document]:
        return [self._document(self._record(line, where), where, bytes_read)]

    def _document(self, record: Mapping[str, Any], where: object, bytes_read: int) -> Document:
        try:
            return self.document(record, where, bytes_read)
        except ValueError as error:
            raise self.error(where, str(error), self.setting) from error


class Chat(Records):
    """One conversation per record."""

    setting = "chat_format"

    @property
    def columns(self) -> frozenset[str]:
        return fields_read(self.config.form)

    def document(self, record: Mapping[str, Any], where: object, bytes_read: int) -> Document:
        conversation = conversation_of(record, self._form, where)
        text = conversation.text
        return Document(text, bytes_read, split_hash(text), conversation, where=where)

    @functools.cached_property
    def _form(self) -> ChatForm:
        return self.config.form


class Preferences(Records):
    """One pair of answers, or one answer with a label, per record."""

    setting = "fields"
    has_preferences = True

    @property
    def columns(self) -> frozenset[str]:
        return preference_fields_read(self._form)

    def document(self, record: Mapping[str, Any], where: object, bytes_read: int) -> Document:
        preference = preference_of(record, self._form, where)
        return Document(preference.text, bytes_read, split_hash(preference.prompt), preference=preference, where=where)

    @functools.cached_property
    def _form(self) -> ChatForm:
        return self.config.form


class Prompts(Records):
    """One prompt per record. Reward functions may need any column, so all of them are read."""

    setting = "fields"
    has_prompts = True

    @property
    def columns(self) -> Container[str]:
        return _Every()

    def document(self, record: Mapping[str, Any], where: object, bytes_read: int) -> Document:
        prompt = prompt_of(record, self._form, where)
        return Document(prompt.text, bytes_read, split_hash(prompt.text), prompt=prompt, where=where)

    @functools.cached_property
    def _form(self) -> ChatForm:
        return self.config.form


class _Every(Container[str]):
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


class Tokenized(Records):
    """The tokens of one document per record."""

    setting = "fields"

    @property
    def columns(self) -> frozenset[str]:
        given = self.config.fields.given
        names = {given.get(name, name) for name in ("input_ids", "labels", "attention_mask")}
        return frozenset({"position_ids", *names, *(name.partition(".")[0] for name in names)})

    def document(self, record: Mapping[str, Any], where: object, bytes_read: int) -> Document:
        encoded = tokens_of(record, self.config.fields)
        text = " ".join(map(str, encoded.ids.tolist())) if encoded.learnt[1:].any() else ""
        return Document(text, bytes_read, split_hash(text), encoded=encoded, where=where)


FORMATS: dict[str, type[Format]] = {
    "text": Text, "jsonl": Jsonl, "parquet": Parquet, "arrow": Arrow, "stdlib": Stdlib, "chat": Chat,
    "preference": Preferences, "prompt": Prompts, "tokenized": Tokenized, "megatron": Megatron,
}  # fmt: skip
"""Format by the `kind` of a source."""
