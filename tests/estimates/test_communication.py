"""Bytes that devices send, against hand counts."""

import dataclasses
from typing import Any

import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import AXES, MeshConfig, ParallelConfig, SequenceForm
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.estimates import communication, formulas

MODEL = ModelConfig(vocab_size=1000, embed_dim=64, mlp_dim=256, num_layers=10, num_heads=8, num_kv_heads=2, head_dim=8)


def least(mesh: dict[str, Any], model: ModelConfig = MODEL, parallel: ParallelConfig | None = None, **train: Any) -> float:
    config = Config(
        run_dir="run",
        model=model,
        data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=128),
        mesh=MeshConfig(**mesh),
        parallel=parallel or ParallelConfig(),
        train=TrainConfig(num_steps=1, global_batch_size=16, **train),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    return communication.least_wire_bytes(config, dict.fromkeys(AXES, 1) | mesh)


def test_least_bytes():
    """ZeRO-3 sends 6N(n-1)/n bytes per micro-batch in bfloat16, 4 for what is gathered once; replicas of it 4N(n-1)/n of
    their shards."""
    N, ends = formulas.num_params(MODEL), 2 * 1000 * 64
    sharded = 6 * N - 2 * ends
    assert least({"fsdp": 8}) == pytest.approx(sharded * 7 / 8)
    assert least({"fsdp": 8}, grad_accum_steps=2) == pytest.approx(2 * sharded * 7 / 8)
    assert least({"fsdp": 8}, dataclasses.replace(MODEL, remat="none")) == pytest.approx(4 * N * 7 / 8)
    assert least({"data": 2, "fsdp": 4}, grad_accum_steps=2) == pytest.approx(2 * sharded * 3 / 4 + 2 * 4 * N / 4 / 2)
    assert least({"data": 4}) == pytest.approx(4 * N * 3 / 4)
    tokens = 16 * 128
    assert least({"tensor": 2}) == pytest.approx((10 * 10 + 4) * (2 * tokens * 64) / 2)
    assert least({"tensor": 2}, dataclasses.replace(MODEL, remat="none")) == pytest.approx(
        (10 * 8 + 4) * (2 * tokens * 64) / 2
    )
    few = dataclasses.replace(MODEL, num_kv_heads=4)  # as devices compute the 2: with a copy each
    exchanged = 3 * 2 * 10 * (64 * 8 * 2 * (8 + 4)) / (2 * 4) * 3 / 4
    assert least({"fsdp": 2, "tensor": 4}) == pytest.approx(least({"fsdp": 2, "tensor": 4}, few) + exchanged)
    whole = 2 * tokens * 2 * 2 * 8
    assert least({"sequence": 4}) == pytest.approx(10 * 3 * whole * 3 / 4 + sharded * 3 / 4)


@pytest.mark.parametrize("stack", ["scan", "prefetch"])
def test_a_byte_of_each_weight_and_token_is_sent_for_matmuls_in_float8(stack):
    parallel = ParallelConfig(stack=stack)
    matrices = {matrix.name: size for matrix, size in formulas.layer_matrices(MODEL).items()}
    in_float8 = dataclasses.replace(MODEL, matmul_dtype="float8")
    some = dataclasses.replace(in_float8, float8_exempt=("w_gate_up", "w_down"))
    gathers = 20 if stack == "scan" else 19  # of ten layers
    for model, named, gathered in ((in_float8, [*matrices], 4), (some, ["wqkv", "wo"], 2)):
        saved = least({"fsdp": 8}, parallel=parallel) - least({"fsdp": 8}, model, parallel)
        assert saved == pytest.approx(gathers * sum(matrices[name] for name in named) * 7 / 8)
        tokens = 16 * 128 * 64
        # Of each pair of matrices the first gathers its tokens and gathers them again, the second its gradients.
        assert least({"tensor": 2}) - least({"tensor": 2}, model) == pytest.approx(10 * gathered // 2 * 3 * tokens / 2)
    axes = {"data": 1, "fsdp": 8, "expert": 1, "sequence": 1, "tensor": 2}
    assert 2 * formulas.gathered_layer_bytes(in_float8, axes) == formulas.layer_matrix_bytes(MODEL, axes)
    assert formulas.layer_matrix_bytes(in_float8, axes) == formulas.layer_matrix_bytes(MODEL, axes)
    assert formulas.gathered_layer_bytes(MODEL, axes) == formulas.layer_matrix_bytes(MODEL, axes)


@pytest.mark.parametrize("data", [1, 2])
def test_stages_of_zero_and_reductions_at_the_end_send_less(data):
    """Counted by hand for four micro-batches over four shards: traffic once per step, and per micro-batch."""
    N, ends = formulas.num_params(MODEL), 2 * 1000 * 64
    layers = N - ends
    first = layers / 10

    def found(**parallel: Any) -> float:
        return least({"data": data, "fsdp": 4}, parallel=ParallelConfig(**parallel), grad_accum_steps=4)

    def expected(once: float, every: float, reductions: int) -> Any:
        replicas = reductions * 2 * 2 * (N / 4) * (data - 1) / data
        return pytest.approx(2 * (once + 4 * every) * 3 / 4 + replicas)

    assert found(zero=3, grad_reduce="micro", stack="scan") == expected(0, 3 * layers + 2 * ends, 4)
    assert found(zero=3, grad_reduce="step", stack="scan") == expected(2 * ends, 3 * layers, 1)
    begun = expected(2 * (ends + first), 3 * layers - 3 * first, 1)
    assert found(zero=3, grad_reduce="step", stack="prefetch") == begun
    assert found(zero=2, grad_reduce="micro", stack="prefetch") == expected(N, N, 4)
    assert found(zero=2, grad_reduce="step", stack="scan") == expected(N + ends, layers, 1)
    assert found(zero=2, grad_reduce="step", stack="prefetch") == expected(N + ends + first, layers - first, 1)
    assert found(zero=1) == expected(2 * N, 0, 1)
    assert found(zero=3, grad_reduce="micro", stack="scan", zero_data=1) == expected(0, 3 * layers + 2 * ends, 1)


def sent(form: SequenceForm, parts: int, tensor: int = 1, **model: Any) -> float:
    return communication.sequence_numbers(
        dataclasses.replace(MODEL, **model),
        {"pipeline": 1, "data": 1, "fsdp": 1, "sequence": parts, "tensor": tensor},
        form,
    )


def test_what_a_form_of_split_rows_sends_by_hand():
    """Eight heads of eight numbers, two of them keys' and values'; per token that a device has."""
    keys_and_values = 2 * 2 * 8
    assert sent("gather", 4) == sent("auto", 4) == keys_and_values * 3 * 3
    assert sent("gather", 4, remat="none") == keys_and_values * 2 * 3
    assert sent("ring", 4, remat="save_attention") == keys_and_values * 3 * 3
    assert sent("ring", 4) == keys_and_values * (3 * 3 + 2)
    assert sent("ring", 2) == keys_and_values * 3
    forward = 2 * 8 * 8 + 2 * keys_and_values  # four devices need a copy each of two heads
    assert sent("ulysses", 4) == 3 * forward * 3 / 4
    assert sent("ulysses", 4, remat="none") == 2 * forward * 3 / 4
    assert sent("ulysses", 4, remat="save_attention") == 3 * forward * 3 / 4
    assert sent("ulysses", 2) == 3 * (2 * 8 * 8 + keys_and_values) / 2
    assert sent("ulysses", 2, tensor=2) == 3 * (2 * 4 * 8 + 2 * 2 * 8) / 2
    assert sent("ring", 2, tensor=4) == 2 * 8 * 3  # a copy of a head for each of four
    assert [sent(form, 1) for form in ("gather", "ring", "ulysses")] == [0, 0, 0]
