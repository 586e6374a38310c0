"""Loss on documents: what training's own evaluation found, of any mesh and source, and one clear line for what cannot be."""

import json
import math
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.cleaning import CleaningConfig
from llamajax.config.data import SourceConfig, StageConfig
from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.file import config_to_dict, dump_config, load_config
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.data.rows.dataset import prepare
from llamajax.data.tokenizers.tokenizer import train_sentencepiece
from llamajax.errors import ConfigError, DataError, EnvironmentMismatchError
from llamajax.evaluation import document_loss, held_out, scoring
from llamajax.evaluation import run as evaluate
from llamajax.model import Llama
from llamajax.parallel.mesh import make_mesh
from llamajax.training import run as train
from llamajax.watch import console
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from tests import runs
from tests.converters.models import write_model
from tests.tiny import single_device_mesh, tiny_config

TEMPLATES = Path(__file__).parents[2] / "configs" / "chat_templates"
KEYS_OF_DATA = ("sources", "seq_len", "held_out_fraction", "cache_dir")
ALL_AXES = MeshConfig(fsdp=2, sequence=2, tensor=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Config:
    """The configuration of a run of two steps on two sources, whose evaluation took all that is held out."""
    path = runs.write_config(tmp_path_factory.mktemp("finished"), num_steps=2, eval_every=None, eval_batches=100)
    text = "".join(json.dumps({"text": f"{i} and {i + 1} come next to {i * i}.\n"}) + "\n" for i in range(200))
    (path.parent / "numbers.jsonl").write_text(text)
    paths = [[str(path.parent / f"{name}.jsonl")] for name in ("text", "numbers")]
    sources = [{"kind": "jsonl", "paths": of_source} for of_source in paths]
    config = load_config(path, [f"data.sources={json.dumps(sources)}", "checkpoint.save_every=null"])
    train.run(config)
    return config


def found_in_training(config: Config) -> dict[str, float]:
    records = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if "eval/loss" in record][-1]


def settings(config: Config, **changes) -> EvaluateConfig:
    return EvaluateConfig(**({"model": config.run_dir, "mesh": ALL_AXES} | changes))


@pytest.mark.parametrize("mesh", [ALL_AXES, MeshConfig(data=8, fsdp=1)], ids=["all", "data"])
def test_the_loss_is_the_one_that_training_found(mesh, finished, tmp_path, capsys):
    path = tmp_path / "results.json"
    results = evaluate.run(settings(finished, mesh=mesh, json=str(path)))
    expected = found_in_training(finished)
    assert results["loss"] == pytest.approx(expected["eval/loss"], abs=1e-5)
    assert results["bits_per_byte"] == pytest.approx(expected["eval/bits_per_byte"], abs=1e-5)
    assert results["perplexity"] == pytest.approx(math.exp(results["loss"]))
    assert json.loads(path.read_text()) == results
    output = capsys.readouterr().out
    row = re.search(r"^all +([\d,]+) +([\d,]+) +(\S+) +(\S+) +(\S+)", output, re.MULTILINE)
    assert row is not None
    assert row[1].replace(",", "") == str(results["tokens"])
    assert (row[3], row[5]) == (f"{expected['eval/loss']:.4f}", f"{expected['eval/bits_per_byte']:.4f}")
    assert "warning" not in output
    assert "note" not in output


def test_every_source_by_itself_and_together(finished):
    results = evaluate.run(settings(finished))
    first, second = results["sources"].values()
    assert list(results["sources"]) == ["data.sources[0] jsonl", "data.sources[1] jsonl"]
    assert first["tokens"] + second["tokens"] == results["tokens"]
    assert first["bytes"] + second["bytes"] == results["bytes"]
    weighted = (first["loss"] * first["tokens"] + second["loss"] * second["tokens"]) / results["tokens"]
    assert results["loss"] == pytest.approx(weighted)
    assert abs(first["loss"] - second["loss"]) > 0.01
    tokenizer = str(next(Path(finished.run_dir).rglob("*/tokenizer.model")))
    alone = finished.changed({"data.sources": finished.data.sources[1:], "data.tokenizer.path": tokenizer})
    rows = prepare(alone, log=lambda line: None).held_out_rows
    assert second["tokens"] == sum(int((rows[i]["targets"] >= 0).sum()) for i in range(len(rows)))


def test_what_is_wrong_with_a_source_is_said_of_that_source(finished, tmp_path, monkeypatch):
    """Its shards are damaged, and its file is gone, while the model is loaded."""
    sources = [shutil.copy(source.paths[0], tmp_path) for source in finished.data.sources]
    named = tuple(SourceConfig(kind="jsonl", paths=(path,)) for path in sources)
    changes = {"data.sources": named, "data.cache_dir": str(tmp_path / "cache")}
    (tmp_path / "moved.yaml").write_text(dump_config(finished.changed(changes)))

    def load(*arguments):
        Path(sources[1]).unlink()
        for shard in (tmp_path / "cache").rglob("*.shard"):
            shard.write_bytes(b"")
        return load_model(*arguments)

    monkeypatch.setattr(document_loss, "load_model", load)
    with pytest.raises(DataError, match=r"data\.sources\[1\]\.paths: ") as caught:
        evaluate.run(settings(finished, data=str(tmp_path / "moved.yaml")))
    assert "sources[0]" not in str(caught.value)


def test_the_section_of_the_data_is_enough(finished, tmp_path, capsys, monkeypatch):
    whole = json.loads(json.dumps(config_to_dict(finished.data)))
    (tmp_path / "data.yaml").write_text(json.dumps({"data": {key: whole[key] for key in KEYS_OF_DATA}}))
    alone, of_run = (evaluate.run(settings(finished, data=path)) for path in (str(tmp_path / "data.yaml"), None))
    assert alone["batch_size"] == 16, "eight on each of the two devices that share a batch"
    for key in ("tokens", "bytes"):
        assert alone[key] == of_run[key]
    assert alone["loss"] == pytest.approx(of_run["loss"], rel=1e-6)
    assert alone["sources"].keys() == of_run["sources"].keys()
    assert "warning" not in capsys.readouterr().err
    (tmp_path / "data.yaml").write_text('data: {seq_len: 32, sorces: [], sources: [{kind: jsonl, paths: ["x"]}]}')
    monkeypatch.chdir(tmp_path)  # a message shortens what is longer than a line
    with pytest.raises(ConfigError, match=r"data\.yaml:1: unknown key 'data\.sorces'; did you mean 'data\.sources'"):
        evaluate.run(settings(finished, data="data.yaml"))


def test_results_that_cannot_be_written_are_refused_at_once(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "open_pretrained", lambda *_: pytest.fail("the model is being opened"))
    with pytest.raises(ConfigError, match=r"json: .*: there is no directory .*; create it, or name another file"):
        evaluate.run(settings(finished, json=str(tmp_path / "no" / "results.json")))


@pytest.mark.parametrize("told", [None, "json: cannot be written"])
def test_the_file_is_looked_at_by_the_process_that_writes_it_once_all_have_met(tmp_path, monkeypatch, told):
    """Two at once would take each other's for one that cannot be written."""
    done = []
    monkeypatch.setattr(evaluate.startup, "connect", lambda *_: done.append("met"))
    monkeypatch.setattr(evaluate, "rank", lambda: 1)
    monkeypatch.setattr(evaluate, "of_first", lambda own: done.append(own) or told)
    monkeypatch.setattr(evaluate.compilation_cache, "start", lambda *_: None)
    monkeypatch.setattr(evaluate, "check_outputs", lambda *_: pytest.fail("it is not ours to write"))
    with pytest.raises(ConfigError, match=told or "there is no such directory"):
        evaluate.run(EvaluateConfig(model=str(tmp_path / "no"), json=str(tmp_path / "results.json")))
    assert done == ["met", None]


def test_conversations_beside_other_documents(finished, tmp_path):
    """The template belongs to the conversations: the other source is evaluated without it."""
    talks = ([{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "next"}] for i in range(100))
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    sources = (*finished.data.sources[1:], SourceConfig(kind="chat", paths=(str(tmp_path / "chat.jsonl"),)))
    mixed = finished.changed({"data.sources": sources, "data.chat_template": str(TEMPLATES / "plain.jinja")})
    (tmp_path / "mixed.yaml").write_text(dump_config(mixed))
    results = evaluate.run(settings(finished, data=str(tmp_path / "mixed.yaml")))
    assert list(results["sources"]) == ["data.sources[0] jsonl", "data.sources[1] chat"]
    assert all(found["tokens"] > 0 for found in results["sources"].values())


def test_what_cleaning_leaves_of_every_source_is_evaluated_once(finished, tmp_path):
    """Copies of one source in another are left out there, though each is evaluated by itself."""
    texts, numbers = (Path(source.paths[0]) for source in finished.data.sources)
    (tmp_path / "both.jsonl").write_text(numbers.read_text() + texts.read_text())
    sources = (finished.data.sources[1], SourceConfig(kind="jsonl", paths=(str(tmp_path / "both.jsonl"),)))
    config = finished.changed({"data.sources": sources, "data.cleaning": CleaningConfig(exact_duplicates=True)})
    (tmp_path / "cleaned.yaml").write_text(dump_config(config))
    found = evaluate.run(settings(finished, data=str(tmp_path / "cleaned.yaml")))["sources"]
    expected = evaluate.run(settings(finished))["sources"]
    assert found["data.sources[0] jsonl"] == expected["data.sources[1] jsonl"]
    assert found["data.sources[1] jsonl"] == expected["data.sources[0] jsonl"]


def test_some_batches_are_those_of_evaluations_while_training(finished, capsys):
    """Against the function that training calls, on weights read back."""
    config = finished.changed({"train.eval_batches": 2})
    results = evaluate.run(settings(finished, num_batches=2))
    assert (results["num_batches"], results["batch_size"]) == (2, 4)
    dataset = prepare(config, log=lambda line: None)
    found = open_pretrained(Path(finished.run_dir))
    expected = held_out.evaluate(config, load_model(found, found.config), dataset, num_rows=2 * 4)
    assert expected is not None
    assert results["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert results["sources"] == {}
    with_fewer = Path(finished.run_dir) / "config.yaml"
    before = with_fewer.read_text()
    try:
        with_fewer.write_text(before.replace("eval_batches: 100", "eval_batches: 2"))
        capsys.readouterr()
        evaluate.run(settings(finished))
    finally:
        with_fewer.write_text(before)
    assert "evaluations during training use only the first 8 rows" in capsys.readouterr().out


def test_rows_of_the_training_split_are_those_that_training_reads(finished):
    results = evaluate.run(settings(finished, split="train", num_batches=3, batch_size=7))
    dataset = prepare(finished, log=lambda line: None)
    assert results["batch_size"] == 8, "rounded up to the two devices that share a batch"
    assert results["tokens"] == sum(int((dataset.train_row(i)["targets"] >= 0).sum()) for i in range(24))


def test_other_rows_types_and_documents(finished, tmp_path, capsys):
    whole = evaluate.run(settings(finished))
    short = evaluate.run(settings(finished, seq_len=16, param_dtype="bfloat16", compute_dtype="bfloat16"))
    assert short["seq_len"] == 16
    assert short["tokens"] == whole["tokens"]
    assert 0 < abs(short["loss"] - whole["loss"]) < 0.2
    capsys.readouterr()
    path = runs.write_config(tmp_path)
    sentences = "".join(json.dumps({"text": f"which token comes next {i}\n"}) + "\n" for i in range(100))
    (tmp_path / "text.jsonl").write_text(sentences)
    other = evaluate.run(settings(finished, data=str(path)))
    assert other["tokens"] != whole["tokens"]
    assert "warning" not in capsys.readouterr().err


@pytest.mark.long
def test_a_run_in_stages_is_evaluated_in_the_rows_it_began_with_unless_others_are_asked_for(finished, tmp_path, capsys):
    first, second = finished.data.sources
    late = {"data.sources": (first, replace(second, weight=0.0)), "run_dir": str(tmp_path / "run")}
    staged = finished.changed(late | {"data.stages": (StageConfig(from_step=1, weights=(1.0, 2.0), seq_len=64),)})
    train.run(staged)
    capsys.readouterr()
    short, long = (evaluate.run(settings(staged, seq_len=length)) for length in (None, 64))
    said = capsys.readouterr().out
    assert (short["seq_len"], long["seq_len"], short["tokens"]) == (32, 64, long["tokens"])
    assert said.count("note       rows have the length of the run before its first stage; set seq_len for 64") == 1
    assert "warning" not in said
    assert long["loss"] == pytest.approx(found_in_training(staged)["eval/loss"], abs=1e-5), "of its last stage"
    assert list(short["sources"]) == ["data.sources[0] jsonl", "data.sources[1] jsonl"]


def test_documents_that_changed_since_are_told(finished, capsys):
    path = Path(finished.data.sources[1].paths[0])
    before = path.read_text()
    try:
        path.write_text(before + json.dumps({"text": "one more"}) + "\n")
        evaluate.run(settings(finished))
    finally:
        path.write_text(before)
    assert "warning    these are not the documents that the model was trained on" in capsys.readouterr().err


def refused(changes: dict, finished: Config, directory: Path) -> EvaluateConfig:
    """Settings with `changes`; the names of files and directories stand for those made here."""
    no_tokenizer, with_tokenizer = directory / "hf", directory / "with_tokenizer"
    for made in (no_tokenizer, with_tokenizer):
        write_model(made, finished.model)
        (made / "generation_config.json").write_text("{}")
    (with_tokenizer / "tokenizer.model").write_bytes(train_sentencepiece(["other words"], vocab_size=280))
    paths = {"hf": no_tokenizer, "with_tokenizer": with_tokenizer, "run.yaml": runs.write_config(directory)}
    text = json.loads(paths["run.yaml"].read_text())
    text["data"]["tokenizer"] = {"path": str(with_tokenizer / "tokenizer.model")}
    paths["tokenizer.yaml"] = directory / "tokenizer.yaml"
    paths["tokenizer.yaml"].write_text(json.dumps(text))
    text["data"] |= {"held_out_fraction": 0, "tokenizer": {}}
    paths["all.yaml"] = directory / "all.yaml"
    paths["pairs.yaml"] = directory / "pairs.yaml"
    pairs = {"kind": "preference", "paths": ["pairs.jsonl"]}
    paths["pairs.yaml"].write_text(json.dumps({"data": {"sources": [pairs], "seq_len": 64}}))
    paths["prompts.yaml"] = directory / "prompts.yaml"
    paths["prompts.yaml"].write_text(json.dumps({"data": {"sources": [pairs | {"kind": "prompt"}], "seq_len": 64}}))
    paths["all.yaml"].write_text(json.dumps(text | {"train": text["train"] | {"eval_every": None}}))
    return settings(
        finished,
        **{key: str(paths.get(value, value)) if isinstance(value, str) else value for key, value in changes.items()},
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "nowhere"}, ConfigError, "nowhere: there is no such directory"),
        ({"model": "hf"}, DataError, "has no tokenizer.json or tokenizer.model"),
        ({"model": "with_tokenizer"}, ConfigError, "data: .* does not name its training data; name the YAML file"),
        ({"data": "missing.yaml"}, ConfigError, "missing.yaml: no such file"),
        ({"data": "tokenizer.yaml"}, ConfigError, "names the tokenizer .*; remove data.tokenizer.path there"),
        ({"data": "all.yaml"}, DataError, "data.held_out_fraction: 0.* selects no documents; raise it, or set split"),
        ({"data": "pairs.yaml"}, ConfigError, r"data: data.sources\[0\] in .* has preferences, which have no loss of doc"),
        ({"data": "prompts.yaml"}, ConfigError, r"data: data.sources\[0\] in .* has prompts, which have no loss of docum"),
        ({"seq_len": 8192}, ConfigError, "seq_len: 8192 is above the model's max_seq_len=4096; lower it"),
        ({"seq_len": 31}, ConfigError, "mesh.sequence: 2 must divide the 31 tokens of a row"),
        ({"mesh": MeshConfig(tensor=8)}, ConfigError, "model.num_kv_heads: 2 must be divisible by mesh.tensor=8"),
        ({"mesh": MeshConfig(fsdp=3)}, ConfigError, "mesh: .* but there are 8 devices"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_evaluated_is_one_line(changes, error, message, finished, tmp_path):
    config = refused(changes, finished, tmp_path)
    with pytest.raises(error, match=message) as raised:
        evaluate.run(config)
    assert "\n" not in str(raised.value)


def test_without_the_extra_tasks_are_refused_with_the_command(finished, monkeypatch, capsys):
    find_spec = evaluate.importlib.util.find_spec
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    with pytest.raises(EnvironmentMismatchError, match=r"run pip install 'llamajax\[eval\]'"):
        evaluate.run(settings(finished, tasks="hellaswag"))
    with pytest.raises(SystemExit) as ended:
        evaluate.main(settings(finished, tasks="hellaswag"))
    assert ended.value.code == 4
    captured = capsys.readouterr()
    assert captured.err == "tasks: lm-eval is not installed; run pip install 'llamajax[eval]'\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 5.0}, "limit: has no effect without tasks"),
        ({"tasks": "arc_easy", "data": "x.yaml"}, "data: has no effect with tasks"),
        ({"tasks": " , "}, "tasks: must not be empty"),
        ({"tasks": "arc_easy", "log_samples": True}, "log_samples: needs a file"),
        ({"split": "train"}, "split: train rows repeat without end; also set num_batches"),
        ({"num_batches": 0}, "num_batches: 0 must be positive"),
        ({"seq_len": 1}, "seq_len: 1 must be above 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_without_sense_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        EvaluateConfig(model="somewhere", **changes)


def test_scores_are_those_of_all_logits_whatever_the_mesh_and_chunks(monkeypatch):
    config = tiny_config().model
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (8, 16), dtype=np.int32)
    with jax.set_mesh(single_device_mesh()):
        model = jax.jit(Llama, static_argnums=0)(config, jax.random.key(0))
        logprobs = np.asarray(jax.nn.log_softmax(jax.jit(lambda model: model(jnp.asarray(tokens)))(model)))
    targets = rng.integers(0, config.vocab_size, (8, 16), dtype=np.int32)
    targets[:4] = logprobs[:4].argmax(axis=-1)
    targets[rng.random((8, 16)) < 0.4] = -1
    taken = np.take_along_axis(logprobs, np.maximum(targets, 0)[:, :, None], axis=-1)[:, :, 0]
    expected = np.where(targets < 0, 0, taken).sum(axis=1)
    monkeypatch.setattr(scoring, "MAX_CHUNK_LOGITS", 5 * config.vocab_size // 2)  # 5 tokens of the 32 on each device
    with jax.set_mesh(make_mesh(ALL_AXES)):
        model = jax.jit(Llama, static_argnums=0)(config, jax.random.key(0))
        sums, greedy = scoring.score(model, tokens, targets)
    np.testing.assert_allclose(sums, expected, rtol=0, atol=2e-5)
    assert greedy.tolist() == [True] * 4 + [False] * 4


def test_progress_is_a_line_for_every_tenth(monkeypatch, capsys):
    monkeypatch.setattr(console, "is_interactive", lambda: False)
    assert list(console.track(iter(range(40)), 40, "scoring")) == list(range(40))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ETA")[0] for line in lines] == [f"scoring {n:>2}/40" for n in range(4, 41, 4)]
    assert list(console.track(iter(range(3)), 3, "scoring")) == [0, 1, 2]


@pytest.mark.slow
def test_the_command(finished):
    command = [sys.executable, "-m", "llamajax.evaluate", "--model", finished.run_dir]
    mesh = ["--mesh.num_cpu_devices", "8", "--mesh.tensor", "2"]
    outcome = subprocess.run([*command, *mesh], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert f"{found_in_training(finished)['eval/loss']:.4f}" in outcome.stdout
    outcome = subprocess.run([*command, "--modle", "x"], capture_output=True, text=True, check=False)
    assert outcome.returncode == 2
    assert "did you mean" in outcome.stderr


@pytest.mark.long
def test_two_processes_find_what_one_finds_and_print_it_once(finished, tmp_path):
    """Four devices each, joined over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = tmp_path / "results.json"
    command = [
        sys.executable, "-m", "llamajax.evaluate", "--model", finished.run_dir, "--json", str(path),
        "--mesh.num_cpu_devices", "4", "--distributed.enabled", "true", "--distributed.num_processes", "2",
        "--distributed.coordinator_address", address, "--distributed.heartbeat_timeout_s", "300",
    ]  # fmt: skip
    processes = [
        subprocess.Popen([*command, "--distributed.process_id", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "bits per byte" in outputs[0]
    assert "bits per byte" not in outputs[1]
    assert json.loads(path.read_text())["loss"] == pytest.approx(found_in_training(finished)["eval/loss"], abs=1e-5)
