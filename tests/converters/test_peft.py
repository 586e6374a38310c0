"""Adapters leave as a PEFT directory or merged into their base, and come back from either, with the same logits."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from converters.arguments import hf_arguments
from converters.convert import main
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig
from llamajax.config.peft import base_of
from llamajax.config.training import CheckpointConfig
from llamajax.parallel.zero import trained_only
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.pretrained import Pretrained
from tests.adapters import ALL, KINDS, base, logits_of, peft, write_adapters, write_base
from tests.converters.models import assert_same_bits, read_weights, tiny
from tests.tiny import single_device_mesh

TOKENS = np.random.default_rng(0).integers(0, 96, (2, 12), dtype=np.int32)
GROUPED = tiny(num_layers=2, num_kv_heads=2)


def write_run(
    directory: Path, found: Pretrained, init_from: Path, files: Mapping[str, bytes] = MappingProxyType({})
) -> None:
    """Writes adapters that were opened as the checkpoint of a run: without the weights that they add to, with `files`."""
    assert found.adapters is not None
    model = load_model(found, dataclasses.replace(found.config, param_dtype="float32"))
    run = {
        "model": dataclasses.asdict(dataclasses.replace(found.config, param_dtype="float32")),
        "adapters": dataclasses.asdict(found.adapters),
        "init_from": str(init_from),
    }
    with Checkpointer(directory, CheckpointConfig(async_save=False)) as checkpointer:
        checkpointer.save(7, {"model": trained_only(model)}, {"config": run, "hf": found.hf, "data": {"tokens": 320}}, files)


def export(*arguments: object) -> int:
    return main(hf_arguments(["export", *map(str, arguments)]))


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(single_device_mesh()):
        yield


@pytest.mark.parametrize(
    ("kind", "targets", "config", "options"),
    [
        ("dora", ALL, GROUPED, ["--no-verify"]),
        pytest.param("lora", ALL, dataclasses.replace(GROUPED, tie_embeddings=True), [], marks=pytest.mark.slow),
        pytest.param(
            "rslora", ("q_proj", "v_proj"), dataclasses.replace(GROUPED, qkv_bias=True, mlp_bias=True, output_bias=True),
            [], marks=pytest.mark.slow,
        ),
        pytest.param(
            "lora", ("q_proj", "o_proj"),
            dataclasses.replace(
                GROUPED, qk_norm=True, experts=ExpertsConfig(num_experts=4, mlp_dim=16, first_dense_layers=1)
            ),
            [], marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_adapters_of_a_run_are_those_of_peft_alone_and_merged(
    kind, targets, config: ModelConfig, options: list[str], tmp_path, capsys
):
    write_base(tmp_path / "base", config)
    # Dropout is a setting of training alone.
    written = write_adapters(tmp_path / "base", tmp_path / "peft", targets, lora_dropout=0.1, **KINDS[kind])
    expected = logits_of(written, TOKENS)
    found = open_pretrained(tmp_path / "peft")
    write_run(tmp_path / "run", found, tmp_path / "base")
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-5 * np.abs(expected).max()}

    assert export(tmp_path / "run", tmp_path / "back", *options) == 0
    if not options:  # our logits were compared with those of the file in peft
        assert "logits of transformers with adapters of peft differ by at most" in capsys.readouterr().out
    assert_same_bits(
        *(safetensors.numpy.load_file(tmp_path / name / "adapter_model.safetensors") for name in ("back", "peft"))
    )
    loaded = peft.PeftModel.from_pretrained(base(tmp_path / "base"), str(tmp_path / "back"))
    np.testing.assert_allclose(logits_of(loaded, TOKENS), expected, **close)

    assert export(tmp_path / "run", tmp_path / "merged", "--merge", "--no-verify") == 0
    assert export(tmp_path / "back", tmp_path / "again", "--merge", "--no-verify") == 0
    np.testing.assert_allclose(logits_of(base(tmp_path / "merged"), TOKENS), expected, **close)
    assert_same_bits(read_weights(tmp_path / "merged"), read_weights(tmp_path / "again"))


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of adapters beside a base in bfloat16."""
    write_base(tmp_path / "base", GROUPED, "bfloat16")
    write_adapters(tmp_path / "base", tmp_path / "peft", ["v_proj"])
    write_run(tmp_path / "run", open_pretrained(tmp_path / "peft"), tmp_path / "base")
    return tmp_path / "run"


@pytest.mark.slow
def test_merged_weights_have_the_type_of_the_base_and_are_verified(run, tmp_path, capsys):
    weights = read_weights(tmp_path / "base")
    for dtype, told in (
        (None, "; merging in bfloat16 changed them by at most"),
        ("float32", "logits of transformers differ"),
    ):
        option = () if dtype is None else ("--dtype", dtype)
        assert export(run, tmp_path / f"merged_{dtype}", "--merge", *option) == 0
        assert told in capsys.readouterr().out
        for name, array in read_weights(tmp_path / f"merged_{dtype}").items():
            assert array.dtype == (ml_dtypes.bfloat16 if dtype is None else np.float32)
            unchanged = np.array_equal(array.astype(np.float32), weights[name].astype(np.float32))
            assert unchanged == (not name.endswith("v_proj.weight")), name
    assert json.loads((tmp_path / "merged_None/config.json").read_text())["dtype"] == "bfloat16"


def test_the_directory_names_its_base(run, tmp_path, capsys):
    assert export(run, tmp_path / "out", "--no-verify", "--dtype", "bfloat16", "--license", "mit") == 0
    body = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (body["base_model_name_or_path"], body["revision"]) == (str(tmp_path / "base"), None)
    assert {array.dtype for array in read_weights(tmp_path / "out").values()} == {np.dtype(ml_dtypes.bfloat16)}
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\nlibrary_name: peft\npipeline_tag: text-generation\nlicense: mit\nbase_model: ")
    assert "Adapters of 384 parameters in bfloat16 for" in card
    assert "Trained with llamajax for 7 steps on 320 tokens" in card
    assert export(run, tmp_path / "named", "--no-verify", "--base", "org/name") == 0
    assert base_of(tmp_path / "named") == "hf://org/name"

    snapshot = tmp_path / "models--org--name/snapshots/abc"
    shutil.copytree(tmp_path / "base", snapshot)
    write_run(tmp_path / "of_hub", open_pretrained(tmp_path / "peft"), snapshot)
    assert export(tmp_path / "of_hub", tmp_path / "hub", "--no-verify") == 0
    assert base_of(tmp_path / "hub") == "hf://org/name@abc"


def test_other_exports_are_refused(run, tmp_path, capsys):
    def refused(*arguments: object) -> str:
        assert export(*arguments, tmp_path / "out", "--no-verify") == 2
        assert not (tmp_path / "out").exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "is already a PEFT directory; --merge writes the whole model" in refused(tmp_path / "peft")
    assert "is already a Hugging Face directory" in refused(tmp_path / "base")
    assert "holds a whole model, and no adapters; leave it out" in refused(tmp_path / "base", "--merge")
    assert "--base: only adapters that are exported alone name their base" in refused(run, "--merge", "--base", "org/name")
    assert main(hf_arguments([str(tmp_path / "peft"), str(tmp_path / "out")])) == 2
    assert "holds adapters, which are used as they are" in capsys.readouterr().err
    assert main(hf_arguments([str(tmp_path / "base"), str(tmp_path / "imported"), "--no-verify"])) == 0
    capsys.readouterr()
    write_run(tmp_path / "above", open_pretrained(tmp_path / "peft"), tmp_path / "imported")
    assert "is a checkpoint, which peft cannot read; export that first" in refused(tmp_path / "above")
    assert export(tmp_path / "above", tmp_path / "merged", "--merge", "--no-verify") == 0
    assert export(run, tmp_path / "expected", "--merge", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "merged"), read_weights(tmp_path / "expected"))
    body = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps(body | {"rms_norm_eps": 0.5}))
    assert f"model.norm_eps: 1e-05 differs from {tmp_path / 'base'}; it must be 0.5" in refused(run)
    shutil.rmtree(tmp_path / "base")
    assert f"{tmp_path / 'base'}: there is no such directory" in refused(run)
