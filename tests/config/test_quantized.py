"""Sizes of models that meshes divide into whole blocks, or not: the lines that say so."""

import dataclasses

import pytest

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import AXES
from llamajax.config.quantized import block_size, undivided_blocks

LLAMA_8B = ModelConfig(
    vocab_size=128256, embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128
)


def on(**sizes: int) -> dict[str, int]:
    return dict.fromkeys(AXES, 1) | sizes


def test_a_block_is_64_weights_or_the_largest_power_of_two_that_divides():
    assert [block_size(size) for size in (4096, 192, 96, 100, 32, 7, 1)] == [64, 64, 32, 4, 32, 1, 1]


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 64}, {"fsdp": 8, "tensor": 8}, {"fsdp": 4, "tensor": 16}, {"data": 999}])
def test_devices_with_whole_blocks_are_no_problem(sizes):
    assert undivided_blocks(LLAMA_8B, "nf4", on(**sizes)) == []


def test_split_blocks_are_named_with_the_rule_and_the_remedy():
    remedy = "use fewer devices on these axes and more on mesh.data"
    assert undivided_blocks(LLAMA_8B, "int8", on(fsdp=64, sequence=2)) == [
        "model.embed_dim: 4096 must be divisible by 64 x mesh.fsdp=64 x mesh.sequence=2 with int8, which scales blocks of 64"
        f" weights; {remedy}"
    ]
    assert undivided_blocks(LLAMA_8B, "nf4", on(fsdp=8, tensor=16)) == [
        "model.embed_dim: 4096 must be divisible by 64 x mesh.fsdp=8 x mesh.tensor=16 with nf4, which scales blocks of 64"
        f" weights; {remedy}"
    ]  # more devices than kv heads: matrices of attention are stored split over mesh.tensor too
    assert undivided_blocks(dataclasses.replace(LLAMA_8B, mlp_dim=11008), "float8", on(tensor=8)) == [
        "model.mlp_dim: 11008 must be divisible by 64 x mesh.tensor=8 with float8, which scales blocks of 64 weights;"
        f" {remedy}"
    ]


def test_nf4_needs_whole_bytes():
    odd = dataclasses.replace(LLAMA_8B, mlp_dim=14335)
    rule = "model.mlp_dim: 14335 must be even with nf4, which stores two weights per byte; choose int8"
    assert undivided_blocks(odd, "nf4", on()) == [rule]
    assert undivided_blocks(odd, "int8", on()) == []
