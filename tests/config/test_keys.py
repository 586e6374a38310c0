"""Changed configurations, by dotted key, and single values read as a command line's."""

import pytest

from llamajax.config.file import read_value
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import RopeScalingConfig
from llamajax.config.parallel import MeshConfig
from llamajax.errors import ConfigError
from tests.tiny import tiny_config

CONFIG = tiny_config()


def test_settings_of_any_depth_are_changed_and_all_others_stay():
    changed = CONFIG.changed({"run_dir": "there", "train.num_steps": 20, "model.rope_scaling.original_max_seq_len": 77})
    assert (changed.run_dir, changed.train.num_steps) == ("there", 20)
    assert changed.model.rope_scaling == RopeScalingConfig(original_max_seq_len=77)
    back = {"run_dir": CONFIG.run_dir, "train.num_steps": 10, "model.rope_scaling": RopeScalingConfig()}
    assert changed.changed(back) == CONFIG
    assert CONFIG.changed({}) == CONFIG


def test_sections_and_items_of_lists_are_changed():
    sections = {"mesh": MeshConfig(num_cpu_devices=4), "hardware": HardwareConfig(nodes=2)}
    changed = CONFIG.changed(sections | {"mesh.tensor": 2, "data.sources.0.weight": 2.5})
    assert changed.mesh == MeshConfig(num_cpu_devices=4, tensor=2)
    assert changed.hardware == HardwareConfig(nodes=2)
    assert [source.weight for source in changed.data.sources] == [2.5]


def test_rules_look_at_the_result_alone():
    changed = CONFIG.changed({"checkpoint.save_every": 300, "checkpoint.keep_every": 600})  # 600 is no multiple of 1000
    assert changed.checkpoint.keep_every == 600
    changed = CONFIG.changed({"train.grad_accum_steps": 3, "train.global_batch_size": 24})
    assert changed.train.rows_after(10) == 240


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.num_layer": 3}, "unknown key 'model.num_layer'; did you mean 'model.num_layers'?"),
        ({"num_layers": 3}, "unknown key 'num_layers'; did you mean 'model.num_layers'?"),
        ({"modle.num_layers": 3}, "unknown key 'modle'; did you mean 'model'?"),
        (
            {"metrics.xyzzy": 3},
            "unknown key 'metrics.xyzzy'; metrics has log_every, straggler_ratio, tensorboard, wandb, wandb_project",
        ),
        ({"data.sources.1.weight": 3}, "unknown key 'data.sources.1'; data.sources has 0"),
        ({"model.num_layers.x": 3}, "unknown key 'model.num_layers.x'; model.num_layers has no keys"),
        ({"train.num_steps": 0}, "train.num_steps: 0 must be positive; set it, or num_epochs"),
        ({"model.rope_scaling.factor": 2.0}, "model.rope_scaling.factor: 2.0 has no effect with kind=none; set kind to"),
        ({"data.sources.0.weight": 0.0}, "data.sources.0.weight: 0.0 must be positive; remove the source to leave it out"),
        ({"train.grad_accum_steps": 3}, "train.grad_accum_steps: 3 must divide global_batch_size=32"),
        (
            {"optimizer.eps": 0.0, "optimizer.b1": 1.0},
            "optimizer.b1: 1.0 must be at least 0 and below 1\noptimizer.eps: 0.0",
        ),
        ({"data.seq_len": 8192, "seed": -1}, "seed: -1 must be at least 0 and below 2**32\ndata.seq_len: 8192 is above"),
        (
            {"mesh.fsdp": 4},
            "mesh: pipeline(1) x data(1) x fsdp(4) x expert(1) x sequence(1) x tensor(1) = 4, but there",
        ),
    ],
)
def test_what_cannot_be_changed_is_told(changes, message):
    with pytest.raises(ConfigError) as error_info:
        CONFIG.changed(changes)
    assert str(error_info.value).startswith(message)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.num_steps", "1_000", 1000),
        ("optimizer.learning_rate", "1", 1.0),
        ("checkpoint.save_every", "null", None),
        ("run_dir", "2024", "2024"),
        ("optimizer.no_weight_decay", "[norm]", ("norm",)),
        ("data.sources.0.weight", "2", 2.0),
        ("model.rope_scaling", "{kind: linear, factor: 2}", RopeScalingConfig(kind="linear", factor=2.0)),
    ],
)
def test_one_value_is_read_as_a_command_line_reads_it(key, text, value):
    read = read_value(CONFIG, key, text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("train.num_step", "1", "--train.num_step: unknown key 'train.num_step'; did you mean 'train.num_steps'?"),
        ("train.num_steps", "1.5", "--train.num_steps: must be a whole number, not 1.5"),
        ("data.sources.1.weight", "2", "--data.sources.1.weight: no such key; data.sources has 1 item(s), counted from 0"),
        ("data.sources", "[{weight: 2}]", "--data.sources: data.sources.0.kind: required, but missing"),
    ],
)
def test_a_value_that_cannot_be_read_is_told(key, text, message):
    with pytest.raises(ConfigError) as error_info:
        read_value(CONFIG, key, text)
    assert str(error_info.value) == message
