"""Grown tokenizers and models: nothing old moves, every text comes back, new rows are means, and mistakes leave nothing."""

import errno
import io
import json
import math
import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import safetensors
import safetensors.numpy
import sentencepiece
import transformers

from converters import convert, grow
from converters.arguments import hf_arguments, tokenizer_arguments
from converters.tokenizer_formats import BpeTokenizer
from llamajax.data.tokenizers.tokenizer import load_tokenizer, sample_texts
from tests.converters.growing import (
    CHINESE,
    KEEPS_TEXT,
    KINDS,
    NEW_TEXT,
    OLD_TEXT,
    STDLIB,
    D,
    read_weights,
    run_grow,
    write_model,
)


@pytest.fixture(scope="module", params=KINDS)
def grown(request, tmp_path_factory):
    """A kind of tokenizer and the directory that holds its old model, `hf`, and the grown one, `out`."""
    directory = tmp_path_factory.mktemp(request.param)
    write_model(directory / "hf", request.param)
    assert run_grow(directory, text=NEW_TEXT + 300 * CHINESE) == 0
    return request.param, directory


def random_texts() -> list[str]:
    rng = random.Random(0)
    ranges = [
        (32, 127),
        (0, 32),
        (0xA0, 0x300),
        (0x4E00, 0x4F00),
        (0x1F600, 0x1F640),
        (0xE000, 0xE100),
        (0x10FF00, 0x10FFFF),
    ]
    texts = ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(40))) for _ in range(100)]
    return [
        *texts,
        *OLD_TEXT.splitlines(),
        *NEW_TEXT.splitlines(),
        CHINESE,
        "",
        " ",
        "\u2581",
        "<s> <|end_of_text|> <tool> <pad>",
    ]


def test_old_tokens_stay_and_texts_come_back(grown):
    kind, directory = grown
    old, new = load_tokenizer(directory / "hf"), load_tokenizer(directory / "out")
    assert new.vocab_size == old.vocab_size + 80
    assert np.array_equal(new.token_bytes[: old.vocab_size], old.token_bytes)
    assert (new.bos_id, new.eos_id) == (old.bos_id, old.eos_id)
    texts = random_texts()
    unchanged = 0
    for text, before, after in zip(texts, old.encode_batch(texts), new.encode_batch(texts), strict=True):
        assert new.decode(after) == old.decode(before)
        assert len(after) <= len(before)
        if kind in KEEPS_TEXT:
            assert new.decode(after) == text.replace("\u2581", "\u2581" if kind == "byte-level" else " ")
            assert np.sum(new.token_bytes[after]) == len(new.decode(after).encode())
        if np.all(after < old.vocab_size):
            assert np.array_equal(after, before)
            unchanged += 1
    assert 30 < unchanged < len(texts) - 30
    before, after = (sum(map(len, some.encode_batch([NEW_TEXT, CHINESE]))) for some in (old, new))
    assert after < 0.9 * before


def test_transformers_reads_the_same_tokenizer(grown):
    _, directory = grown
    old, new = (transformers.AutoTokenizer.from_pretrained(directory / name) for name in ("hf", "out"))
    assert new.get_vocab().items() >= old.get_vocab().items()
    assert len(new) == len(old) + 80
    assert new.special_tokens_map == old.special_tokens_map
    assert new.chat_template == old.chat_template is not None
    ours_old, ours_new = load_tokenizer(directory / "hf"), load_tokenizer(directory / "out")
    for text in [*NEW_TEXT.splitlines()[:100], CHINESE, f"a {CHINESE} b"]:
        ids = new.encode(text, add_special_tokens=False)
        assert old.decode(old.encode(text)) == new.decode(new.encode(text))
        if old.encode(text, add_special_tokens=False) == ours_old.encode_batch([text])[0].tolist():
            assert ids == ours_new.encode_batch([text])[0].tolist()


def test_both_forms_of_a_tokenizer_grow_alike(grown):
    _, directory = grown
    files = [directory / "out" / name for name in ("tokenizer.json", "tokenizer.model")]
    forms = [load_tokenizer(file) for file in files if file.exists()]
    texts = [text for text in random_texts() if not text.startswith((" ", "\u2581")) and "<" not in text]
    for encoded in zip(*(form.encode_batch(texts) for form in forms), strict=True):
        assert np.array_equal(encoded[0], encoded[-1])
    assert forms[0].vocab_size == forms[-1].vocab_size


def test_small_files_travel(grown):
    _, directory = grown
    old, new = ({path.name for path in (directory / name).iterdir()} for name in ("hf", "out"))
    assert new == old
    for name in ("generation_config.json", "chat_template.jinja", "README.md", "tokenizer_config.json"):
        assert (directory / "out" / name).read_bytes() == (directory / "hf" / name).read_bytes()
    before, after = (json.loads((directory / name / "config.json").read_text()) for name in ("hf", "out"))
    assert after == before | {"vocab_size": 512}
    assert [path for path in directory.iterdir() if path.name.startswith(".")] == []


def test_a_grown_model_grows_again_and_is_imported(grown, tmp_path):
    _, directory = grown
    shutil.copytree(directory / "out", tmp_path / "hf")
    assert run_grow(tmp_path, text=(STDLIB / "calendar.py").read_text()) == 0
    old, new = (transformers.AutoTokenizer.from_pretrained(tmp_path / name).get_vocab() for name in ("hf", "out"))
    assert new.items() >= old.items()
    assert len(new) == len(old) + 80
    assert convert.main(hf_arguments(["import", str(tmp_path / "out"), str(tmp_path / "run"), "--no-verify"])) == 0


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["fp32", "bf16", "fp16"])
def test_rows_are_means_and_all_else_is_kept(dtype, tied, tmp_path):
    write_model(tmp_path / "hf", "ours", tied=tied, dtype=dtype, rows=420)
    assert run_grow(tmp_path, "--pad_vocab_multiple", 128) == 0
    old, new = load_tokenizer(tmp_path / "hf"), load_tokenizer(tmp_path / "out")
    before, after = read_weights(tmp_path / "hf"), read_weights(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert after[name].dtype == array.dtype
        if name not in ("model.embed_tokens.weight", "lm_head.weight"):
            assert after[name].tobytes() == array.tobytes()
            continue
        table = after[name]
        assert table.shape == (512, D)
        assert table[:420].tobytes() == array.tobytes()
        for token in range(420, new.vocab_size):
            parts = old.encode_batch([new.decode([token])])[0]
            mean = np.mean(array[parts].astype(np.float32), axis=0).astype(dtype)
            assert table[token].tobytes() == mean.tobytes()
        mean = np.mean(array.astype(np.float64), axis=0)
        np.testing.assert_allclose(table[new.vocab_size :].astype(np.float64), np.tile(mean, (12, 1)), atol=2e-3)
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safetensors.safe_open(file, "np") as opened:
            assert opened.metadata() == {"format": "pt", "made": "here"}
    if not tied:
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        assert index["weight_map"] == json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())["weight_map"]
        sizes = {"total_size": sum(array.nbytes for array in after.values())}
        assert index["metadata"] == sizes | {"total_parameters": sum(array.size for array in after.values())}


def test_rows_that_the_model_has_already_are_used_first(tmp_path):
    write_model(tmp_path / "hf", "ours", rows=1000)
    assert run_grow(tmp_path, "--pad_vocab_multiple", 1) == 0
    before, after = (read_weights(tmp_path / name)["lm_head.weight"] for name in ("hf", "out"))
    assert after.shape == before.shape
    assert np.array_equal(np.flatnonzero(np.any(after != before, axis=1)), np.arange(420, 500))


def test_transformers_computes_with_the_grown_model(tmp_path):
    torch = pytest.importorskip("torch")
    write_model(tmp_path / "hf", "byte-level")
    config = transformers.LlamaConfig.from_pretrained(tmp_path / "hf")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    for path in (tmp_path / "hf").glob("token*"):
        shutil.copy(path, tmp_path / "model")
    assert run_grow(tmp_path, source="model") == 0
    nats_per_byte = []
    for name in ("model", "out"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        ids = torch.tensor([loaded.encode(NEW_TEXT)[:60]])
        with torch.no_grad():
            loss = float(model(ids, labels=ids).loss)
        assert abs(loss - math.log(model.config.vocab_size)) < 0.3
        nats_per_byte.append(loss * 59 / len(loaded.decode(ids[0], skip_special_tokens=True).encode()))
    assert nats_per_byte[1] < nats_per_byte[0]


def test_what_it_says(tmp_path, capsys):
    write_model(tmp_path / "hf", "ours")
    assert run_grow(tmp_path, "--num_pieces", 10**6, text=NEW_TEXT) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["read", "corpus", "learnt", "held", "used", "frequent", "longest", "vocabulary", "wrote", "done"]
    learnt = int(lines["learnt"].split()[0].replace(",", ""))
    assert 200 < learnt < 10_000
    assert "not 1,000,000: no further one would save 2 tokens" in lines["learnt"]
    assert lines["vocabulary"].startswith(f"448 -> {-(-(420 + learnt) // 64) * 64:,} rows: {learnt:,} new tokens")
    held_out = sample_texts([NEW_TEXT], 10**9)[:: grow.HELD_OUT_EVERY]
    texts = [load_tokenizer(tmp_path / name).encode_batch(held_out) for name in ("hf", "out")]
    before, after = (sum(map(len, encoded)) for encoded in texts)
    num_bytes = len("".join(held_out).encode())
    assert lines["held"].startswith(f"out   {before:,} tokens -> {after:,} ({after / before - 1:+.1%})")
    assert lines["held"].endswith(f"; {num_bytes / before:.3f} bytes per token -> {num_bytes / after:.3f}")


def test_other_kinds_of_corpus(tmp_path):
    write_model(tmp_path / "hf", "ours")
    lines = NEW_TEXT.split("\n\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))
    pyarrow.parquet.write_table(pyarrow.table({"body": lines}), tmp_path / "a.parquet")
    grown = []
    for kind in ("jsonl", "parquet"):
        options = ["--corpus", tmp_path / f"*.{kind}", "--kind", kind, "--text_key", "body"]
        assert run_grow(tmp_path, *options, out=kind) == 0
        grown.append((tmp_path / kind / "tokenizer.json").read_bytes())
    assert grown[0] == grown[1]


def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: object, code: int = 2, text: str = NEW_TEXT) -> str:
    """The line with which growing is refused, after which nothing but what was there is there."""
    before = {path.name for path in tmp_path.iterdir()} | {"corpus.txt"}
    assert run_grow(tmp_path, *options, text=text) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert {path.name for path in tmp_path.iterdir()} == before
    return error


def change_json(path: Path, change: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_models_that_do_not_grow(tmp_path, capsys):
    write_model(tmp_path / "hf", "ours")
    change_json(tmp_path / "hf/config.json", {"vocab_size": 449})
    assert "is [448, 16], but vocab_size in config.json is 449" in refuse(tmp_path, capsys)
    (tmp_path / "hf/config.json").unlink()
    assert "config.json: No such file" in refuse(tmp_path, capsys)
    shutil.rmtree(tmp_path / "hf")
    write_model(tmp_path / "hf", "ours", rows=419)
    assert "the tokenizer has ids up to 419, but the model has only 419 rows" in refuse(tmp_path, capsys)
    shutil.rmtree(tmp_path / "hf")
    write_model(tmp_path / "hf", "ours", tied=True)
    change_json(tmp_path / "hf/config.json", {"tie_word_embeddings": False})
    assert "lm_head.weight is missing" in refuse(tmp_path, capsys)
    weights = read_weights(tmp_path / "hf")
    safetensors.numpy.save_file(weights | {"lm_head.bias": np.zeros(448, np.float32)}, tmp_path / "hf/model.safetensors")
    assert "lm_head.bias is not a tensor of a Llama" in refuse(tmp_path, capsys)
    (tmp_path / "hf/checkpoints").mkdir()
    assert f"python -m converters.hf export {tmp_path / 'hf'} HF_DIR" in refuse(tmp_path, capsys)


def test_tokenizers_that_do_not_grow(tmp_path, capsys):
    write_model(tmp_path / "hf", "ours")
    path = tmp_path / "hf/tokenizer.json"
    whole = path.read_text()
    model = json.loads(whole)["model"]
    change_json(path, {"model": model | {"dropout": 0.1}})
    assert "tokenizer.json: model.dropout: 0.1 is not supported" in refuse(tmp_path, capsys)
    change_json(path, {"model": {"type": "WordLevel", "vocab": model["vocab"], "unk_token": "<unk>"}})
    assert "model.type: WordLevel cannot learn new pieces" in refuse(tmp_path, capsys)
    vocab = model["vocab"] | {"th": model["vocab"]["in"], "in": model["vocab"]["th"]}
    change_json(path, {"model": model | {"vocab": vocab}})
    assert "tokenizer.model: its ids differ from those in tokenizer.json" in refuse(tmp_path, capsys)
    path.write_text(whole[:1000])
    assert "is not a tokenizer.json" in refuse(tmp_path, capsys, code=3)
    path.unlink()
    unigram = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(OLD_TEXT.splitlines()), model_writer=unigram, vocab_size=200, minloglevel=2
    )
    (tmp_path / "hf/tokenizer.model").write_bytes(unigram.getvalue())
    assert "is a SentencePiece unigram model, not BPE" in refuse(tmp_path, capsys)
    (tmp_path / "hf/tokenizer.model").unlink()
    assert "has no tokenizer.json or tokenizer.model" in refuse(tmp_path, capsys, code=3)


def test_a_tokenizer_file_of_another_kind_stays_behind(tmp_path):
    """Llama 3 comes with a file of tiktoken beside its tokenizer.json."""
    write_model(tmp_path / "hf", "byte-level")
    (tmp_path / "hf/tokenizer.model").write_text("IQ== 0\nIg== 1\nIw== 2\n")
    assert run_grow(tmp_path) == 0
    assert not (tmp_path / "out/tokenizer.model").exists()


def test_corpora_that_cannot_be_learnt_from(tmp_path, capsys):
    write_model(tmp_path / "hf", "ours")
    assert "too little text" in refuse(tmp_path, capsys, code=3, text="short")
    assert "no new piece would save 2 tokens" in refuse(tmp_path, capsys, code=3, text="a " * 4000)
    missing = ("--corpus", tmp_path / "none-*.txt")
    assert "corpus.paths" in refuse(tmp_path, capsys, *missing, code=3)
    assert "corpus.txt:1: corpus.paths: is not JSON" in refuse(tmp_path, capsys, "--kind", "jsonl", code=3)


def test_what_exists_is_not_overwritten(tmp_path, capsys):
    write_model(tmp_path / "hf", "ours")
    (tmp_path / "out").mkdir()
    assert "exists already" in refuse(tmp_path, capsys)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError(errno.ENOSPC, "No space left on device"), 74), (KeyboardInterrupt(), 130), (RuntimeError("a defect"), 70)],
)
def test_an_interrupted_growth_leaves_nothing(error, code, tmp_path, capsys, monkeypatch):
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("converters.grow.write_weights", fail)
    write_model(tmp_path / "hf", "ours")
    assert run_grow(tmp_path) == code
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "corpus.txt"}


def test_a_tokenizer_that_would_lose_text_is_not_kept(tmp_path, capsys, monkeypatch):
    write_model(tmp_path / "hf", "ours")
    monkeypatch.setattr("converters.tokenizer_formats.BpeTokenizer.grown", forget_a_piece)
    assert "does not decode all texts as before, and nothing was kept" in refuse(tmp_path, capsys)


def forget_a_piece(self: BpeTokenizer, pieces: Sequence[str]) -> dict[str, bytes]:
    body = json.loads(self.files["tokenizer.json"])
    vocab, last = body["model"]["vocab"], max(self.vocabulary.ids, key=lambda piece: self.vocabulary.ids[piece])
    vocab["lost"] = vocab.pop(last)
    body["model"]["merges"] = [pair for pair in body["model"]["merges"] if "".join(pair) != last]
    return {"tokenizer.json": json.dumps(body).encode()}


@pytest.mark.parametrize(
    "options", [["--num_pieces", "0"], ["--num_pieces", "x"], ["--pad_vocab_multiple", "-1"], ["--kind", "csv"]]
)
def test_a_wrong_command_line(options, capsys):
    with pytest.raises(SystemExit) as exit_info:
        tokenizer_arguments(["grow", "hf", "out", "--corpus", "a", "--num_pieces", "5", *options])
    assert exit_info.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_long_work_tells_its_seconds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("llamajax.data.progress.REPORT_EVERY_S", 0.0001)
    write_model(tmp_path / "hf", "ours")
    assert run_grow(tmp_path) == 0
    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "done in" in line]
    assert told == ["reading    the corpus", "learning   pieces", "measuring  the new pieces"]


def test_mutated_directories(tmp_path, capsys):
    """A byte or a value changed somewhere: grown as it stands, or refused in one line; never a traceback."""
    rng = np.random.default_rng(0)
    write_model(tmp_path / "whole", "llama2")
    (tmp_path / "whole/added_tokens.json").write_text('{"<pad>": 400}')
    names = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json", "config.json"]
    values = (None, -1, 0, 2**31, 0.5, True, "x", "", [], {}, [[]], {"a": 1}, {"1": "x"}, {"1": {"content": 5}}, [1, 2])
    refused = 0
    for trial in range(40):
        shutil.copytree(tmp_path / "whole", tmp_path / "hf")
        path = tmp_path / "hf" / names[trial % len(names)]
        data = bytearray(path.read_bytes())
        if path.suffix == ".json" and rng.random() < 0.7:
            body = json.loads(data)
            place = body["model"] if "model" in body and rng.random() < 0.6 else body
            key = rng.choice(["added_tokens_decoder", *place])
            place[str(key)] = values[rng.integers(len(values))]
            data = bytearray(json.dumps(body).encode())
        elif rng.random() < 0.5:
            data[rng.integers(len(data))] = rng.integers(256)
        else:
            del data[rng.integers(len(data)) :]
        path.write_bytes(data)
        code = run_grow(tmp_path, "--num_pieces", 5, "--train_max_bytes", 5000)
        error = capsys.readouterr().err
        assert code in (0, 2, 3), (trial, path.name, error)
        if code:
            refused += 1
            assert error.count("\n") == 1, error
            assert {path.name for path in tmp_path.iterdir()} == {"hf", "whole", "corpus.txt"}
        else:
            shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "hf")
    assert 10 < refused < 40
