"""A base and adapters under names of their own: each writes what it writes alone, and the base is in memory once."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from llamajax.config.generate import GenerateConfig
from llamajax.config.serve import ServeConfig
from llamajax.generation import run as generation
from llamajax.parallel.arrays import named_arrays
from llamajax.serving import run
from llamajax.weights.open_model import open_pretrained
from tests.adapters import write_adapters, write_base
from tests.converters.models import tiny
from tests.converters.test_peft import write_run
from tests.runs import WORDS
from tests.serving.served import Running, write_tokenizer
from tests.tiny import single_device_mesh

PROMPTS = [" ".join([*WORDS, *WORDS, last]) for last in ("the", "model", "reads")]
"""They share more tokens than a slot must share to be copied."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A base, adapters that peft wrote, and a checkpoint of a run with others, by name."""
    directory = tmp_path_factory.mktemp("adapters")
    places = {name: directory / name for name in ("base", "peft", "run")}
    write_base(places["base"], tiny(vocab_size=326, num_layers=1, num_kv_heads=2))
    write_tokenizer(places["base"])
    write_adapters(places["base"], places["peft"], ["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    write_adapters(places["base"], directory / "other", seed=1, use_dora=True)
    with jax.set_mesh(single_device_mesh()):
        files = {"tokenizer.json": (places["base"] / "tokenizer.json").read_bytes()}
        write_run(places["run"], open_pretrained(directory / "other"), places["base"], files)
    return places


def written_alone(model, out):
    """What `generate` writes after the prompts."""
    settings: dict[str, Any] = {
        "max_tokens": 12,
        "temperature": 0.0,
        "ignore_eos": True,
        "max_seq_len": 64,
        "output": str(out),
    }
    generation.run(GenerateConfig(model=str(model), prompt=tuple(PROMPTS), **settings))
    return [json.loads(line)["text"] for line in out.read_text().splitlines()]


def test_each_name_writes_what_it_writes_alone_and_has_the_arrays_of_the_base(places, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(run, "say", said.append)
    adapters = tuple(f"{name}={places[name]}" for name in ("peft", "run"))
    settings: dict[str, Any] = {"slots": 8, "max_seq_len": 64, "tokens_per_step": 16}
    models = run.load_models(ServeConfig(model=(f"base={places['base']}",), adapter=adapters, **settings))
    assert any(
        line.startswith(f"adapter    peft: {places['peft']}: LoRA of rank 4, alpha 6, on q, v, down;") for line in said
    )
    base = named_arrays(models["base"].engine._model)
    for name in ("peft", "run"):
        adapted = named_arrays(models[name].engine._model)
        assert all(adapted[array] is base[array] for array in base)

    with Running(*models.values()) as running:
        listed = running.ask("/v1/models")[1]["data"]
        assert [(found["id"], found["parent"]) for found in listed] == [("base", None), ("peft", "base"), ("run", "base")]
        assert running.ask("/v1/completions", {"prompt": "a", "model": "other"})[0] == 404

        def written(name):
            bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} for prompt in PROMPTS]
            return [running.post("/v1/completions", model=name, **body)["choices"][0]["text"] for body in bodies]

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(written, [*places, *places]))
    assert all(models[name].engine.totals.shared_tokens for name in places)
    expected = [written_alone(place, tmp_path / name) for name, place in places.items()]
    assert found == expected * 2
    assert len({str(texts) for texts in expected}) == 3
