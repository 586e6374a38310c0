"""PEFT directories are read whole, in every form that peft writes them, or refused in one line."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from llamajax.config.adapters import AdaptersConfig
from llamajax.config.file import load_config
from llamajax.config.inherited import OF_THE_RUN
from llamajax.config.peft import base_of
from llamajax.errors import ConfigError
from llamajax.weights import names
from llamajax.weights.open_model import open_pretrained
from tests.adapters import write_adapters, write_base
from tests.converters.models import tiny
from tests.front_door import MINIMAL
from tests.tiny import single_device_mesh

MODEL = tiny(num_layers=2, num_kv_heads=2)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(single_device_mesh()):
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A base, and adapters of its queries and values as peft writes them."""
    directory = tmp_path_factory.mktemp("peft")
    write_base(directory / "base", MODEL)
    write_adapters(directory / "base", directory / "peft", ["q_proj", "v_proj"], lora_dropout=0.1)
    return directory


@pytest.fixture
def copied(written, tmp_path) -> Path:
    return Path(shutil.copytree(written / "peft", tmp_path / "peft"))


def change(directory: Path, **settings: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def rewrite(directory: Path, change: Any) -> None:
    """Writes the tensors after `change`, which takes and returns them by name."""
    file = directory / "adapter_model.safetensors"
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(file)), file)


def test_adapters_are_opened_with_their_base(written):
    found = open_pretrained(written / "peft")
    assert found.adapters == AdaptersConfig(kind="lora", rank=4, alpha=6.0, dropout=0.1, targets=("q", "v"))
    assert found.base is not None
    assert found.config == found.base.config
    assert (found.base.source, found.files) == (written / "base", written / "base")
    assert found.tensors is not None
    assert found.tensors.keys() == names.hf_shapes(MODEL, found.adapters).keys()


@pytest.mark.parametrize(
    ("settings", "kind", "scale"),
    [
        ({"use_rslora": True}, "rslora", 3.0),
        ({"target_modules": "all-linear"}, "lora", 1.5),
        ({"target_modules": r".*\.self_attn\.(q|v)_proj", "init_lora_weights": "gaussian"}, "lora", 1.5),
        ({"target_modules": ["model.layers.0.self_attn.q_proj", "v_proj"], "lora_bias": False}, "lora", 1.5),
        ({"r": 4, "lora_alpha": 6.5, "revision": "main", "task_type": None}, "lora", 1.625),
    ],
)
def test_settings_are_read_as_peft_means_them(settings, kind, scale, copied):
    change(copied, **settings)
    adapters = open_pretrained(copied).adapters
    assert adapters is not None
    assert (adapters.kind, adapters.scale, adapters.targets) == (kind, scale, ("q", "v"))


def test_dora_may_have_the_scale_of_rslora(written, tmp_path):
    write_adapters(written / "base", tmp_path / "peft", ["k_proj"], use_dora=True, use_rslora=True)
    adapters = open_pretrained(tmp_path / "peft").adapters
    assert adapters is not None
    assert (adapters.kind, adapters.scale) == ("dora", 3.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, 'peft_type: "IA3" is not supported; merge it with peft'),
    "no-kind": ({"peft_type": None}, "peft_type: null is not supported"),
    "task": ({"task_type": "SEQ_CLS"}, 'task_type: "SEQ_CLS" is not supported'),
    "biases": ({"bias": "all"}, 'bias: "all" is not supported'),
    "own-biases": ({"lora_bias": True}, "lora_bias: true is not supported"),
    "modules": ({"modules_to_save": ["lm_head"]}, r'modules_to_save: ["lm_head"] is not supported'),
    "layers": ({"layers_to_transform": [0]}, "layers_to_transform: [0] is not supported"),
    "ranks": ({"rank_pattern": {"q_proj": 2}}, 'rank_pattern: {"q_proj": 2} is not supported'),
    "alphas": ({"alpha_pattern": {"q_proj": 2}}, 'alpha_pattern: {"q_proj": 2} is not supported'),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out: true is not supported"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices: [1] is not supported"),
    "changed-base": ({"init_lora_weights": "pissa_niter_4"}, 'init_lora_weights: "pissa_niter_4" is not supported'),
    "new": ({"use_something_new": {"x": 1}}, 'use_something_new: {"x": 1} is not supported'),
    "rank": ({"r": 0}, "r: must be a whole number from 1 to below 65536, not 0; correct it"),
    "rank-of-text": ({"r": "4"}, "r: must be a whole number"),
    "other-rank": ({"r": 8}, "q_proj.lora_A.weight is [4, 32], but r and the base"),
    "alpha": ({"lora_alpha": -1}, "lora_alpha: must be a number"),
    "dropout": ({"lora_dropout": 1.0}, "lora_dropout: must be a number from 0 to below 1, not 1.0"),
    "flag": ({"use_dora": "yes"}, "use_dora: must be true or false, not yes"),
    "dora": ({"use_dora": True}, "q_proj.lora_magnitude_vector is missing, and 3 more: all layers of the base must have"),
    "more-targets": ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "target_modules: o_proj has no tensors"),
    "fewer-targets": ({"target_modules": ["q_proj"]}, "target_modules: v_proj has tensors, but is not named"),
    "no-base": ({"base_model_name_or_path": None}, "base_model_name_or_path: names no model"),
    "gone-base": ({"base_model_name_or_path": "/no/such"}, "base_model_name_or_path: there is no directory /no/such"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_settings_are_refused(case, copied):
    settings, expected = REFUSED[case]
    change(copied, **settings)
    with pytest.raises(ConfigError) as refused:
        open_pretrained(copied)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            lambda found: {name: x for name, x in found.items() if ".layers.1." not in name},
            "lora_A.weight is missing, and 3",
        ),
        (lambda found: found | {"base_model.model.lm_head.lora_A.weight": found[FIRST]}, "belongs to no adapter of a layer"),
        (lambda found: found | {"base_model.model.model.embed_tokens.weight": found[FIRST]}, "belongs to no adapter"),
        (lambda found: found | {FIRST: np.zeros((4, 64), np.float32)}, "lora_A.weight is [4, 64], but r and the base"),
        (lambda found: {"x": found[FIRST]}, "has no adapter of a layer's projections"),
    ],
    ids=["layer", "head", "embedding", "shape", "none"],
)
def test_other_tensors_are_refused(changed, expected, copied):
    rewrite(copied, changed)
    with pytest.raises(ConfigError) as refused:
        open_pretrained(copied)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_pickles_damage_and_adapters_of_adapters_are_refused(written, copied, tmp_path):
    shutil.copytree(copied, tmp_path / "above")
    change(tmp_path / "above", base_model_name_or_path=str(copied))
    with pytest.raises(ConfigError, match="holds adapters itself; export that with --merge first"):
        open_pretrained(tmp_path / "above")
    change(copied, base_model_name_or_path=str(copied))
    with pytest.raises(ConfigError, match=f"^{copied}: names adapters as their own base; name the model"):
        open_pretrained(copied)
    shutil.copy(written / "peft/adapter_config.json", copied)
    file = copied / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="download it again"):
        open_pretrained(copied)
    file.rename(copied / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.bin: pickles can run code and are not read"):
        open_pretrained(copied)


def test_bfloat16_adapters_are_read_exactly(copied):
    rewrite(copied, lambda found: {name: x.astype(ml_dtypes.bfloat16) for name, x in found.items()})
    tensors = open_pretrained(copied).tensors
    assert tensors is not None
    assert {stored.dtype for stored in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_the_name_of_a_base_is_a_directory_or_a_model_on_the_hub(copied, tmp_path, monkeypatch):
    change(copied, base_model_name_or_path="org/name")
    assert base_of(copied) == "hf://org/name"
    change(copied, revision="abc")
    assert base_of(copied) == "hf://org/name@abc"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    assert base_of(copied) == "org/name"


def test_a_run_has_the_settings_of_the_base(written, tmp_path):
    without_model = MINIMAL[: MINIMAL.index("model:")] + MINIMAL[MINIMAL.index("data:") :]
    (tmp_path / "run.yaml").write_text(without_model)
    config = load_config(tmp_path / "run.yaml", [f"init_from={written / 'peft'}", "adapters.kind=lora"])
    own = open_pretrained(written / "base").config
    assert own == dataclasses.replace(config.model, **{key: getattr(own, key) for key in OF_THE_RUN})


def test_a_run_must_train_the_same_adapters(written):
    found = open_pretrained(written / "peft")
    own = AdaptersConfig(kind="lora", rank=4, alpha=6.0, targets=("v", "q"))
    found.check_adapters(dataclasses.replace(own, dropout=0.5, base="float32"))
    with pytest.raises(ConfigError, match=r"adapters: are not set, but .* holds LoRA of rank 4, alpha 6, on q, v; set them"):
        found.check_adapters(AdaptersConfig())
    with pytest.raises(ConfigError) as refused:
        found.check_adapters(dataclasses.replace(own, kind="dora", alpha=8.0, targets=("q",)))
    assert [line.split(";")[0] for line in str(refused.value).splitlines()] == [
        f"adapters.kind: dora differs from {written / 'peft'}",
        f"adapters.alpha: 8.0 differs from {written / 'peft'}",
        f"adapters.targets: ['q'] differs from {written / 'peft'}",
    ]
