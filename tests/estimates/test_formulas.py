"""Parameters, FLOPs and bytes against published figures and hand counts."""

import dataclasses
import itertools
import math
import subprocess
import sys
from typing import get_args

import pytest

from llamajax.config.layer_weights import LAYER_WEIGHTS, MATRICES, Matrix
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import MOMENTS, Moments, OptimizerConfig
from llamajax.estimates import device_memory, formulas
from llamajax.model import Llama
from llamajax.weights.names import TENSORS
from tests.tiny import tiny_config

LLAMA_2_7B = ModelConfig(
    vocab_size=32000, embed_dim=4096, mlp_dim=11008, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128
)
LLAMA_3_8B = ModelConfig(
    vocab_size=128256, embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    max_seq_len=8192,
)  # fmt: skip
LLAMA_3_2_1B = ModelConfig(
    vocab_size=128256, embed_dim=2048, mlp_dim=8192, num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64,
    tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "num_params"),
    [(LLAMA_2_7B, 6_738_415_616), (LLAMA_3_8B, 8_030_261_248), (LLAMA_3_2_1B, 1_235_814_400)],
)
def test_num_params_of_published_models(model, num_params):
    assert formulas.num_params(model) == num_params


TRAITS = tuple(dict.fromkeys(weight.trait for weight in LAYER_WEIGHTS if weight.trait is not None))
SIZES = {"vocab_size": 97, "embed_dim": 10, "mlp_dim": 14, "num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}


@pytest.mark.parametrize("tied", [False, True])
def test_a_score_head_is_one_row(tied):
    model = dataclasses.replace(LLAMA_3_2_1B, head="score", tie_embeddings=tied)
    shapes = {name: leaf.shape for name, leaf in Llama.shapes(model).items()}
    assert shapes["head"] == (1, 2048)
    assert formulas.weights(model) == {name: math.prod(shape) for name, shape in shapes.items()}
    vocabulary = dataclasses.replace(model, head="vocabulary")
    assert formulas.num_matmul_params(vocabulary) - formulas.num_matmul_params(model) == 128255 * 2048


@pytest.mark.parametrize("has", [*itertools.product((False, True), repeat=len(TRAITS))], ids=str)
def test_the_table_of_weights_is_that_of_the_model(has):
    traits = dict(zip(TRAITS, has, strict=True))
    if traits["qk_norm"] and traits["qk_norm_across_heads"]:
        return  # they exclude each other
    model = ModelConfig(**SIZES, **traits)
    shapes = {name: leaf.shape for name, leaf in Llama.shapes(model).items()}
    counted = {f"layers.{weight.path}": (3, *shape) for weight, shape in formulas.layer_shapes(model).items()}
    assert counted == {name: shape for name, shape in shapes.items() if name.startswith("layers.")}
    assert formulas.num_params(model) == sum(map(math.prod, shapes.values()))


def test_a_layers_weights_have_names_of_their_own_and_tensors():
    assert len({(weight.path, weight.trait) for weight in LAYER_WEIGHTS}) == len(LAYER_WEIGHTS)
    assert get_args(Matrix) == MATRICES
    arrays = {tensor.array for tensor in TENSORS}
    assert {f"model.layers.{weight.path}" for weight in LAYER_WEIGHTS} <= arrays


def test_estimates_are_made_without_jax():
    code = "import sys, llamajax.config.run, llamajax.estimates.communication; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flops_per_token_of_llama_3_8b():
    matmuls = 6 * (formulas.num_params(LLAMA_3_8B) - 128256 * 4096 - 65 * 4096)  # all but the embedding and the norms
    scores_and_values = 2 * 2 * 32 * 32 * 128 * 8192  # two matmuls of two FLOPs, layers, heads, head_dim, keys
    assert formulas.flops_per_token(LLAMA_3_8B, 8192, full_attention=True) == matmuls + 3 * scores_and_values
    assert formulas.flops_per_token(LLAMA_3_8B, 8192) == matmuls + 3 * scores_and_values // 2
    assert round(formulas.flops_per_token(LLAMA_3_8B, 8192) / 1e9, 2) == 51.47
    assert round(formulas.flops_per_token(LLAMA_3_8B, 8192, full_attention=True) / 1e9, 2) == 57.91


def test_windows_count_in_the_layers_that_have_them():
    """Three of five layers, the first, third and fifth, have a window of 1024 tokens."""
    windows = {"num_layers": 5, "sliding_window": 1024, "layer_types": ("sliding_attention", "full_attention")}
    mixed = dataclasses.replace(LLAMA_3_8B, **windows)
    full = dataclasses.replace(mixed, sliding_window=None, layer_types=())
    sliding = dataclasses.replace(mixed, layer_types=())
    for attention in (False, True):
        flops = [formulas.flops_per_token(model, 8192, full_attention=attention) for model in (mixed, sliding, full)]
        assert flops[0] == pytest.approx((3 * flops[1] + 2 * flops[2]) / 5, abs=1)
    keys = [formulas.mean_keys(model, 8192, 700.0) for model in (mixed, sliding, full)]
    assert keys[1] < keys[0] < keys[2]
    assert keys[0] == pytest.approx((3 * keys[1] + 2 * keys[2]) / 5)
    assert formulas.num_params(mixed) == formulas.num_params(full)


def test_a_tied_head_costs_flops_but_no_parameters():
    untied = dataclasses.replace(LLAMA_3_2_1B, tie_embeddings=False)
    assert formulas.num_params(untied) - formulas.num_params(LLAMA_3_2_1B) == 128256 * 2048
    assert formulas.flops_per_token(untied, 2048) == formulas.flops_per_token(LLAMA_3_2_1B, 2048)


def test_the_minimum_splits_all_matrices_over_all_shards():
    run = tiny_config(hardware=HardwareConfig(gpu="h100"), mesh=MeshConfig(fsdp=4, tensor=2))
    norms = (2 * 2 + 1) * 32
    matrices = formulas.num_params(run.model) - norms
    assert formulas.minimum_state_bytes(run) == 12 * (matrices // 8 + norms)
    half = run.changed({"optimizer.moment_dtype": "bfloat16"})
    assert formulas.minimum_state_bytes(half) == 8 * (matrices // 8 + norms)
    replicated = run.changed({"mesh.data": 4, "mesh.fsdp": 1})
    assert formulas.minimum_state_bytes(replicated) == 12 * (matrices // 2 + norms)
    assert formulas.minimum_state_bytes(replicated.changed({"parallel.zero_data": 1})) == 12 * (matrices // 8 + norms)


def test_what_is_gathered_once_per_step_is_counted():
    run = tiny_config(hardware=HardwareConfig(gpu="h100"), mesh=MeshConfig(fsdp=4, tensor=2))
    run = run.changed({"train.grad_accum_steps": 2, "parallel.grad_reduce": "micro"})
    mesh = {"pipeline": 1, "data": 1, "fsdp": 4, "expert": 1, "sequence": 1, "tensor": 2}
    tables, all_matrices = 2 * 64 * 32, formulas.num_params(run.model) - (2 * 2 + 1) * 32
    layer = (all_matrices - tables) // 2
    whole = {
        "micro, scan": 0,
        "step, scan": tables // 2,
        "step, prefetch": (tables + layer) // 2,
        "auto, scan": all_matrices // 2,
    }
    for form, params in whole.items():
        reduction, stack = form.split(", ")
        zero = 1 if reduction == "auto" else 3
        changed = run.changed({"parallel.grad_reduce": reduction, "parallel.stack": stack, "parallel.zero": zero})
        assert formulas.params_gathered_once(changed, mesh) == params, form
        micro = run.changed({"parallel.stack": stack})
        more = device_memory.expected_bytes(changed, formulas.mesh_sizes(changed), max_chunk_scores=1, max_chunk_logits=1)
        less = device_memory.expected_bytes(micro, formulas.mesh_sizes(micro), max_chunk_scores=1, max_chunk_logits=1)
        # Of what is whole: the copy, the fp32 sum of its gradients, and of these themselves one table's, or all. A shard
        # of it, one of four, has neither gradient nor sum of its own.
        at_once = params if zero == 1 else min(params, tables // 2 // 2)
        assert more["gradients"] - less["gradients"] == 4 * params + 4 * at_once - (4 + 4) * params // 4
        wide = 4 * (params + ((2 * 2 + 1) * 32 if zero == 1 else 0))
        assert more["collectives"] - less["collectives"] == wide


def test_what_is_alive_in_turn_counts_once():
    run = tiny_config(hardware=HardwareConfig(gpu="h100"), mesh=MeshConfig(fsdp=8))
    bounds = {"max_chunk_scores": 2**20, "max_chunk_logits": 2**20}
    scan = device_memory.expected_bytes(run, formulas.mesh_sizes(run), **bounds)
    prefetched = device_memory.expected_bytes(
        run.changed({"parallel.stack": "prefetch"}), formulas.mesh_sizes(run), **bounds
    )
    assert prefetched["collectives"] == 3 * formulas.layer_matrix_bytes(run.model, formulas.mesh_sizes(run))
    assert {kind for kind in scan if scan[kind] != prefetched[kind]} == {"collectives"}
    assert scan["logits"] == 0
    large = device_memory.expected_bytes(run.changed({"model.vocab_size": 2**20}), formulas.mesh_sizes(run), **bounds)
    loss = 2**20 * (4 + 2 * 4) + 2**20 * run.model.embed_dim * (4 + 8)  # a chunk in fp32, the head and its gradient twice
    assert large["logits"] + large["temporaries"] + large["collectives"] == loss
    assert large["temporaries"] == scan["temporaries"]


@pytest.mark.parametrize("share", ["none", 0.6, 1.0])
def test_a_checkpoint_has_the_state_wherever_it_waits(share):
    run = tiny_config(hardware=HardwareConfig(gpu="h100"), mesh=MeshConfig(fsdp=8)).changed({"offload.optimizer": share})
    assert formulas.state_bytes(run) == 12 * formulas.num_params(run.model)


def test_what_is_frozen_has_weights_alone():
    run = tiny_config(hardware=HardwareConfig(gpu="h100"), mesh=MeshConfig(fsdp=8))
    frozen = run.changed({"train.frozen": ("embedding", "norm", "w_down")})
    table, down, norms = 64 * 32, 2 * 32 * 64, (2 * 2 + 1) * 32
    all_of_it = formulas.num_params(run.model)
    assert formulas.state_bytes(run) == 12 * all_of_it
    assert formulas.state_bytes(frozen) == 12 * all_of_it - 8 * (table + down + norms)
    assert formulas.minimum_state_bytes(run) - formulas.minimum_state_bytes(frozen) == 8 * ((table + down) // 8 + norms)
    bounds = {"max_chunk_scores": 2**20, "max_chunk_logits": 2**20}
    # What is whole for the step has one gradient, whole; with `zero: 1` that is all but norms.
    for changes, fewer in (({}, (table + down) // 8 + norms), ({"parallel.zero": 1}, table + down + norms)):
        more, less = (
            device_memory.expected_bytes(some.changed(changes), formulas.mesh_sizes(some), **bounds)
            for some in (run, frozen)
        )
        assert more["gradients"] - less["gradients"] == 4 * fewer
        assert more["optimizer"] - less["optimizer"] == 8 * ((table + down) // 8 + norms)
        assert {kind for kind in more if more[kind] != less[kind]} == {"gradients", "optimizer"}
    # Reduced once, tables that are whole for the step have a gradient, one at a time, unless both are frozen.
    late = {"parallel.grad_reduce": "step"}
    (one, _), (none, norms_alone) = (
        [
            device_memory.expected_bytes(run.changed(late | {"train.frozen": names}), formulas.mesh_sizes(run), **bounds)
            for names in (tables, (*tables, "norm"))
        ]
        for tables in (("embedding",), ("embedding", "head"))
    )
    assert one["gradients"] - none["gradients"] == 4 * table
    assert none["gradients"] - norms_alone["gradients"] == 4 * norms


def test_optimizers_keep_what_their_row_says(monkeypatch):
    monkeypatch.setitem(MOMENTS, "muon", Moments(of_layer_matrices=1, of_others=2))
    run = tiny_config(optimizer=OptimizerConfig(learning_rate=1.0, name="muon", moment_dtype="bfloat16"))
    layers = run.model.num_layers * sum(formulas.layer_matrices(run.model).values())
    assert formulas.state_bytes(run) == 4 * formulas.num_params(run.model) + 2 * (
        layers + 2 * (formulas.num_params(run.model) - layers)
    )
