"""Prompts from files and into tokens, what is refused with its line, and the tokens that end a text."""

import codecs
import errno
import json
import os

import pytest

from converters.hf_tokenizer import convert_sentencepiece
from llamajax import disk
from llamajax.config.generate import GenerateConfig
from llamajax.data.chat.chat_template import ChatTemplate
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from llamajax.errors import DataError, DiskError
from llamajax.generation.prompts import Prompt, find_ends, read_prompts
from tests.runs import WORDS

TALK = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "the model"})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """With a special token for the end of a turn, beside those of every text."""
    directory = tmp_path_factory.mktemp("tokenizer")
    body = convert_sentencepiece(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=320), bos_id=1)
    assert body is not None
    model = json.loads(body)
    token = {"id": 320, "content": "<|end|>", "special": True}
    model["added_tokens"].append(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | token)
    (directory / "tokenizer.json").write_text(json.dumps(model))
    return load_tokenizer(directory)


def template(tokenizer, end: str) -> ChatTemplate:
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}END{% endfor %}{% if add_generation_prompt %}Me: {% endif %}"
    return ChatTemplate(text.replace("END", end), tokenizer, "a test")


def test_a_text_file_has_a_prompt_per_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("the model\r\n\n  \u6f22\u5b57\u2028{}\n".encode())
    assert read_prompts(path) == [Prompt("the model"), Prompt("  \u6f22\u5b57\u2028{}")]
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read_prompts(path)[0] == Prompt("the model")


def test_a_jsonl_file_has_texts_and_conversations(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a\nb", "id": 3, "system": None, "tools": []}, {"messages": TALK}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_prompts(path) == [Prompt("a\nb"), Prompt("the model", TALK)]
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read_prompts(path) == [Prompt("a\nb"), Prompt("the model", TALK)]


def test_a_conversation_is_read_as_training_reads_it(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "model"}]
    line = {"system": "Be brief.", "messages": [{"from": "human", "value": "?"}, {"role": "user", "content": parts}]}
    path.write_text(json.dumps(line | {"tools": [{"name": "f"}]}))
    (prompt,) = read_prompts(path)
    assert prompt.text == "the\nmodel"
    text = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}.{% endfor %}"
    ids = prompt.encode(tokenizer, ChatTemplate(text, tokenizer, "a test"))
    assert ids == tokenizer.encode_template('[{"name": "f"}]system:Be brief..user:?.user:the\nmodel.').tolist()
    with pytest.raises(DataError, match=r"^a test: chat template: does not write tools; name a template that does, or"):
        prompt.encode(tokenizer, template(tokenizer, "."))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('"text"', "must be"),
        ('{"text": "a"}', "must be"),
        ('{"prompt": 1}', "must be"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "must be"),
        ('{"messages": []}', "must be"),
        ('{"messages": [{"role": "user"}]}', "messages[0] has no 'content', only 'role'; correct the line"),
        ('{"messages": [{"role": "nobody", "content": "a"}]}', "messages[0].role must be one of system, "),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 3}', "tools must be a list"),
        ('{"messages": [{"role": "user", "content": null}]}', "must be"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        (
            '{"prompt": "a", "system": "b"}',
            "system is not read beside prompt; write the line with messages, or remove system",
        ),
        ('{"prompt": "a", "tools": [{"name": "f"}]}', "tools is not read beside prompt; "),
        ('{"prompt": "a", "chat_template_kwargs": {"b": 1}}', "chat_template_kwargs is not read beside prompt; "),
        ('{"prompt": "a", "images": ["b.png"]}', "images is not read beside prompt; "),
        ('{"messages": [{"role": "\\ud800", "content": ""}]}', "surrogate"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line, complaint, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(DataError) as refused:
        read_prompts(path)
    assert f"{path}:2: prompts_file: " in str(refused.value)
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path):
    for name, content in (("a.txt", "the model"), ("a.jsonl", json.dumps({"prompt": "the model"}))):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert read_prompts(tmp_path / name) == [Prompt("the model")]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_not_taken_for_a_file_that_is_missing(tmp_path, monkeypatch, number):
    path = tmp_path / "prompts.txt"
    path.write_text("the model")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "_PAUSES_S", (0, 0, 0))
    with monkeypatch.context() as failing:
        failing.setattr(os, "stat", fail)
        problems = GenerateConfig(model=str(tmp_path), prompts_file=str(path)).file_problems()
    assert problems == []
    monkeypatch.setattr(type(path), "read_bytes", fail)
    with pytest.raises(DiskError, match=rf"^{path}: prompts_file: .*; check the disk and run the same command again$"):
        read_prompts(path)


def test_special_tokens_in_a_prompt_are_tokens_where_that_is_asked_for(tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer.source))
    for text, is_special in (("the model", False), ("a row<|end|> the model<|end|>", True), ("reads</s>a row", True)):
        prompt = Prompt(text)
        assert prompt.has_special(tokenizer) == is_special
        assert prompt.encode(tokenizer, None, parse_special=True) == theirs(text)["input_ids"]
        assert prompt.encode(tokenizer, None) == theirs(text, split_special_tokens=True)["input_ids"]


def test_what_begins_a_text_is_not_doubled_by_a_prompt_that_writes_it(tokenizer):
    ids = Prompt(f"{tokenizer.bos_token}the model").encode(tokenizer, None, parse_special=True)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id


def test_files_without_prompts_are_refused(tmp_path):
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for name, complaint in (("empty.txt", "has no prompt"), ("latin.txt", "not UTF-8"), ("none.txt", "No such file")):
        with pytest.raises(DataError, match=complaint):
            read_prompts(tmp_path / name)


def test_a_text_begins_with_bos_and_a_conversation_is_put_into_the_template(tokenizer):
    plain = tokenizer.encode_batch(["the model</s>"])[0].tolist()
    assert Prompt("the model</s>").encode(tokenizer, None) == [tokenizer.bos_id, *plain]
    assert Prompt("").encode(tokenizer, None) == [tokenizer.bos_id]
    talk = Prompt("the model").in_chat("Be brief.")
    assert talk == Prompt("the model", TALK)
    assert talk.in_chat("Be long.") == talk
    assert Prompt("a").in_chat(None).messages == ({"role": "user", "content": "a"},)
    tokens = talk.encode(tokenizer, template(tokenizer, "<|end|>"))
    assert tokenizer.bos_id not in tokens
    assert tokens.count(320) == 2
    assert tokenizer.decode(tokens) == "system: Be brief.user: the modelMe: "


def test_a_tokenizer_without_bos_puts_nothing_before_a_text(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "prefix", ())
    assert Prompt("the model").encode(tokenizer, None) == tokenizer.encode_batch(["the model"])[0].tolist()
    assert len(Prompt("").encode(tokenizer, None)) == 1


def test_ends_are_those_of_model_tokenizer_and_template(tokenizer):
    assert find_ends((), tokenizer, None) == {2}
    assert find_ends((5,), tokenizer, None) == {2, 5}
    assert find_ends((5, 6), tokenizer, None) == {2, 5, 6}
    assert find_ends((), tokenizer, template(tokenizer, "<|end|>\n")) == {2, 320}
    assert find_ends((), tokenizer, template(tokenizer, " </s>")) == {2}
    assert find_ends((), tokenizer, template(tokenizer, "\nthe next <|end|>")) == {2}
