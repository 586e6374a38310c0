"""Finds and reads a tokenizer's files: the vocabulary, and the configuration files beside it."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from llamajax.disk import cannot_read
from llamajax.errors import DataError

JSON_FILE = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
"""File name of a SentencePiece model. Llama 3 uses the name for a tiktoken file."""

_MODEL_NAME = re.compile(r".+\.model(\.v\w+)?")
"""Other names of SentencePiece models, as in Mistral's releases."""
_CONFIG, _NAMES, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_ENDS = ("bos_token", "eos_token")
_KEYS = (*_ENDS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys under which a configuration names special tokens, in the order in which transformers adds missing ones."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer's files: its vocabulary and what the neighbouring files say, interpreted as transformers does."""

    source: Path
    """The vocabulary file, for messages."""
    contents: Mapping[str, bytes]
    """Content of the files by name. The vocabulary comes first and is always named `JSON_FILE` or `MODEL_FILE`, so it can
    be found wherever the files are kept."""
    values: Mapping[str, Any]
    """Values of tokenizer_config.json, and of special_tokens_map.json where it applies."""
    added: tuple[tuple[int | None, AddedToken], ...]
    """Tokens that are found in a text before the vocabulary is used, with their ids, in the order they are added. The
    id None means the next free one, unless the vocabulary has the token."""
    ends: Mapping[str, str]
    """Tokens that begin and end a text, under the keys bos_token and eos_token."""
    denied: frozenset[str]
    """Keys among bos_token and eos_token that are explicitly null, as in Qwen's configuration."""


def find_vocabulary(folder: Path) -> Path | None:
    """Returns the vocabulary file in a directory, such as a checkpoint's, or None.

    None means that no file fits, or that several do and none has a standard name.
    """
    files = (file for file in folder.iterdir() if file.is_file())  # reading a pipe may never end
    found = [file for file in files if file.name == JSON_FILE or _MODEL_NAME.fullmatch(file.name)]
    named = [file for file in found if file.name in (JSON_FILE, MODEL_FILE)]
    # tokenizer.json before tokenizer.model: the latter may be Llama 3's tiktoken file
    return min(named) if named else found[0] if len(found) == 1 else None


def read_files(path: Path) -> TokenizerFiles | None:
    """Reads a tokenizer's files, given its vocabulary file or its directory; returns None if the directory has none.

    Raises:
        DataError: a file cannot be read, or a file beside the vocabulary is damaged.
    """
    try:
        source = find_vocabulary(path) if path.is_dir() else path
        if source is None:
            return None
        content = source.read_bytes()
        is_json = source.suffix == ".json" or content.startswith(b"{")
        beside = (source.with_name(name) for name in (_CONFIG, _NAMES, _ADDED))
        contents = {JSON_FILE if is_json else MODEL_FILE: content}
        contents |= {file.name: file.read_bytes() for file in beside if file.is_file()}
    except OSError as error:
        raise cannot_read(error, f"{error.filename or path}: data.tokenizer.path", "correct the path") from error
    return parse_files(source, contents)


def parse_files(source: Path, files: Mapping[str, bytes]) -> TokenizerFiles:
    """Interprets the files of a tokenizer.

    Added tokens are listed with their ids in tokenizer_config.json or else in added_tokens.json. The other files say which
    of them are special. Tokens that are only named are added too, as transformers does.

    Args:
        source: path of the vocabulary, for messages.
        files: content of each file by name.

    Raises:
        DataError: a file is damaged.
    """
    values, names, added = (_read(source, files, name) for name in (_CONFIG, _NAMES, _ADDED))
    has_list = "added_tokens_decoder" in values
    if not has_list:
        values |= names
    try:
        named = {token.content: token for token in _named(values)}
        listed = (
            {int(token): _token(entry) for token, entry in values["added_tokens_decoder"].items()}
            if has_list
            else {
                int(token): AddedToken(text, special=text in named, normalized=text not in named)
                for text, token in added.items()
            }
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        read = ", ".join(name for name in ((_CONFIG,) if has_list else (_CONFIG, _NAMES, _ADDED)) if name in files)
        raise DataError(f"{source.parent}: the tokens in {read} are damaged; replace the files") from error
    for token in listed.values():
        token.special = token.special or token.content in named
    known = {token.content for token in listed.values()}
    others = [(None, token) for content, token in named.items() if content not in known]
    ends = {key: token for key in _ENDS if (token := _content(values.get(key)))}
    denied = frozenset(key for key in _ENDS if values.get(key, key) is None)
    in_order = sorted(listed.items(), key=lambda entry: entry[0])
    return TokenizerFiles(source, files, values, (*in_order, *others), ends, denied)


def _read(source: Path, files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        body = json.loads(files[name])
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise DataError(f"{source.with_name(name)}: is not a JSON object; replace the file")
    return body


def _named(values: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yields the special tokens that a configuration names, in order."""
    lists = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    others = list(lists.values()) if isinstance(lists, dict) else lists
    for value in (*(values.get(key) for key in _KEYS), *others):
        if _content(value):
            token = _token(value) if isinstance(value, dict) else AddedToken(value, normalized=False)
            token.special = True
            yield token


def _token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized", "special") if key in entry}
    return AddedToken(_content(entry), **flags)


def _content(value: Any) -> str:
    """Returns the text of a token given as a string or an object; empty if there is none."""
    content = value["content"] if isinstance(value, Mapping) else value
    if not isinstance(content, str | None):
        raise TypeError("a token must be text")
    return content or ""
