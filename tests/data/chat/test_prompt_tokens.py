"""Prompts as tokens: texts as they are, messages by the template, and the bytes of the record behind both."""

from pathlib import Path

import pytest

from llamajax.config.conversations import ChatForm
from llamajax.data.chat.chat_template import load_chat_template
from llamajax.data.chat.prompt_tokens import encode_prompt
from llamajax.data.documents.prompts import prompt_of
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.errors import DataError
from tests import real_tokenizers

LLAMA2 = Path(__file__).parents[3] / "configs" / "chat_templates" / "llama2.jinja"


@pytest.fixture(scope="module")
def mistral():
    return load_tokenizer(real_tokenizers.mistral("v1"))


def test_texts_and_messages(mistral):
    template = load_chat_template(LLAMA2, mistral)
    text = prompt_of({"prompt": "2 + 2 =", "answer": "é"}, ChatForm())
    ids, record = encode_prompt(None, mistral, text)
    assert ids.ids.tolist() == mistral.encode_prompt("2 + 2 =")
    assert bytes(record.ids.tolist()) == '["2 + 2 =",{"prompt":"2 + 2 =","answer":"é"}]'.encode()
    assert not ids.learnt.any()
    assert len(record.learnt) == len(record.ids)
    asked = prompt_of({"prompt": [{"role": "user", "content": "2 + 2?"}], "system": "Add."}, ChatForm())
    ids, _ = encode_prompt(template, mistral, asked)
    expected = "<s>[INST] <<SYS>>\nAdd.\n<</SYS>>\n\n2 + 2? [/INST]"
    assert ids.ids.tolist() == mistral.encode_template(expected).tolist()
    assert mistral.decode_all(ids.ids.tolist()) == expected


def test_messages_need_a_template(mistral):
    asked = prompt_of({"prompt": [{"role": "user", "content": "2 + 2?"}]}, ChatForm())
    with pytest.raises(DataError, match=r"^data.chat_template: is required for prompts of messages, because the tokenizer"):
        encode_prompt(None, mistral, asked)
