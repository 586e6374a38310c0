"""Conversations and templates that write them, spelt byte by byte, as we and as transformers read them."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llamajax.config.conversations import ChatForm, ChatFormat
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.chat.chat_tokens import encode_conversation
from llamajax.data.documents.conversations import conversation_of
from llamajax.data.tokenizers.tokenizer import load_tokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
Q, R = {"role": "user", "content": "q"}, {"role": "user", "content": "r"}
ONE, TWO = {"role": "assistant", "content": "one"}, {"role": "assistant", "content": "two"}
SYSTEM = {"role": "system", "content": "Be kind."}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def call(arguments) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


def calling(arguments) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}


RESULT = {"role": "tool", "tool_call_id": "a", "content": "4"}


def spelling(folder: Path, special: Sequence[str] = ()):
    """A tokenizer that spells every byte, and has the special tokens, as we and transformers read it; templates by text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    ours = load_tokenizer(folder)
    return ours, theirs, functools.cache(lambda text: ChatTemplate(text, ours, "some.jinja"))


def samples(both, text, record, chat_format: ChatFormat = "messages"):
    """Returns the text of each sample and its learnt part, decoded by transformers."""
    ours, theirs, template = both
    encoded = encode_conversation(template(text), ours, conversation_of(record, ChatForm(chat_format=chat_format)))
    found = []
    for ids, learnt in encoded:
        said, before = [], False
        for token, is_learnt in zip(ids.tolist(), learnt.tolist(), strict=True):
            if is_learnt:
                said = [*said[:-1], [*said[-1], token]] if before else [*said, [token]]
            before = is_learnt
        found.append((theirs.decode(ids), [theirs.decode(turn) for turn in said]))
    return found


def served(both, text, messages, **others):
    return both[1].apply_chat_template(messages, chat_template=text, tokenize=False, **others)
