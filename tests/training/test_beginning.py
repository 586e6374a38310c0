"""A new run starts from the adapters of a PEFT directory, beside the base that it names, or from another kind of head."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.objective import ObjectiveConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.step.state import TrainState, init_state
from llamajax.training.beginning import Beginning, open_weights
from llamajax.weights import names
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.origin import Origin
from tests.adapters import write_adapters, write_base
from tests.converters.models import convert, tiny, write_model
from tests.tiny import single_device_mesh, tiny_config


def test_a_new_run_continues_to_train_given_adapters(tmp_path):
    write_base(tmp_path / "base", tiny(num_layers=2, num_kv_heads=2), "bfloat16")
    write_adapters(tmp_path / "base", tmp_path / "peft", ["q_proj", "down_proj"], use_dora=True)
    with jax.set_mesh(single_device_mesh()):
        found = open_pretrained(tmp_path / "peft")
        assert found.adapters is not None
        model = dataclasses.replace(found.config, param_dtype="float32", compute_dtype="float32", remat="none")
        config = tiny_config(
            str(tmp_path / "run"), model=model, adapters=found.adapters, init_from=str(tmp_path / "peft"), mesh=MeshConfig()
        )
        beginning = Beginning(
            found=None, passed_over=(), pretrained=open_weights(config, tmp_path / "run"), origin=Origin()
        )  # fmt: skip
        state = beginning.start_from(None, config, ()).state
        expected = named_arrays(load_model(found, found.config))
    arrays = named_arrays(state.model)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == ("float32" if names.is_adapter(name) else "bfloat16")
        np.testing.assert_array_equal(np.asarray(array), np.asarray(expected[name]), name)


def reward_run(source: Path, mesh: MeshConfig) -> Config:
    """A run of a reward model from these weights; the current mesh is its own."""
    found = open_pretrained(source)
    model = dataclasses.replace(found.config, compute_dtype="float32", remat="none", head="score")
    data = DataConfig(sources=(SourceConfig(kind="preference", paths=("unused",)),), seq_len=16)
    return tiny_config(model=model, init_from=str(source), mesh=mesh, data=data, objective=ObjectiveConfig(kind="reward"))


def first_state(config: Config) -> TrainState:
    pretrained = open_weights(config, Path("unused"))
    return Beginning(found=None, passed_over=(), pretrained=pretrained, origin=Origin()).start_from(None, config, ()).state


@pytest.mark.parametrize(("kind", "tied", "offload"), [("hf", False, 0.0), ("run", True, 0.0), ("hf", True, 1.0)])
def test_a_reward_model_starts_from_a_language_model(kind, tied, offload, tmp_path):
    write_model(tmp_path / "hf", tiny(num_layers=2, num_kv_heads=2, tie_embeddings=tied))
    if kind == "run":
        assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    mesh = MeshConfig(num_cpu_devices=8, fsdp=4, tensor=2)
    with jax.set_mesh(single_device_mesh()):
        config = reward_run(tmp_path / kind, MeshConfig())
        found = open_pretrained(tmp_path / kind)
        expected = {name: np.asarray(array) for name, array in named_arrays(load_model(found, found.config)).items()}
        drawn = np.asarray(init_state(config).model.output_weight()[...])
        assert found.changed_by(config.model).startswith("; a new score head in place of its head")
    with jax.set_mesh(make_mesh(mesh)):
        config = reward_run(tmp_path / kind, mesh).changed({"offload.optimizer": offload})
        arrays = named_arrays(first_state(config).model)
    assert arrays.keys() == expected.keys() | {"head"}
    np.testing.assert_array_equal(np.asarray(arrays.pop("head")), drawn)
    assert 0.1 < drawn.std() < 0.3
    for name, array in arrays.items():
        np.testing.assert_array_equal(np.asarray(array), expected[name], name)


def test_a_score_head_is_loaded_and_belongs_to_reward_models(tmp_path):
    weights = write_model(tmp_path / "hf", tiny(num_layers=2, num_kv_heads=2, head="score"))
    with jax.set_mesh(single_device_mesh()):
        config = reward_run(tmp_path / "hf", MeshConfig())
        state = first_state(config)
        np.testing.assert_array_equal(np.asarray(state.model.output_weight()[...]), weights["score.weight"])
        found = open_pretrained(tmp_path / "hf")
        assert found.changed_by(config.model) == ""
        with pytest.raises(ConfigError, match="is a reward model, which scores texts and predicts no tokens"):
            found.check_predicts()
        with pytest.raises(ConfigError, match="it must be score"):
            found.check(dataclasses.replace(found.config, head="vocabulary"))
