"""Strict reader of JSON files from other programs; each must hold one object."""

import json
from pathlib import Path
from typing import Any

from llamajax import disk
from llamajax.errors import ConfigError, show

MAX_JSON_BYTES = 4_000_000  # thirty times what the largest Llama needs
_MAX_BYTES = 64_000_000  # the largest tokenizer.json is a quarter of that


def read_bytes(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Returns the content of a file.

    Raises:
        ConfigError: the file is missing, cannot be read or is too large.
        DiskError: the disk fails, which may pass.
    """

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)

    try:
        data = disk.read_again(read)
    except OSError as error:
        if disk.may_pass(error):
            raise disk.cannot_read(error, path, "") from error
        raise ConfigError(f"{path}: {error.strerror}; give the directory of a complete Hugging Face model") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: is larger than {max_bytes // 10**6} MB; download the file again")
    return data


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        ConfigError: the file is missing, cannot be read, is too large or holds something else.
        DiskError: see `read_bytes`.
    """
    return parse_json(path, read_bytes(path, MAX_JSON_BYTES))


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """Returns a JSON object; `path` is for messages.

    Raises:
        ConfigError: the text is not a JSON object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{show(next(name for name in names if names.count(name) > 1))} appears twice")
        return found

    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is not a JSON number")

    try:
        body = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else show(str(error))
        raise ConfigError(f"{path}: is not valid JSON: {reason}; download the file again") from error
    if not isinstance(body, dict):
        raise ConfigError(f"{path}: must hold a JSON object; download the file again")
    return body
