"""Exported tokenizers have the ids of training: in transformers, in what it reads `tokenizer.json` with, and here."""

import functools
import io
import json
import shutil

import pytest
import sentencepiece
import tokenizers
import transformers

from converters import convert
from converters.arguments import hf_arguments
from converters.hf_tokenizer import tokenizer_files
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from tests import real_tokenizers as real
from tests.converters.models import tiny, write_model
from tests.mixed_texts import TEXTS

SENTENCES = [text for text in TEXTS if "\0" not in text]
DEFINED = ("<mask>", "<mask>s", "[two words]")


def other_sentencepiece(**options) -> bytes:
    model = io.BytesIO()
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=model, vocab_size=2000, minloglevel=2, **options
    )
    return model.getvalue()


MODELS = {
    "ours": lambda: train_sentencepiece(SENTENCES, vocab_size=2000),
    **{version: lambda version=version: real.mistral(version).read_bytes() for version in real.MISTRAL_VERSIONS},
    "strips-spaces": other_sentencepiece,
    "no-bos": lambda: other_sentencepiece(bos_id=-1, eos_id=1),
    "added-tokens": lambda: real.mistral("v1").read_bytes(),
    "added-to-defined": lambda: real.mistral("v7").read_bytes(),
    "defined-symbols": lambda: other_sentencepiece(user_defined_symbols=DEFINED, remove_extra_whitespaces=False),
}

ADDED = {"32000": {"content": "<|im_start|>", "special": True}, "32001": {"content": "<think>", "lstrip": True},
         "32002": {"content": "<|im_end|>", "special": True, "rstrip": True}}  # fmt: skip
BESIDE = {
    # The layout of fine-tunes of 2023, and of those after; tokens that are only named get the next ids.
    "added-tokens": {
        "added_tokens.json": {"<|im_start|>": 32000, "<think>": 32001, "<|im_end|>": 32002},
        "special_tokens_map.json": {"eos_token": "<|im_end|>", "pad_token": "[PAD]"},
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "legacy": True},
    },
    "added-to-defined": {
        "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": False,
                                  "added_tokens_decoder": {str(int(token) + 768): entry for token, entry in ADDED.items()}}
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Makes, of a SentencePiece model, the tokenizer that trains and a directory as export writes it."""

    @functools.cache
    def make(name: str):
        directory = tmp_path_factory.mktemp(name)
        path = directory / "training/tokenizer.model"
        path.parent.mkdir()
        path.write_bytes(MODELS[name]())
        for file, content in BESIDE.get(name, {}).items():
            (path.parent / file).write_text(json.dumps(content))
        ours = load_tokenizer(path)
        for file, content in {**ours.files, **tokenizer_files(ours.files, ours)}.items():
            (directory / file).write_bytes(content)
        (directory / "config.json").write_text('{"model_type": "llama"}')
        return ours, directory

    return make


@pytest.mark.parametrize("name", MODELS)
def test_every_reader_has_the_ids_of_training(exported, name):
    ours, directory = exported(name)
    texts = [*TEXTS, *(f"{symbol} a {symbol}b{symbol}" for symbol in (*DEFINED, "[REFERENCE_DOC_1]", "[REF]"))]
    auto = transformers.AutoTokenizer.from_pretrained(directory)
    plain = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))  # as transformers 4 takes it
    plain.encode_special_tokens = True
    again = load_tokenizer(directory)
    empty = [ours.bos_id]  # a prompt has at least one token
    readings = zip(
        texts,
        auto(texts, split_special_tokens=True)["input_ids"],
        plain.encode_batch(texts),
        again.encode_batch(texts),
        strict=True,
    )
    for text, by_auto, by_plain, by_again in readings:
        of_training = ours.encode_prompt(text)
        assert (by_auto or empty) == of_training, text
        assert (by_plain.ids or empty) == of_training, text
        assert ([*again.prefix, *by_again.tolist()] or empty) == of_training, text
    assert (auto.bos_token, auto.eos_token) == (ours.bos_token, ours.eos_token)
    assert (again.bos_id, again.eos_id) == (ours.bos_id, ours.eos_id)


@pytest.mark.parametrize("name", ["ours", "v1", "v7", "added-tokens", "added-to-defined"])
def test_special_tokens_in_chats_are_those_of_training(exported, name):
    ours, directory = exported(name)
    auto, again = transformers.AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    texts = [text for text in TEXTS if "<unk>" not in text]  # a token to transformers wherever it stands
    for text, by_auto in zip(texts, auto(texts, add_special_tokens=False)["input_ids"], strict=True):
        ids = ours.encode_template(text).tolist()
        assert by_auto == ids, text
        assert again.encode_template(text).tolist() == ids, text


def test_a_space_before_prompts_is_put_by_llama_cpp_only_where_training_does(exported):
    for name, told in (("ours", False), ("v1", None)):
        _, directory = exported(name)
        assert json.loads((directory / "tokenizer_config.json").read_text()).get("add_prefix_space") is told


def export(*arguments: object) -> int:
    return convert.main(hf_arguments(["export", *map(str, arguments)]))


@pytest.fixture
def imported(tmp_path):
    """Imports a tiny model with the tokenizer files in `hf`, and returns the checkpoint's directory."""

    def make(vocab_size: int, **changes):
        out = tmp_path / "hf"
        shutil.move(out, tmp_path / "files")
        write_model(out, tiny(vocab_size=vocab_size, num_layers=1, **changes))
        for path in (tmp_path / "files").iterdir():
            shutil.copy(path, out)
        assert convert.main(hf_arguments([str(out), str(tmp_path / "imported"), "--no-verify"])) == 0
        return tmp_path / "imported"

    (tmp_path / "hf").mkdir()
    return make


def test_a_lone_llama_2_model_is_exported_for_transformers(tmp_path, imported, capsys):
    shutil.copy(real.mistral("v1"), tmp_path / "hf/tokenizer.model")
    (tmp_path / "hf/tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": true, "x": 1}'
    )
    assert export(imported(32000), tmp_path / "out") == 0
    assert "verify     transformers gives the ids of training for all 83 texts" in capsys.readouterr().out
    assert (tmp_path / "out/tokenizer.model").read_bytes() == real.mistral("v1").read_bytes()
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["x"] == 1
    text = "  leading spaces"
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out/tokenizer.model"))
    assert auto(text)["input_ids"] == [1, *model.encode(text)]


@pytest.mark.parametrize("options", [{"normalization_rule_name": "nmt_nfkc"}, {"model_type": "unigram"}])
def test_a_model_that_transformers_reads_otherwise_is_not_kept_unless_asked_for(options, tmp_path, imported, capsys):
    (tmp_path / "hf/tokenizer.model").write_bytes(other_sentencepiece(**options))
    checkpoint = imported(2000)
    assert export(checkpoint, tmp_path / "out") == 65
    assert not (tmp_path / "out").exists()
    message = capsys.readouterr().err
    assert "other ids than training, for example" in message
    assert message.count("\n") == 1
    assert export(checkpoint, tmp_path / "out", "--no-verify") == 0
    assert (tmp_path / "out/tokenizer.model").is_file()
