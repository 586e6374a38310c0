"""SentencePiece models with added tokens beside them: the layout of fine-tunes of 2023."""

import json
import re
import shutil

import pytest
import sentencepiece
import transformers

from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.errors import DataError
from tests import real_tokenizers as real
from tests.mixed_texts import TEXTS

CONFIG = {
    "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    "add_bos_token": True, "legacy": True,
}  # fmt: skip
MARKS = {"<|im_start|>": 32001, "<|im_end|>": 32000}
TURN = "<|im_start|>user\nIs it?<|im_end|>\n<|im_start|>assistant\n"


def listed(content, special=True, **flags):
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": special} | flags  # fmt: skip


CONTROL = {"0": listed("<unk>"), "1": listed("<s>"), "2": listed("</s>")}
LAYOUTS = {
    "added_tokens.json": {"tokenizer_config.json": CONFIG, "added_tokens.json": MARKS},
    "and special_tokens_map.json": {
        "tokenizer_config.json": CONFIG,
        "added_tokens.json": MARKS,
        "special_tokens_map.json": {"bos_token": listed("<s>"), "eos_token": "<|im_end|>", "pad_token": "[PAD]"},
    },
    "added_tokens_decoder": {
        "tokenizer_config.json": CONFIG
        | {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": CONTROL
            | {
                "32000": listed("<|im_end|>"),
                "32001": listed("<|im_start|>", False),
                "32002": listed("<think>", rstrip=True),
            },
        }
    },
    "space before the first text only": {"tokenizer_config.json": CONFIG | {"legacy": False}, "added_tokens.json": MARKS},
}


@pytest.fixture
def model(tmp_path):
    """Mistral's first model in a directory, with files beside it."""

    def write(files):
        shutil.copy(real.mistral("v1"), tmp_path / "tokenizer.model")
        for name, content in files.items():
            (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_ids_are_those_of_transformers(model, files):
    """But for spaces, of which transformers 5 makes other tokens than SentencePiece and transformers 4 do."""
    directory = model(files)
    ours, reference = load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    assert (ours.vocab_size, ours.eos_id, ours.eos_token) == (len(reference), reference.eos_token_id, reference.eos_token)
    assert ours.encode_prompt("it") == reference("it")["input_ids"]
    for text in (TURN, *TEXTS):
        bare = re.sub("[ \u2581]", "", text)
        assert ours.encode_template(bare).tolist() == reference(bare, add_special_tokens=False)["input_ids"], bare
        plain = reference.encode(bare, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode_batch([bare])[0].tolist() == plain, bare


def test_what_is_between_added_tokens_is_read_by_sentencepiece(model):
    ours = load_tokenizer(model(LAYOUTS["added_tokens_decoder"]))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(real.mistral("v1")))
    ids = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_end|>": 32000, "<|im_start|>": 32001, "<think>": 32002}
    for text in (TURN, *TEXTS):
        sections = re.split(r"(<unk>|</?s>|<\|im_end\|>|<\|im_start\|>|<think>\s*)", text)
        expected = [
            token
            for section in sections
            for token in ([ids[section.strip()]] if section.strip() in ids else reference.encode(section))
        ]
        assert ours.encode_template(text).tolist() == expected, text
    assert ours.token_bytes[32000:].tolist() == [0, 12, 0]
    assert ours.decode(ours.encode_template("it<|im_end|>")) == "it"
    assert ours.decode(ours.encode_template("<|im_start|>")) == "<|im_start|>"
    parts = ["<s>", "<|im_start|>user\n", "Is it", " so?<|im_end|>", "\n"]
    assert [token for part in ours.encode_template_parts(parts) for token in part] == ours.encode_template(
        "".join(parts)
    ).tolist()


def test_a_model_that_is_alone_is_read_as_it_is(model):
    ours = load_tokenizer(model({}))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(real.mistral("v1")))
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS)] == reference.encode(list(TEXTS))
    assert (ours.bos_id, ours.eos_id, ours.prefix, ours.vocab_size) == (1, 2, (1,), 32000)
    assert 2 not in ours.encode_batch(["a</s>"])[0]


def test_prompts_begin_with_nothing_where_the_configuration_says_so(model):
    ours = load_tokenizer(model({"tokenizer_config.json": CONFIG | {"add_bos_token": False}}))
    assert (ours.prefix, ours.bos_id, ours.bos_token) == ((), 1, "<s>")
    assert ours.encode_prompt("it") == ours.encode_batch(["it"])[0].tolist()
    ours = load_tokenizer(model({"tokenizer_config.json": CONFIG | {"bos_token": None}}))
    assert (ours.prefix, ours.bos_id, ours.bos_token) == ((), 1, None)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"added_tokens.json": {"<|a|>": 32005}},
            r"'<\|a\|>' with the id 32005, but it has 32000 here; use files",
        ),
        ({"added_tokens.json": {"<|a|>": 31999}}, r"'<\|a\|>' with the id 31999, but it has 32000"),
        ({"added_tokens.json": {"</s>": 32000}}, r"'</s>' with the id 32000, but it has 2"),
        ({"added_tokens.json": {"<|a|>": "x"}}, r"the tokens in added_tokens.json are damaged; replace the files"),
        ({"added_tokens.json": "[1]"}, r"added_tokens.json: is not a JSON object; replace the file"),
        ({"tokenizer_config.json": "{"}, r"tokenizer_config.json: is not a JSON object; replace the file"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"32000": 1}}},
            r"the tokens in tokenizer_config.json are damaged",
        ),
        ({"tokenizer_config.json": {"bos_token": 5}}, r"the tokens in tokenizer_config.json are damaged"),
        (
            {"special_tokens_map.json": {"eos_token": "<|a|>"}},
            r"eos_token: '<\|a\|>', named by the files beside it, is not in",
        ),
    ],
)
def test_files_that_do_not_belong_together_are_refused_in_a_line(model, files, message):
    with pytest.raises(DataError, match=message) as caught:
        load_tokenizer(model(files))
    assert "\n" not in str(caught.value)
