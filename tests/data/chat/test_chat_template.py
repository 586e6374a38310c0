"""Chat templates: rendered as transformers does, learnt is what the assistant says, and hostile ones do no harm."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from llamajax.config.conversations import ChatForm
from llamajax.data.chat import chat_template
from llamajax.data.chat.chat_template import ChatTemplate, load_chat_template
from llamajax.data.chat.chat_tokens import Encoded, encode_conversation, encode_messages
from llamajax.data.documents.conversations import conversation_of
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import DataError
from tests import real_tokenizers
from tests.data.chat.chat_from_docs import conversations, record_of

TEMPLATES = Path(__file__).parents[3] / "configs" / "chat_templates"
SPECIAL = [
    "<s>", "</s>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|im_start|>", "<|im_end|>",
]  # fmt: skip
ENDS = {
    "chatml": (None, "<|im_end|>"),
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "plain": ("<s>", "</s>"),
}
SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye\nnow"},
    {"role": "assistant", "content": "So long!"},
]
# What the assistant says is in brackets.
GOLDEN = {
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "⟦Hello<|im_end|>⟧\n<|im_start|>user\nBye\nnow<|im_end|>\n<|im_start|>assistant\n⟦So long!<|im_end|>⟧\n",
    "llama2": "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]⟦ Hello </s>⟧<s>[INST] Bye\nnow [/INST]⟦ So long! </s>⟧",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello<|eot_id|>⟧"
    "<|start_header_id|>user<|end_header_id|>\n\nBye\nnow<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦So long!<|eot_id|>⟧",
    "plain": "<s>### System\nBe kind.\n\n### User\nHi\n\n### Assistant\n⟦Hello</s>⟧\n"
    "### User\nBye\nnow\n\n### Assistant\n⟦So long!</s>⟧\n",
}


def read_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate:
    template = load_chat_template(path, tokenizer)
    assert template is not None
    return template


def encode(template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> Encoded:
    (encoded,) = encode_conversation(template, tokenizer, conversation_of({"messages": messages}, ChatForm()))
    return encoded


@pytest.fixture
def spelling(tmp_path):
    """Makes a tokenizer that spells every byte, and has the special tokens of all templates."""

    def make(bos, eos):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = tokenizers.Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(SPECIAL)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos, "eos_token": eos}))
        return load_tokenizer(tmp_path)

    return make


@pytest.fixture
def tokenizer(spelling):
    return spelling("<s>", "</s>")


@pytest.fixture
def template(tokenizer):
    """A template from its text."""
    return lambda text: ChatTemplate(text, tokenizer, "some.jinja")


def spelt(tokenizer, text):
    """The ids of a golden text, and which of them are in brackets; found without a tokenizer's splitting."""
    ids, learnt, is_learnt = [], [], False
    for piece in re.findall("|".join(map(re.escape, [*SPECIAL, "⟦", "⟧"])) + "|.", text, re.DOTALL):
        if piece in "⟦⟧":
            is_learnt = piece == "⟦"
            continue
        token = tokenizer._tokenizer.token_to_id({" ": "Ġ", "\n": "Ċ"}.get(piece, piece))
        ids.append(token)
        learnt.append(is_learnt)
    return ids, learnt


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text_and_tokens(spelling, name):
    tokenizer = spelling(*ENDS[name])
    template = read_template(TEMPLATES / f"{name}.jinja", tokenizer)
    messages = [SYSTEM, *TURNS]
    text = GOLDEN[name].replace("⟦", "").replace("⟧", "")
    assert template.render(messages, add_generation_prompt=False) == text
    prompt = GOLDEN[name].rpartition("⟦")[0].replace("⟦", "").replace("⟧", "")
    assert template.render(messages[:-1], add_generation_prompt=True) == prompt
    ids, learnt = encode(template, tokenizer, messages)
    assert (ids.tolist(), learnt.tolist()) == spelt(tokenizer, GOLDEN[name])
    assert tokenizer.encode_template(text).tolist() == ids.tolist()
    assert ids.dtype == np.int32


@pytest.mark.parametrize("chat_format", ["messages", "sharegpt", "alpaca", "prompt_completion"])
@pytest.mark.parametrize("name", GOLDEN)
def test_every_format_gives_the_same_tokens(spelling, name, chat_format):
    tokenizer = spelling(*ENDS[name])
    template = read_template(TEMPLATES / f"{name}.jinja", tokenizer)
    messages = [SYSTEM, *TURNS[:2]]
    read = conversation_of(record_of(messages, chat_format), ChatForm(chat_format=chat_format)).messages
    ids, learnt = encode(template, tokenizer, read)
    golden = GOLDEN[name].partition("⟧")[0] + "⟧" + ("\n" if name in ("chatml", "plain") else "")
    assert (ids.tolist(), learnt.tolist()) == spelt(tokenizer, golden)


MACROS = """\
{%- set state = namespace(count=0, names=[]) %}
{% macro turn(message) %}<|{{ message.role | upper }}|>{{ message['content'] | trim }}{% endmacro %}
{% for message in messages if message.role != 'tool' %}
    {%- set state.count = state.count + 1 %}
    {% if message.role == 'assistant' %}{% generation %}{{ turn(message) }}!{% endgeneration %}
    {% else %}{{ turn(message) }}{% endif %}
    {% if state.count > 3 %}{% break %}{% endif %}
{% endfor %}
{{ messages | tojson(indent=2) }}{{ {'ä': '<&>'} | tojson }}{{ dict(a=1).items() | list }}
{%- if tools is defined and tools %}tools{% endif %}{{ bos_token }}{{ unknown_token }}
{%- if add_generation_prompt %}go{% endif %}
"""


@pytest.mark.parametrize("name", [*GOLDEN, "macros"])
@pytest.mark.parametrize("prompt", [False, True])
def test_transformers_renders_the_same(spelling, name, prompt):
    bos, eos = ENDS.get(name, ("<s>", "</s>"))
    text = MACROS if name == "macros" else (TEMPLATES / f"{name}.jinja").read_text()
    template = ChatTemplate(text, spelling(bos, eos), name)
    for messages in (
        [SYSTEM, *TURNS],
        TURNS,
        TURNS[:1],
        [SYSTEM, *TURNS[:3]],
        [{"role": "user", "content": " \nä \u2581 "}],
    ):
        special = {key: token for key, token in {"bos_token": bos, "eos_token": eos}.items() if token is not None}
        (expected,), _ = render_jinja_template([messages], chat_template=text, add_generation_prompt=prompt, **special)
        assert template.render(messages, add_generation_prompt=prompt) == expected


def test_generation_blocks_say_what_is_learnt(tokenizer, template):
    marked = template(
        "{% macro say(text) %}{% generation %}{{ text }}</s>{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ say(m.content) | trim }}"
        "{% else %}U:{{ m.content }}|{% endif %}{% endfor %}"
    )
    ids, learnt = encode(marked, tokenizer, TURNS)
    golden = "U:Hi|A:⟦Hello</s>⟧U:Bye\nnow|A:⟦So long!</s>⟧"
    assert (ids.tolist(), learnt.tolist()) == spelt(tokenizer, golden)
    assert "\ue000" not in marked.render(TURNS, add_generation_prompt=True)


def test_transformers_has_the_same_tokens_and_mask(tmp_path, spelling):
    tokenizer = spelling("<s>", "</s>")
    marked = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}</s>"
        "{% endgeneration %}{% else %}U:{{ m.content }}|{% endif %}{% endfor %}"
    )
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>")
    template = ChatTemplate(marked, tokenizer, "")
    for messages in [TURNS, *conversations(20)]:
        expected: Any = theirs.apply_chat_template(
            messages, chat_template=marked, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learnt = encode(template, tokenizer, messages)
        assert ids.tolist() == expected["input_ids"]
        assert learnt.astype(int).tolist() == expected["assistant_masks"]


def test_what_the_assistant_says_must_be_found(tokenizer, template):
    message = (
        r"^some.jinja: chat template: the assistant's messages cannot be found in its output; put {% generation %} and"
        r" {% endgeneration %} around it, or name a file of configs/chat_templates as data.chat_template$"
    )
    for text in (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",  # has roles, and no generation prompt
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",  # the beginning follows the end
    ):
        with pytest.raises(DataError, match=message):
            encode(template(text), tokenizer, TURNS)


@pytest.mark.parametrize("bos", ["<s>", None])
@pytest.mark.parametrize("writes", [True, False])
def test_a_conversation_begins_as_the_template_says(spelling, bos, writes):
    tokenizer = spelling(bos, "</s>")
    begin = "<s>" if writes else ""
    text = begin + "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    template = ChatTemplate(text, tokenizer, "")
    ids, learnt = encode(template, tokenizer, TURNS[:2])
    golden = begin + "Hi</s>⟦Hello</s>⟧"
    assert (ids.tolist(), learnt.tolist()) == spelt(tokenizer, golden)
    prompt = encode_messages(template, tokenizer, TURNS[:1])
    assert prompt.tolist() == ids[: len(prompt)].tolist()


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    """Llama 3's tokenizer, with ChatML's two tokens, as we and as transformers read it."""
    path = real_tokenizers.llama3(tmp_path_factory.mktemp("llama3"))
    path.with_name("added_tokens.json").write_text('{"<|im_start|>": 128256, "<|im_end|>": 128257}')
    return load_tokenizer(path), AutoTokenizer.from_pretrained(path.parent)


@pytest.mark.parametrize("name", ["chatml", "llama3", "plain"])
def test_a_conversation_has_the_tokens_that_transformers_serves(llama3, name):
    """With a tokenizer that begins every other text: a template that does not write its bos token gets none."""
    tokenizer, theirs = llama3
    template = read_template(TEMPLATES / f"{name}.jinja", tokenizer)
    theirs.chat_template = template.text
    ids, _ = encode(template, tokenizer, [SYSTEM, *TURNS])
    assert ids.tolist() == theirs.apply_chat_template([SYSTEM, *TURNS])["input_ids"]
    prompt = encode_messages(template, tokenizer, [SYSTEM, *TURNS[:1]])
    assert prompt.tolist() == theirs.apply_chat_template([SYSTEM, *TURNS[:1]], add_generation_prompt=True)["input_ids"]
    assert (ids[0] == tokenizer.bos_id) == (name != "chatml")


def sentencepiece(folder):
    texts = [turn["content"] for messages in conversations(200) for turn in messages]
    texts += ["### System\n", "### User\n", "### Assistant\n"] * 50
    (folder / "tokenizer.model").write_bytes(train_sentencepiece(texts, vocab_size=700))
    return load_tokenizer(folder)


@pytest.mark.parametrize("name", GOLDEN)
def test_learnt_is_exactly_what_the_assistant_says(tmp_path, name):
    """On help texts, with a tokenizer that has no token of any chat: its pieces could reach across the marks."""
    tokenizer = sentencepiece(tmp_path)
    template = read_template(TEMPLATES / f"{name}.jinja", tokenizer)
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}.get(name, "")
    for messages in conversations(60):
        ids, learnt = encode(template, tokenizer, messages)
        turns = np.split(ids, np.flatnonzero(np.diff(learnt)) + 1)
        said = [tokenizer.decode(turn) for turn in turns[1::2]]
        contents = [message["content"] for message in messages if message["role"] == "assistant"]
        padded = [f" {content} " if name == "llama2" else content for content in contents]
        assert said == [content + end for content in padded]
        if not end:
            assert all(turn[-1] == tokenizer.eos_id for turn in turns[1::2])
        for index, message in enumerate(messages):  # what is generated after is what is learnt after
            if message["role"] == "assistant":
                prompt = encode_messages(template, tokenizer, messages[:index])
                assert prompt.tolist() == ids[: len(prompt)].tolist()
                assert learnt[len(prompt)]
                assert not learnt[len(prompt) - 1]


def test_the_date_is_fixed_in_what_is_learnt(tokenizer, template):
    dated = template("{{ strftime_now('%d %b %Y') }}:{% for m in messages %}{{ m.content }};{% endfor %}")
    ids, _ = encode(dated, tokenizer, TURNS[:2])
    assert tokenizer.decode(ids) == "26 Jul 2024:Hi;Hello;"
    assert re.fullmatch(r"\d\d \w{3} 20\d\d:Hi;", dated.render(TURNS[:1], add_generation_prompt=True))


def test_where_a_template_is_found(tmp_path, spelling):
    tokenizer = spelling("<s>", "</s>")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert load_chat_template(tmp_path, tokenizer) is None

    def configure(value: object) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": value}))

    def configured(value: object) -> ChatTemplate:
        configure(value)
        return read_template(tmp_path, tokenizer)

    assert configured("text").text == "text"
    assert configured([{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]).text == "b"
    with_tools = " \n{{- tools | tojson }}\n{% if 1 %}\n!{% endif %}\n  \n"
    parts = {"default": "\n  {{ messages[0].content }} \n\n", "tool_use": with_tools}
    both = configured([{"name": name, "template": text} for name, text in parts.items()])
    chosen: list[tuple[str, dict[str, Any]]] = [("default", {}), ("tool_use", {"tools": [{"name": "f"}]})]
    for name, variables in chosen:
        expected, _ = render_jinja_template([TURNS], chat_template=parts[name], **variables)
        assert [one.text for one in both.render_prefixes(TURNS, [(4, False)], None, variables)] == expected
    configure(None)
    assert load_chat_template(tmp_path, tokenizer) is None
    (tmp_path / "chat_template.jinja").write_text("file\n")
    first = configured("text")
    assert first.text == "file\n"
    (tmp_path / "other.jinja").write_text("file\n")
    assert read_template(tmp_path / "other.jinja", tokenizer).sha256 == first.sha256 != configured("text").text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("chat_template.jinja", b"{% if %}", r"chat_template.jinja: chat template: is malformed: line 1: Expected an expr"),
        ("chat_template.jinja", b"a\n{{ x | nope }}", r"is malformed: line 2: No filter named 'nope'"),
        ("chat_template.jinja", b"{% generation %}", r"is malformed: line 1: Unexpected end of template"),
        ("chat_template.jinja", b"{% generation %}a{% endfor %}", r"is malformed: line 1: .*endfor"),
        ("chat_template.jinja", b"\xff", r"chat template: is not UTF-8"),
        ("tokenizer_config.json", b"{", r"tokenizer_config.json: chat template: is not JSON; replace the file"),
        ("tokenizer_config.json", b"[" * 10**5, r"chat template: is not JSON"),
        ("tokenizer_config.json", b'{"chat_template": 3}', r"chat template: must be text or a list of named ones, not int"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x"}, 3]}', r"no template in the list is named default"),
        ("tokenizer_config.json", b'{"chat_template": "\\ud800"}', r"chat template: is not UTF-8"),
    ],
)
def test_what_is_no_template(tmp_path, tokenizer, name, content, message):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_chat_template(folder, tokenizer)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_there_or_too_large(tmp_path, tokenizer, monkeypatch):
    with pytest.raises(DataError, match=r"nowhere.jinja: chat template: No such file or directory; correct the path"):
        load_chat_template(tmp_path / "nowhere.jinja", tokenizer)
    monkeypatch.setattr(chat_template, "MAX_FILE_BYTES", 10)
    (tmp_path / "large.jinja").write_text("x" * 11)
    with pytest.raises(DataError, match=r"large.jinja: chat template: the file is larger than 10 bytes; name another"):
        load_chat_template(tmp_path / "large.jinja", tokenizer)


def test_a_byte_order_mark_is_no_part_of_a_template(tmp_path, tokenizer):
    (tmp_path / "marked.jinja").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    assert read_template(tmp_path / "marked.jinja", tokenizer).render(TURNS[:1], add_generation_prompt=False) == "Hi"
