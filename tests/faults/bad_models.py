"""Hugging Face directories of which one or two files are damaged, each opened as weights to start from are."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.origin import take_along
from tests import real_tokenizers
from tests.converters.mutate import ARCHITECTURES, mutate, write_whole

_JSON_TOKENS = 3000
"""Number of Qwen's 151,643 tokens to read; all would take longer than everything else."""


def _write_real_tokenizers(directory: Path) -> None:
    """One model with Mistral's SentencePiece model, and one with the beginning of Qwen's tokenizer.json."""
    for name, source in (("mistral-real", "mistral"), ("qwen2-real", "qwen2")):
        shutil.copytree(directory / source, directory / name)
        for file in ("tokenizer.json", "tokenizer.model"):
            (directory / name / file).unlink(missing_ok=True)
        tokens = {"bos_token": None, "eos_token": "<|endoftext|>"} if source == "qwen2" else {}
        (directory / name / "tokenizer_config.json").write_text(json.dumps(tokens | {"chat_template": "{{ messages }}"}))
    shutil.copy(real_tokenizers.mistral("v1"), directory / "mistral-real" / "tokenizer.model")
    whole = real_tokenizers.qwen2(directory / "qwen2-whole").parent / "tokenizer.json"
    body = json.loads(whole.read_text())
    vocabulary = {name: token for name, token in body["model"]["vocab"].items() if token < _JSON_TOKENS}
    body["model"] |= {"vocab": vocabulary, "merges": body["model"]["merges"][: _JSON_TOKENS - 256]}
    (directory / "qwen2-real" / "tokenizer.json").write_text(json.dumps(body))
    shutil.rmtree(directory / "qwen2-whole")


def read(path: Path) -> None:
    """Opens a directory, reads all of its weights, and a text with its tokenizer.

    Raises:
        UserError: it is no whole model.
    """
    pretrained = open_pretrained(path)
    origin = take_along(pretrained.files, pretrained.hf)
    assert pretrained.tensors is not None
    for stored in pretrained.tensors.values():
        stored.read()
    pretrained.ends()
    if origin.tokenizer is not None:
        (ids,) = origin.tokenizer.encode_batch(["Once upon a time, 1234 café\n"])
        origin.tokenizer.encode_template_parts(["<s>[INST] Hello", "world</s>"])
        origin.tokenizer.decode(ids)


def prepare(directory: Path):
    """Reads one model after the other in `directory`."""
    jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1]))
    whole = directory / "whole"
    whole.mkdir()
    for architecture in ARCHITECTURES:
        write_whole(whole / architecture, architecture)
    _write_real_tokenizers(whole)
    models = sorted(whole.iterdir())

    def attempt(rng: np.random.Generator) -> None:
        model = directory / "hf"
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(models[rng.integers(len(models))], model)
        files = sorted(model.iterdir())
        for at in rng.permutation(len(files))[: rng.integers(1, 3)]:
            mutate(files[at], rng)
        read(model)

    for model in models:
        read(model)
    return attempt
