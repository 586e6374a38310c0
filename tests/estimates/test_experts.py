"""Experts in formulas: released models, BigMac's anchors, shares of devices, and bytes that are sent."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from llamajax.config.experts import ExpertsConfig
from llamajax.config.file import load_config
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import AXES, MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.estimates import communication, device_memory, formulas
from llamajax.estimates.experts import Dispatch, exchange_form, num_exchanges
from llamajax.model import Llama
from llamajax.model.experts import Experts
from llamajax.model.token_dispatcher import TokenDispatcher
from llamajax.parallel.dispatch import Block
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from tests.tiny import tiny_config

CONFIGS = Path(__file__).parents[2] / "configs"
RELEASED = {  # parameters by the index of each release's files; and the active ones, which its name gives
    "mixtral_8x7b_64xh100": (46_702_792_704, 12.9e9),
    "qwen3_30b_a3b_16xh100": (30_532_122_624, 3.35e9),
    "qwen3_235b_a22b_256xh100": (235_093_634_560, 22.2e9),
    "deepseek_moe_16b_64xa100_80gb": (16_375_728_128, 2.83e9),
}


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_of_released_models(name):
    model = load_config(CONFIGS / f"{name}.yaml").model
    total, active = RELEASED[name]
    assert formulas.num_params(model) == total
    assert formulas.num_active_params(model) == pytest.approx(active, rel=0.005)


TINY = ModelConfig(
    vocab_size=96, embed_dim=32, mlp_dim=48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, compute_dtype="bfloat16",
    remat="full", experts=ExpertsConfig(num_experts=16, top_k=2, mlp_dim=8),
)  # fmt: skip
KINDS = {
    "large": {"num_experts": 4, "mlp_dim": None, "normalize": False},
    "fine": {"shared_mlp_dim": 24, "shared_gate": True, "top_k": 4},
    "biased": {"bias_update_rate": 0.0, "scores": "sigmoid", "shared_mlp_dim": 8},
    "narrow": {"latent_dim": 16, "gated": False},
}


def of_kind(kind: str, **changes) -> ModelConfig:
    return dataclasses.replace(TINY, experts=dataclasses.replace(TINY.experts, **KINDS[kind] | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_weights_is_that_of_the_model(kind):
    model = of_kind(kind)
    shapes = {name: leaf.shape for name, leaf in Llama.shapes(model).items()}
    assert {f"layers.{weight.path}": (4, *shape) for weight, shape in formulas.layer_shapes(model).items()} == {
        name: shape for name, shape in shapes.items() if name.startswith("layers.")
    }
    assert formulas.weights(model) == {name: math.prod(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(("first", "step"), [(1, 1), (0, 2), (2, 2)])
def test_layers_without_experts_count_as_those_of_a_dense_model(first, step):
    mixed = of_kind("fine", first_dense_layers=first, layer_step=step)
    dense = len(mixed.experts.dense_layers(4))
    sizes, all_dense = formulas.weights(mixed), formulas.weights(dataclasses.replace(TINY, experts=ExpertsConfig()))
    all_sparse = formulas.weights(of_kind("fine"))
    of_dense = {name.removeprefix("dense_"): size for name, size in sizes.items() if name.startswith("dense_")}
    assert of_dense == {name: size * dense // 4 for name, size in all_dense.items() if name.startswith("layers.")}
    assert {name: size for name, size in sizes.items() if name.startswith("layers.")} == {
        name: size * (4 - dense) // 4 for name, size in all_sparse.items() if name.startswith("layers.")
    }
    for count in (formulas.num_matmul_params, formulas.num_active_params, formulas.num_params):
        both = (count(dataclasses.replace(TINY, experts=ExpertsConfig())), count(of_kind("fine")))
        assert count(mixed) == both[0] * dense / 4 + both[1] * (4 - dense) / 4


def test_only_chosen_experts_count_in_flops():
    """A token's router, shared expert with its gate, and four of 16 experts."""
    model = of_kind("fine")
    dense = dataclasses.replace(TINY, experts=ExpertsConfig())
    own = 32 * 16 + 3 * 32 * 24 + 32 + 4 * 3 * 32 * 8
    assert formulas.flops_per_token(model, 64) - formulas.flops_per_token(dense, 64) == 6 * 4 * (own - 3 * 32 * 48)
    narrow = of_kind("narrow")
    own = 32 * 16 + 2 * 32 * 16 + 2 * 2 * 16 * 8
    assert formulas.flops_per_token(narrow, 64) - formulas.flops_per_token(dense, 64) == 6 * 4 * (own - 3 * 32 * 48)


def anchors() -> dict[str, Config]:
    """BigMac on GPT3-XL as shipped, and the fine-grained model beside it (arXiv:2502.16927)."""
    bigmac = load_config(CONFIGS / "bigmac_gpt3_xl_64xa100_80gb.yaml").changed({"mesh.fsdp": 1, "hardware.nodes": 4})
    return {"bigmac": bigmac, "fine": bigmac.changed({"model.experts.latent_dim": None, "model.experts.mlp_dim": 512})}


@pytest.mark.parametrize(("kind", "billions", "tflop"), [("fine", 3.73, 3490.67), ("bigmac", 3.78, 3649.00)])
def test_bigmacs_anchors_of_size_and_work(kind, billions, tflop):
    """The paper counts biases, which these models lack, and neither the routers' work nor all of their parameters."""
    config = anchors()[kind]
    model, tokens = config.model, config.train.global_batch_size * config.data.seq_len
    assert (tokens, mesh_of(config)["expert"]) == (524_288, 32)
    assert round(formulas.num_params(model) / 1e9, 2) == billions
    routers = 6 * model.num_layers * model.embed_dim * model.experts.num_experts
    flops = formulas.flops_per_token(model, config.data.seq_len, full_attention=True) - routers
    assert round(flops * tokens / 1e12, 2) == tflop


def test_bigmacs_anchors_of_bytes():
    """All devices send 1,488 and 372 GiB of tokens, exactly a quarter, without room for imbalance and without headers."""
    found = {}
    for kind, config in anchors().items():
        config = config.changed({"parallel.expert_slots": 1.0, "model.remat": "none"})
        mesh = mesh_of(config)
        way = Dispatch.of(config, mesh)
        headers = (way.block_rows - way.slots) / way.block_rows
        assert (num_exchanges(config), way.slots * way.peers) == (4, way.choices)
        assert headers < 0.01
        sent = 32 * communication.expert_bytes(config, mesh)
        found[kind] = sent * (1 - headers)
    assert {kind: round(size / 2**30, 6) for kind, size in found.items()} == {"fine": 1488, "bigmac": 372}
    assert found["bigmac"] == pytest.approx(0.25 * found["fine"], rel=1e-12)


def mesh_of(config: Config) -> dict[str, int]:
    return formulas.mesh_sizes(config)


MESHES = (
    {"expert": 4, "fsdp": 2},
    {"expert": 2, "sequence": 2, "tensor": 2},
    {"tensor": 4, "fsdp": 2},
    {"data": 2, "fsdp": 4},
)


@pytest.mark.parametrize(
    ("axes", "slots", "seq_len"), [*itertools.product(MESHES, (0.0, 0.5, 1.25), (64,)), (MESHES[1], 1.25, 66)]
)
def test_blocks_are_those_of_the_layer(axes, slots, seq_len):
    config = run(axes, **{"parallel.expert_slots": slots, "data.seq_len": seq_len})
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        stream = "residual_seq" if seq_len % 4 == 0 else "seq"
        x = jax.ShapeDtypeStruct(
            (32, seq_len, 32), jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec("batch", stream, None))
        )

        def block(key: jax.Array, x: jax.Array) -> jax.Array:
            weights = {"router": Experts(config.model, key).router[...]}
            return jnp.zeros(TokenDispatcher.of(config.model.experts, weights, x, config.parallel).block)

        found = jax.eval_shape(block, jax.random.key(0), x).shape
    way = Dispatch.of(config, mesh_of(config))
    assert Block(*found) == (way.slots, way.experts, way.width, way.terms)
    assert Block(*found).rows == way.block_rows


def run(axes: dict[str, int], **changes: Any) -> Config:
    config = tiny_config(model=TINY, train=TrainConfig(num_steps=10, global_batch_size=32), mesh=MeshConfig(fsdp=1))
    cluster = {"hardware.gpu": "h100", "hardware.gpus_per_node": math.prod(axes.values())}
    return config.changed(cluster | {"data.seq_len": 64} | {f"mesh.{axis}": size for axis, size in axes.items()} | changes)


def test_a_load_beyond_the_slots_takes_further_rounds():
    way = Dispatch.of(run({"expert": 4, "fsdp": 2}), mesh_of(run({"expert": 4, "fsdp": 2})))
    assert (way.choices, way.places) == (4 * 64 * 2, 4 * 160)
    assert way.loads(1.0) == [512]
    assert way.loads(1.25) == [640]
    assert way.loads(1.5) == [640, 128]
    assert way.loads(4.0) == way.loads(1000.0) == [640, 640, 640, 128]


def test_devices_hold_their_experts():
    """Stored, all axes split them; computed with, `expert` and `tensor` alone, while other matrices are whole or split by
    `tensor`."""
    model, mesh = of_kind("fine"), dict.fromkeys(AXES, 1) | {"fsdp": 2, "expert": 2, "tensor": 2}
    experts, shared = 16 * 3 * 32 * 8, 3 * 32 * 24
    attention, tokenwise = 32 * 8 * (4 + 2 * 2) + 32 * 32, 32 * 16 + 32
    assert formulas.layer_matrix_bytes(model, mesh) == 2 * (experts // 4 + (attention + shared) // 2 + tokenwise)
    whole = run({"fsdp": 2, "expert": 2, "tensor": 2}, **{"parallel.zero": 1, "train.grad_accum_steps": 2, "model": model})
    ends = 2 * 96 * 32 // 2
    layers = 4 * (experts // 4 + (attention + shared + tokenwise) // 2)
    assert formulas.params_gathered_once(whole, mesh) == ends + layers
    norms = 4 * 2 * 32 + 32
    split = formulas.num_params(model) - norms
    assert formulas.minimum_state_bytes(whole) == 12 * (split // 8 + norms)


def test_experts_are_gathered_and_reduced_over_the_devices_that_share_them():
    """All other matrices pass (n - 1) / n of their bytes over four devices, a device's half of the experts over two."""
    config = run({"fsdp": 2, "expert": 2})
    mesh = mesh_of(config)
    others = formulas.num_params(TINY) - (own := sum(formulas.expert_weights(TINY).values()))
    tables = 2 * 96 * 32
    tokens = 5 * 4 * 2 * Dispatch.of(config, mesh).sent_numbers
    assert communication.expert_bytes(config, mesh) == tokens
    assert communication.least_wire_bytes(config, mesh) == pytest.approx(
        (6 * others - 2 * tables) * 3 / 4 + 6 * own / 2 * 1 / 2 + tokens
    )
    over_data = run({"data": 2, "expert": 2})
    assert communication.least_wire_bytes(over_data, mesh_of(over_data)) == pytest.approx(
        (6 * others - 2 * tables) / 2 + 4 * (others + own) / 2 * 1 / 2 + tokens
    )


@pytest.mark.parametrize(
    ("kind", "remat", "count"),
    [
        ("large", "none", 4),
        ("large", "save_attention_qkv", 5),
        ("large", "full", 5),
        ("narrow", "full", 6),
        ("narrow", "save_attention_qkv_mlp", 4),
    ],
)
def test_recomputation_sends_again(kind, remat, count):
    config = run({"expert": 4}, model=dataclasses.replace(of_kind(kind), remat=remat))
    assert num_exchanges(config) == count


def test_places_count_in_memory():
    """A layer saves gate and up of all places, used or not."""
    config = run({"expert": 4, "fsdp": 2}, **{"model.remat": "save_attention_qkv_mlp", "parallel.expert_slots": 1.25})
    saved, _ = device_memory.saved_bytes(config, mesh_of(config))
    assert saved["gate_up"] == 4 * 160 * 2 * 8 * 2
    twice, _ = device_memory.saved_bytes(config.changed({"parallel.expert_slots": 2.5}), mesh_of(config))
    assert twice["gate_up"] == 2 * saved["gate_up"]


def test_blocks_that_are_kept_count_in_memory():
    """Per layer, a device's blocks in bfloat16; of narrow tokens also the results for its own tokens."""
    changes = {"model.remat": "save_attention_qkv_mlp"}
    config = run({"expert": 4, "fsdp": 2}, **changes)
    way = Dispatch.of(config, mesh_of(config))
    assert device_memory.kept_block_bytes(config, mesh_of(config)) == 2 * way.rows * 32
    narrow = run({"expert": 4, "fsdp": 2}, model=of_kind("narrow"), **changes)
    way, tokens = Dispatch.of(narrow, mesh_of(narrow)), device_memory.tokens_per_device(narrow, mesh_of(narrow))
    assert device_memory.kept_block_bytes(narrow, mesh_of(narrow)) == 2 * (way.rows + tokens) * 16
    assert device_memory.kept_block_bytes(narrow.changed({"model.remat": "full"}), mesh_of(narrow)) == 0


@pytest.mark.parametrize(
    ("axes", "changes", "form"),
    [
        ({"expert": 8, "fsdp": 2}, {}, "blocks"),
        ({"fsdp": 16}, {}, "blocks"),
        ({"expert": 8, "fsdp": 2}, {"mesh.num_cpu_devices": 16, "parallel.expert_exchange": "ragged"}, "blocks"),
        ({"expert": 8, "fsdp": 2}, {"parallel.expert_exchange": "ragged"}, "ragged"),
    ],
)
def test_empty_slots_do_not_travel_in_ragged_blocks(axes, changes, form):
    """A ragged block holds a header and the mean number of tokens; a whole block also holds empty slots."""
    config = run(axes, **{"mesh.num_cpu_devices": None, "hardware.gpus_per_node": 4, "hardware.nodes": 4} | changes)
    assert exchange_form(config, mesh_of(config))[0] == form
    way = Dispatch.of(config, mesh_of(config))
    rows = way.block_rows if form == "blocks" else way.header_rows + way.choices / way.peers
    assert way.sent_numbers == (way.peers - 1) * rows * way.width
