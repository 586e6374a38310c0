"""Sinks of metrics beside the run's own files: TensorBoard and W&B."""

import contextlib
import struct
import sys
import types
from importlib.machinery import ModuleSpec

import jax.numpy as jnp
from tiny import tiny_config

from llamajax.config.watch import MetricsConfig
from llamajax.watch import metrics
from tests.watch.test_metrics import open_writer, step_values


def read_tensorboard(run_dir):
    """(step, tag, value) of every point, and the steps from which on older points are hidden."""
    from tensorboardX.proto import event_pb2

    points, purges = [], []
    for path in sorted((run_dir / metrics.TENSORBOARD_DIR).iterdir()):
        data = path.read_bytes()
        while data:  # TFRecord: length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])  # pyright: ignore[reportAttributeAccessIssue] (made at run time)
            points += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            purges += [event.step] * (event.WhichOneof("what") == "session_log")
            data = data[16 + length :]
    return points, purges


def test_tensorboard(tmp_path):
    config = tiny_config(str(tmp_path), metrics=MetricsConfig(tensorboard=True))
    for start_step in (0, 2):
        with open_writer(config, start_step) as writer:
            for step in range(start_step + 1, start_step + 4):
                writer.write(step, step_values(step))
            writer.write_eval(start_step + 3, {"loss": 2.5})
    points, purges = read_tensorboard(tmp_path)
    assert [point for point in points if point[1] == "train/grad_norm"] == [
        (step, "train/grad_norm", 0.5) for step in (1, 2, 3, 3, 4, 5)
    ]
    assert [point[0] for point in points if point[1] == "eval/loss"] == [3, 5]
    assert {"perf/mfu", "perf/tokens_per_sec", "train/learning_rate"} <= {point[1] for point in points}
    assert not {"step", "time"} & {point[1] for point in points}
    assert purges == [1, 3]


def test_numbers_of_layers_are_written_now_and_then_by_index(tmp_path):
    config = tiny_config(str(tmp_path), metrics=MetricsConfig(tensorboard=True))
    with open_writer(config, 8) as writer:
        for step in (9, 10, 11):
            writer.write(step, step_values(step) | {"load_by_layer": jnp.array([1.0, step])})
    points, _ = read_tensorboard(tmp_path)
    assert [point for point in points if "load_by_layer" in point[1]] == [
        (10, "train/load_by_layer/0", 1.0),
        (10, "train/load_by_layer/1", 10.0),
    ]


def test_an_event_file_is_one_that_tensorboardx_would_write(tmp_path):
    from tensorboardX.record_writer import RecordWriter

    config = tiny_config(str(tmp_path), metrics=MetricsConfig(tensorboard=True))
    with open_writer(config) as writer:
        for step in range(1, 4):
            writer.write(step, step_values(step))
    (path,) = (tmp_path / metrics.TENSORBOARD_DIR).iterdir()
    data = ours = path.read_bytes()
    theirs = RecordWriter(str(tmp_path / "theirs"))
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        theirs.write(data[12 : 12 + length])
        data = data[16 + length :]
    theirs.close()
    assert (tmp_path / "theirs").read_bytes() == ours


def test_wandb(tmp_path, monkeypatch):
    starts, logged, finished = [], [], []

    class Run(contextlib.AbstractContextManager):
        def define_metric(self, name, *, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, record):
            logged.append(record)

        def __exit__(self, *exc_info):
            finished.append(exc_info[0])

    def init(**settings):
        starts.append(settings)
        return Run()

    fake = types.ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setattr(fake, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = tiny_config(str(tmp_path), metrics=MetricsConfig(wandb=True, wandb_project="llamas", wandb_tags=("a", "b")))
    for start_step in (0, 1):
        with open_writer(config, start_step) as writer:
            writer.write(start_step + 1, step_values(start_step + 1))
    assert [record["step"] for record in logged] == [1, 2]
    assert finished == [None, None]
    own = {"project": "llamas", "entity": None, "name": tmp_path.name, "tags": ["a", "b"]}
    assert starts[0].items() >= own.items()
    assert starts[0]["id"] == starts[1]["id"], "a resumed run continues the same W&B run"
    with open_writer(config.changed({"metrics.wandb_entity": "us", "metrics.wandb_name": "first"}), 2):
        assert starts[2].items() >= (own | {"entity": "us", "name": "first", "id": starts[0]["id"]}).items()
