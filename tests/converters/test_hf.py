"""Hugging Face in, Hugging Face out: every tensor bit for bit, every logit, and nothing of what cannot be read whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import yaml
from jax.sharding import AxisType

from converters import blocks, hf
from converters.hf_cli import parse_args
from converters.hf_config import read_config, write_config
from converters.hf_tokenizer import convert_sentencepiece
from converters.safetensors_io import open_model
from llamajax.config import MeshConfig, ModelConfig, RopeScalingConfig
from llamajax.config_file import load_config
from llamajax.data.tokenizer import train_sentencepiece
from llamajax.mesh import AXES, make_mesh
from llamajax.model import Llama
from llamajax.restore import restore
from tests.front_door import MINIMAL

TINY = ModelConfig(
    vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8,
    max_seq_len=16384, init_std=0.2,
)  # fmt: skip
LLAMA3 = RopeScalingConfig(kind="llama3", factor=8.0, original_max_seq_len=8192)
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama1": {"norm_eps": 1e-6},
    "llama2-70b": {"num_heads": 8, "num_kv_heads": 2},
    "llama3": {"num_kv_heads": 2, "rope_theta": 5e5},
    "llama3.1": {"num_kv_heads": 1, "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "llama3.2": {"num_kv_heads": 2, "rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_embeddings": True},
    "linear-scaling": {"rope_scaling": RopeScalingConfig(kind="linear", factor=4.0)},
    "separate-head-dim": {"head_dim": 20, "num_kv_heads": 2},
}


def convert(*arguments: object) -> int:
    return hf.main(parse_args([str(argument) for argument in arguments]))


def tiny(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**vars(TINY), **changes})


def write_model(directory: Path, config: ModelConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """A model directory as others write it, of random weights, through the safetensors library; returns the weights."""
    rng = np.random.default_rng(0)
    D, F, H, kv = config.embed_dim, config.mlp_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "self_attn.q_proj": (H, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D), "self_attn.o_proj": (D, H),
        "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        "input_layernorm": (D,), "post_attention_layernorm": (D,),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (config.vocab_size, D), "model.norm": (D,)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    shapes |= {} if config.tie_embeddings else {"lm_head": (config.vocab_size, D)}
    weights = {f"{name}.weight": rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}
    directory.mkdir()
    safetensors.numpy.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    name = {np.dtype(np.float32): "float32", np.dtype(np.float16): "float16"}.get(np.dtype(dtype), "bfloat16")
    (directory / "config.json").write_text(json.dumps(write_config(config, SPECIAL, name)))
    return weights


def shard(directory: Path) -> None:
    """Turns the one file of a model directory into three with an index."""
    weights = safetensors.numpy.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(weights)
    files = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    for i, file in enumerate(files):
        safetensors.numpy.save_file({name: weights[name] for name in names[i::3]}, directory / file)
    index = {"metadata": {}, "weight_map": {name: files[i % 3] for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor, through the safetensors library."""
    files = directory.glob("*.safetensors")
    return {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}


def assert_same_bits(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


def our_logits(run_dir: Path, config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    config = ModelConfig(**{**vars(config), "compute_dtype": "float32", "remat": "none"})
    axes = (AxisType.Explicit,) * len(AXES)
    with jax.set_mesh(jax.make_mesh((1,) * len(AXES), AXES, axes, devices=jax.devices()[:1])):
        abstract = jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0))
        model = restore(run_dir, {"model": abstract}, partial=True).state["model"]
        return np.asarray(jax.jit(lambda model: model(tokens))(model))


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back_changes_no_bit(variant, dtype, sharded, tmp_path, monkeypatch):
    config = tiny(**VARIANTS[variant])
    weights = write_model(tmp_path / "hf", config, dtype)
    if sharded:
        shard(tmp_path / "hf")
        monkeypatch.setattr("converters.hf_export.MAX_SHARD_BYTES", 10_000)
        monkeypatch.setattr("converters.blocks._BLOCK_BYTES", 5_000)  # several blocks of every array
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "back", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "back"), weights)
    assert (
        len(list((tmp_path / "back").glob("*.safetensors"))) > 3
        if sharded
        else (tmp_path / "back/model.safetensors").exists()
    )
    if sharded:
        index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights.values())
        assert index["weight_map"].keys() == weights.keys()
    body = json.loads((tmp_path / "hf/config.json").read_text())
    assert json.loads((tmp_path / "back/config.json").read_text()) == body
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run", "back"}


def test_the_checkpoint_restores_onto_a_mesh_and_its_model_section_configures_a_run(tmp_path):
    weights = write_model(tmp_path / "hf", tiny(num_kv_heads=2, rope_scaling=LLAMA3), ml_dtypes.bfloat16)
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    body = yaml.safe_load(MINIMAL) | {"mesh": {"fsdp": 2, "tensor": 2, "data": 2}}
    body = json.loads(json.dumps(body)) | yaml.safe_load((tmp_path / "run/model.yaml").read_text())
    body["optimizer"]["learning_rate"] = 3e-4
    (tmp_path / "run.yaml").write_text(json.dumps(body))
    config = load_config(tmp_path / "run.yaml").model
    assert config == tiny(num_kv_heads=2, rope_scaling=LLAMA3, param_dtype="bfloat16")
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        abstract = jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0))
        model = restore(tmp_path / "run", {"model": abstract}, partial=True).state["model"]
        assert len(model.layers.attention.wqkv[...].sharding.device_set) == 8
    assert np.array_equal(model.embedding[...], weights["model.embed_tokens.weight"])


def test_dtypes_widen_exactly_and_round_only_on_request(tmp_path):
    weights = write_model(tmp_path / "hf", TINY, np.float16)
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "wide", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "narrow", "--dtype", "bfloat16", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "wide"), {name: array.astype(np.float32) for name, array in weights.items()})
    narrow = {name: array.astype(np.float32).astype(ml_dtypes.bfloat16) for name, array in weights.items()}
    assert_same_bits(read_weights(tmp_path / "narrow"), narrow)


def test_small_files_travel_and_lose_their_auto_map(tmp_path):
    write_model(tmp_path / "hf", TINY)
    kept = {"chat_template.jinja": "{{ messages }}", "LICENSE": "all rights", "generation_config.json": '{"top_p": 0.9}'}
    for name, text in kept.items():
        (tmp_path / "hf" / name).write_text(text)
    (tmp_path / "hf/tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "evil.Evil"}, "bos_token": "<s>"}')
    (tmp_path / "hf/evil.py").write_text("raise SystemExit")
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run/checkpoints/0", tmp_path / "back", "--no-verify") == 0
    assert {name: (tmp_path / "back" / name).read_text() for name in kept} == kept
    assert json.loads((tmp_path / "back/tokenizer_config.json").read_text()) == {"bos_token": "<s>"}
    assert not (tmp_path / "back/evil.py").exists()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_transformers_own_models(variant, tmp_path, capsys):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = tiny(**VARIANTS[variant])
    # Only what transformers 5 writes itself: no fields of transformers 4.
    old = ("rope_theta", "rope_scaling", "torch_dtype")
    fields = {key: value for key, value in write_config(config, SPECIAL, "float32").items() if key not in old}
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    theirs.save_pretrained(tmp_path / "hf")
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--verify") == 0
    found = capsys.readouterr().out.split("differ by at most ")[1].split()[0]
    assert float(found) < 1e-4
    assert convert("export", tmp_path / "run", tmp_path / "back", "--no-verify") == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 16), dtype=np.int32)
    with torch.no_grad():
        logits, again = (model(torch.from_numpy(tokens).long()).logits.numpy() for model in (theirs, back))
    assert np.array_equal(logits, again)
    np.testing.assert_allclose(our_logits(tmp_path / "run", config, tokens), logits, atol=1e-4, rtol=0)


def test_a_wrong_conversion_is_not_kept(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    write_model(tmp_path / "hf", TINY)

    def mistaken(body: dict[str, Any], *rest: Any) -> Any:
        return read_config({**body, "rms_norm_eps": 0.5}, *rest)

    monkeypatch.setattr("converters.hf_import.read_config", mistaken)
    assert convert("import", tmp_path / "hf", tmp_path / "run") == 65
    assert "logits of transformers differ from ours" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path, *, verb: str = "import", code: int = 2) -> str:
    """The line with which the conversion of `tmp_path / "hf"` is refused, after which nothing but it is there."""
    assert convert(verb, tmp_path / "hf", tmp_path / "out", "--no-verify") == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
    return error


CONFIG_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mistral"}, "model_type: mistral is not llama"),
    ({"hidden_act": "gelu"}, 'hidden_act: gelu is not supported; it must be "silu"'),
    ({"attention_bias": True}, "attention_bias: True is not supported"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": "32"}, "hidden_size: must be a positive whole number"),
    ({"num_key_value_heads": 3}, "num_kv_heads: 3 must divide num_heads=4"),
    ({"intermediate_size": 64}, "gate_proj.weight is [48, 32], but config.json asks for [64, 32]"),
    ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is missing, and 8 more"),
    ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight is no tensor of a Llama, and 8 more"),
    ({"num_hidden_layers": 2**30}, "describes"),
    ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ({"rope_theta": 5e5}, "rope_theta: 500000.0 contradicts rope_parameters.rope_theta, 10000.0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling: contradicts rope_parameters"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters.rope_type: yarn is not one of"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters.low_freq_factor: is missing"),
    ({"rope_parameters": {"rope_type": "default", "beta_fast": 2.0}}, "rope_parameters.beta_fast: has no meaning"),
    ({"eos_token_id": 96}, "eos_token_id: 96 must be below vocab_size=96"),
]


@pytest.mark.parametrize(("change", "message"), CONFIG_MISTAKES, ids=lambda value: str(value)[:40])
def test_config_that_is_not_read(change, message, tmp_path, capsys):
    write_model(tmp_path / "hf", TINY)
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in refuse(capsys, tmp_path)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, (10000.0, RopeScalingConfig())),
        ({"rope_theta": 500000}, (5e5, RopeScalingConfig())),
        ({"rope_theta": 1e4, "rope_scaling": None}, (1e4, RopeScalingConfig())),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, (1e4, RopeScalingConfig(kind="linear", factor=2.0))),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, (5e5, RopeScalingConfig())),
    ],
)
def test_every_way_to_write_rotary_settings(rope, expected):
    body = {key: value for key, value in write_config(TINY, SPECIAL, "float32").items() if not key.startswith("rope")}
    config, special = read_config(body | rope, Path("config.json"), "float32")
    assert (config.rope_theta, config.rope_scaling) == expected
    assert special == SPECIAL


def test_files_that_are_not_read(tmp_path, capsys):
    hf_dir, model = tmp_path / "hf", tmp_path / "hf/model.safetensors"
    write_model(hf_dir, TINY)
    whole = model.read_bytes()
    model.unlink()
    (hf_dir / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert "pickles can run code and are not read" in refuse(capsys, tmp_path)
    for damaged in (whole[:-1], whole + b"\0", whole[:100], b"", b"\xff" * 8 + whole):
        model.write_bytes(damaged)
        assert "model.safetensors: " in refuse(capsys, tmp_path)
    weights = safetensors.numpy.load(whole)
    safetensors.numpy.save_file(weights | {"model.norm.weight": np.zeros(32, np.int8)}, model)
    assert "model.norm.weight is stored as I8" in refuse(capsys, tmp_path)
    (hf_dir / "config.json").unlink()
    assert "config.json: No such file" in refuse(capsys, tmp_path)


def test_shards_that_do_not_agree_with_their_index(tmp_path, capsys):
    write_model(tmp_path / "hf", TINY)
    shard(tmp_path / "hf")
    index, second = tmp_path / "hf/model.safetensors.index.json", tmp_path / "hf/model-00002-of-00003.safetensors"
    text, weights = index.read_text(), safetensors.numpy.load_file(second)
    for place in ("../hf/model-00002-of-00003.safetensors", "/etc/passwd", "..", "x/y.safetensors", "a.bin"):
        index.write_text(text.replace(second.name, place))
        assert "must name a .safetensors file of this directory" in refuse(capsys, tmp_path)
    index.write_text(text.replace('"weight_map": {', '"weight_map": {"model.extra": "' + second.name + '", '))
    assert "model.extra of model.safetensors.index.json is missing" in refuse(capsys, tmp_path)
    index.write_text(text)
    safetensors.numpy.save_file(weights | {"lm_head.weight": np.zeros(1, np.float32)}, second)
    assert "lm_head.weight" in refuse(capsys, tmp_path)
    second.unlink()
    assert "No such file" in refuse(capsys, tmp_path)


def test_what_exists_is_not_overwritten(tmp_path, capsys):
    write_model(tmp_path / "hf", TINY)
    (tmp_path / "out").mkdir()
    assert convert("import", tmp_path / "hf", tmp_path / "out") == 2
    assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_checkpoints_that_are_not_exported(tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    assert "has no checkpoint" in refuse(capsys, tmp_path, verb="export", code=65)
    shutil.rmtree(tmp_path / "hf")
    write_model(tmp_path / "model", TINY)
    assert convert("import", tmp_path / "model", tmp_path / "hf", "--no-verify") == 0
    shutil.rmtree(tmp_path / "model")
    largest = max((tmp_path / "hf").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert convert("export", tmp_path / "hf/checkpoints/0", tmp_path / "out") == 65
    assert "does not match its SHA-256; choose another step" in capsys.readouterr().err
    assert convert("export", tmp_path / "hf/checkpoints/7", tmp_path / "out") == 65
    assert "there is no such checkpoint" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_a_step_that_its_run_deletes_meanwhile(tmp_path, capsys, monkeypatch):
    write_model(tmp_path / "model", TINY)
    assert convert("import", tmp_path / "model", tmp_path / "hf", "--no-verify") == 0
    shutil.rmtree(tmp_path / "model")

    def delete_first(step_dir: Path, name: str) -> blocks.StoredArray:
        shutil.rmtree(step_dir, ignore_errors=True)
        return blocks.open_array(step_dir, name)

    monkeypatch.setattr("converters.hf_export.open_array", delete_first)
    assert "was deleted by its run while it was read" in refuse(capsys, tmp_path, verb="export", code=65)


def test_what_old_files_hold_beside_the_weights(tmp_path):
    """Rotary frequencies, and a head that is the embedding table once more."""
    weights = write_model(tmp_path / "hf", tiny(tie_embeddings=True))
    more = {"lm_head.weight": weights["model.embed_tokens.weight"]}
    more |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for i in range(3)}
    safetensors.numpy.save_file(weights | more, tmp_path / "hf/model.safetensors")
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "back", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "back"), weights)


def test_mutated_directories(tmp_path, capsys):
    """A byte or a value changed somewhere: converted as it stands, or refused in one line; never a traceback."""
    rng = np.random.default_rng(0)
    write_model(tmp_path / "whole", tiny(num_layers=1, vocab_size=8, mlp_dim=8))
    shard(tmp_path / "whole")
    (tmp_path / "whole/generation_config.json").write_text('{"eos_token_id": [2, 3], "top_p": 0.9}')
    tokenizer = convert_sentencepiece(train_sentencepiece(["a b c d"], vocab_size=270))
    assert tokenizer is not None
    (tmp_path / "whole/tokenizer.json").write_bytes(tokenizer["tokenizer.json"])
    (tmp_path / "whole/tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    values = (None, -1, 0, 2**31, 10**30, 1e300, 0.5, True, "x", "", [], {}, [[]], {"a": 1}, [1, 2], "../x")
    refused = 0
    for trial in range(100):
        shutil.copytree(tmp_path / "whole", tmp_path / "hf")
        path = tmp_path / "hf" / names[trial % len(names)]
        data = bytearray(path.read_bytes())
        kind = "value" if path.suffix == ".json" and rng.random() < 0.6 else rng.choice(["byte", "cut", "insert"])
        if kind == "value":
            body = json.loads(data)
            place = body["weight_map"] if "weight_map" in body and rng.random() < 0.7 else body
            place[list(place)[rng.integers(len(place))]] = values[rng.integers(len(values))]
            data = bytearray(json.dumps(body).encode())
        elif kind == "byte":
            data[rng.integers(min(len(data), 600))] = rng.integers(256)
        elif kind == "cut":
            del data[rng.integers(len(data)) :]
        else:
            data[rng.integers(len(data)) : 0] = (
                b"[" * 5000 if rng.random() < 0.5 else bytes(rng.integers(0, 256, 20).tolist())
            )
        path.write_bytes(data)
        code = convert("import", tmp_path / "hf", tmp_path / "out", "--no-verify")
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert code in (0, 2), error
        if code:
            refused += 1
            assert error.count("\n") == 1, error
            assert {path.name for path in tmp_path.iterdir()} == {"hf", "whole"}
        else:
            assert open_model(tmp_path / "hf")
            shutil.rmtree(tmp_path / "out")
        shutil.rmtree(tmp_path / "hf")
    assert 50 < refused < 100
