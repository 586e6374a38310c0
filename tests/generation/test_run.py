"""The command as its users meet it: what it writes from every kind of model, and how it ends."""

import dataclasses
import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from converters import convert
from converters.arguments import hf_arguments
from llamajax.config.file import load_config
from llamajax.config.generate import GenerateConfig
from llamajax.config.parallel import MeshConfig
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.errors import ConfigError, DataError
from llamajax.generate import main as generate_command
from llamajax.generation import run as generate
from llamajax.generation.completion import Completer, Completion, Piece
from llamajax.training import run as train
from tests import runs

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of two steps, with the chat template that belongs to it."""
    directory = tmp_path_factory.mktemp("generate")
    path = runs.write_config(directory, num_steps=2, eval_every=None, eval_batches=0, grad_accum_steps=1)
    train.run(load_config(path))
    (directory / "template.jinja").write_text(TEMPLATE)
    return directory / "run"


def settings(run_dir: pathlib.Path, **changes) -> GenerateConfig:
    return GenerateConfig(**({"model": str(run_dir), "max_tokens": 6, "prompt": ("the model",)} | changes))


def written(capsys, config: GenerateConfig) -> str:
    """Returns the standard output of a run of the command."""
    generate.run(config)
    return capsys.readouterr().out


def records(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def hf_dir(run_dir):
    """The run's model for Hugging Face."""
    assert convert.main(hf_arguments(["export", str(run_dir), str(run_dir.parent / "hf"), "--no-verify"])) == 0
    return run_dir.parent / "hf"


def test_the_same_text_from_a_run_its_checkpoint_and_its_export(run_dir, hf_dir, capsys):
    texts = [written(capsys, settings(model, temperature=0.0)) for model in (run_dir, run_dir / "checkpoints/2", hf_dir)]
    assert texts[0].startswith("the model")
    assert len(texts[0]) > len("the model\n")
    assert texts == [texts[0]] * 3


def test_transformers_writes_the_same_tokens(hf_dir, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    changes = {"temperature": 0.0, "max_tokens": 12, "output": str(tmp_path / "out.jsonl")}
    generate.run(settings(hf_dir, **changes))
    (ours,) = records(tmp_path / "out.jsonl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    prompt = tokenizer("the model", return_tensors="pt")
    theirs = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert ours["tokens"] == theirs.tolist()
    assert ours["text"] == tokenizer.decode(theirs, skip_special_tokens=True)

    shutil.copytree(hf_dir, tmp_path / "ends")
    (tmp_path / "ends/generation_config.json").write_text(json.dumps({"eos_token_id": [2, ours["tokens"][4]]}))
    generate.run(settings(tmp_path / "ends", **changes | {"output": str(tmp_path / "short.jsonl")}))
    (short,) = records(tmp_path / "short.jsonl")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ends", dtype=torch.float32)
    theirs = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert short["tokens"] == theirs.tolist()
    assert (short["finish_reason"], len(short["tokens"])) == ("stop", ours["tokens"].index(ours["tokens"][4]) + 1)


def test_several_texts_are_printed_in_order_under_their_prompts(run_dir, capsys, tmp_path):
    prompts = ("the model reads", "a", "which")
    several = settings(run_dir, prompt=prompts, num_samples=2, batch_size=4)
    generate.run(several)
    captured = capsys.readouterr()
    generate.run(settings(run_dir, prompt=prompts, num_samples=2, batch_size=4, output=str(tmp_path / "out.jsonl")))
    assert capsys.readouterr().out == ""
    found = records(tmp_path / "out.jsonl")
    assert [(record["prompt"], record["sample"]) for record in found] == [(p, s) for p in prompts for s in range(2)]
    shown = "".join(f"{record['prompt']}{record['text']}\n\n" for record in found)
    assert captured.out == "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in shown)
    assert {record["finish_reason"] for record in found} <= {"stop", "length"}
    assert all(len(record["tokens"]) == 6 or record["finish_reason"] == "stop" for record in found)
    assert all(record["logprob"] < 0 for record in found)
    for part in ("model      ", "devices    8 x cpu", "speed      prefill", "tokens/s; compiled in"):
        assert part in captured.err


def test_texts_come_in_order_and_what_is_finished_comes_before_an_interruption():
    def pieces():
        for row in (2, 0, 3):
            yield Piece(row, "", Completion("", (1,), "stop", 0.0))
        raise KeyboardInterrupt

    rows = []

    def collect():
        for row, _ in generate.in_order(pieces(), 4):
            rows.append(row)

    with pytest.raises(KeyboardInterrupt):
        collect()
    assert rows == [0, 2, 3]


def test_conversations_go_through_the_template_and_end_with_the_turn(run_dir, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        Completer, "complete", lambda self, prompts, **_: asked.extend([*prompts, self._end_ids]) or iter(())
    )
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "a row"}, {"role": "assistant", "content": "of"}, {"role": "user", "content": "the"}]
    path.write_text(json.dumps({"prompt": "the model"}) + "\n" + json.dumps({"messages": talk}))
    template = str(run_dir.parent / "template.jinja")
    generate.run(settings(run_dir, prompt=(), prompts_file=str(path), chat=True, system="Be brief.", chat_template=template))
    tokenizer = load_tokenizer(run_dir / "checkpoints/2/files")
    assert [tokenizer.decode(tokens) for tokens in asked[:2]] == [
        "system: Be brief.user: the modelassistant: ",
        "user: a rowassistant: ofuser: theassistant: ",
    ]
    assert asked[2] == {tokenizer.eos_id}
    assert [tokens.count(tokenizer.eos_id) for tokens in asked[:2]] == [2, 3]


def test_a_talk_keeps_what_was_said(run_dir, monkeypatch, capsys):
    lines, prompts = iter(["the model", "  ", "which one"]), []

    def type_line(_: str) -> str:
        for line in lines:
            return line
        raise EOFError

    def answer(self: Completer, token_ids, **_):
        prompts.extend(token_ids)
        yield Piece(0, "reads ", None)
        if len(prompts) == 1:
            raise KeyboardInterrupt
        yield Piece(0, "tokens", None)

    monkeypatch.setattr(Completer, "complete", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", type_line)
    generate.run(settings(run_dir, prompt=(), chat=True, chat_template=str(run_dir.parent / "template.jinja")))
    assert capsys.readouterr().out == "reads \nreads tokens\n\n"
    tokenizer = load_tokenizer(run_dir / "checkpoints/2/files")
    assert [tokenizer.decode(tokens) for tokens in prompts] == [
        "user: the modelassistant: ",
        "user: the modelassistant: reads user: which oneassistant: ",
    ]


def test_mistakes_are_told_with_their_remedy(run_dir, tmp_path, monkeypatch):
    def refused(kind: type[Exception], **changes) -> str:
        with pytest.raises(kind) as caught:
            generate.run(settings(run_dir, **changes))
        assert len(str(caught.value).splitlines()) == 1
        return str(caught.value)

    assert "chat_template: " in refused(ConfigError, chat=True)
    assert "5000 is more than the 4096 tokens" in refused(ConfigError, max_seq_len=5000)
    assert "prompt 1: " in refused(DataError, max_seq_len=3)
    assert "model.num_kv_heads: 2 must be divisible by mesh.tensor=8" in refused(ConfigError, mesh=MeshConfig(tensor=8))
    assert "neither checkpoints/" in refused(ConfigError, model=str(tmp_path))
    (tmp_path / "there").touch()
    assert "output: " in refused(ConfigError, output=str(tmp_path / "there"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert "no terminal" in refused(ConfigError, prompt=(), chat=True)


def test_special_tokens_that_are_read_as_text_are_said(run_dir, tmp_path, capsys):
    prompts = ("the model", "the model</s>")
    for parse_special in (False, True):
        output = str(tmp_path / f"{parse_special}.jsonl")
        generate.run(settings(run_dir, prompt=prompts, parse_special=parse_special, output=output))
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
        note = "note       prompt 2: special tokens in it are read as text; parse_special reads them as tokens"
        assert notes == ([] if parse_special else [note])
    first, second = (records(tmp_path / f"{name}.jsonl") for name in (False, True))
    assert first[0] == second[0]
    assert first[1]["tokens"] != second[1]["tokens"]


def test_text_that_the_screen_has_no_letters_for_is_printed_as_escapes(run_dir, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "argv", ["generate", f"--model={run_dir}", "--prompt=the model\u00e9\u4e2d", "--max_tokens=2"])
    with pytest.raises(SystemExit) as ended:
        generate_command()
    assert ended.value.code == 0
    assert b"the model\\xe9\\u4e2d" in screen.buffer.getvalue()


def test_settings_are_checked_before_anything_runs(capsys, monkeypatch):
    bad = {"max_tokens": 0, "temperature": 0.0, "top_k": 3, "top_p": 1.5, "num_samples": 2, "stop": ("",), "system": "x"}
    with pytest.raises(ConfigError) as caught:
        GenerateConfig(model="", **bad)
    named = [line.split(":")[0] for line in str(caught.value).splitlines()]
    assert set(named) == {"model", "prompt", *bad} - {"temperature"}
    missing = GenerateConfig(model="/nowhere", prompts_file="/no.txt", output=__file__, chat_template="/no.jinja")
    assert [line.split(":")[0] for line in missing.file_problems()] == ["prompts_file", "chat_template", "model", "output"]


@pytest.mark.parametrize(
    ("num_devices", "num_kv_heads", "axes"),
    [(8, 8, (1, 8)), (8, 2, (4, 2)), (3, 8, (3, 1)), (16, 8, (2, 8)), (1, 1, (1, 1))],
)
def test_the_mesh_that_is_chosen_fits_any_number_of_devices(num_devices, num_kv_heads, axes, run_dir):
    model = load_config(run_dir / "config.yaml").model
    sizes = {"num_heads": 8, "num_kv_heads": num_kv_heads, "mlp_dim": 64, "vocab_size": 320}
    chosen = generate.choose_mesh(MeshConfig(), dataclasses.replace(model, **sizes), num_devices)
    assert (chosen.data, chosen.fsdp, chosen.tensor) == (axes[0], 1, axes[1])
    assert chosen.axis_sizes(num_devices)["tensor"] == axes[1]


def start(run_dir: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "llamajax.generate", "--model", str(run_dir), *arguments]
    env = runs.environment(run_dir.parent)
    return subprocess.Popen(command, text=True, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_command_itself(run_dir, tmp_path):
    out = tmp_path / "out.jsonl"
    arguments = ["--prompt", "the model: [a]", "--prompt", "a", "--max_tokens", "4", "--output", str(out), "--stop", "\n\n"]
    output, errors = (process := start(run_dir, *arguments)).communicate(timeout=600)
    assert (process.returncode, output) == (0, ""), errors
    assert [record["prompt"] for record in records(out)] == ["the model: [a]", "a"]
    output, errors = (process := start(run_dir, "--prompt", "a", "--output", str(out), "--top_k", "0")).communicate(
        timeout=600
    )
    assert (process.returncode, output) == (2, "")
    assert [line.split(":")[0] for line in errors.splitlines()] == ["--top_k"]


def test_interrupting_keeps_what_was_written(run_dir):
    # A shell's background job ignores the signal, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start(run_dir, "--prompt", "the", "--max_tokens", "4000", "--ignore_eos")
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    begun = process.stdout.read(30)  # it is writing
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert (begun + rest).endswith("\n")
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert "decode" in errors


def test_a_reader_that_leaves_ends_it_quietly(run_dir):
    with start(run_dir, "--prompt", "the", "--max_tokens", "4000", "--ignore_eos") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=600) == 1
    assert [line.split()[0] for line in errors.splitlines()] == ["model", "devices"]
