"""The files of a tokenizer: which they are, and what those beside the vocabulary say."""

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
"""A SentencePiece model; Llama 3 comes with another file of that name."""

_MODEL_NAME = re.compile(r".+\.model(\.v\w+)?")
"""As Mistral calls them."""
_CONFIG, _NAMES, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_ENDS = ("bos_token", "eos_token")
_KEYS = (*_ENDS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Under these a configuration names special tokens, in the order in which transformers adds those that are missing."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer, read: its vocabulary, and what those beside it say, as transformers reads them."""

    source: Path
    """The one with the vocabulary, for messages."""
    contents: Mapping[str, bytes]
    """By name; whatever the vocabulary's own name is, it comes first, as `JSON_FILE` or `MODEL_FILE`, so that it is found
    again wherever the files are kept."""
    values: Mapping[str, Any]
    """Of tokenizer_config.json, and of special_tokens_map.json where that counts."""
    added: tuple[tuple[int | None, AddedToken], ...]
    """Tokens that are looked for in a text before the vocabulary is used, with their ids; None: the next one that is free,
    unless the vocabulary has the token. In the order in which they are added."""
    ends: Mapping[str, str]
    """What is named to begin and to end a text, under bos_token and eos_token."""
    denied: frozenset[str]
    """Those of bos_token and eos_token of which it is said that there is none, as Qwen's configuration does."""


def find_vocabulary(folder: Path) -> Path | None:
    """The file in a directory, such as a checkpoint's, that has the tokenizer's vocabulary; None if none has, or it cannot
    be told which of several that have other names."""
    files = (file for file in folder.iterdir() if file.is_file())  # what is read of a pipe may have no end
    found = [file for file in files if file.name == JSON_FILE or _MODEL_NAME.fullmatch(file.name)]
    named = [file for file in found if file.name in (JSON_FILE, MODEL_FILE)]
    # tokenizer.json before tokenizer.model: the latter may be Llama 3's tiktoken file
    return min(named) if named else found[0] if len(found) == 1 else None


def read_files(path: Path) -> TokenizerFiles | None:
    """A tokenizer's files, by the one with its vocabulary or by their directory; None if that has none.

    Raises:
        DataError: a file cannot be read, or one beside the vocabulary is damaged.
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
    """What the files of a tokenizer say.

    Added tokens are listed with ids in tokenizer_config.json, or else in added_tokens.json, which the others say are
    special; transformers also adds those that are only named.

    Args:
        source: where the vocabulary lies, for messages.
        files: name and content.

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
    """The special tokens that a configuration names, in order."""
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
    """The text of a token, which is written alone or as an object; empty if there is none."""
    content = value["content"] if isinstance(value, Mapping) else value
    if not isinstance(content, str | None):
        raise TypeError("a token must be text")
    return content or ""
