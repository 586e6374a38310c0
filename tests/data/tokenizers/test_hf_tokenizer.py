"""Published `tokenizer.json` files: what begins and ends their texts, and ids as transformers has them."""

import json

import pytest
import transformers

from llamajax.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.errors import DataError
from tests import real_tokenizers as real
from tests.data.tokenizers.test_tokenizer import byte_fallback, byte_level
from tests.mixed_texts import TEXTS

QWEN_END, QWEN_ORDINARY = 151643, (128245, 128247)
"""<|endoftext|>, and pieces of the vocabulary that are called <s> and </s>."""


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return real.qwen2(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    return real.llama3(tmp_path_factory.mktemp("llama3"))


@pytest.fixture(scope="module")
def theirs(qwen2, llama3):
    """transformers' tokenizers of the same directories."""
    return {path: transformers.AutoTokenizer.from_pretrained(path.parent) for path in (qwen2, llama3)}


def alone(path, directory):
    """The same vocabulary without a configuration beside it."""
    (directory / "tokenizer.json").write_bytes(path.read_bytes())
    return load_tokenizer(directory)


def test_an_id_that_would_fill_the_memory_is_refused(tmp_path):
    byte_level(tmp_path, ("[CLS]", "[SEP]"), {"eos_token": "[SEP]"})
    path = tmp_path / "tokenizer.json"
    body = json.loads(path.read_text())
    body["model"]["vocab"]["a"] = 2**31
    path.write_text(json.dumps(body))
    with pytest.raises(DataError, match=r"tokenizer\.json: has the token id 2147483648; all must be below 16,777,216"):
        load_tokenizer(path)


@pytest.mark.parametrize("place", ["normalizer", "pre_tokenizer"])
def test_an_expression_that_never_ends_is_an_error_in_one_line(tmp_path, place):
    """The library gives it up after ten million ways, by a panic."""
    byte_level(tmp_path)
    path = tmp_path / "tokenizer.json"
    body = json.loads(path.read_text())
    endless = {"pattern": {"Regex": "(a+)+$"}}
    if place == "normalizer":
        body[place] = {"type": "Replace", "content": "b"} | endless
    else:
        split = {"type": "Split", "behavior": "Isolated", "invert": False} | endless
        body[place] = {"type": "Sequence", "pretokenizers": [split, body[place]]}
    path.write_text(json.dumps(body))
    tokenizer = load_tokenizer(path)
    for encode in (tokenizer.encode_batch, tokenizer.encode_template_parts):
        with pytest.raises(DataError, match=r"tokenizer\.json: data\.tokenizer\.path: fails: .*; use another tokenizer$"):
            encode(["a" * 40 + "!"])


def test_an_ordinary_piece_neither_begins_nor_ends_a_text(qwen2, tmp_path):
    for tokenizer in (load_tokenizer(qwen2), alone(qwen2, tmp_path)):
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        assert tuple(map(tokenizer._tokenizer.token_to_id, ("<s>", "</s>"))) == QWEN_ORDINARY
        assert (tokenizer.bos_id, tokenizer.eos_id) == (QWEN_END, QWEN_END)
        assert (tokenizer.bos_token, tokenizer.eos_token) == (None, "<|endoftext|>")
        assert tokenizer.encode_prompt("") == [QWEN_END]
        assert tokenizer.token_bytes[list(QWEN_ORDINARY)].tolist() == [3, 4]


def test_what_a_post_processor_puts_before_a_text_begins_it(llama3, tmp_path):
    for tokenizer in (load_tokenizer(llama3), alone(llama3, tmp_path)):
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.prefix) == (128000, 128001, (128000,))
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")
    classifier = byte_level(tmp_path, ("[CLS]", "[SEP]"), {"eos_token": "[SEP]"})
    assert (classifier.bos_id, classifier.eos_id, classifier.bos_token) == (0, 1, "[CLS]")


@pytest.mark.parametrize("name", ["qwen2", "llama3"])
def test_ids_are_those_of_transformers(name, request, theirs):
    path = request.getfixturevalue(name)
    ours, reference = load_tokenizer(path), theirs[path]
    plain = reference(list(TEXTS), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert [ids.tolist() for ids in ours.encode_batch(TEXTS)] == plain
    for text, ids in zip(TEXTS, reference(list(TEXTS), add_special_tokens=False)["input_ids"], strict=True):
        assert ours.encode_template(text).tolist() == ids, text
    prompts = [
        text for text in TEXTS if text and ours.encode_template(text).tolist() == ours.encode_batch([text])[0].tolist()
    ]
    assert len(prompts) > 350
    for text in prompts:
        assert ours.encode_prompt(text) == reference(text)["input_ids"], text


@pytest.mark.parametrize("add_bos", [None, False, True])
@pytest.mark.parametrize("begins", [True, False])
def test_prompts_begin_as_those_of_transformers(tmp_path, begins, add_bos):
    """A `tokenizer.json` is believed: a configuration beside it cannot take back what its post-processor does."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "LlamaTokenizerFast"}
    config |= {} if add_bos is None else {"add_bos_token": add_bos}
    ours = byte_level(tmp_path, ("<s>", "</s>"), config, begins=begins)
    tokenizer_class = config | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_class))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reference.backend_tokenizer.no_padding()
    assert ours.encode_prompt("the") == reference("the")["input_ids"]
    assert ours.prefix == ((0,) if begins else ())
    assert (ours.bos_id, ours.bos_token) == (0, "<s>")


def test_tokens_that_only_the_configuration_adds(tmp_path):
    config = {
        "bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "[PAD]", "additional_special_tokens": ["<|x|>"],
        "added_tokens_decoder": {"259": {"content": "<|im_end|>", "special": True}, "260": {"content": "<|y|>"}},
    }  # fmt: skip
    byte_fallback(tmp_path)
    size = load_tokenizer(tmp_path).vocab_size
    config["added_tokens_decoder"] = {
        str(size + place): token for place, token in enumerate(config["added_tokens_decoder"].values())
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, reference = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "en<|im_end|>n<|y|>en[PAD]<|x|> <s>"
    assert ours.encode_template(text).tolist() == reference(text, add_special_tokens=False)["input_ids"]
    assert (ours.eos_id, ours.vocab_size) == (size, size + 4) == (reference.eos_token_id, len(reference))
    assert ours.token_bytes[size:].tolist() == [0, 5, 0, 0]
    assert ours.decode([size, size + 1, size + 2]) == "<|y|>"
    del config["added_tokens_decoder"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "</s>"}))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|y|>": size + 5}))
    with pytest.raises(DataError, match=rf"the added token '<\|y\|>' with the id {size + 5}, but it has {size} here; use"):
        load_tokenizer(tmp_path)
