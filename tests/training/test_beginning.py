"""A new run starts from the adapters of a PEFT directory, beside the base that it names."""

import dataclasses

import jax
import numpy as np

from llamajax.config.parallel import MeshConfig
from llamajax.parallel.arrays import named_arrays
from llamajax.training.beginning import Beginning, open_weights
from llamajax.weights import names
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.origin import Origin
from tests.adapters import write_adapters, write_base
from tests.converters.models import tiny
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
