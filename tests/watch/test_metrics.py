"""The metrics writer: one step late, every step once whatever happens, right numbers, all sinks."""

import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_config

from llamajax.config.data import DataConfig, SourceConfig, StageConfig
from llamajax.config.model import ModelConfig
from llamajax.config.training import TrainConfig
from llamajax.errors import DivergedError
from llamajax.estimates.formulas import flops_per_token, num_params
from llamajax.watch import hosts, metrics, run_log
from llamajax.watch.peak import PeakFlops

PEAK = PeakFlops(flops_per_sec=1e12, source="a test")


@pytest.fixture(autouse=True)
def known_peak(monkeypatch):
    monkeypatch.setattr(metrics, "peak_flops", lambda _: PEAK)


def open_writer(config, start_step=0):
    return metrics.MetricsWriter(config, start_step=start_step)


def step_values(step, **others):
    loss = np.float32(1) / np.float32(step)
    return {"loss": loss, "grad_norm": 0.5, "learning_rate": 1e-3, "skipped_steps": 0, **others}


def records(config):
    with open(f"{config.run_dir}/metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def events(config):
    with open(f"{config.run_dir}/events.jsonl") as file:
        return [json.loads(line) for line in file]


@pytest.fixture
def config(tmp_path):
    return tiny_config(str(tmp_path / "run"))


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until its `now` is moved."""
    clock = SimpleNamespace(now=50.0)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock.now)
    return clock


class Scalar:
    """A value on the device whose fetch is noted."""

    def __init__(self, step, fetched):
        self.step, self.fetched = step, fetched

    def __array__(self, dtype=None, copy=None):
        self.fetched.append(self.step)
        return np.float32(self.step)


def test_a_step_is_fetched_when_the_next_one_is_handed_in(config):
    fetched = []
    with open_writer(config) as writer:
        assert writer.write(1, step_values(1, loss=Scalar(1, fetched))) is None
        assert fetched == []
        record = writer.write(2, step_values(2, loss=Scalar(2, fetched)))
        assert record is not None
        assert (record["step"], record["train/loss"], fetched) == (1, 1.0, [1])
        assert [r["step"] for r in records(config)] == [1], "what was fetched is in the file at once"
        record = writer.flush()
        assert record is not None
        assert (record["step"], fetched) == (2, [1, 2])
        assert writer.flush() is None
        writer.write(3, step_values(3, loss=Scalar(3, fetched)))
    assert [r["step"] for r in records(config)] == [1, 2, 3]


def test_values_are_those_of_the_device_bit_for_bit(config):
    loss = jax.jit(lambda x: jnp.exp(x) / 3)(jnp.float32(0.7))
    with open_writer(config) as writer:
        writer.write(1, step_values(1, loss=loss, tokens=jnp.int32(77), narrow=jnp.bfloat16(1.7)))
    (record,) = records(config)
    assert np.float32(record["train/loss"]).tobytes() == np.asarray(loss).tobytes()
    assert record["train/tokens"] == 77
    assert record["train/narrow"] == 1.703125


def test_a_resumed_run_has_every_step_once_in_order(config):
    path = f"{config.run_dir}/metrics.jsonl"
    with open_writer(config) as writer:
        for step in range(1, 11):
            writer.write(step, step_values(step))
            if step % 4 == 0:
                writer.write_eval(step, {"loss": 1.0, "bits_per_byte": 0.5})
    unbroken = [(r["step"], r.get("train/loss"), r.get("eval/loss")) for r in records(config)]
    with open(path, "a") as file, open(f"{config.run_dir}/events.jsonl", "a") as event_file:
        file.write('{"step": 11, "time": 17')
        event_file.write('{"time": 1')
    for start_step in (10, 8, 7, 0):
        with open_writer(config, start_step) as writer:
            for step in range(start_step + 1, 11):
                writer.write(step, step_values(step))
                if step % 4 == 0:
                    writer.write_eval(step, {"loss": 1.0, "bits_per_byte": 0.5})
        assert [(r["step"], r.get("train/loss"), r.get("eval/loss")) for r in records(config)] == unbroken
    assert [e["step"] for e in events(config) if e["event"] == "start"] == [0, 10, 8, 7, 0]


def test_broken_numbers_are_kept(config):
    with open_writer(config) as writer:
        writer.write(1, step_values(1, loss=jnp.float32(jnp.nan), grad_norm=jnp.float32(jnp.inf)))
    (record,) = records(config)
    assert (record["train/loss"], record["train/grad_norm"]) == ("NaN", "Infinity")


def test_documents_that_are_closed_count_what_they_see(tmp_path, clock):
    config = tiny_config(str(tmp_path))
    records = []
    for keys in (None, [3.0]):
        with metrics.MetricsWriter(config, start_step=0, keys=keys) as writer:
            writer.write(1, step_values(1))
            clock.now += 1.0
            records.append(writer.flush())
    whole, closed = records
    assert whole is not None
    assert closed is not None
    model, half = config.model, config.data.seq_len / 2
    per_key = 12 * model.num_layers * model.num_heads * model.head_dim
    tokens = config.train.global_batch_size * config.data.seq_len / jax.device_count()
    assert (whole["perf/mfu"] - closed["perf/mfu"]) * 1e12 == pytest.approx(tokens * per_key * (half - 3))
    assert whole["perf/mfu_full_attention"] == closed["perf/mfu_full_attention"]


def test_speeds_of_llama_3_8b_by_hand(tmp_path, clock, monkeypatch):
    config = tiny_config(
        str(tmp_path),
        model=ModelConfig(
            vocab_size=128_256, embed_dim=4096, mlp_dim=14_336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
            max_seq_len=8192,
        ),
        data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=8192),
        train=TrainConfig(num_steps=10, global_batch_size=16),
    )  # fmt: skip
    monkeypatch.setattr(metrics, "peak_flops", lambda _: PeakFlops(flops_per_sec=989.5e12, source="a test"))
    with open_writer(config) as writer:
        writer.write(1, step_values(1))
        clock.now += 2.0
        record = writer.write(2, step_values(2), data_wait_s=0.25)
        assert record is not None
        assert (record["perf/step_time_s"], record["perf/data_wait_s"]) == (2.0, 0.25), "of which the second step's wait is"
        assert record["perf/tokens_per_sec"] == 65_536  # 16 x 8192 tokens in 2 s
        assert record["perf/tokens_per_sec_per_device"] == 8192
        # Per token: 6 x 7,504,658,432 matmul parameters, and 6 or 12 x 32 layers x 4096 x 8192.
        assert record["perf/mfu"] == pytest.approx(8192 * 51.470_4e9 / 989.5e12, rel=1e-5)
        assert record["perf/mfu_full_attention"] == pytest.approx(8192 * 57.912_8e9 / 989.5e12, rel=1e-5)
        clock.now += 1.0
        record = writer.flush()
        assert record is not None
        assert (record["perf/step_time_s"], record["perf/data_wait_s"]) == (1.0, 0.0)


def test_no_step_waits_for_longer_than_it_takes(config, clock):
    """The host waits for data; the device, which takes a thousandth of that, has long finished the step before."""
    with open_writer(config) as writer:
        for step, wait_s in enumerate((0.5, 0.125, 1.0, 0.25, 2.0), start=1):
            clock.now += wait_s
            writer.write(step, step_values(step), data_wait_s=wait_s)
            clock.now += 0.001
            if step == 3:
                with writer.pause("saving"):
                    clock.now += 10.0
    found = [(record["perf/data_wait_s"], record["perf/step_time_s"]) for record in records(config)]
    assert all(wait_s <= step_time_s for wait_s, step_time_s in found), found
    assert sum(wait_s for wait_s, _ in found) == 3.875


def test_evaluations_and_checkpoints_are_no_steps_time(config, clock):
    with open_writer(config) as writer:
        clock.now += 1.0
        writer.write(1, step_values(1))
        clock.now += 2.0
        with writer.pause("evaluating"):
            clock.now += 100.0
        writer.write_eval(1, {"loss": 3.0})
        clock.now += 0.5
        writer.write(2, step_values(2))
        clock.now += 4.0
    assert [r.get("perf/step_time_s") for r in records(config)] == [3.0, None, 4.5]
    assert [r.get("eval/loss") for r in records(config)] == [None, 3.0, None]


def test_a_pause_is_an_event_and_one_within_it_is_part_of_it(config, clock):
    with open_writer(config) as writer:
        writer.write(1, step_values(1))
        clock.now += 1.0
        with writer.pause("saving"):
            clock.now += 2.0
            with writer.pause("comparing replicas"):
                clock.now += 1.0
        with writer.pause("evaluating"):
            clock.now += 0.5
    pauses = [(e["doing"], e["seconds"], e["step"]) for e in events(config) if e["event"] == "pause"]
    assert pauses == [("saving", 3.0, 1), ("evaluating", 0.5, 1)]


def test_devices_are_timed_when_they_are_idle_and_that_is_no_steps_time(config, clock, monkeypatch):
    sent = []

    def takes(seconds):
        clock.now += seconds
        return seconds

    monkeypatch.setattr(
        metrics.peers,
        "current",
        lambda: SimpleNamespace(rank=1, reports={}, report=lambda values: sent.append(dict(values))),
    )
    monkeypatch.setattr(hosts, "DeviceProbe", lambda: SimpleNamespace(seconds=lambda num_rounds: takes(0.001)))
    monkeypatch.setattr(jax, "block_until_ready", lambda _: takes(1.0))
    with open_writer(config) as writer:
        for step in range(1, 26):
            clock.now += step not in (9, 17, 25)  # whose devices begin when the timing, in write, has ended
            writer.write(step, step_values(step), data_wait_s=0.25 * (step not in (9, 17, 25)))
        clock.now += 1.0
    times = [record["perf/step_time_s"] for record in records(config)]
    assert times == pytest.approx([2.0] + [1.0] * 24), "but for the first, before which a second went by"
    assert [(report["step"], report["device"]) for report in sent] == [(8, 0.001), (16, 0.001), (24, 0.001)]
    assert sent[0]["data"] == pytest.approx(0.25)
    assert sent[0]["host"] == pytest.approx(0.75)
    assert sent[1]["host"] == pytest.approx(0.75 * 7 / 8), "after a timing nobody was late"


def test_hosts_are_compared_also_behind_a_pause(config):
    """A checkpoint after every tenth step fetches its metrics before the next one is there."""
    compared = []
    with open_writer(config) as writer:
        listed: Any = SimpleNamespace(
            add_step=lambda *_, **__: None, probe_due=lambda step: False, write=lambda *_, **__: None,
            report=lambda step: (compared.append(step) or [], {}),
        )  # fmt: skip
        writer._hosts = listed
        for step in range(1, 32):
            writer.write(step, step_values(step))
            if step % 10 == 0:
                writer.flush()
    assert compared == list(range(1, 32))


def test_only_the_first_process_writes_but_all_fetch(config, capsys, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with open_writer(config) as writer:
        writer.write(1, step_values(1))
        record = writer.write(2, step_values(2))
        assert record is not None
        assert record["train/loss"] == 1.0
        with writer.pause("saving"):
            writer.event("save")
        writer.write_eval(2, {"loss": 3.0})
    with pytest.raises(FileNotFoundError):
        records(config)
    assert "loss" not in capsys.readouterr().out


def test_events_tell_the_story_of_the_run(config):
    with open_writer(config) as writer:
        writer.write(1, step_values(1))
        writer.flush()
        writer.event("save", path="checkpoints/1")
    with pytest.raises(DivergedError), open_writer(config, 1):
        raise DivergedError("step 3: gradients were not finite\nsecond line")
    with open_writer(config, 1) as writer:
        for step in range(2, 11):
            writer.write(step, step_values(step))
    story = [(e["event"], e["step"], e.get("reason")) for e in events(config)]
    assert story == [
        ("start", 0, None),
        ("save", 1, None),
        ("stop", 1, "stopped"),
        ("start", 1, None),
        ("stop", 1, "DivergedError: step 3: gradients were not finite"),
        ("start", 1, None),
        ("stop", 10, "finished"),
    ]
    start = events(config)[0]
    assert (start["devices"], start["device_kind"], start["mesh"]) == (8, "cpu", {"fsdp": 8})
    assert (start["num_params"], start["num_steps"], start["tokens_per_step"]) == (num_params(config.model), 10, 32 * 16)
    assert (start["peak_flops_per_device"], start["peak_flops_source"]) == (1e12, "a test")
    assert events(config)[3]["config_sha256"] == start["config_sha256"]


def test_the_log_is_readable_while_the_run_goes_on(config):
    with open_writer(config) as writer:
        for step in range(1, 5):
            writer.write(step, step_values(step))
        summary = run_log.summarize(run_log.read_run(writer.run_dir))
    assert (summary.step, summary.num_steps, summary.stop_reason) == (3, 10, None)


def test_what_was_read_and_how_fast_is_counted_by_the_rows_of_each_stage(tmp_path, clock):
    config = tiny_config(str(tmp_path)).changed({"data.stages": (StageConfig(from_step=3, seq_len=48),)})
    with metrics.MetricsWriter(config, start_step=0, epochs=lambda step: (step / 4, 0.5), keys=(3.0, 5.0)) as writer:
        for step in range(1, 6):
            writer.write(step, step_values(step))
            clock.now += 2.0
            writer.flush()
    short, long = 32 * 16, 32 * 48
    read_so_far = [0, *(r["data/tokens"] for r in records(config))]
    assert np.diff(read_so_far).tolist() == [short] * 3 + [long] * 2
    assert [r["perf/tokens_per_sec"] for r in records(config)] == [short / 2] * 3 + [long / 2] * 2
    flops = [tokens * flops_per_token(config.model, T, keys=keys) for tokens, T, keys in ((short, 16, 3.0), (long, 48, 5.0))]
    speeds = [record["perf/mfu"] * 2 * jax.device_count() * PEAK.flops_per_sec for record in records(config)[2:4]]
    assert speeds == pytest.approx(flops)
    summary = run_log.summarize(run_log.read_run(writer.run_dir))
    assert (summary.tokens, summary.epochs) == (3 * short + 2 * long, (1.25, 0.5))
