"""The small files that travel with a Hugging Face model: tokenizer, chat template, generation settings, licence."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from llamajax.data.tokenizer_files import MODEL_FILE, find_vocabulary, is_model
from llamajax.errors import ConfigError
from llamajax.weights.safetensors import parse_json

_TRAVELLING = re.compile(
    r"tokenizer\.json|tokenizer\.model|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|chat_template\.jinja|generation_config\.json|(LICENSE|NOTICE|USE_POLICY)(\.txt|\.md)?"
)

TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model"})
"""Either is a whole tokenizer, but for the names of its special tokens."""

LICENSE = r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}"
"""How Hugging Face writes licences: `apache-2.0`, `llama3.1`, `other`."""

_MAX_BYTES = 64_000_000  # the largest tokenizer.json is a quarter of that


def travelling_files(directory: Path) -> list[Path]:
    """The files of `directory` that are kept with the weights, in order; the tokenizer's whatever its name."""
    named = {path for path in directory.iterdir() if path.is_file() and _TRAVELLING.fullmatch(path.name)}
    return sorted(named | ({vocabulary} if (vocabulary := find_vocabulary(directory)) else set()))


def read_travelling(paths: Iterable[Path]) -> dict[str, bytes]:
    """Name and content of each file, unchanged except for `auto_map`, which names code to run and is left out; a
    SentencePiece model of another name becomes `tokenizer.model`.

    Raises:
        ConfigError: a file cannot be read, or is not the JSON object it should be.
    """
    contents = {}
    for path in paths:
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ConfigError(f"{path}: is larger than {_MAX_BYTES // 10**6} MB; download the file again")
            name = MODEL_FILE if is_model(path) else path.name
            contents[name] = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give the directory of a complete Hugging Face model") from error
        if path.suffix == ".json" and path.name != "tokenizer.json":
            body = parse_json(path, contents[name])
            if body.pop("auto_map", None) is not None:
                contents[name] = json.dumps(body, indent=2, ensure_ascii=False).encode()
    return contents


def read_license(model_card: Path) -> str | None:
    """The licence's identifier in a model card, which is the line `license: ...` of the block at its beginning."""
    try:
        with model_card.open("rb") as file:
            text = file.read(64_000).decode(errors="replace")
    except OSError:  # a model needs no card
        return None
    block = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = re.search(rf"^license:[ '\"]*({LICENSE})[ '\"]*\r?$", block[1], re.MULTILINE) if block else None
    return found[1] if found else None
