"""Hugging Face in, Hugging Face out: every tensor bit for bit, every logit, and nothing of what cannot be read whole."""

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
import yaml

from converters import blocks
from converters.arguments import hf_arguments
from llamajax.checkpoint.read import restore
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.file import load_config
from llamajax.config.hf_config import hf_config_of, read_hf_config
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import CheckpointConfig
from llamajax.model import Llama
from llamajax.parallel.mesh import make_mesh
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_directory, open_pretrained
from tests.converters.models import (
    LLAMA3,
    SPECIAL,
    TINY,
    VARIANTS,
    WITHOUT_CLASS,
    assert_same_bits,
    convert,
    read_weights,
    refuse,
    shard,
    tiny,
    write_model,
)
from tests.front_door import MINIMAL
from tests.tiny import single_device_mesh


def greedy(model_dir: Path, prompt: np.ndarray, num_tokens: int) -> np.ndarray:
    """The likeliest continuation of a prompt [1, T], every token from a forward pass over the whole row."""
    length = prompt.shape[1]
    row = np.zeros((1, length + num_tokens), np.int32)
    row[:, :length] = prompt
    with jax.set_mesh(single_device_mesh()):
        found = open_pretrained(model_dir)
        model = load_model(found, dataclasses.replace(found.config, compute_dtype="float32", remat="none"))
        logits = jax.jit(lambda model, tokens: model(tokens))
        for at in range(length, row.shape[1]):
            row[:, at] = np.argmax(logits(model, row)[:, at - 1], axis=-1)
    return row


FP32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "sharded"),
    [
        (FP32, False),
        (BF16, True),
        pytest.param(FP32, True, marks=pytest.mark.long),
        pytest.param(BF16, False, marks=pytest.mark.long),
    ],
    ids=["fp32-single", "bf16-sharded", "fp32-sharded", "bf16-single"],
)
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=SLOW) if name in ("qwen3-moe", "olmoe", "deepseek") else name for name in VARIANTS]
)
def test_there_and_back_changes_no_bit(variant, dtype, sharded, tmp_path, monkeypatch):
    config = tiny(**VARIANTS[variant])
    weights = write_model(tmp_path / "hf", config, dtype)
    if sharded:
        shard(tmp_path / "hf")
        monkeypatch.setattr("converters.hf_export.MAX_SHARD_BYTES", 10_000)
        monkeypatch.setattr("converters.blocks.BLOCK_BYTES", 5_000)  # several blocks of every layer
        monkeypatch.setattr("converters.hf_export.PIECE_BYTES", 3_000)  # some of which are read tensor by tensor
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
    assert config == tiny(num_kv_heads=2, rope_scaling=LLAMA3)  # to train on: master weights in float32
    config = dataclasses.replace(config, param_dtype="bfloat16")
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        abstract = jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0))
        model = restore(tmp_path / "run", {"model": abstract}, partial=True).state["model"]
        assert len(model.layers.attention.wqkv[...].sharding.device_set) == 8
    assert np.array_equal(model.embedding[...], weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("many_bytes", [0, 2**40], ids=["layer-by-layer", "all-layers"])
def test_a_run_on_eight_devices_is_exported_in_pieces(many_bytes, tmp_path, monkeypatch):
    """As training stores it now, and as it did before."""
    config = tiny(num_heads=8, num_kv_heads=4, qkv_bias=True)
    weights = write_model(tmp_path / "model", config)
    jax.set_mesh(make_mesh(MeshConfig(fsdp=4, tensor=2)))
    monkeypatch.setattr("llamajax.checkpoint.array_writer._MANY_BYTES", many_bytes)
    state = {"model": load_model(open_pretrained(tmp_path / "model"), config)}
    with Checkpointer(tmp_path / "run", CheckpointConfig(async_save=False)) as checkpointer:
        checkpointer.save(3, state, {"config": {"model": dataclasses.asdict(config)}})
    stored = blocks.open_array(tmp_path / "run/checkpoints/3", "model.layers.mlp.w_down")
    assert stored.block_shape == (3 if many_bytes else 1, 8, 24)
    monkeypatch.setattr("converters.hf_export.PIECE_BYTES", 5_000)
    assert convert("export", tmp_path / "run", tmp_path / "hf", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "hf"), weights)


def test_a_run_whose_heads_and_vocabulary_do_not_divide_is_exported_as_it_came(tmp_path):
    config = tiny(num_heads=8, num_kv_heads=2, vocab_size=61, qkv_bias=True)
    weights = write_model(tmp_path / "model", config)
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, tensor=4)))
    model = load_model(open_pretrained(tmp_path / "model"), config)
    assert model.embedding[...].sharding.shard_shape((61, 32)) == (61, 4)
    with Checkpointer(tmp_path / "run", CheckpointConfig(async_save=False)) as checkpointer:
        checkpointer.save(3, {"model": model}, {"config": {"model": dataclasses.asdict(config)}})
    assert convert("export", tmp_path / "run", tmp_path / "hf", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "hf"), weights)


def test_a_checkpoint_of_another_layout_is_refused(tmp_path, capfd):
    write_model(tmp_path / "model", TINY)
    state = {"model": load_model(open_pretrained(tmp_path / "model"), TINY)}
    other = dataclasses.asdict(dataclasses.replace(TINY, mlp_dim=2 * TINY.mlp_dim))
    with Checkpointer(tmp_path / "run", CheckpointConfig(async_save=False)) as checkpointer:
        checkpointer.save(3, state, {"config": {"model": other}})
    assert convert("export", tmp_path / "run", tmp_path / "hf") == 65
    assert "has no model.layers.mlp.w_down of shape" in capfd.readouterr().err


def test_dtypes_widen_exactly_and_round_only_on_request(tmp_path):
    weights = write_model(tmp_path / "hf", TINY, np.float16)
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "back", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "wide", "--dtype", "float32", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "narrow", "--dtype", "bfloat16", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "back"), weights)
    assert_same_bits(read_weights(tmp_path / "wide"), {name: array.astype(np.float32) for name, array in weights.items()})
    narrow = {name: array.astype(np.float32).astype(ml_dtypes.bfloat16) for name, array in weights.items()}
    assert_same_bits(read_weights(tmp_path / "narrow"), narrow)


def test_float16_and_what_does_not_fit_it(tmp_path, capsys):
    weights = write_model(tmp_path / "model", TINY)
    assert convert("import", tmp_path / "model", tmp_path / "hf", "--no-verify") == 0
    assert convert("export", tmp_path / "hf", tmp_path / "half", "--dtype", "float16", "--no-verify") == 0
    assert_same_bits(read_weights(tmp_path / "half"), {name: array.astype(np.float16) for name, array in weights.items()})
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "float16"
    for name in ("model", "hf", "half"):
        shutil.rmtree(tmp_path / name)
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = 7e4
    (tmp_path / "model").mkdir()
    safetensors.numpy.save_file(weights, tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text(json.dumps(hf_config_of(TINY, SPECIAL, "float32")))
    assert convert("import", tmp_path / "model", tmp_path / "hf", "--no-verify") == 0
    shutil.rmtree(tmp_path / "model")
    error = refuse(capsys, tmp_path, "--dtype", "float16", verb="export")
    assert "model.layers.1.mlp.up_proj.weight has a weight 7e+04, above float16's maximum 65504" in error


def test_the_command_line(capsys):
    assert hf_arguments(["a", "b"]) == hf_arguments(["import", "a", "b"])
    assert hf_arguments(["--dtype", "bfloat16", "a", "b"]).dtype == "bfloat16"
    assert hf_arguments(["export", "a", "b", "--license", "llama3.1"]).license == "llama3.1"
    for wrong in ([], ["a"], ["a", "b", "--dtype", "float16"], ["export", "a", "b", "--license", "a b"]):
        with pytest.raises(SystemExit) as error:
            hf_arguments(wrong)
        assert error.value.code == 2
    assert "is not a licence identifier; write one such as apache-2.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("beside", "options", "expected"),
    [
        ({}, [], 'base_model: "llama"\ntags:'),
        ({"README.md": "---\ntags: [x]\nlicense: 'mit'\n---\nlicense: none"}, [], "license: mit\nbase_model"),
        ({"README.md": "license: mit", "LICENSE.txt": "all"}, [], "license: other\nlicense_link: LICENSE.txt\n"),
        ({"README.md": "---\nlicense: mit\n---\n"}, ["--license", "apache-2.0"], "license: apache-2.0\n"),
    ],
)
def test_the_model_card_tells_what_is_known(beside, options, expected, tmp_path):
    write_model(tmp_path / "llama", TINY)
    for name, text in beside.items():
        (tmp_path / "llama" / name).write_text(text)
    assert convert(tmp_path / "llama", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "hf", "--no-verify", *options) == 0
    card = (tmp_path / "hf/README.md").read_text()
    assert expected in card
    assert "A Llama with 32,480 parameters in float32" in card
    assert "Written by llamajax at step 0; started from llama." in card


def test_a_model_in_the_cache_of_downloads_is_told_by_its_name(tmp_path):
    (tmp_path / "models--meta-llama--Llama-3.2-1B/snapshots").mkdir(parents=True)
    snapshot = tmp_path / "models--meta-llama--Llama-3.2-1B/snapshots/4e20de"
    write_model(snapshot, TINY)
    assert (open_directory(snapshot).hf or {})["source"] == "meta-llama/Llama-3.2-1B"


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


def test_a_mistral_without_a_window_stays_one(tmp_path):
    write_model(tmp_path / "hf", tiny(num_kv_heads=2))
    body = json.loads((tmp_path / "hf/config.json").read_text())
    body |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    (tmp_path / "hf/config.json").write_text(json.dumps(body))
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "back", "--no-verify") == 0
    back = json.loads((tmp_path / "back/config.json").read_text())
    for key in ("model_type", "architectures", "sliding_window"):
        assert back[key] == body[key]
    with jax.set_mesh(single_device_mesh()):
        assert "Hugging Face Mistral" in open_pretrained(tmp_path / "hf").about


def test_heads_that_do_not_divide_the_width(tmp_path, capsys):
    """transformers 5 refuses a Llama of this shape, and takes a Mistral, which computes the same."""
    pytest.importorskip("torch")
    weights = write_model(tmp_path / "hf", tiny(embed_dim=36, num_heads=8, num_kv_heads=2, head_dim=8))
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "mistral"
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--no-verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "back") == 0
    assert "differ by at most" in capsys.readouterr().out
    assert_same_bits(read_weights(tmp_path / "back"), weights)


@pytest.mark.parametrize(("variant", "odd"), [("llama1", {"rms_norm_eps": 1}), ("mistral", {"num_key_value_heads": None})])
def test_what_transformers_refuses_is_told_in_a_line(variant, odd, tmp_path, capsys):
    pytest.importorskip("torch")
    write_model(tmp_path / "hf", tiny(**VARIANTS[variant] | {"num_kv_heads": 4}))
    body = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(body | odd))
    assert convert("import", tmp_path / "hf", tmp_path / "run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert f"cannot read it, and nothing was compared: Validation error for field '{next(iter(odd))}'" in error
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


IN_TRANSFORMERS = ("linear-scaling", "llama3.2", "mistral", "qwen2-window", "qwen3")
WITH_SCORES = tuple(name for name in VARIANTS if VARIANTS[name].get("head") == "score")


@pytest.mark.parametrize(
    "variant",
    [
        name if name in IN_TRANSFORMERS else pytest.param(name, marks=SLOW)
        for name in VARIANTS
        if name not in (*WITH_SCORES, *WITHOUT_CLASS)
    ],
)
def test_logits_of_transformers_own_models(variant, tmp_path, capsys):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = tiny(**VARIANTS[variant])
    # Only what transformers 5 writes itself: no fields of transformers 4.
    old = ("rope_theta", "rope_scaling", "torch_dtype")
    fields = {key: value for key, value in hf_config_of(config, SPECIAL, "float32").items() if key not in old}
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields)).eval()
    for name, parameter in theirs.named_parameters():  # which transformers begins as zeros and ones
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    theirs.save_pretrained(tmp_path / "hf")
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--verify") == 0
    found = capsys.readouterr().out.split("differ by at most ")[1].split()[0]
    assert float(found) < 1e-4
    assert convert("export", tmp_path / "run", tmp_path / "back", "--no-verify") == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(theirs)
    prompt = np.random.default_rng(0).integers(4, config.vocab_size, (1, 12), dtype=np.int32)
    with torch.no_grad():
        logits, again = (model(torch.from_numpy(prompt).long()).logits for model in (theirs, back))
    assert torch.equal(logits, again)
    if variant in IN_TRANSFORMERS[1:]:
        ids = torch.from_numpy(prompt).long()
        text = back.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=0)
        written = greedy(tmp_path / "back", prompt, 12)[:, : text.shape[1]]
        assert written.tolist() == text.tolist()


@pytest.mark.slow
def test_a_deepseek_computes_what_its_layers_say(tmp_path, capsys):
    """transformers has no class of it. A Qwen2-MoE is one whose shared expert's gate, of zeros, halves what is doubled."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = tiny(**VARIANTS["deepseek"])
    weights = write_model(tmp_path / "hf", config)
    body = json.loads((tmp_path / "hf/config.json").read_text())
    like = {"model_type": "qwen2_moe", "qkv_bias": False, "num_experts": 4, "mlp_only_layers": [0]}
    like |= {"shared_expert_intermediate_size": 32, "architectures": ["Qwen2MoeForCausalLM"]}
    small = np.float32(0.2)
    weights = {name.replace("shared_experts", "shared_expert"): small * values for name, values in weights.items()}
    safetensors.numpy.save_file(
        {name.replace("shared_expert", "shared_experts"): values for name, values in weights.items()},
        tmp_path / "hf/model.safetensors",
    )
    for layer in range(1, config.num_layers):
        mlp = f"model.layers.{layer}.mlp"
        weights[f"{mlp}.shared_expert.down_proj.weight"] *= 2
        weights[f"{mlp}.shared_expert_gate.weight"] = np.zeros((1, config.embed_dim), np.float32)
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text(json.dumps(body | like))
    safetensors.numpy.save_file(weights, tmp_path / "like/model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "like").eval()
    tokens = np.random.default_rng(0).integers(4, config.vocab_size, (2, 12), dtype=np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    with jax.set_mesh(single_device_mesh()):
        model = load_model(open_pretrained(tmp_path / "hf"), dataclasses.replace(config, compute_dtype="float32"))
        logits = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens))
    assert np.std(expected) > 0.2
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    assert convert("import", tmp_path / "hf", tmp_path / "run") == 0
    assert "skipped: transformers has no class of its own for Deepseek" in capsys.readouterr().out


@pytest.mark.parametrize("variant", [WITH_SCORES[0], *(pytest.param(name, marks=SLOW) for name in WITH_SCORES[1:])])
def test_scores_of_transformers_own_models(variant, tmp_path, capsys):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = tiny(**VARIANTS[variant])
    special, tokens = SPECIAL | {"pad_token_id": 0}, np.random.default_rng(0).integers(4, config.vocab_size, (3, 12))
    lengths = (5, 12, 9)
    for row, length in zip(tokens, lengths, strict=True):
        row[length:] = 0
    torch.manual_seed(0)
    known = transformers.AutoConfig.for_model(**hf_config_of(config, special, "float32"))
    theirs = transformers.AutoModelForSequenceClassification.from_config(known).eval()
    theirs.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens), attention_mask=torch.from_numpy(tokens != 0).long()).logits.numpy()
    assert convert("import", tmp_path / "hf", tmp_path / "run", "--verify") == 0
    assert convert("export", tmp_path / "run", tmp_path / "back", "--verify") == 0
    assert capsys.readouterr().out.count("differ by at most ") == 2
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "back")
    assert type(back) is type(theirs)
    assert back.config.num_labels == 1
    assert json.loads((tmp_path / "hf/config.json").read_text())["id2label"] == {"0": "LABEL_0"}
    for name, weight in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    for source in ("hf", "run"):
        with jax.set_mesh(single_device_mesh()):
            found = open_pretrained(tmp_path / source)
            model = load_model(found, dataclasses.replace(found.config, compute_dtype="float32", remat="none"))
            scores = np.asarray(jax.jit(lambda model, tokens: model(tokens))(model, tokens.astype(np.int32)))
        ours = [scores[row, length - 1] for row, length in enumerate(lengths)]
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "id2label: has 2 labels; only models with a single score are supported"),
        ({"id2label": None, "num_labels": 3}, "id2label: has 3 labels"),
        ({"architectures": ["LlamaForTokenClassification"]}, 'must be ["LlamaForCausalLM"] or ["LlamaForSequenceClass'),
    ],
)
def test_other_classifiers_are_refused(change, message, tmp_path, capsys):
    write_model(tmp_path / "hf", tiny(head="score"))
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in refuse(capsys, tmp_path)


def test_a_wrong_conversion_is_not_kept(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    write_model(tmp_path / "hf", TINY)

    def mistaken(body: dict[str, Any], *rest: Any) -> Any:
        return read_hf_config({**body, "rms_norm_eps": 0.5}, *rest)

    monkeypatch.setattr("llamajax.weights.open_model.read_hf_config", mistaken)
    assert convert("import", tmp_path / "hf", tmp_path / "run") == 65
    assert "logits of transformers differ from ours" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_exists_is_not_overwritten(tmp_path, capsys):
    write_model(tmp_path / "hf", TINY)
    (tmp_path / "out").mkdir()
    assert convert("import", tmp_path / "hf", tmp_path / "out") == 2
    assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_checkpoints_that_are_not_exported(tmp_path, capsys):
    (tmp_path / "hf").mkdir()
    assert "has neither checkpoints/, as a run has" in refuse(capsys, tmp_path, verb="export")
    (tmp_path / "hf/checkpoints").mkdir()
    assert "has no checkpoint" in refuse(capsys, tmp_path, verb="export", code=65)
    shutil.rmtree(tmp_path / "hf")
    write_model(tmp_path / "model", TINY)
    assert convert("export", tmp_path / "model", tmp_path / "out") == 2
    assert "is already a Hugging Face directory" in capsys.readouterr().err
    assert convert("import", tmp_path / "model", tmp_path / "hf", "--no-verify") == 0
    shutil.rmtree(tmp_path / "model")
    largest = max((tmp_path / "hf/checkpoints/0/state").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert convert("export", tmp_path / "hf/checkpoints/0", tmp_path / "out") == 65
    assert "does not match its SHA-256; choose another step" in capsys.readouterr().err
    assert convert("export", tmp_path / "hf/checkpoints/7", tmp_path / "out") == 2
    assert "there is no such directory" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_a_step_that_its_run_deletes_meanwhile(tmp_path, capsys, monkeypatch):
    write_model(tmp_path / "model", TINY)
    assert convert("import", tmp_path / "model", tmp_path / "hf", "--no-verify") == 0
    shutil.rmtree(tmp_path / "model")

    def delete_first(step_dir: Path, name: str) -> blocks.StoredArray:
        shutil.rmtree(step_dir, ignore_errors=True)
        return blocks.open_array(step_dir, name)

    monkeypatch.setattr("converters.copying.open_array", delete_first)
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
