"""Weights of any kind, read onto any mesh: the same bits everywhere, and one clear line for what is no model."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from converters import convert
from converters.arguments import hf_arguments
from llamajax.checkpoint import manifest
from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.experts import ExpertsConfig
from llamajax.config.generate import GenerateConfig
from llamajax.config.model import ModelConfig, RopeScalingConfig
from llamajax.config.parallel import MeshConfig
from llamajax.data.tokenizers.tokenizer import train_sentencepiece
from llamajax.errors import CheckpointError, ConfigError, DataError
from llamajax.evaluation import run as evaluate
from llamajax.generation import run as generate
from llamajax.model import Llama
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.mesh import make_mesh
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from tests.converters.models import LLAMA3, SPECIAL, TINY, shard, write_model
from tests.tiny import single_device_mesh

CONFIG = dataclasses.replace(TINY, num_heads=8, num_kv_heads=4, rope_scaling=LLAMA3)
MESHES = {
    "one": single_device_mesh,
    "fsdp": lambda: make_mesh(MeshConfig(fsdp=8)),
    "all": lambda: make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)),
}
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(scope="module", params=DTYPES)
def sources(request, tmp_path_factory) -> dict[str, Path]:
    """The same weights of one type as a Hugging Face directory, an imported one, and its checkpoint."""
    directory = tmp_path_factory.mktemp(request.param)
    write_model(directory / "hf", CONFIG, DTYPES[request.param])
    shard(directory / "hf")
    assert convert.main(hf_arguments(["import", str(directory / "hf"), str(directory / "run"), "--no-verify"])) == 0
    return {"hf": directory / "hf", "run": directory / "run", "step": directory / "run/checkpoints/0"}


def expected_arrays(directory: Path, config: ModelConfig) -> dict[str, np.ndarray]:
    """Our arrays, put together plainly from what the safetensors library reads."""
    weights = {
        name: array.astype(config.param_dtype)
        for file in directory.glob("*.safetensors")
        for name, array in safetensors.numpy.load_file(file).items()
    }
    K, H, D = config.num_kv_heads, config.head_dim, config.embed_dim

    def layers(name: str) -> np.ndarray:
        return np.stack([weights[f"model.layers.{i}.{name}.weight"] for i in range(config.num_layers)])

    def heads(name: str) -> np.ndarray:
        return np.moveaxis(layers(f"self_attn.{name}_proj").reshape(config.num_layers, K, -1, H, D), -1, 1)

    return {
        "model.embedding": weights["model.embed_tokens.weight"],
        "model.layers.attention_norm.scale": layers("input_layernorm"),
        "model.layers.attention.wqkv": np.concatenate([heads("q"), heads("k"), heads("v")], axis=3),
        "model.layers.attention.wo": layers("self_attn.o_proj").reshape(config.num_layers, D, K, -1, H),
        "model.layers.mlp_norm.scale": layers("post_attention_layernorm"),
        "model.layers.mlp.w_gate_up": np.stack([layers("mlp.gate_proj"), layers("mlp.up_proj")], 1).transpose(0, 3, 1, 2),
        "model.layers.mlp.w_down": layers("mlp.down_proj"),
        "model.final_norm.scale": weights["model.norm.weight"],
        "model.head": weights["lm_head.weight"],
    }


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["hf", "run"])
def test_the_same_bits_on_every_mesh(kind, mesh, sources):
    with jax.set_mesh(MESHES[mesh]()):
        found = open_pretrained(sources[kind])
        dtype = found.config.param_dtype
        if mesh == "all":  # and cast
            dtype = "float32" if dtype == "bfloat16" else "bfloat16"
        config = dataclasses.replace(found.config, param_dtype=dtype, max_seq_len=8, rope_scaling=RopeScalingConfig())
        arrays = named_arrays({"model": load_model(found, config)})
        expected = expected_arrays(sources["hf"], config)
        assert arrays.keys() == expected.keys()
        for name, array in expected.items():
            assert arrays[name].dtype == array.dtype
            assert np.asarray(arrays[name]).tobytes() == array.tobytes(), name


def test_what_is_loaded_has_the_sharding_of_a_fresh_model_and_may_be_donated(tmp_path):
    write_model(tmp_path / "hf", CONFIG)
    jax.set_mesh(MESHES["all"]())
    found = open_pretrained(tmp_path / "hf")
    model = load_model(found, found.config)
    fresh = jax.jit(Llama, static_argnums=0)(found.config, jax.random.key(0))
    assert jax.tree.structure(model) == jax.tree.structure(fresh)
    for array, other in zip(jax.tree.leaves(model), jax.tree.leaves(fresh), strict=True):
        assert array.sharding.is_equivalent_to(other.sharding, array.ndim)
    doubled = jax.jit(lambda model: jax.tree.map(lambda array: 2 * array, model), donate_argnums=0)(model)
    assert np.array_equal(doubled.embedding[...], 2 * expected_arrays(tmp_path / "hf", found.config)["model.embedding"])


def test_what_is_told_of_a_model(sources):
    for kind, about in {"hf": "Hugging Face Llama", "run": "run/checkpoints/0", "step": "run/checkpoints/0"}.items():
        found = open_pretrained(sources[kind])
        assert found.source == (sources["hf"] if kind == "hf" else sources["step"])
        assert about in found.about
        assert "\n" not in found.about
        stored = found.config.param_dtype
        assert found.config == dataclasses.replace(CONFIG, param_dtype=stored, compute_dtype=stored)
        assert found.special_tokens() == SPECIAL
        with pytest.raises(DataError, match="has no tokenizer"):
            found.tokenizer()


def test_tokens_that_end_a_text_are_those_of_both_configurations_everywhere(tmp_path):
    write_model(tmp_path / "hf", CONFIG)
    (tmp_path / "hf/generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert convert.main(hf_arguments(["import", str(tmp_path / "hf"), str(tmp_path / "run"), "--no-verify"])) == 0
    assert convert.main(hf_arguments(["export", str(tmp_path / "run"), str(tmp_path / "back"), "--no-verify"])) == 0
    for kind in ("hf", "run", "back"):
        assert open_pretrained(tmp_path / kind).ends() == (2, 3, 7)
        assert open_pretrained(tmp_path / kind).special_tokens() == SPECIAL
    (tmp_path / "hf/generation_config.json").write_text('{"eos_token_id": 96}')
    with pytest.raises(ConfigError, match=r"generation_config.json: eos_token_id: 96 must be below vocab_size=96"):
        open_pretrained(tmp_path / "hf")


def test_weights_that_are_no_numbers_are_not_loaded(tmp_path):
    weights = write_model(tmp_path / "hf", CONFIG)
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = np.nan
    safetensors.numpy.save_file(weights, tmp_path / "hf/model.safetensors", {"format": "pt"})
    found = open_pretrained(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"hf: model.layers.mlp.w_down holds values that are not finite"):
        load_model(found, found.config)


def test_generate_and_evaluate_compute_in_the_same_type(sources):
    for found in map(open_pretrained, sources.values()):
        assert evaluate.choose_types(EvaluateConfig(model="m"), found.config) == found.config
        assert generate.choose_types(GenerateConfig(model="m", prompt=("p",)), found.config) == found.config


def test_the_tokenizer_comes_along(tmp_path):
    write_model(tmp_path / "hf", dataclasses.replace(CONFIG, vocab_size=300))
    (tmp_path / "hf/tokenizer.model").write_bytes(train_sentencepiece(["a b c d"], vocab_size=270))
    assert convert.main(hf_arguments(["import", str(tmp_path / "hf"), str(tmp_path / "run"), "--no-verify"])) == 0
    tokenizers = [open_pretrained(tmp_path / kind).tokenizer() for kind in ("hf", "run")]
    assert tokenizers[0].sha256 == tokenizers[1].sha256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 5e5}, "model.rope_theta: 500000.0 differs from .*; it must be 10000.0"),
        (
            {"num_layers": 2, "norm_eps": 1.0},
            "model.num_layers: 2 differs from .*; it must be 3\nmodel.norm_eps: 1.0 differs",
        ),
        ({"tie_embeddings": True}, "model.tie_embeddings: True differs from"),
        (
            {"rope_scaling": RopeScalingConfig()},
            "model.rope_scaling: {'kind': 'none'.*, or init_changes must name rope_scaling",
        ),
        ({"max_seq_len": 8, "rope_theta": 1e6}, "^model.rope_theta: 1000000.0 differs from [^\n]*$"),
    ],
)
def test_a_configuration_of_another_model(change, message, sources):
    found = open_pretrained(sources["hf"])
    with pytest.raises(ConfigError, match=message):
        found.check(dataclasses.replace(found.config, **change))


def test_a_run_changes_the_model_only_by_name_and_says_so(sources):
    found = open_pretrained(sources["hf"])
    longer = dataclasses.replace(found.config, max_seq_len=65536, rope_theta=5e5, remat="none")
    found.check(longer, ("rope_theta",))
    assert found.changed_by(longer) == (
        "; model.max_seq_len 65536 instead of 16384; model.rope_theta 500000.0 instead of 10000.0"
    )
    assert not found.changed_by(found.config)


def test_a_run_trains_experts_in_its_own_way(tmp_path):
    own = ExpertsConfig(num_experts=4, top_k=1)
    write_model(tmp_path / "hf", dataclasses.replace(CONFIG, experts=own))
    jax.set_mesh(single_device_mesh())
    found = open_pretrained(tmp_path / "hf")
    width = found.config.mlp_dim
    mine = dataclasses.replace(own, mlp_dim=width, balance_loss=0.01, capacity_factor=1.5, kernel="plain")
    found.check(dataclasses.replace(found.config, experts=mine))
    told = found.changed_by(dataclasses.replace(found.config, experts=mine))
    assert "; model.experts.balance_loss 0.01 instead of 0.0" in told
    assert "mlp_dim" not in told
    wrong = dataclasses.replace(found.config, experts=dataclasses.replace(own, top_k=2))
    with pytest.raises(ConfigError, match=r"model\.experts\.top_k: 2 differs from .*; it must be 1"):
        found.check(wrong)


def test_a_directory_with_a_run_and_a_hugging_face_model_is_neither(tmp_path, sources):
    shutil.copytree(sources["hf"], tmp_path / "both")
    shutil.copytree(sources["run"] / "checkpoints", tmp_path / "both/checkpoints")
    with pytest.raises(ConfigError, match=r"both: holds both a run's checkpoints/ and .* config.json; give .*/STEP"):
        open_pretrained(tmp_path / "both")
    assert open_pretrained(tmp_path / "both/checkpoints/0").tensors is None


def test_what_is_no_model(tmp_path, sources):
    cases = {
        tmp_path / "nowhere": "there is no such directory",
        tmp_path: "has neither checkpoints/, as a run has, nor config.json",
        sources["run"] / "checkpoints/7": "there is no such directory",
        sources["run"] / "checkpoints": "has neither checkpoints/",
        sources["hf"] / "config.json": "there is no such directory",
    }
    for path, message in cases.items():
        with pytest.raises(ConfigError, match=message) as error:
            open_pretrained(path)
        assert "\n" not in str(error.value)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        open_pretrained(tmp_path)


def test_damage_is_found_before_anything_is_believed(tmp_path, sources, capsys):
    shutil.copytree(sources["run"], tmp_path / "run")
    steps = tmp_path / "run/checkpoints"
    shutil.copytree(steps / "0", steps / "5")
    largest = max((steps / "5/state").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CheckpointError, match="SHA-256; choose another step"):
        open_pretrained(steps / "5")
    assert open_pretrained(tmp_path / "run").source == steps / "0"
    assert "5 is damaged" in capsys.readouterr().err
    found = open_pretrained(steps / "0")
    shutil.rmtree(steps / "0")
    with pytest.raises(CheckpointError, match="was deleted by its run while it was read"):
        load_model(found, found.config)


def rewritten(run: Path, step_dir: Path, **model) -> Path:
    """A copy of the run's only step, with other settings of its model."""
    shutil.copytree(run, step_dir.parents[1])
    meta = json.loads((step_dir / "meta.json").read_text())
    meta["config"]["model"] |= model
    (step_dir / "meta.json").write_text(json.dumps(meta))
    (step_dir / "manifest.json").unlink()
    manifest.write(step_dir, manifest.records_of(step_dir, manifest.list_files(step_dir)))
    return step_dir


def test_a_checkpoint_of_another_versions_model(tmp_path, sources):
    step = rewritten(sources["run"], tmp_path / "run/checkpoints/0", num_experts=8)
    with pytest.raises(CheckpointError, match="holds a model of another llamajax version"):
        open_pretrained(step)


def test_the_kernel_belongs_to_the_machine_that_trained(tmp_path, sources):
    step = rewritten(sources["run"], tmp_path / "run/checkpoints/0", attention_kernel="cudnn")
    assert open_pretrained(step).config == open_pretrained(sources["step"]).config
