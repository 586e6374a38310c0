"""Small sizes that are to a small mesh what the configured ones are to the configured mesh."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from llamajax.config.data import DataConfig
from llamajax.config.experts import ExpertsConfig
from llamajax.config.file import load_config
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig, RopeScalingConfig
from llamajax.config.parallel import AXES, PLAIN, DistributedConfig, MeshConfig, num_parts
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.errors import ConfigError
from llamajax.verification.scaling import (
    LEAST_EPS,
    changes,
    configured_axes,
    fitting_axes,
    on_one_device,
    scale_down,
    scaled_axes,
    scaled_heads,
)
from tests.tiny import tiny_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
MODEL = ModelConfig(
    vocab_size=128256, embed_dim=4096, mlp_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    max_seq_len=32768,
)  # fmt: skip


def mesh(data: int = 1, fsdp: int = 1, sequence: int = 1, tensor: int = 1, expert: int = 1) -> dict[str, int]:
    return dict(zip(AXES, (1, data, fsdp, expert, sequence, tensor), strict=True))


def large(axes: dict[str, Any], model: ModelConfig = MODEL, **changed) -> Config:
    config = tiny_config(
        model=model,
        data=DataConfig(sources=tiny_config().data.sources, seq_len=8192),
        train=TrainConfig(
            num_steps=1000, global_batch_size=24 * axes["data"] * axes["fsdp"] * axes["expert"], grad_accum_steps=4
        ),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=100),
        mesh=MeshConfig(**axes, num_cpu_devices=math.prod(axes.values())),
    )
    return config.changed({key.replace("__", "."): value for key, value in changed.items()})


@pytest.mark.parametrize(
    ("configured", "num_devices", "scaled"),
    [
        (mesh(fsdp=8), None, mesh(fsdp=8)),
        (mesh(fsdp=4), None, mesh(fsdp=4)),
        (mesh(data=4, fsdp=128), None, mesh(data=2, fsdp=4)),
        (mesh(tensor=8), None, mesh(tensor=8)),
        (mesh(fsdp=64, tensor=8), None, mesh(fsdp=4, tensor=2)),
        (mesh(fsdp=1024), 64, mesh(fsdp=64)),
        (mesh(fsdp=2, sequence=2, tensor=2), None, mesh(fsdp=2, sequence=2, tensor=2)),
        (mesh(data=2, fsdp=16, sequence=4, tensor=8), None, mesh(2, 2, 2, 2)),
        (mesh(fsdp=3), None, mesh(fsdp=3)),
        (mesh(fsdp=6), None, mesh(fsdp=6)),
        (mesh(fsdp=11, tensor=2), None, mesh(fsdp=3, tensor=2)),
        (mesh(fsdp=9, tensor=5), None, mesh(fsdp=3, tensor=3)),
        (mesh(fsdp=8), 2, mesh(fsdp=2)),
        (mesh(fsdp=6, tensor=2), None, mesh(fsdp=2, tensor=2)),  # 3 x 2 would be more, but odd
    ],
)
def test_every_axis_that_is_split_stays_split(configured, num_devices, scaled):
    assert scaled_axes(configured, num_devices) == scaled


def test_too_few_devices_are_refused():
    with pytest.raises(
        ConfigError, match=r"^--devices: 4 cannot keep every axis of data\(2\) x fsdp\(8\) x tensor\(4\) split"
    ):
        scaled_axes(mesh(data=2, fsdp=8, tensor=4), 4)


SIZES = ("model.vocab_size", "model.embed_dim", "model.mlp_dim", "model.num_kv_heads", "model.num_heads", "data.seq_len")


def size(config: Config, key: str) -> int:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


@pytest.mark.parametrize(
    "axes", [mesh(*sizes) for sizes in itertools.product((1, 4, 3), (1, 64, 8), (1, 8), (1, 2, 16)) if math.prod(sizes) > 1]
)
def test_what_a_product_of_axes_divides_it_divides(axes):
    scaled = scaled_axes(axes)
    model = dataclasses.replace(MODEL, embed_dim=12288, num_kv_heads=16, num_heads=48, vocab_size=128256)
    config = large(axes, model, data__seq_len=24576)
    small = scale_down(config, axes, scaled)
    for key, number in itertools.product(SIZES, range(len(AXES) + 1)):
        axes_of_size = ("sequence", "tensor") if "heads" in key else AXES
        for group in itertools.combinations(axes_of_size, number):
            before, after = math.prod(axes[axis] for axis in group), math.prod(scaled[axis] for axis in group)
            if size(config, key) % before == 0:
                assert size(small, key) % after == 0, (key, group)
            if size(config, key) % (2 * before) == 0:
                assert size(small, key) % (2 * after) == 0, (key, group)
        assert size(small, key) <= 384


@pytest.mark.parametrize(
    ("kv_heads", "tensor", "own_tensor", "scaled"),
    [(4, 8, 8, 4), (2, 8, 8, 2), (4, 8, 2, 1), (8, 16, 4, 2), (12, 8, 4, 6), (3, 1, 1, 3)],
)
def test_key_value_heads_that_the_axis_does_not_divide_stay_so(kv_heads, tensor, own_tensor, scaled):
    """Fewer than the axis, and dividing it; or more, and no multiple."""
    model = dataclasses.replace(MODEL, num_kv_heads=kv_heads, num_heads=48)
    own, groups = scaled_heads(model, mesh(fsdp=4, tensor=tensor), mesh(fsdp=4, tensor=own_tensor))
    assert own == scaled
    assert groups > 1


def test_heads_fewer_than_the_axis_take_more_devices_where_eight_cannot_keep_them_so():
    few = dataclasses.replace(MODEL, num_kv_heads=4)
    axes = mesh(fsdp=2, sequence=2, tensor=8)
    assert fitting_axes(MODEL, axes) == mesh(fsdp=2, sequence=2, tensor=2)
    assert fitting_axes(few, axes) == axes
    assert scaled_heads(few, axes, axes)[0] == 4
    assert fitting_axes(few, mesh(tensor=8)) == mesh(tensor=8)


@pytest.mark.parametrize(("num_heads", "groups"), [(8, 1), (24, 3), (64, 2)])
def test_groups_of_query_heads_stay_one_even_or_odd(num_heads, groups):
    model = dataclasses.replace(MODEL, num_heads=num_heads)
    assert scaled_heads(model, mesh(fsdp=4), mesh(fsdp=4)) == (2, groups)


def test_what_does_not_divide_still_does_not():
    axes = mesh(fsdp=8, sequence=2)
    small = scale_down(large(axes, dataclasses.replace(MODEL, vocab_size=32001, mlp_dim=11008)), axes, axes)
    assert small.model.vocab_size % 2 == 1


def test_the_model_stays_what_it_is():
    kept: dict[str, Any] = {
        "rope_theta": 5e5, "rope_scaling": RopeScalingConfig(kind="llama3", factor=8.0), "attend_across_documents": True,
        "qkv_bias": True, "qk_norm": True, "tie_embeddings": True, "remat": "save_attention", "norm_eps": 1e-6,
    }  # fmt: skip
    axes = mesh(fsdp=8)
    optimizer = OptimizerConfig(
        learning_rate=3e-4, schedule="wsd", warmup_steps=100, decay_steps=50, b1=0.8, b2=0.97, weight_decay=0.3,
        grad_clip_norm=0.5, moment_dtype="bfloat16",
    )  # fmt: skip
    config = large(axes, dataclasses.replace(MODEL, **kept), optimizer=optimizer, train__z_loss_weight=1e-4, seed=7)
    small = scale_down(config, axes, axes)
    assert {name: getattr(small.model, name) for name in kept} == kept
    for name in ("schedule", "b1", "b2", "weight_decay", "grad_clip_norm", "no_weight_decay", "min_lr_ratio"):
        assert getattr(small.optimizer, name) == getattr(optimizer, name)
    assert small.optimizer.decay_steps == 2
    assert small.optimizer.eps == LEAST_EPS
    assert scale_down(config.changed({"optimizer.eps": 0.1}), axes, axes).optimizer.eps == 0.1
    assert (small.train.z_loss_weight, small.seed, small.parallel) == (1e-4, 7, config.parallel)
    dtypes = small.model.param_dtype, small.model.compute_dtype, small.optimizer.moment_dtype
    assert dtypes == ("float32",) * 3
    assert small.model.attention_kernel == "plain"
    assert small.model.matmul_dtype == "compute_dtype"
    assert (small.model.num_layers, small.model.num_heads // small.model.num_kv_heads) == (4, 2)


@pytest.mark.parametrize(
    ("batch", "accumulated", "scaled"),
    [(8, 1, (8, 1)), (64, 1, (16, 1)), (24, 1, (24, 1)), (512, 4, (32, 2)), (24, 3, (24, 3))],
)
def test_rows_per_device_and_micro_batches_stay_one_even_or_odd(batch, accumulated, scaled):
    axes = mesh(fsdp=8)
    config = large(axes, train=TrainConfig(num_steps=1000, global_batch_size=batch, grad_accum_steps=accumulated))
    train = scale_down(config, axes, axes).train
    assert (train.global_batch_size, train.grad_accum_steps) == scaled


@pytest.mark.parametrize(
    ("window", "axes", "scaled"),
    [
        (None, mesh(fsdp=8), None),
        (8192, mesh(fsdp=8), 8192),
        (4096, mesh(fsdp=8), 16),
        (100, mesh(fsdp=8), 2),
        (8191, mesh(fsdp=8), 31),
        (1024, mesh(sequence=8), 8),
        (1024, mesh(sequence=16), 16),  # two of 16 parts become two of 8, of 8 tokens each
        (4096, mesh(sequence=16), 63),
    ],
)
def test_a_window_narrower_than_a_row_stays_so(window, axes, scaled):
    own = scaled_axes(axes)
    small = scale_down(large(axes, model__sliding_window=window), axes, own)
    assert small.model.sliding_window == scaled


def test_layers_that_take_turns_do_so_in_the_fewest():
    axes, kinds = mesh(fsdp=8), ("sliding_attention", "sliding_attention", "full_attention")
    config = large(axes, model__sliding_window=4096, model__layer_types=kinds * 4)
    assert scale_down(config, axes, axes).model.windows == (16, None)


@pytest.mark.parametrize(
    ("counts", "scaled_stages", "expected"),
    [((26, 22), 2, (2, 1)), ((24, 24), 2, (2, 2)), ((5, 7, 7, 5), 4, (2, 2, 2, 1))],
)
def test_stages_with_own_programs_keep_them(counts, scaled_stages, expected):
    axes = mesh(fsdp=2) | {"pipeline": len(counts)}
    changed = {"model.num_layers": sum(counts), "parallel.zero": 1, "mesh": MeshConfig(**axes, stages=counts)}
    config = large(mesh(fsdp=8)).changed(changed)
    small = scale_down(config, axes, axes | {"pipeline": scaled_stages})
    assert (small.mesh.stages, small.model.num_layers) == (expected, sum(expected))


def test_the_number_of_devices_is_found_where_it_stands():
    run = large(mesh(fsdp=4)).changed
    assert configured_axes(run({})) == mesh(fsdp=4)
    planned = {"mesh": MeshConfig(tensor=2), "hardware": HardwareConfig(gpu="h100", nodes=2), "train.global_batch_size": 32}
    assert configured_axes(run(planned)) == mesh(fsdp=8, tensor=2)
    assert configured_axes(run({"mesh": MeshConfig(data=3, fsdp=2)})) == mesh(data=3, fsdp=2)
    assert configured_axes(run({"mesh": MeshConfig(tensor=2)})) == mesh(fsdp=8, tensor=2)
    processes = DistributedConfig(enabled=True, num_processes=3)
    assert configured_axes(run({"mesh": MeshConfig(num_cpu_devices=4), "distributed": processes})) == mesh(fsdp=12)
    unknown = DistributedConfig(enabled=True)
    assert configured_axes(run({"mesh": MeshConfig(num_cpu_devices=4), "distributed": unknown})) == mesh(fsdp=8)


def test_one_device_is_the_plainest_run_there_is():
    axes = mesh(data=2, fsdp=4)
    small = scale_down(large(axes, model__remat="full"), axes, axes)
    one = on_one_device(small)
    assert set(changes(small, one)) >= {"mesh.data", "mesh.fsdp", "mesh.num_cpu_devices", "train.grad_accum_steps"}
    assert (one.parallel, one.model.remat, one.train.grad_accum_steps) == (PLAIN, "none", 1)
    assert one.train.global_batch_size == small.train.global_batch_size


@pytest.mark.parametrize(
    ("num_experts", "configured", "scaled"),
    [
        (128, mesh(fsdp=2, expert=8), "every device has whole experts"),
        (8, mesh(fsdp=8, expert=8), "one expert of a device is split by the others that hold it"),
        (128, mesh(fsdp=32, expert=8), "so are several"),
        (64, mesh(expert=8, tensor=8), "every device has whole experts"),
    ],
)
def test_experts_stay_whole_or_split(num_experts, configured, scaled):
    changed = {"num_experts": num_experts, "top_k": 8, "mlp_dim": 768, "shared_mlp_dim": 1536, "latent_dim": None}
    config = large(configured, model__experts=ExpertsConfig(**changed))
    axes = scaled_axes(configured)
    small = scale_down(config, configured, axes).model.experts
    for dim in ("experts", "expert_shards"):
        before, after = num_parts(dim, configured), num_parts(dim, axes)
        assert (small.num_experts % after == 0) == (num_experts % before == 0), scaled
    assert small.top_k == min(2, small.num_experts)
    assert small.mlp_dim
    assert small.shared_mlp_dim
    assert small.latent_dim is None
    assert not list(small.broken_rules())


def test_groups_and_layers_without_experts_stay():
    grouped = {"num_experts": 256, "num_groups": 8, "top_groups": 4, "top_k": 8, "scores": "sigmoid", "latent_dim": 1024}
    axes = mesh(fsdp=8, expert=8)
    for first, step, num_layers in ((3, 1, 61), (0, 2, 32), (1, 4, 29), (0, 1, 32)):
        experts = ExpertsConfig(**grouped, first_dense_layers=first, layer_step=step)
        config = large(axes, dataclasses.replace(MODEL, num_layers=num_layers, experts=experts))
        small = scale_down(config, axes, scaled_axes(axes)).model
        dense, configured = small.experts.dense_layers(small.num_layers), experts.dense_layers(num_layers)
        assert (0 in dense, bool(dense)) == (0 in configured, bool(configured))
        assert (small.experts.layer_step == 1) == (step == 1)
        assert 1 < small.experts.num_groups > small.experts.top_groups
        assert not list(small.broken_rules())


@pytest.mark.parametrize(("first", "step", "num_layers"), [(3, 1, 61), (0, 2, 32), (1, 2, 33)])
def test_a_pipeline_keeps_layers_without_experts(first, step, num_layers):
    axes = mesh(fsdp=2, expert=8) | {"pipeline": 4}
    experts = ExpertsConfig(num_experts=64, top_k=8, first_dense_layers=first, layer_step=step)
    model = dataclasses.replace(MODEL, num_layers=num_layers, experts=experts)
    config = large(axes, model, parallel__zero=1, train__grad_accum_steps=8)
    small = scale_down(config, axes, scaled_axes(axes))
    assert (small.model.experts.first_dense_layers, small.model.experts.layer_step) == (min(first, 1), step)
    assert small.mesh.pipeline > 1


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_can_be_scaled_down(path):
    config = load_config(path).in_largest_steps()  # as `verify` does
    axes = configured_axes(config)
    small = scale_down(config, axes, scaled_axes(axes))
    has_odd_stages = axes["pipeline"] % 2 == 1 < axes["pipeline"]  # three of them, beside two axes of two
    # On one, what waits in host memory is verified.
    assert small.mesh.num_cpu_devices == (12 if has_odd_stages else min(8, math.prod(axes.values())))
    told = changes(config, small)
    assert told["model.embed_dim"] == (config.model.embed_dim, small.model.embed_dim)
    assert not any(key.startswith(("data.sources", "hardware", "run_dir")) for key in told)
