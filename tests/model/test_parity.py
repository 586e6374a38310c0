"""Logits and every gradient equal those of transformers' own models, on random weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.experts import ExpertsConfig
from llamajax.config.model import ModelConfig, RopeScalingConfig
from llamajax.config.parallel import MeshConfig
from llamajax.model import Llama
from llamajax.model.experts import Experts
from llamajax.parallel import mesh
from llamajax.parallel.zero import PreparedWeights
from llamajax.step.batch import IGNORE
from llamajax.step.loss import loss_fn
from tests.tiny import single_device_mesh

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = ModelConfig(
    vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=8,
    compute_dtype="float32", remat="none",
)  # fmt: skip


def _stretched(factor: float = 8.0, original_max_seq_len: int = 8192) -> RopeScalingConfig:
    return RopeScalingConfig(kind="llama3", factor=factor, original_max_seq_len=original_max_seq_len)


VARIANTS = {
    "llama1": {"norm_eps": 1e-6},
    "llama2-7b": {},
    "llama2-70b": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 4},
    "llama3": {"num_kv_heads": 2, "rope_theta": 5e5},
    "llama3.1": {"num_kv_heads": 2, "rope_theta": 5e5, "rope_scaling": _stretched(), "head_dim": 16, "embed_dim": 64},
    "llama3.1-short": {"num_kv_heads": 2, "rope_scaling": _stretched(original_max_seq_len=64)},
    "llama3.2": {"num_kv_heads": 1, "rope_theta": 5e5, "rope_scaling": _stretched(factor=32.0), "tie_embeddings": True},
    "llama3.3": {"num_heads": 8, "num_kv_heads": 1, "head_dim": 4, "rope_theta": 5e5, "rope_scaling": _stretched()},
    "linear-scaling": {"rope_scaling": RopeScalingConfig(kind="linear", factor=4.0)},
    "separate-head-dim": {"head_dim": 20, "num_kv_heads": 2},
    "yarn": {
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e6,
        "rope_scaling": RopeScalingConfig(kind="yarn", factor=4.0, original_max_seq_len=32768),
    },
    "dynamic": {"rope_scaling": RopeScalingConfig(kind="dynamic", factor=4.0, original_max_seq_len=131072)},
    "biases": {"num_kv_heads": 2, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen3-biases": {"qk_norm": True, "qkv_bias": True, "output_bias": True},
    "mistral": {"num_kv_heads": 2, "sliding_window": 5},
    "mistral-narrowest": {"sliding_window": 1},
    "qwen2": {"num_kv_heads": 2, "qkv_bias": True, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen2-tied": {"qkv_bias": True, "tie_embeddings": True},
    "qwen2-turns": {
        "num_kv_heads": 2,
        "qkv_bias": True,
        "num_layers": 3,
        "sliding_window": 4,
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "qwen3": {"num_kv_heads": 2, "qk_norm": True, "head_dim": 16, "rope_theta": 1e6, "norm_eps": 1e-6},
    "qwen3-tied": {"qk_norm": True, "tie_embeddings": True},
    "qwen3-upper": {"qk_norm": True, "sliding_window": 3, "layer_types": ("full_attention", "sliding_attention")},
    "mixtral": {"num_kv_heads": 2, "sliding_window": 5, "experts": ExpertsConfig(num_experts=4)},
    "qwen2-moe": {
        "num_kv_heads": 2,
        "qkv_bias": True,
        "num_layers": 4,
        "experts": ExpertsConfig(
            num_experts=6, top_k=3, mlp_dim=16, shared_mlp_dim=24, shared_gate=True, normalize=False, layer_step=2
        ),
    },
    "qwen3-moe": {
        "num_kv_heads": 2,
        "qk_norm": True,
        "head_dim": 16,
        "experts": ExpertsConfig(num_experts=8, top_k=3, mlp_dim=16, first_dense_layers=1),
    },
    "olmoe": {"num_kv_heads": 2, "qk_norm_across_heads": True, "experts": ExpertsConfig(num_experts=4, normalize=False)},
}
LEFT_TO_SLOW = (
    "llama2-70b",
    "llama3",
    "llama3.1-short",
    "llama3.3",
    "mistral-narrowest",
    "qwen2-tied",
    "qwen3-tied",
    "dynamic",
    "qwen3-biases",
    "qwen3-upper",
    "mixtral",
    "qwen3-moe",
    "olmoe",
)
"""Those that have their like among the others; the slow tests look at them."""

B, T = 2, 12


def _config(variant: str) -> ModelConfig:
    return dataclasses.replace(TINY, **VARIANTS[variant])


def _positions(rng: np.random.Generator) -> np.ndarray:
    """One row from 0 on; one row with gaps, far behind every original length."""
    return np.stack([np.arange(T), 8000 + np.cumsum(rng.integers(1, 2000, T))]).astype(np.int32)


def _llama(config: ModelConfig) -> Llama:
    """A model with random weights, large enough to matter, norms included; drawn by numpy to spare a compilation."""
    rng = np.random.default_rng(1)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        normal = rng.standard_normal(leaf.shape, dtype=np.float32)
        is_norm = "scale" in jax.tree_util.keystr(path)
        return jax.device_put(1 + 0.1 * normal if is_norm else 0.2 * normal, leaf.sharding.spec)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(lambda key: Llama(config, key), jax.random.key(0)))


def _hf_arrays(model: Llama) -> dict[str, np.ndarray]:
    """Parameters, or gradients of their shape, under Hugging Face names and in Hugging Face layouts."""
    config = model.config
    dense = config.experts.dense_layers(config.num_layers) if config.experts.enabled else ()
    sparse = [n for n in range(config.num_layers) if n not in dense]
    D, H = config.embed_dim, config.head_dim
    arrays = {"model.embed_tokens.weight": model.embedding[...], "model.norm.weight": model.final_norm.scale[...]}
    if model.head is not None:
        arrays["lm_head.weight"] = model.head[...]
    for n in range(config.num_layers):
        layers, i = (model.dense_layers, dense.index(n)) if n in dense else (model.layers, sparse.index(n))
        assert layers is not None
        wqkv = np.asarray(layers.attention.wqkv[...])[i]
        arrays |= {
            f"model.layers.{n}.input_layernorm.weight": np.asarray(layers.attention_norm.scale[...])[i],
            f"model.layers.{n}.self_attn.q_proj.weight": wqkv[:, :, :-2].reshape(D, -1).T,
            f"model.layers.{n}.self_attn.k_proj.weight": wqkv[:, :, -2].reshape(D, -1).T,
            f"model.layers.{n}.self_attn.v_proj.weight": wqkv[:, :, -1].reshape(D, -1).T,
            f"model.layers.{n}.self_attn.o_proj.weight": np.asarray(layers.attention.wo[...])[i].reshape(D, -1),
            f"model.layers.{n}.post_attention_layernorm.weight": np.asarray(layers.mlp_norm.scale[...])[i],
            **{f"model.layers.{n}.mlp.{name}": array for name, array in _mlp_arrays(layers.mlp, i).items()},
        }
        if layers.attention.qkv_bias is not None:
            bias = np.asarray(layers.attention.qkv_bias[...])[i]
            arrays |= {
                f"model.layers.{n}.self_attn.q_proj.bias": bias[:, :-2].reshape(-1),
                f"model.layers.{n}.self_attn.k_proj.bias": bias[:, -2].reshape(-1),
                f"model.layers.{n}.self_attn.v_proj.bias": bias[:, -1].reshape(-1),
            }
        if layers.attention.output_bias is not None:
            arrays[f"model.layers.{n}.self_attn.o_proj.bias"] = np.asarray(layers.attention.output_bias[...])[i]
        if layers.attention.q_norm is not None and layers.attention.k_norm is not None:
            arrays |= {
                f"model.layers.{n}.self_attn.q_norm.weight": np.asarray(layers.attention.q_norm.scale[...])[i].reshape(-1),
                f"model.layers.{n}.self_attn.k_norm.weight": np.asarray(layers.attention.k_norm.scale[...])[i].reshape(-1),
            }
        assert wqkv.shape[-1] == H
    return {name: np.asarray(array) for name, array in arrays.items()}


def _mlp_arrays(mlp: Any, i: int) -> dict[str, np.ndarray]:
    """A layer's MLP, or its experts, stacked as transformers 5 has them."""
    gate_up, down = np.asarray(mlp.w_gate_up[...])[i], np.asarray(mlp.w_down[...])[i]
    if isinstance(mlp, Experts):
        E, D, _, F = gate_up.shape
        arrays = {
            "gate.weight": np.asarray(mlp.router[...])[i].T,
            "experts.gate_up_proj": gate_up.transpose(0, 2, 3, 1).reshape(E, 2 * F, D),
            "experts.down_proj": down.transpose(0, 2, 1),
        }
        if mlp.shared is not None and mlp.shared_gate is not None:
            arrays |= {f"shared_expert.{name}": array for name, array in _mlp_arrays(mlp.shared, i).items()}
            arrays["shared_expert_gate.weight"] = np.asarray(mlp.shared_gate[...])[i].T
        return arrays
    arrays = {"gate_proj.weight": gate_up[:, 0].T, "up_proj.weight": gate_up[:, 1].T, "down_proj.weight": down}
    if mlp.gate_up_bias is not None and mlp.down_bias is not None:
        gate_bias, up_bias = np.asarray(mlp.gate_up_bias[...])[i]
        arrays |= {
            "gate_proj.bias": gate_bias,
            "up_proj.bias": up_bias,
            "down_proj.bias": np.asarray(mlp.down_bias[...])[i],
        }
    return arrays


def _hf_experts(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The family with such experts, and its settings."""
    own = config.experts
    width = own.mlp_dim or config.mlp_dim
    kind: dict[str, Any] = {
        "num_experts_per_tok": own.top_k,
        "norm_topk_prob": own.normalize,
        "num_experts": own.num_experts,
    }
    of_qwen = {"moe_intermediate_size": width, "mlp_only_layers": [*own.dense_layers(config.num_layers)]}
    if own.shared_gate:
        return "Qwen2Moe", kind | of_qwen | {"shared_expert_intermediate_size": own.shared_mlp_dim}
    if config.qk_norm:
        return "Qwen3Moe", kind | of_qwen
    if config.qk_norm_across_heads:
        return "Olmoe", kind
    of_mixtral = {"num_local_experts": own.num_experts, "sliding_window": config.sliding_window}
    return "Mixtral", {"num_experts_per_tok": own.top_k, **of_mixtral}


def _hf_llama(model: Llama):
    """transformers' model of the same kind with the same weights."""
    config = model.config
    family, kind = "Llama", {}
    if config.experts.enabled:
        family, kind = _hf_experts(config)
    elif config.sliding_window is not None and not config.layer_types:
        family, kind = "Mistral", {"sliding_window": config.sliding_window}
    elif config.qk_norm:
        family, kind = "Qwen3", {"attention_bias": config.output_bias}
    elif config.output_bias:
        kind = {"attention_bias": True, "mlp_bias": config.mlp_bias}
    elif config.qkv_bias:
        family = "Qwen2"
    if config.layer_types:
        kinds = [*config.layer_types] * config.num_layers
        kind |= {"use_sliding_window": True, "sliding_window": config.sliding_window}
        kind |= {"layer_types": kinds[: config.num_layers]}
    scaling = config.rope_scaling
    rope: dict = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling.kind == "linear":
        rope |= {"rope_type": "linear", "factor": scaling.factor}
    if scaling.kind == "dynamic":
        rope |= {"rope_type": "dynamic", "factor": scaling.factor}
    if scaling.kind == "yarn":
        original = scaling.original_max_seq_len
        rope |= {"rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": original}
    if scaling.kind == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    hf_config = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.embed_dim,
        intermediate_size=config.mlp_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=131072,
        rms_norm_eps=config.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="eager",
        use_cache=False,
        **kind,
    )
    hf = getattr(transformers, f"{family}ForCausalLM")(hf_config)
    weights = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in _hf_arrays(model).items()}
    missing, unexpected = hf.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.tie_embeddings else set())
    return hf.eval()


def _hf_logits(hf, tokens: np.ndarray, positions: np.ndarray):
    mask = torch.ones(tokens.shape, dtype=torch.long)  # without it transformers takes gaps in positions for packed documents
    return hf(
        input_ids=torch.from_numpy(tokens).long(), position_ids=torch.from_numpy(positions).long(), attention_mask=mask
    ).logits


def _inputs(config: ModelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets with some to ignore, and positions."""
    rng = np.random.default_rng(2)
    tokens, targets = rng.integers(0, config.vocab_size, (2, B, T), dtype=np.int32)
    targets[0, 3:6] = IGNORE
    return tokens, targets, _positions(rng)


def _assert_parity(model: Llama, loss: np.ndarray, logits: np.ndarray, gradients: Llama) -> None:
    """Compares with transformers, on the inputs above, for the loss summed over the tokens that are not ignored."""
    tokens, targets, positions = _inputs(model.config)
    hf = _hf_llama(model)
    hf_logits = _hf_logits(hf, tokens, positions)
    hf_loss = torch.nn.functional.cross_entropy(
        hf_logits.flatten(0, 1), torch.from_numpy(targets).long().flatten(), ignore_index=IGNORE, reduction="sum"
    )
    hf_loss.backward()
    assert np.std(logits) > 0.3  # weights large enough for differences to show
    np.testing.assert_allclose(logits, hf_logits.detach().numpy(), atol=1e-4, rtol=0)
    np.testing.assert_allclose(loss, hf_loss.detach().numpy(), rtol=1e-6)
    ours, theirs = _hf_arrays(gradients), {name: p.grad.numpy() for name, p in hf.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        np.testing.assert_allclose(ours[name], gradient, atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow if name in LEFT_TO_SLOW else ()) for name in VARIANTS]
)
def test_logits_and_gradients_equal_transformers(variant: str):
    jax.set_mesh(single_device_mesh())
    model = _llama(_config(variant))
    tokens, targets, positions = _inputs(model.config)

    @jax.jit
    def value_and_gradients(model: Llama):
        def loss(model: Llama) -> tuple[jax.Array, jax.Array]:
            logits = model(jnp.asarray(tokens), None, jnp.asarray(positions))
            one_hot = jax.nn.one_hot(targets, model.config.vocab_size)  # all zero where ignored
            return -jnp.sum(jax.nn.log_softmax(logits) * one_hot), logits

        return jax.value_and_grad(loss, has_aux=True)(model)

    (loss, logits), gradients = value_and_gradients(model)
    _assert_parity(model, loss, logits, gradients)


ON_A_MESH = [
    "qwen2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama3.1", "qwen3", "mistral", "biases", "olmoe")),
]


@pytest.mark.parametrize("variant", ON_A_MESH)
def test_training_loss_on_a_mesh_equals_transformers(variant: str):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))
    model = _llama(dataclasses.replace(_config(variant), remat="full"))
    tokens, targets, positions = _inputs(model.config)
    arrays = {"tokens": tokens, "targets": targets, "segment_ids": np.ones_like(tokens), "positions": positions}
    batch = jax.tree.map(jnp.asarray, arrays)

    @jax.jit
    def value_and_gradients(model: Llama):
        (loss, _), gradients = jax.value_and_grad(loss_fn, has_aux=True)(PreparedWeights(model), batch, z_loss_weight=0.0)
        return loss, model(batch["tokens"], None, batch["positions"]), gradients.trained

    _assert_parity(model, *value_and_gradients(model))


@pytest.mark.parametrize(
    "variant", ["llama3.1", "llama3.2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3"))]
)
def test_bf16_is_as_close_to_fp32_as_transformers_bf16(variant: str):
    jax.set_mesh(single_device_mesh())
    model = _llama(dataclasses.replace(_config(variant), compute_dtype="bfloat16"))
    tokens, _, positions = _inputs(model.config)
    hf = _hf_llama(model)
    frequencies = hf.model.rotary_emb.inv_freq
    with torch.no_grad():
        exact = _hf_logits(hf, tokens, positions).numpy()
        hf.to(torch.bfloat16).model.rotary_emb.inv_freq = frequencies  # which from_pretrained keeps in fp32 too
        theirs = _hf_logits(hf, tokens, positions).float().numpy()
    ours = np.asarray(jax.jit(lambda model: model(jnp.asarray(tokens), None, jnp.asarray(positions)))(model))
    ours_rms, theirs_rms = (np.sqrt(np.mean(np.square(logits - exact))) for logits in (ours, theirs))
    assert 0 < ours_rms <= 1.2 * theirs_rms
