"""Adapters beside a base that is there already: its very arrays, and no other base than theirs."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from llamajax.checkpoint.write import Checkpointer
from llamajax.config.adapters import AdaptersConfig
from llamajax.config.peft import peft_config_of
from llamajax.config.training import CheckpointConfig
from llamajax.errors import ConfigError
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.zero import with_value
from llamajax.step.checksum import fingerprint
from llamajax.step.frozen import partition
from llamajax.step.state import abstract_model, init_state
from llamajax.weights import names
from llamajax.weights.beside import check_base, open_beside
from llamajax.weights.loading import load_beside, load_model
from llamajax.weights.open_model import open_pretrained
from tests.converters.models import tiny, write_model
from tests.tiny import single_device_mesh, tiny_config

MODEL = tiny(num_layers=1, num_kv_heads=2, embed_dim=64, mlp_dim=64)
LORA = AdaptersConfig(kind="lora", rank=4, alpha=8.0, targets=("q", "down"))


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(single_device_mesh()):
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model in float32, so that bfloat16 rounds it."""
    directory = tmp_path_factory.mktemp("base") / "base"
    write_model(directory, MODEL)
    return directory


def write_peft(directory: Path, base: str, adapters: AdaptersConfig = LORA) -> Path:
    """Adapters in PEFT's form, of random numbers."""
    draw = np.random.default_rng(1)
    shapes = names.hf_shapes(MODEL, adapters)
    directory.mkdir()
    tensors = {name: draw.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(peft_config_of(adapters, base, None)))
    return directory


def write_run(directory: Path, init_from: object, adapters: AdaptersConfig, told: str | None) -> Path:
    """What the checkpoint of a run tells of its adapters; `told` is the fingerprint of their base."""
    model = dataclasses.asdict(dataclasses.replace(MODEL, param_dtype="float32", compute_dtype="float32"))
    run = {"model": model, "adapters": dataclasses.asdict(adapters), "init_from": str(init_from)}
    meta = {"config": run, "hf": None, "data": {"tokens": 0}} | ({} if told is None else {"base": told})
    with Checkpointer(directory, CheckpointConfig(async_save=False)) as checkpointer:
        checkpointer.save(7, {"model": {"x": np.zeros(1)}}, meta)
    return directory


def fingerprint_in_training(base: Path, adapters: AdaptersConfig) -> str:
    """The fingerprint that a run of these adapters writes into its checkpoints."""
    found = open_pretrained(base)
    model = dataclasses.replace(found.config, param_dtype="float32", compute_dtype="float32", remat="none")
    config = tiny_config(model=model, adapters=adapters, init_from=str(base))
    state = init_state(config, load_model(found, config.stored_model, abstract_model(config)))
    return fingerprint(partition(config, state.model)[1])


def test_adapters_have_the_very_arrays_of_their_base(base, tmp_path):
    found = open_pretrained(base)
    weights = load_model(found, found.config)
    for number in range(2):
        # Dropout is a setting of training alone.
        adapters = dataclasses.replace(LORA, dropout=0.1 * number, rank=4 + number)
        own = open_beside(str(write_peft(tmp_path / str(number), str(base), adapters)), found, "float32")
        adapted = named_arrays(load_beside(own, found.config, weights))
        for name, array in named_arrays(weights).items():
            assert adapted.pop(name) is array
        assert adapted.keys() == {f"layers.{part}_adapter.{x}" for part in ("attention.q", "mlp.down") for x in "ab"}


@pytest.mark.parametrize(
    ("form", "changes", "kept"),
    [
        ("bfloat16", {"dropout": 0.1}, "float32"),
        pytest.param("nf4", {}, "float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", {"kind": "dora"}, "bfloat16", marks=pytest.mark.long),
        pytest.param("float32", {}, "float32", marks=pytest.mark.long),
        pytest.param("nf4", {"double_quantization": False}, "bfloat16", marks=pytest.mark.long),
        pytest.param("int8", {}, "float32", marks=pytest.mark.long),
        pytest.param("float8", {}, "float32", marks=pytest.mark.long),
    ],
)
def test_a_run_proves_its_base_in_any_type_and_place(form, changes, kept, base, tmp_path):
    adapters = dataclasses.replace(LORA, base=form, **changes)
    run = write_run(tmp_path / "run", "gone", adapters, fingerprint_in_training(base, adapters))
    served = open_pretrained(base)
    found = open_beside(str(run), served, kept)
    weights = load_model(served, dataclasses.replace(served.config, param_dtype=kept))
    check_base(found, weights, kept)
    weights.final_norm.scale = with_value(weights.final_norm.scale, 2 * weights.final_norm.scale[...])
    with pytest.raises(ConfigError, match=rf"^adapter: {run}/.* was trained beside other weights .*; serve gone$"):
        check_base(found, weights, kept)


def test_adapters_without_proof_name_their_base(base, tmp_path):
    served = open_pretrained(base)
    write_run(tmp_path / "untold", base, LORA, None)
    write_run(tmp_path / "finer", "hf://org/name@main", dataclasses.replace(LORA, base="float32"), "0" * 64)
    write_peft(tmp_path / "hub", "org/name")
    write_peft(tmp_path / "same", f"{base}/../base/")
    assert open_beside(str(tmp_path / "untold"), served, "bfloat16").base is served
    for name in ("same", "finer"):
        assert open_beside(str(tmp_path / name), served, "float32").base is served
    for name, named in (("hub", "hf://org/name"), ("finer", "hf://org/name@main")):
        with pytest.raises(ConfigError, match=rf"^adapter: .* adds to {named}, but the server has {base}; serve") as refused:
            open_beside(str(tmp_path / name), served, "bfloat16")
        assert "\n" not in str(refused.value)
    snapshot = tmp_path / "models--org--name/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(base)
    assert open_beside(str(tmp_path / "hub"), open_pretrained(snapshot), "bfloat16").adapters == LORA


def test_other_things_than_adapters_of_the_base_are_refused(base, tmp_path):
    served = open_pretrained(base)
    with pytest.raises(ConfigError, match=rf"^adapter: {base} holds a whole model; name it with --model$"):
        open_beside(str(base), served, "float32")
    peft = write_peft(tmp_path / "peft", str(base))
    with pytest.raises(ConfigError, match=rf"^model: {peft} holds adapters itself; name its base with --model, and"):
        open_beside(str(peft), open_pretrained(peft), "float32")
    write_model(tmp_path / "other", dataclasses.replace(MODEL, mlp_dim=128))
    other = open_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"down_proj.lora_A.weight is \[4, 64\], but r and the base .* need \[4, 128\]"):
        open_beside(str(peft), other, "float32")
    with pytest.raises(ConfigError, match=r"^model.mlp_dim: 64 differs from .*/other; it must be 128$"):
        open_beside(str(write_run(tmp_path / "run", base, LORA, None)), other, "float32")
