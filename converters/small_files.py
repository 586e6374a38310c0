"""The small files of an exported model: tokenizer, chat template, generation settings, licence."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from converters.hf_tokenizer import tokenizer_files
from llamajax.data.chat.chat_template import load_chat_template
from llamajax.generation.prompts import find_ends
from llamajax.weights.hf_files import GENERATION, TOKENIZERS, read_travelling
from llamajax.weights.pretrained import Pretrained


@dataclass(frozen=True)
class SmallFiles:
    """Files that an export writes beside the weights of a model."""

    found: Pretrained
    contents: Mapping[str, bytes]
    """Contents of the files of the model, by name."""

    @property
    def listed(self) -> str:
        """Names of the files, for people."""
        return ", ".join(self.contents) or "no tokenizer"

    @property
    def has_tokenizer(self) -> bool:
        """Whether the files include a tokenizer."""
        return bool(TOKENIZERS & self.contents.keys())

    @property
    def special_tokens(self) -> dict[str, Any]:
        """The model's special tokens, of which `eos_token_id` includes those that end an answer in its chat template."""
        known = self.found.special_tokens()
        return known | {"eos_token_id": _with_ends(known["eos_token_id"], self._ends)}

    def write(self, out: Path) -> None:
        """Writes the files, and `generation_config.json` in any case."""
        for name, content in self.contents.items():
            (out / name).write_bytes(content)
        body: dict[str, Any] | None = {"_from_model_config": True, **self.special_tokens}
        if GENERATION in self.contents:
            given = json.loads(self.contents[GENERATION])
            known = given.get("eos_token_id", self.found.special_tokens()["eos_token_id"])
            body = given | {"eos_token_id": _with_ends(known, self._ends)} if self._ends else None
        if body is not None:
            (out / GENERATION).write_text(json.dumps(body, indent=2) + "\n")

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Returns the special tokens that end an answer in the chat template, if the model has one."""
        if not self.has_tokenizer:
            return frozenset()
        tokenizer = self.found.tokenizer()
        template = load_chat_template(self.found.files, tokenizer)
        return frozenset() if template is None else find_ends((), tokenizer, template)


def read_small_files(found: Pretrained) -> SmallFiles:
    """Reads the small files of a model, with those that other programs need to encode texts as training does.

    Raises:
        ConfigError: a file cannot be read.
        DataError: the tokenizer cannot be read.
    """
    contents = read_travelling(found.files)
    if found.base is not None and GENERATION not in contents and (found.base.files / GENERATION).is_file():
        contents[GENERATION] = read_travelling(found.base.files)[GENERATION]
    if TOKENIZERS & contents.keys():
        contents |= tokenizer_files(contents, found.tokenizer())
    return SmallFiles(found, contents)


def _with_ends(known: int | list[int] | None, ends: frozenset[int]) -> int | list[int] | None:
    """Returns `known` unchanged if it has all of `ends`, else a list with the missing ones appended."""
    before = known if isinstance(known, list) else [] if known is None else [known]
    new = sorted(ends - set(before))
    return [*before, *new] if new else known
