"""A run that was trained here leaves as a model that transformers loads plainly: weights, tokenizer, logits."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
import transformers

from converters import convert
from converters.arguments import hf_arguments
from llamajax.checkpoint.read import restore
from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.file import load_config
from llamajax.config.generate import GenerateConfig
from llamajax.config.parallel import MeshConfig
from llamajax.data.tokenizers.tokenizer import load_tokenizer, train_sentencepiece
from llamajax.evaluation import run as evaluate
from llamajax.generation import run as generate
from llamajax.model import Llama
from llamajax.training import run as train
from llamajax.watch.run_log import read_run
from tests.runs import WORDS, write_config

TEXTS = [
    "the model reads a row of tokens",
    "  def f(x):\n\treturn {x: 'two  spaces', 12345: 0}\n\n\n",
    "\u00e9t\u00e9 \u6f22\u5b57 \U0001f600 \x07 never seen",
    " ",
    "",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a finished run of two steps, and its model's configuration."""
    directory = tmp_path_factory.mktemp("run")
    config = load_config(write_config(directory, num_steps=2, eval_every=None))
    train.run(config)
    return directory / "run", config.model


def export(*arguments: object) -> int:
    return convert.main(hf_arguments(["export", *map(str, arguments)]))


def test_tokenizer_of_an_exported_run_gives_the_same_ids(trained, tmp_path):
    run_dir, _ = trained
    assert export(run_dir, tmp_path / "hf", "--no-verify") == 0
    ours, theirs = (
        load_tokenizer(run_dir / "checkpoints/2/files"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"),
    )
    for text in [*TEXTS, " ".join(WORDS)]:
        ids = theirs(text)["input_ids"]
        assert ids == [ours.bos_id, *ours.encode_batch([text])[0].tolist()]
        assert theirs.decode(ids[1:]) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


def test_a_tokenizer_of_any_name_comes_along_with_what_is_beside_it(tmp_path, capsys):
    """From training to text, evaluation and export."""
    (tmp_path / "its").mkdir()
    (tmp_path / "its/x.model.v3").write_bytes(train_sentencepiece([" ".join(WORDS)] * 20, vocab_size=310))
    pieces = load_tokenizer(tmp_path / "its").vocab_size
    (tmp_path / "its/added_tokens.json").write_text(json.dumps({"<|end|>": pieces}))
    (tmp_path / "its/tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "<|end|>"}')
    config = load_config(write_config(tmp_path, num_steps=2, eval_every=None, eval_batches=0))
    train.run(config.changed({"data.tokenizer.path": str(tmp_path / "its/x.model.v3")}))
    mesh = MeshConfig(num_cpu_devices=8)
    generate.run(GenerateConfig(model=str(tmp_path / "run"), prompt=("the model",), max_tokens=2, mesh=mesh))
    evaluate.run(EvaluateConfig(model=str(tmp_path / "run"), num_batches=1, mesh=config.mesh))
    assert export(tmp_path / "run", tmp_path / "hf", "--no-verify") == 0
    special_tokens = json.loads((tmp_path / "hf/config.json").read_text())
    assert (special_tokens["bos_token_id"], special_tokens["eos_token_id"]) == (1, pieces)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = load_tokenizer(tmp_path / "its")
    assert theirs("the model<|end|> reads")["input_ids"] == [1, *ours.encode_template("the model<|end|> reads").tolist()]


def test_transformers_computes_the_logits_of_an_exported_run(trained, tmp_path, capsys):
    torch = pytest.importorskip("torch")
    run_dir, config = trained
    assert export(run_dir, tmp_path / "hf") == 0
    assert "logits of transformers differ by at most" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    abstract = jax.eval_shape(lambda key: Llama(dataclasses.replace(config, remat="none"), key), jax.random.key(0))
    model = restore(run_dir, {"model": abstract}, partial=True).state["model"]
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (8, 32), dtype=np.int32)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(jax.jit(lambda model: model(jax.numpy.asarray(tokens)))(model), logits, atol=1e-4, rtol=0)


def test_transformers_writes_the_same_text(trained, tmp_path):
    torch = pytest.importorskip("torch")
    assert export(trained[0], tmp_path / "hf", "--no-verify") == 0
    settings = {"max_tokens": 16, "temperature": 0.0, "compute_dtype": "float32", "mesh": MeshConfig(num_cpu_devices=8)}
    prompt, output = "the model reads", tmp_path / "texts.jsonl"
    generate.run(GenerateConfig(model=str(tmp_path / "hf"), prompt=(prompt,), output=str(output), **settings))
    ours = json.loads(output.read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer(prompt, return_tensors="pt")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        theirs = model.generate(**ids, do_sample=False, max_new_tokens=16, pad_token_id=0)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(theirs, skip_special_tokens=True) == ours["text"]
    assert theirs.tolist() == ours["tokens"]


def test_the_model_card_tells_of_the_training(trained, tmp_path):
    run_dir, _ = trained
    assert export(run_dir, tmp_path / "hf", "--no-verify") == 0
    loss = read_run(run_dir).series["eval/loss"][1][-1]
    told = "Trained with llamajax for 2 steps on 512 tokens (padding included); started from random weights."
    assert f"{told} Loss on held-out documents: {loss:.4f} nats per token." in (tmp_path / "hf/README.md").read_text()


def test_without_torch_verification_says_so(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert export(trained[0], tmp_path / "hf") == 0
    assert "verify     skipped: transformers needs torch" in capsys.readouterr().out
