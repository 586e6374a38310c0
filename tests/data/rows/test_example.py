"""The document that a run shows is one that is learned in part, spelled with its special tokens."""

import json

import pytest

from llamajax.data.rows.example import Stretch, find_example
from tests.data.rows.test_chat_dataset import chat_config, chat_source, prepared, tokenizer
from tests.data.rows.test_dataset import config_for, jsonl_source, random_texts

__all__ = ["tokenizer"]


def test_a_conversation_is_shown_with_what_is_learned(tmp_path, tokenizer):
    turns = [("user", "Hi"), ("assistant", "Yo"), ("user", "So?"), ("assistant", "No")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    source, _ = chat_source(tmp_path, "chat.jsonl", 1)
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    text = jsonl_source(tmp_path, "text.jsonl", random_texts(20), weight=4.0)
    example = find_example(prepared(chat_config(tmp_path, text, source, seq_len=64)))
    assert example is not None
    assert example.stretches == [
        Stretch("<s>### User\nHi\n\n### Assistant\n", False),
        Stretch("Yo</s>", True),
        Stretch("\n### User\nSo?\n\n### Assistant\n", False),
        Stretch("No</s>", True),
    ]
    assert example.num_learned == sum(len(tokenizer.encode_batch([text])[0]) + 1 for text in ("Yo", "No"))


@pytest.mark.usefixtures("tokenizer")
def test_texts_alone_are_not_shown(tmp_path):
    assert find_example(prepared(config_for(tmp_path, jsonl_source(tmp_path, "a.jsonl", random_texts(20))))) is None
