"""The library: one import, lazily; what the commands do, without ending the process; every example of its docstrings."""

import ast
import asyncio
import inspect
import json
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import llamajax
from llamajax import library
from llamajax.training import stop
from llamajax.training.stop import StopSignal
from tests.runs import ROOT

FUNCTIONS = [value for value in vars(library).values() if inspect.isfunction(value) and value.__module__ == library.__name__]
FUNCTIONS = [function for function in FUNCTIONS if not function.__name__.startswith("_")]


def python(code: str, folder: Path, **variables: str) -> str:
    """Runs a program in `folder`; returns its output."""
    env = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    outcome = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


async def within_a_loop(work: Callable[[], Path]) -> Path:
    """Works where an event loop runs, as in a notebook."""
    return work()


def load(folder: Path, run: str, **others: object) -> llamajax.Config:
    """A run of four steps of a tiny model on 99 documents, over all devices of the tests."""
    text = folder / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} bottles of beer on the wall, {n} bottles"}) + "\n" for n in range(99)))
    model = {"vocab_size": 320, "embed_dim": 16, "mlp_dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    settings = {
        "run_dir": folder / run, "model": {**model, "head_dim": 8, "compute_dtype": "float32", "remat": "none"},
        "mesh": {"num_cpu_devices": 8}, "data": {"sources": [{"kind": "jsonl", "paths": [text]}], "seq_len": 32},
        "data.cache_dir": folder / "cache", "data.held_out_fraction": 0.1, "sample": {}, "metrics": {"tensorboard": False},
        "optimizer": {"learning_rate": 1e-3}, "train": {"num_steps": 4, "global_batch_size": 8, "eval_batches": 1},
    }  # fmt: skip
    return llamajax.load_config("quickstart", {**settings, **others})


def test_import_does_no_work_and_functions_stay_where_commands_are_imported(tmp_path):
    code = """
import sys
import llamajax
assert "train" in dir(llamajax) and callable(llamajax.setup)
from llamajax.train import main
assert llamajax.train.__module__ == "llamajax.library"
import llamajax.plan
from llamajax import plan, verify, disk
from llamajax.plan import main as plan_main
assert llamajax.plan is plan is not plan_main and plan.__module__ == verify.__module__ == "llamajax.library"
assert sys.modules["llamajax.plan"].main is plan_main and disk.__name__ == "llamajax.disk"
assert llamajax.load_config("quickstart", ["seed=3"]).seed == llamajax.load_config("quickstart", {"seed": 3}).seed == 3
print(*sorted({"jax", "numpy", "flax"} & sys.modules.keys()), llamajax.__version__)
"""
    assert python(code, tmp_path).strip() == llamajax.__version__


def test_types_are_declared_for_every_name():
    stub = ast.parse((ROOT / "llamajax" / "__init__.pyi").read_text())
    imported = {alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    declared = {ast.unparse(node.target) for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert imported == vars(llamajax)["_HOMES"]
    assert declared == {"__version__", "BEGAN"}
    assert {function.__name__ for function in FUNCTIONS} <= imported.keys() <= set(dir(llamajax))
    with pytest.raises(AttributeError, match=r"^module 'llamajax' has no attribute 'trian'$"):
        operator.attrgetter("trian")(llamajax)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_function_is_documented(function):
    doc = inspect.getdoc(function) or ""
    for section in ("Args:\n", "Raises:\n", "Example:\n    >>> import llamajax\n"):
        assert f"\n\n{section}" in doc
    assert [name for name in inspect.signature(function).parameters if f"\n    {name}: " not in doc] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of the run `whole`, and its result beside it."""
    folder = tmp_path_factory.mktemp("library")
    handlers, mesh = [signal.getsignal(number) for number in stop.SIGNALS], jax.sharding.get_mesh()
    mask = os.umask(0o022)
    result = llamajax.train(load(folder, "whole"))
    assert os.umask(mask) == 0o022
    assert handlers == [signal.getsignal(number) for number in stop.SIGNALS]
    assert jax.sharding.get_mesh() == mesh
    assert (result.steps, result.stop_reason, result.checkpoints) == (4, "finished", [result.run_dir / "checkpoints" / "4"])
    return folder


def test_a_finished_run_is_a_result_with_its_curves(trained):
    results = []
    thread = threading.Thread(target=lambda: results.append(llamajax.train(load(trained, "whole"))))
    thread.start()  # the second call in this process, and in a thread that handles no signals
    thread.join()
    result, records = (
        results[0],
        [json.loads(line) for line in (trained / "whole" / "metrics.jsonl").read_text().splitlines()],
    )
    assert [record["step"] for record in result.metrics] == [1, 2, 3, 4]
    assert [record["train/loss"] for record in result.metrics] == [r["train/loss"] for r in records if "train/loss" in r]
    assert result.loss == np.mean([record["train/loss"] for record in result.metrics])
    assert result.held_out_loss == result.metrics[-1]["eval/loss"]
    assert repr(result).startswith(f"TrainResult('{trained}/whole', steps=4, loss={result.loss:.4f}, held_out_loss=")
    html = result._repr_html_()
    assert html is not None
    assert html.startswith("<iframe srcdoc=")
    assert "&lt;svg" in html
    assert "<html" not in html


@pytest.mark.slow
def test_a_loop_of_ones_own_trains_the_same_to_the_bit(trained):
    losses = []
    with llamajax.setup(load(trained, "own")) as run:
        state = run.state
        for step, batch in run.batches():
            state, metrics = run.train_step(state, batch)
            losses.append(float(metrics["loss"]))
            if step == 2:
                break
        assert asyncio.run(within_a_loop(lambda: run.save(state))) == trained / "own" / "checkpoints" / "2"
        assert run.evaluate(state)["loss"] > 1
    result = llamajax.train(load(trained, "own"))  # which resumes it
    losses += [record["train/loss"] for record in result.metrics]
    whole = llamajax.train(load(trained, "whole"))
    assert losses == [record["train/loss"] for record in whole.metrics]
    assert result.held_out_loss == whole.held_out_loss
    states = [llamajax.restore(trained / name).state for name in ("own", "whole")]
    ours, theirs = ([np.asarray(leaf) for leaf in jax.tree.leaves((s.model, s.opt_state, s.step))] for s in states)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with llamajax.setup(load(trained, "own")) as run:
        assert int(run.state.step) == 4
        assert list(run.batches()) == []


def test_a_model_is_loaded_called_and_continues_texts(trained):
    model = llamajax.load_model(trained / "whole")
    tokens = model.tokenizer.encode_prompt("9 bottles of")
    logits = np.asarray(model([tokens, tokens]))
    assert (logits.shape, logits.dtype) == ((2, len(tokens), 320), np.float32)
    embedding, restored = model.weights.embedding, llamajax.restore(trained / "whole").state.model.embedding
    assert np.array_equal(np.asarray(embedding[...]), np.asarray(restored[...]))
    texts = llamajax.generate(model, "9 bottles of", max_tokens=1, temperature=0, ignore_eos=True)
    before, after = (model.tokenizer.decode(ids) for ids in (tokens, [*tokens, int(logits[0, -1].argmax())]))
    assert texts == [after[len(before) :]]
    assert llamajax.generate(trained / "whole", ["9 bottles of"], max_tokens=1, temperature=0, ignore_eos=True) == texts


def test_mistakes_are_one_line_and_end_nothing(trained, tmp_path):
    run = trained / "whole"
    missing = {"data.sources": [{"kind": "jsonl", "paths": ["nowhere.jsonl"]}]}
    four = {"mesh": {"num_cpu_devices": 4}}
    mistakes = {
        "data.sources.0.paths.0: no file matches": lambda: llamajax.train(load(tmp_path, "run", **missing)),
        "mesh.num_cpu_devices: 4 .* start a new process": lambda: llamajax.train(load(tmp_path, "run", **four)),
        "--temperture: unknown key .* did you mean 'temperature'": lambda: llamajax.generate(run, "x", temperture=1),
        "--model: there is no directory": lambda: llamajax.generate(tmp_path / "nowhere", "x"),
        "prompts: there is none": lambda: llamajax.generate(run, []),
        "prompts: this function": lambda: llamajax.generate(run, "x", output="texts.jsonl"),
        "--split: ": lambda: llamajax.evaluate(run, split="held-out"),
        "devices: 1 must be a number from 2 to 64": lambda: llamajax.verify(load(tmp_path, "run"), devices=1),
        ".*nowhere: there is no such directory": lambda: llamajax.restore(tmp_path / "nowhere"),
        ".*: has no undamaged checkpoint of step 3": lambda: llamajax.restore(run, step=3),
        "hardware.gpu: ": lambda: llamajax.plan(load(tmp_path, "run")),
        "--train.num_step: unknown key": lambda: llamajax.load_config("quickstart", {"train.num_step": 3}),
    }
    for message, mistaken in mistakes.items():
        with pytest.raises(llamajax.UserError, match=f"^{message}") as error:
            mistaken()
        assert len(str(error.value).splitlines()) == 1


def test_one_device_has_nothing_to_verify(tmp_path):
    verification = llamajax.verify(load(tmp_path, "run", mesh={"num_cpu_devices": 1}))
    assert verification
    assert verification.figures is None
    assert repr(verification).startswith("verdict    nothing to verify")


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals are the main thread's")
def test_signals_of_a_guest_wait_for_a_step_or_do_what_they_did(monkeypatch):
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.1)

    monkeypatch.setattr(stop, "_SAME_S", 0.05)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopSignal(ends_process=False), pytest.raises(KeyboardInterrupt):  # before the first step
            interrupt()
        with StopSignal(ends_process=False) as guest, guest.at_end_of_step():
            assert not guest.requested()
            interrupt()
            assert any(guest.requested() or time.sleep(0.01) for _ in range(500))
            with pytest.raises(KeyboardInterrupt):
                interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_an_interrupted_run_returns_with_its_checkpoint(trained):
    load(trained, "stopped")  # writes the text
    code = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(ROOT / "tests")!r})
import llamajax, test_library
from pathlib import Path
config = test_library.load(Path({str(trained)!r}), "stopped", **{{"train.num_steps": 100_000}})
log = Path(config.run_dir, "metrics.jsonl")
def interrupt():
    while not log.exists() or log.read_bytes().count(b"train/loss") < 3:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
result = llamajax.train(config)
assert result.stop_reason == "stopped" and result.checkpoints[-1].name == str(result.steps), result
print("returned", result.steps)
"""
    assert "returned" in python(code, trained)


@pytest.mark.slow
def test_examples_of_the_docstrings(tmp_path):
    """In one process, in the order of the functions; the plan has a test of its own."""
    code = """
import doctest, sys
from llamajax import library
tests = sorted(doctest.DocTestFinder().find(library), key=lambda test: test.lineno or 0)
runner = doctest.DocTestRunner()
for test in tests:
    runner.run(test)
print(runner.tries)
sys.exit(runner.failures)
"""
    assert int(python(code, tmp_path).split()[-1]) > 30


@pytest.mark.long
def test_a_plan_is_a_report_and_a_picture(gpu_compiler, tmp_path):
    code = """
import llamajax
config = llamajax.load_config("llama3_2_1b_8xh100", {"model.num_layers": 1})
plan = llamajax.plan(config)
assert plan.fits and plan.figures["step_time_s"] > 0
assert repr(plan).startswith(f"verdict    {plan.verdict}\\n"), repr(plan)[:200]
assert "memory" in str(plan) and "&lt;svg" in plan._repr_html_()
"""
    assert python(code, tmp_path) == ""


@pytest.mark.long
def test_a_verification_shows_every_tensor(tmp_path):
    verification = llamajax.verify(load(tmp_path, "run", mesh={"fsdp": 2, "num_cpu_devices": 2}), devices=2)
    assert verification.equal
    assert verification.figures is not None
    assert f"verdict    {verification.verdict}" in repr(verification)
    assert "embedding" in (verification._repr_html_() or "")
