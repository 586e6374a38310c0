"""A run as its user meets it: what is refused and how, what a dry run prints, traces, samples, and no leaks."""

import dataclasses
import gc
import json
import math
import os
import pathlib
import shutil
import signal
import threading

import jaxlib.version
import pytest

from llamajax.checkpoint.read import Saved
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.data import SourceConfig
from llamajax.config.file import config_to_dict, dump_config, load_config
from llamajax.config.run import Config
from llamajax.data.tokens import tokenize_run
from llamajax.errors import CheckpointError, ConfigError, DataError, DivergedError, SaveError
from llamajax.training import run as train
from llamajax.training.resume import check_settings
from tests import runs
from tests.estimates.test_calibration import MEASUREMENT


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The configuration of a run of four steps that is over, traced and with a sample."""
    path = runs.write_config(tmp_path_factory.mktemp("finished"), num_steps=4, eval_every=2)
    overrides = ["profile.start_step=3", "profile.num_steps=2", "sample.prompt=</s> the model", "sample.max_tokens=5"]
    config = load_config(path, [*overrides, "metrics.tensorboard=true", "checkpoint.save_every=2"])
    train.run(config)
    return config


def test_a_run_leaves_all_that_it_promises(finished):
    run_dir = pathlib.Path(finished.run_dir)
    assert runs.committed_steps(run_dir) == {2, 4}
    assert load_config(run_dir / "config.yaml") == finished
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "eval/bits_per_byte" in record] == [2, 4]
    assert {"train/loss", "train/grad_norm", "perf/mfu", "perf/mfu_full_attention", "perf/data_wait_s"} < records[0].keys()
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    compilation = next(event for event in events if event["event"] == "compile")
    assert compilation["jaxlib"] == jaxlib.version.__version__
    assert (compilation["device_kind"], compilation["options"], compilation["from_cache"]) == ("cpu", {}, False)
    assert compilation["xla_flags"] == os.environ["XLA_FLAGS"]
    assert list((run_dir / "profile").rglob("*.trace.json.gz"))
    assert list((run_dir / "tensorboard").glob("events*"))


def test_starting_a_finished_run_again_trains_nothing_and_says_so(finished, capsys):
    before = (pathlib.Path(finished.run_dir) / "metrics.jsonl").read_text()
    train.run(finished)
    told = capsys.readouterr().out
    assert "resuming at step 4" in told
    assert "note       sample.prompt: special tokens in it are read as text\n" in told
    after = (pathlib.Path(finished.run_dir) / "metrics.jsonl").read_text()
    assert [line for line in after.splitlines() if "train/loss" in line] == [
        line for line in before.splitlines() if "train/loss" in line
    ]


def test_what_a_run_has_read_may_change_and_go(finished, tmp_path):
    """Checkpoints keep the tokenizer and the other small files that the run began with."""
    source = shutil.copytree(f"{finished.run_dir}/checkpoints/4", tmp_path / "source/checkpoints/4")
    (source / "files/LICENSE").write_text("as it was")
    tokenizer = pathlib.Path(shutil.copy(source / "files/tokenizer.model", tmp_path / "tokenizer.model"))
    before = tokenizer.read_bytes()
    names = {"run_dir": str(tmp_path / "run"), "init_from": str(source), "data.tokenizer.path": str(tokenizer)}
    config = finished.changed(names | {"checkpoint.save_every": 1, "profile.start_step": None})

    class Spoil(train.StopSignal):
        calls = 0

        def requested(self):
            self.calls += 1
            if self.calls == 2:  # after the first step
                tokenizer.write_bytes(b"another")
                (source / "files/LICENSE").write_text("another")
            if self.calls == 3:
                tokenizer.unlink()
                shutil.rmtree(source)
            return super().requested()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "StopSignal", Spoil)
        train.run(config)
    for step in range(1, 5):
        files = tmp_path / f"run/checkpoints/{step}/files"
        assert {path.name: path.read_bytes() for path in files.iterdir()} == {
            "LICENSE": b"as it was", "tokenizer.model": before,
        }  # fmt: skip


def test_a_damaged_log_is_named_when_a_run_is_over_and_does_no_harm(finished, tmp_path, capsys):
    run_dir = shutil.copytree(finished.run_dir, tmp_path / "run")
    for name in ("events.jsonl", "metrics.jsonl"):
        first, *rest = (run_dir / name).read_text().splitlines(keepends=True)
        (run_dir / name).write_text("".join([first, "{]\n", *rest]))
    train.run(finished.changed({"run_dir": str(run_dir)}))
    captured = capsys.readouterr()
    assert f"{run_dir}/metrics.jsonl:2, {run_dir}/events.jsonl:2: not a record, skipped; restore the file" in captured.err
    assert "steps          4 of 4" in captured.out


def test_a_dry_run_tells_everything_and_writes_nothing(finished, tmp_path, capsys):
    train.run(finished.changed({"run_dir": str(tmp_path / "dry")}), dry_run=True)
    output = capsys.readouterr().out
    for expected in ("8 x cpu", "= 2 per device", "layers.attention.wqkv", "parameters", "memory per device"):
        assert expected in output
    assert not (tmp_path / "dry").exists()


@pytest.fixture
def nothing_compiles(monkeypatch):
    """A run that comes to compiling its step fails."""
    monkeypatch.setattr(train, "compile_all", lambda *_: pytest.fail("the run has begun to compile"))


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("changes", "error", "refusal"),
    [
        ({"data.sources.0.text_key": "body"}, DataError, r"text.jsonl:1: .*body"),
        ({"data.tokenizer.path": "no.model"}, DataError, r"no\.model"),
        ({"optimizer.learning_rate": 0.5}, CheckpointError, r"optimizer\.learning_rate: 0\.01 -> 0\.5"),
        (
            {"run_dir": "new"},
            SaveError,
            r"^run_dir: a checkpoint needs .* 1\.00 KiB are free .*; make room",
        ),
    ],
)
def test_a_dry_run_refuses_what_would_end_the_run(finished, tmp_path, monkeypatch, changes, error, refusal):
    """And takes no lock, and writes nothing."""
    (tmp_path / "no.model").write_text("this is none")
    usage = shutil.disk_usage(tmp_path)
    if "run_dir" in changes:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1024))
    changes = {key: str(tmp_path / value) if value in ("new", "no.model") else value for key, value in changes.items()}
    before = sorted(pathlib.Path(finished.run_dir).rglob("*"))
    with pytest.raises(error, match=refusal):
        train.run(finished.changed(changes), dry_run=True)
    assert sorted(pathlib.Path(finished.run_dir).rglob("*")) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("nothing_compiles")
def test_a_later_source_is_looked_at_before_an_earlier_one_is_tokenized(finished, tmp_path, monkeypatch):
    (tmp_path / "second.jsonl").write_text('{"text": "no body"}\n')
    second = SourceConfig(kind="jsonl", paths=(str(tmp_path / "second.jsonl"),), text_key="body")
    monkeypatch.setattr(tokenize_run, "tokenizer_for", lambda *_: pytest.fail("the run has begun with its first source"))
    changes = {"run_dir": str(tmp_path / "run"), "data.sources": (*finished.data.sources, second)}
    with pytest.raises(DataError, match=r"second.jsonl:1: .*body"):
        train.run(finished.changed(changes | {"data.cache_dir": str(tmp_path / "cache")}))


@pytest.mark.usefixtures("nothing_compiles")
def test_other_data_do_not_continue_a_run(finished):
    with pytest.raises(CheckpointError, match="other documents"):
        train.run(finished.changed({"data.held_out_fraction": 0.2}))


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"optimizer.learning_rate": 0.5}, r"optimizer\.learning_rate: 0\.01 -> 0\.5"),
        ({"train.global_batch_size": 16, "checkpoint.allow_changes": ("train.global_batch_size",)}, "keep 8"),
        ({"model.embed_dim": 32, "checkpoint.allow_changes": ("model",)}, "holds a different state: "),
    ],
)
def test_other_settings_do_not_continue_a_run(finished, monkeypatch, changes, refusal):
    """Nor do its data come first: to tokenize may take hours."""
    monkeypatch.setattr(train, "prepare", lambda *_, **__: pytest.fail("the run has begun to read data"))
    with pytest.raises(CheckpointError, match=refusal):
        train.run(finished.changed(changes))


def saved_by(config: Config, step: int) -> Saved:
    data = {"position": step * config.train.global_batch_size}
    return Saved(step=step, meta={"config": config_to_dict(config), "data": data}, files=pathlib.Path())


def test_a_resumed_run_may_change_the_settings_that_it_names_alone(finished, capsys):
    saved = saved_by(finished, 4)
    changes = {"train.num_steps": 8, "optimizer.learning_rate": 0.5, "checkpoint.allow_changes": ("train.num_steps",)}
    with pytest.raises(CheckpointError) as caught:
        check_settings(finished.changed(changes), saved)
    assert str(caught.value) == (
        f"run_dir: {finished.run_dir} holds a run with other settings (optimizer.learning_rate: 0.01 -> 0.5); choose another"
        " run_dir, or allow the changes: --checkpoint.allow_changes '[train.num_steps, optimizer.learning_rate]'"
    )
    assert not capsys.readouterr().out
    for names in (("train.num_steps", "optimizer.learning_rate"), ("optimizer", "train")):
        check_settings(finished.changed(changes | {"checkpoint.allow_changes": names}), saved)
        line = "changed    optimizer.learning_rate: 0.01 -> 0.5; train.num_steps: 4 -> 8"
        assert capsys.readouterr().out.startswith(line)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"optimizer.schedule": "constant"}, ""),
        ({"optimizer.schedule": "linear"}, "; the linear schedule of the learning rate is now the one of 8 steps"),
        (
            {"optimizer.schedule": "wsd", "optimizer.decay_steps": 2},
            "; the wsd schedule of the learning rate is now the one of 8 steps, with its decay from step 6",
        ),
    ],
)
def test_more_steps_mean_another_schedule_and_a_line_says_so(finished, capsys, changes, note):
    before = finished.changed(changes)
    after = before.changed({"train.num_steps": 8, "checkpoint.allow_changes": ("train.num_steps",)})
    check_settings(after, saved_by(before, 4))
    assert capsys.readouterr().out == f"changed    train.num_steps: 4 -> 8{note}\n"


def test_a_checkpoint_of_an_earlier_version_has_keys_that_are_gone(finished):
    saved = saved_by(finished, 4)
    del saved.meta["config"]["checkpoint"]["allow_changes"]
    saved.meta["config"]["checkpoint"]["allow_config_change"] = True
    check_settings(finished, saved)
    with pytest.raises(CheckpointError, match=r"\(train.num_steps: 4 -> 8\); choose"):
        check_settings(finished.changed({"train.num_steps": 8}), saved)


@pytest.mark.usefixtures("nothing_compiles")
def test_a_kernel_that_cannot_compute_is_refused_before_the_data(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "prepare", lambda *_, **__: pytest.fail("the run has begun to read data"))
    with pytest.raises(ConfigError, match=r"model\.attention_kernel: "):
        train.run(finished.changed({"run_dir": str(tmp_path / "run"), "model.attention_kernel": "cudnn"}))


@pytest.mark.usefixtures("nothing_compiles")
@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"xla.flags": ("xla_gpu_no_such_thing=1",)}, "does not support xla_gpu_no_such_thing"),
        ({"xla.latency_profile": "/nowhere.pbtxt"}, r"xla\.latency_profile: /nowhere.pbtxt cannot be read"),
        ({"hardware.gpu": "h100", "hardware.calibration": "CALIBRATION"}, "measured on a100-80gb, but hardware.gpu is h100"),
    ],
)
def test_what_only_the_compiler_for_gpus_is_told_is_refused_before_the_data(
    finished, tmp_path, monkeypatch, changes, refusal
):
    other = dataclasses.replace(MEASUREMENT, gpu="a100-80gb")
    (tmp_path / "CALIBRATION").write_text(dump_config(other))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "prepare", lambda *_, **__: pytest.fail("the run has begun to read data"))
    monkeypatch.setattr(train, "check_forms", lambda config: None)  # which would ask the GPU what it can compute
    monkeypatch.setattr(train.jax, "default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match=refusal):
        train.run(finished.changed(changes | {"run_dir": str(tmp_path / "run")}))


def test_a_run_goes_on_with_the_defaults_of_settings_that_are_younger(finished):
    """Which its checkpoints say nothing of."""
    saved = saved_by(finished, 4)
    old = saved.meta["config"]
    del old["model"]["matmul_dtype"]
    del old["optimizer"]["b1"], old["optimizer"]["name"], old["train"]["frozen"]

    def check(changes):
        check_settings(finished.changed(changes), saved)

    check({})
    with pytest.raises(CheckpointError, match=r"optimizer\.b1: 0\.9 -> 0\.8\); choose"):
        check({"optimizer.b1": 0.8})
    with pytest.raises(CheckpointError, match=r"train\.frozen: \[\] -> \[head\]\); choose"):
        check({"train.frozen": ("head",)})
    with pytest.raises(CheckpointError, match=r"model\.matmul_dtype: compute_dtype -> float8\); choose"):
        check({"model.matmul_dtype": "float8"})


@pytest.mark.usefixtures("nothing_compiles")
def test_a_second_writer_is_refused(finished):
    with (
        Checkpointer(pathlib.Path(finished.run_dir), finished.checkpoint),
        pytest.raises(CheckpointError, match=str(os.getpid())),
    ):
        train.run(finished)


@pytest.mark.slow
def test_a_signal_during_an_evaluation_ends_it_after_the_batch_in_progress(finished, tmp_path):
    """The step is saved; the evaluation leaves no record, and is the next run's where it was the last."""
    many = {"train.num_steps": 2, "train.eval_every": None, "train.eval_batches": 100, "data.held_out_fraction": 0.4}
    config = finished.changed(many | {"run_dir": str(tmp_path / "run"), "profile.start_step": None})

    class Terminate(train.StopSignal):
        calls = 0

        def requested(self):
            self.calls += 1
            if self.calls == 4:  # after two steps and a batch; the signal is heard by a thread of its own
                os.kill(os.getpid(), signal.SIGTERM)
                runs.wait_until(lambda: self._stop_after < math.inf, [])
            return super().requested()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "StopSignal", Terminate)
        train.run(config)
    assert max(runs.committed_steps(tmp_path / "run")) == 2
    assert "eval/loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    train.run(config)
    assert "eval/loss" in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_gradients_that_stay_infinite_end_the_run(finished, tmp_path, monkeypatch):
    """Weights of 1e30 overflow every step: all are skipped, the fifth in a row sends the run back to the beginning, three
    times, and then is the last, evaluations or not."""
    long = {"train.num_steps": 50, "train.max_nonfinite_steps": 5, "train.eval_every": 1, "profile.start_step": None}
    config = finished.changed(long | {"run_dir": str(tmp_path / "run"), "model.init_std": 1e30})
    with pytest.raises(DivergedError, match="step 5: gradients were not finite in 5 steps in a row"):
        train.run(config)
    passed_over = json.loads((tmp_path / "run" / "passed_over.json").read_text())
    windows = [(window["after_step"], window["first_row"], window["num_rows"]) for window in passed_over]
    assert windows == [(0, 0, 40), (0, 40, 40), (0, 80, 40)]
    assert not runs.committed_steps(tmp_path / "run")
    with pytest.raises(SystemExit) as exit_info:
        train.main(config, dry_run=False)
    assert exit_info.value.code == DivergedError.exit_code


@pytest.mark.usefixtures("nothing_compiles")
def test_what_cannot_end_well_is_refused_before_the_first_step(finished, tmp_path):
    config = finished.changed({"run_dir": str(tmp_path / "run")})
    with pytest.raises(DataError, match=r"sample\.prompt: \d+ tokens leave no room in rows of 32"):
        train.run(config.changed({"sample.prompt": "the model " * 50}))
    with pytest.raises(ConfigError, match=r"optimizer\.no_weight_decay: nrom"):
        train.run(config.changed({"optimizer.no_weight_decay": ("nrom",)}))
    with pytest.raises(ConfigError, match=r"train\.frozen: embeding matches no parameter name"):
        train.run(config.changed({"train.frozen": ("embeding",)}))
    assert runs.steps_on_record(tmp_path / "run") == 0


def test_mistakes_end_in_one_line_and_their_exit_code(finished, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    config = runs.write_config(tmp_path)
    override = f'--data.sources=[{{"kind": "jsonl", "paths": ["{tmp_path}/bad.jsonl"]}}]'
    process = runs.start(config, override)
    last = runs.finish(process, expected_code=3).splitlines()[-1]
    assert last.startswith(f"{tmp_path}/bad.jsonl:2")
    assert "text" in last


@pytest.mark.parametrize(
    "num_steps", [pytest.param(600, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)]
)
def test_many_steps_leak_nothing(finished, tmp_path, num_steps):
    """Memory, files and threads after the second half, with saves and evaluations, are those before it."""
    often = {
        "train.grad_accum_steps": 1,
        "train.eval_every": 100,
        "checkpoint.save_every": 100,
        "checkpoint.keep_last": 2,
        "profile.start_step": None,
    }
    config = finished.changed(often | {"run_dir": str(tmp_path / "run"), "train.num_steps": num_steps})
    held: list[tuple[int, int, int]] = []

    class Watch(train.StopSignal):
        calls = 0

        def requested(self):
            self.calls += 1  # before every step, and before every batch of an evaluation
            if self.calls in (num_steps // 2, num_steps):
                gc.collect()
                resident_pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
                files = len(os.listdir("/proc/self/fd"))
                held.append((resident_pages * os.sysconf("SC_PAGE_SIZE"), files, threading.active_count()))
            return super().requested()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "StopSignal", Watch)
        train.run(config)
    (memory_before, files_before, threads_before), (memory, files, threads) = held
    assert memory - memory_before < num_steps / 2000 * 16 * 2**20
    assert files <= files_before + 4
    assert threads <= threads_before + 2
