"""Reads a Hugging Face directory: `config.json`, the location of its tensors, and the small files that belong to them."""

import json
import os
import re
from pathlib import Path
from typing import Any

from llamajax.config.json_file import MAX_JSON_BYTES, parse_json, read_bytes, read_json
from llamajax.data.tokenizers.tokenizer_files import MODEL_FILE, find_vocabulary
from llamajax.errors import ConfigError, show, show_path
from llamajax.weights.safetensors import INDEX, SINGLE, Stored, stored_tensors

TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model"})
"""Files that are complete tokenizers, except for the names of special tokens."""

GENERATION = "generation_config.json"

LICENSE = r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}"
"""Pattern of licence identifiers on Hugging Face: `apache-2.0`, `llama3.1`, `other`."""

TRAVELLING = (
    r"tokenizer\.json|tokenizer\.model|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|chat_template\.jinja|generation_config\.json|(LICENSE|NOTICE|USE_POLICY)(\.txt|\.md)?"
)
"""Pattern of the small files that stay with the weights."""
_TRAVELLING = re.compile(TRAVELLING)
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}


def source_name(directory: Path) -> str:
    """Returns the model's name: OWNER/NAME in the cache of Hugging Face downloads, otherwise the name of the directory."""
    cached = re.fullmatch("models--(.+?)--(.+)", directory.absolute().parent.parent.name)
    return f"{cached[1]}/{cached[2]}" if cached else directory.absolute().name


def shown_directory(directory: Path) -> str:
    """Returns the path of a model for people: hf://OWNER/NAME@COMMIT in the cache of Hugging Face downloads."""
    is_cached = directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--")
    return f"hf://{source_name(directory)}@{directory.name}" if is_cached else str(directory)


def read_generation(directory: Path) -> dict[str, Any]:
    """Returns the content of `generation_config.json`, as `read_json` does; empty if the file does not exist."""
    path = directory / GENERATION
    return read_json(path) if path.is_file() else {}


def read_travelling(directory: Path) -> dict[str, bytes]:
    """Returns name and content of the files in `directory` that stay with the weights, in order.

    A SentencePiece model with another name is returned as `tokenizer.model`. All files are unchanged except for `auto_map`,
    which names code to run and is removed.

    Raises:
        ConfigError: a file cannot be read, is not the expected JSON object, or is a link to a file outside, which would be
            passed on with the model.
    """
    root = directory.resolve()
    # In the download cache, files in snapshots/REVISION are links to blobs.
    root = root.parent.parent if re.fullmatch("models--.+--.+", root.parent.parent.name) else root
    vocabulary = find_vocabulary(directory)
    named = {path for path in directory.iterdir() if path.is_file() and _TRAVELLING.fullmatch(path.name)}
    contents = {}
    for path in sorted(named | ({vocabulary} if vocabulary else set())):
        name = path.name if _TRAVELLING.fullmatch(path.name) else MODEL_FILE
        if not path.resolve().is_relative_to(root):
            raise ConfigError(f"{path}: is a link to {path.resolve()}, outside of the model; put the file itself there")
        contents[name] = read_bytes(path)
        if path.suffix == ".json" and path.name != "tokenizer.json":
            body = parse_json(path, contents[name])
            if body.pop("auto_map", None) is not None:
                contents[name] = json.dumps(body, indent=2, ensure_ascii=False).encode()
    return contents


def read_license(model_card: Path) -> str | None:
    """Returns the licence identifier of a model card: the line `license: ...` in its front matter, if any."""
    try:
        with model_card.open("rb") as file:
            text = file.read(64_000).decode(errors="replace")
    except OSError:  # a model needs no card
        return None
    block = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = re.search(rf"^license:[ '\"]*({LICENSE})[ '\"]*\r?$", block[1], re.MULTILINE) if block else None
    return found[1] if found else None


def open_model(directory: Path) -> dict[str, Stored]:
    """Returns every tensor of a model directory, in one file or in shards with an index, after checking all headers.

    Raises:
        ConfigError: there are no safetensors, a file is damaged, or files and index disagree.
    """
    weight_map = _read_index(directory)
    tensors: dict[str, Stored] = {}
    for file in [SINGLE] if weight_map is None else sorted(set(weight_map.values())):
        for name, stored in _read_header(directory / file).items():
            if name in tensors:
                raise ConfigError(f"{stored.file}: {show(name)} is also in {tensors[name].file.name}; remove one of them")
            if weight_map is not None and weight_map.get(name) != file:
                raise ConfigError(f"{stored.file}: {show(name)} is not there according to {INDEX}; download both again")
            tensors[name] = stored
    for name, file in (weight_map or {}).items():
        if name not in tensors:
            raise ConfigError(f"{directory / file}: {show(name)} of {INDEX} is missing; download it again")
    return tensors


def _read_index(directory: Path) -> dict[str, str] | None:
    """Returns the file of each tensor; None if all are in `SINGLE`."""
    single, index = directory / SINGLE, directory / INDEX
    if single.is_file() and index.is_file():
        raise ConfigError(f"{directory}: has both {SINGLE} and {INDEX}; remove the one that does not belong")
    if single.is_file():
        return None
    if not index.is_file():
        names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        if pickles := [name for name in names if Path(name).suffix in PICKLES]:
            raise ConfigError(
                f"{show_path(str(directory / pickles[0]))}: pickles can run code and are not read; convert the model where"
                " you trust it: transformers.AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
            )
        raise ConfigError(f"{directory}: has neither {SINGLE} nor {INDEX}; give the directory of a Hugging Face model")
    return read_weight_map(index)


def read_weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each tensor, as an index names it.

    Raises:
        ConfigError: the index is damaged, or names other files than safetensors beside it.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: weight_map: must map tensor names to file names; download the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", file):
            raise ConfigError(
                f"{index}: weight_map: {show(name)}: must name a .safetensors file of this directory,"
                f" not {show(str(file))}; correct it"
            )
    return weight_map


def _read_header(path: Path) -> dict[str, Stored]:
    if path.exists() and not path.is_file():  # reading a pipe may never end
        raise ConfigError(f"{path}: is not a regular file; download the file")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_JSON_BYTES, size - 8):
                raise ConfigError(f"{path}: is truncated or not a safetensors file; download it again")
            header = parse_json(path, file.read(length))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; download the file") from error
    return stored_tensors(path, header, 8 + length, size)
