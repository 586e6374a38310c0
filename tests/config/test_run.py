"""The rules of the sections, and the numbers derived from them."""

import dataclasses
import errno
import importlib.util
import os
import re
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from llamajax.config.data import DataConfig, SourceConfig, StageConfig
from llamajax.config.experts import ExpertsConfig
from llamajax.config.keys import keys
from llamajax.config.offload import OffloadConfig, TiersConfig
from llamajax.config.parallel import AXES, DistributedConfig, MeshConfig, ParallelConfig
from llamajax.config.recovery import WatchdogConfig
from llamajax.config.rules import Section
from llamajax.config.run import Config
from llamajax.config.training import CheckpointConfig, OptimizerConfig, TrainConfig
from llamajax.config.watch import MetricsConfig, ProfileConfig
from llamajax.errors import ConfigError
from tests.config.broken import BROKEN, LLAMA_2_7B, SECTIONS

MIXTRAL = dataclasses.replace(LLAMA_2_7B, experts=ExpertsConfig(num_experts=8))


def config(**sections: Any) -> Config:
    defaults = {
        "model": LLAMA_2_7B,
        "data": DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=4096),
        "train": TrainConfig(num_steps=100, global_batch_size=64),
        "optimizer": OptimizerConfig(learning_rate=1e-3),
    }
    return Config(run_dir="run", **(defaults | sections))


def staged(*stages: StageConfig, seq_len: int = 4096) -> DataConfig:
    """Two sources, of which the second one comes with the first stage that gives it weight, if there is one."""
    weight = 0.0 if any(any(stage.weights[1:]) for stage in stages) else 1.0
    sources = SourceConfig(kind="stdlib"), SourceConfig(kind="stdlib", weight=weight)
    return DataConfig(sources=sources, seq_len=seq_len, stages=stages)


@pytest.mark.parametrize(("section", "changes", "keys"), BROKEN)
def test_a_section_names_every_field_that_breaks_a_rule(section, changes, keys):
    section(**SECTIONS[section])
    with pytest.raises(ConfigError) as error_info:
        section(**SECTIONS[section] | changes)
    assert [line.partition(": ")[0] for line in str(error_info.value).splitlines()] == keys


def test_every_section_is_tested():
    assert {section for section, _, _ in BROKEN} | {ParallelConfig} == SECTIONS.keys()  # whose settings have no rules
    assert {section for _, section, _ in keys(Config)} - {Config} == SECTIONS.keys()
    assert all(issubclass(section, Section) for section in SECTIONS)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"init_changes": ("rope_theta",)}, "init_changes"),
        ({"data": DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=4097)}, "data.seq_len"),
        ({"data": staged(StageConfig(from_step=5, seq_len=4097))}, "data.stages.0.seq_len"),
        (
            {"data": staged(StageConfig(from_step=5, seq_len=8), StageConfig(from_step=100, seq_len=4))},
            "data.stages.1.from_step",
        ),
        ({"optimizer": OptimizerConfig(learning_rate=1.0, warmup_steps=101)}, "optimizer.warmup_steps"),
        (
            {"optimizer": OptimizerConfig(learning_rate=1.0, warmup_steps=60, schedule="wsd", decay_steps=41)},
            "optimizer.warmup_steps",
        ),
        ({"profile": ProfileConfig(start_step=99, num_steps=3)}, "profile.start_step"),
        ({"offload": OffloadConfig(activations=("input", "qkv"))}, "offload.activations"),
        ({"offload": OffloadConfig(activations=("input",)), "mesh": MeshConfig(pipeline=2)}, "offload.activations"),
        ({"offload": OffloadConfig(activations=("input",)), "parallel": ParallelConfig(stack="scan")}, "parallel.stack"),
        ({"offload": OffloadConfig(activations="auto", fraction=0.5), "model": MIXTRAL}, "offload.fraction"),
        (
            {
                "offload": OffloadConfig(optimizer=1.0),
                "model": dataclasses.replace(MIXTRAL, experts=ExpertsConfig(num_experts=8, first_dense_layers=1)),
            },
            "offload.optimizer",
        ),
        (
            {
                "offload": OffloadConfig(activations="auto", tiers=TiersConfig(nvme_dir="d")),
                "model": dataclasses.replace(MIXTRAL, experts=ExpertsConfig(num_experts=8, first_dense_layers=1)),
            },
            "offload.tiers.nvme_dir",
        ),
        ({"offload": OffloadConfig(tiers=TiersConfig(nvme_dir="d"))}, "offload.tiers.nvme_dir"),
        (
            {"offload": OffloadConfig(activations="auto", optimizer=1.0, parameters="all", tiers=TiersConfig(nvme_dir="d"))},
            "offload.tiers.nvme_dir",
        ),
        (
            {
                "offload": OffloadConfig(activations=("input",), tiers=TiersConfig(nvme_dir="d")),
                "parallel": ParallelConfig(stack="scan"),
            },
            "parallel.stack",
        ),
        ({"distributed": DistributedConfig(enabled=True), "watchdog": WatchdogConfig(start_s=300.0)}, "watchdog.start_s"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        (
            {
                "train": TrainConfig(num_steps=1, global_batch_size=1, eval_every=1),
                "data": DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=1, held_out_fraction=0.0),
            },
            "train.eval_every",
        ),
    ],
)
def test_rules_between_sections(sections, key):
    assert config().problems() == []
    (problem,) = config(**sections).problems()
    assert problem.startswith(f"{key}: ")


def test_axis_sizes():
    one = dict.fromkeys(AXES, 1)
    assert MeshConfig().axis_sizes(8) == one | {"fsdp": 8}
    assert list(MeshConfig().axis_sizes(8)) == ["pipeline", "data", "fsdp", "expert", "sequence", "tensor"]
    assert MeshConfig(data=-1, fsdp=2, tensor=2).axis_sizes(8) == one | {"data": 2, "fsdp": 2, "tensor": 2}
    assert MeshConfig(pipeline=4).axis_sizes(8) == one | {"pipeline": 4, "fsdp": 2}
    assert MeshConfig(expert=4).axis_sizes(8) == one | {"expert": 4, "fsdp": 2}
    assert MeshConfig(fsdp=2, sequence=2, tensor=2).axis_sizes(8) == one | {"fsdp": 2, "sequence": 2, "tensor": 2}
    with pytest.raises(ConfigError, match=r"^mesh: pipeline\(1\) x .* x tensor\(3\) = 3 does not divide the 8 devices"):
        MeshConfig(tensor=3).axis_sizes(8)
    with pytest.raises(ConfigError, match=r"^mesh: .* = 4, but there are 8 devices; set one axis to -1"):
        MeshConfig(fsdp=4).axis_sizes(8)
    with pytest.raises(ConfigError, match=r"= 16 does not divide the 8 devices"):
        MeshConfig(tensor=16).axis_sizes(8)


@pytest.mark.parametrize(
    ("model", "seq_len", "mesh", "key"),
    [
        ({"embed_dim": 100}, 4096, MeshConfig(), "model.embed_dim"),
        ({"num_heads": 36, "num_kv_heads": 4}, 4096, MeshConfig(tensor=8), "model.num_kv_heads"),
        ({"num_heads": 24, "num_kv_heads": 3}, 4096, MeshConfig(tensor=8), "model.num_kv_heads"),
        ({"mlp_dim": 1001}, 4096, MeshConfig(tensor=8), "model.mlp_dim"),
        ({"vocab_size": 32001, "embed_dim": 4100}, 4096, MeshConfig(tensor=8), "model.vocab_size"),
        ({"num_kv_heads": 4, "embed_dim": 4100}, 4096, MeshConfig(tensor=8), "model.num_kv_heads"),
        ({}, 4095, MeshConfig(sequence=8), "data.seq_len"),
        ({"embed_dim": 100}, 4096, MeshConfig(fsdp=2, sequence=4), "model.embed_dim"),
        ({}, 4096, MeshConfig(tensor=3), "mesh"),
    ],
)
def test_what_cannot_be_divided_over_the_mesh_is_named(model, seq_len, mesh, key):
    data = DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=seq_len)
    run = config(model=dataclasses.replace(LLAMA_2_7B, **model), data=data, mesh=mesh)
    (problem,) = run.placement_problems(8)
    assert problem.startswith(f"{key}: ")
    assert config().placement_problems(8) == []


def test_a_vocabulary_and_kv_heads_need_not_divide():
    odd = dataclasses.replace(LLAMA_2_7B, vocab_size=32001, num_kv_heads=2)
    assert config(model=odd, mesh=MeshConfig(tensor=8)).placement_problems(16) == []
    assert [odd.computed_kv_heads({"tensor": size}) for size in (1, 2, 8)] == [2, 2, 8]


@pytest.mark.parametrize(
    ("form", "seq_len", "axes", "problem"),
    [
        ("ring", 4096, {"sequence": 8}, None),
        ("ring", 4104, {"sequence": 8}, "data.seq_len: 4104 must be divisible by 2 . mesh.sequence=16 .*; make it 4096, or"),
        ("ring", 4097, {}, None),
        ("gather", 4104, {"sequence": 8}, None),
        ("ulysses", 4096, {"sequence": 4, "tensor": 8}, None),
        ("ulysses", 4096, {"sequence": 8, "tensor": 8}, r"parallel.sequence: ulysses cannot divide .* = 4 heads over mesh"),
        ("auto", 4104, {"sequence": 8, "tensor": 8}, None),
    ],
)
def test_what_a_form_of_split_rows_needs_is_told_in_one_line(form, seq_len, axes, problem):
    data = DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=seq_len)
    model = dataclasses.replace(LLAMA_2_7B, max_seq_len=8192)
    run = config(data=data, model=model, mesh=MeshConfig(**axes), parallel=ParallelConfig(sequence=form))
    problems = run.placement_problems(64)
    assert len(problems) == (problem is not None)
    assert problem is None or re.match(problem, problems[0])


def test_the_rows_of_every_stage_divide_over_the_mesh():
    stages = StageConfig(from_step=5, seq_len=4092), StageConfig(from_step=7, weights=(1.0, 2.0))
    of_rows = config(data=staged(*stages), mesh=MeshConfig(sequence=8)).placement_problems(64)
    assert of_rows == ["data.stages.0.seq_len: 4092 must be divisible by mesh.sequence=8"]
    model = dataclasses.replace(LLAMA_2_7B, max_seq_len=8192)
    ring = config(
        model=model, data=staged(StageConfig(from_step=5, seq_len=4104)), mesh=MeshConfig(sequence=8),
        parallel=ParallelConfig(sequence="ring"),
    )  # fmt: skip
    (problem,) = ring.placement_problems(64)
    assert problem.startswith("data.stages.0.seq_len: 4104 must be divisible by 2 * mesh.sequence=16 ")
    (problem,) = ring.changed({"mesh.sequence": 1, "mesh.tensor": 16, "parallel.tensor": "ring"}).placement_problems(64)
    assert problem.startswith("data.stages.0.seq_len: 4104 must be divisible by mesh.sequence x mesh.tensor=16 ")
    heads = ring.changed({"mesh.tensor": 8, "parallel.sequence": "ulysses"}).placement_problems(64)
    assert [problem.partition(":")[0] for problem in heads] == ["parallel.sequence"]


def test_what_stages_leave_out_is_as_before():
    stages = StageConfig(from_step=10, weights=(1.0, 3.0), name="mid"), StageConfig(from_step=30, seq_len=64)
    run = config(data=staged(*stages, seq_len=16), train=TrainConfig(num_steps=100, global_batch_size=2))
    assert [(s.from_step, s.weights, s.seq_len, s.name) for s in run.data.all_stages] == [
        (0, (1.0, 0.0), 16, ""), (10, (1.0, 3.0), 16, "mid"), (30, (1.0, 3.0), 64, ""),
    ]  # fmt: skip
    assert [run.data.stage_at(step) for step in (0, 9, 10, 29, 30, 99)] == [0, 0, 1, 1, 2, 2]
    assert [run.tokens_after(step) for step in (0, 9, 30, 31, 100)] == [0, 288, 960, 1088, 960 + 70 * 128]
    longest = run.in_largest_steps()
    assert (longest.data.seq_len, longest.data.stages, longest.hardware.token_budget) == (64, (), 9920.0)
    assert [source.weight for source in longest.data.sources] == [1.0, 3.0]
    assert run.changed({"data.stages": (), "data.sources.1.weight": 2.0}).in_largest_steps().data.seq_len == 16


def test_a_ring_of_matmuls_needs_rows_that_it_can_divide():
    run = config(mesh=MeshConfig(tensor=8), parallel=ParallelConfig(tensor="ring"))
    (problem,) = run.changed({"data.seq_len": 4090}).placement_problems(64)
    assert problem == (
        "data.seq_len: 4090 must be divisible by mesh.sequence x mesh.tensor=8 for parallel.tensor: ring;"
        " make it 4088, or choose collective"
    )
    assert run.changed({"data.seq_len": 4088}).placement_problems(64) == []
    assert run.changed({"data.seq_len": 4090, "mesh.tensor": 1}).placement_problems(64) == []


@pytest.mark.parametrize(
    ("batch", "accum"), [(1, 1), (3, 1), (7, 1), (12, 1), (20, 1), (21, 1), (63, 1), (65, 1), (3, 3), (36, 3), (63, 3)]
)
def test_the_batch_that_is_proposed_is_legal_and_none_is_nearer(batch, accum):
    def problems(size: int) -> list[str]:
        train = TrainConfig(num_steps=100, global_batch_size=size, grad_accum_steps=accum)
        return config(train=train, mesh=MeshConfig(data=2)).placement_problems(8)

    (problem,) = problems(batch)
    assert problem.startswith("train.global_batch_size: ")
    proposed = int(problem.rpartition(" ")[2])
    legal = [size for size in range(accum, 2 * batch + 8 * accum + 1, accum) if not problems(size)]
    assert proposed in legal
    assert abs(proposed - batch) == min(abs(size - batch) for size in legal)


def test_batch_arithmetic_is_one_line_that_adds_up():
    run = config(train=TrainConfig(num_steps=1, global_batch_size=64, grad_accum_steps=2), mesh=MeshConfig(data=2, tensor=2))
    assert run.batch_arithmetic(16) == (
        "global batch 64 sequences x 4096 tokens = 262,144 tokens"
        " = 4 per device x 8 data-parallel devices x 2 accumulation steps"
    )


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    def problems(*, wandb: bool) -> list[str]:
        run = config(metrics=MetricsConfig(wandb=wandb))
        return [problem for problem in run.file_problems() if problem.startswith("metrics.")]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problems(wandb=True) == [
        "metrics.wandb: wandb is not installed; run pip install 'llamajax[wandb]', or turn it off"
    ]
    assert problems(wandb=False) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    assert problems(wandb=True) == []


def test_a_directory_that_is_named_will_do_and_one_that_a_pattern_matches_for_saved_datasets_only(tmp_path):
    (tmp_path / "part=1").mkdir()
    matched = f"{tmp_path}/part=*"
    cases: list[tuple[Any, str, int]] = [
        ("arrow", str(tmp_path), 0), ("parquet", str(tmp_path), 0), ("text", str(tmp_path), 0), ("arrow", matched, 0),
        ("megatron", str(tmp_path), 0), ("megatron", f"{tmp_path}/", 0), ("parquet", matched, 1),
    ]  # fmt: skip
    for kind, path, wrong in cases:
        data = DataConfig(sources=(SourceConfig(kind=kind, paths=(path,)),), seq_len=128)
        problems = [problem for problem in config(data=data).file_problems() if problem.startswith("data.s")]
        assert len(problems) == wrong
        assert all(problem.endswith(f"directories do; write {matched}/** for the files in them") for problem in problems)


def test_remote_files_are_not_looked_for_on_the_disk():
    paths = ("s3://bucket/*.parquet", "hf://datasets/a/b/x.parquet", "none.parquet")
    data = DataConfig(sources=(SourceConfig(kind="parquet", paths=paths),), seq_len=128)
    (problem,) = [problem for problem in config(data=data).file_problems() if problem.startswith("data.sources")]
    assert problem.startswith("data.sources.0.paths.2: no file matches none.parquet")


@pytest.mark.parametrize("key", ["data.tokenizer.path", "data.sources.0.paths.0", "hardware.calibration"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOTCONN, errno.ENOENT, errno.EACCES])
def test_a_file_on_a_disk_that_fails_is_not_taken_for_missing(monkeypatch, tmp_path, key, number):
    """Who reads it tells, as what may pass; a mistake in the configuration would not be tried again."""
    path = tmp_path / "file[1].txt"
    path.touch()
    named: Any = str(path)
    if key == "data.sources.0.paths.0":
        key, named = "data.sources", (SourceConfig(kind="text", paths=(str(path),)),)
    run = config().changed({key: named})

    def problems() -> list[str]:
        return [problem for problem in run.file_problems() if problem.startswith(key)]

    assert problems() == []
    stat = os.stat

    def fail(asked, **kwargs):
        if os.fspath(asked) == str(path):
            raise OSError(number, os.strerror(number), asked)
        return stat(asked, **kwargs)

    monkeypatch.setattr(os, "stat", fail)
    assert bool(problems()) == (number in (errno.ENOENT, errno.EACCES))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (("train.num_steps", "data", "model", "data.sources.1.weight", "optimizer.schedule"), None),
        (("train.num_step",), "unknown key 'train.num_step'; did you mean 'train.num_steps'?"),
        (("data", "trian"), "unknown key 'trian'; did you mean 'train'?"),
        (("num_steps",), "unknown key 'num_steps'; did you mean 'train.num_steps' or 'profile.num_steps'?"),
        (("seed.x",), "unknown key 'seed.x'; seed has no such key"),
    ],
)
def test_settings_that_may_change_exist(names, problem):
    found = config(checkpoint=CheckpointConfig(allow_changes=names)).problems()
    assert found == ([] if problem is None else [f"checkpoint.allow_changes: {problem}"])
