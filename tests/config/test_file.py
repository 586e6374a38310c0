"""Configuration files: every mistake is one line with its place, and what is right comes back unchanged."""

import contextlib
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from front_door import MINIMAL, changed, refuse

from llamajax.config.adapters import AdaptersConfig
from llamajax.config.batch_ramp import BatchRampConfig
from llamajax.config.cleaning import (
    CleaningConfig,
    DecontaminationConfig,
    FilterConfig,
    LanguageConfig,
    NearDuplicateConfig,
)
from llamajax.config.conversations import FieldNames, RoleNames
from llamajax.config.data import DataConfig, SourceConfig, StageConfig, TokenizerConfig
from llamajax.config.domains import DomainConfig
from llamajax.config.experts import ExpertsConfig
from llamajax.config.file import config_to_dict, dump_config, load_config
from llamajax.config.keys import keys
from llamajax.config.machine import HardwareConfig, XlaConfig
from llamajax.config.model import ModelConfig, RopeScalingConfig
from llamajax.config.objective import ObjectiveConfig
from llamajax.config.offload import OffloadConfig, TiersConfig
from llamajax.config.parallel import DistributedConfig, MeshConfig, ParallelConfig
from llamajax.config.recovery import RecoveryConfig, WatchdogConfig
from llamajax.config.run import Config
from llamajax.config.training import (
    MOMENTS,
    CheckpointConfig,
    Moments,
    OptimizerConfig,
    SampleConfig,
    TrainConfig,
)
from llamajax.config.watch import MetricsConfig, ProfileConfig
from llamajax.errors import ConfigError
from tests.faults.bad_configs import mutated, read


@pytest.fixture
def everything(monkeypatch) -> Config:
    """A value of its own for every setting."""
    monkeypatch.setitem(MOMENTS, "of_my_own", Moments(1, 0))
    return Config(
        run_dir="runs/1e3",
        model=ModelConfig(
            vocab_size=1024, embed_dim=48, mlp_dim=96, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=10,
            max_seq_len=999, rope_theta=500000.0,
            rope_scaling=RopeScalingConfig(
                kind="yarn", factor=32.0, low_freq_factor=1.5, high_freq_factor=5.0, original_max_seq_len=77,
                beta_fast=30.0, beta_slow=2.0, attention_factor=1.5, truncate=False,
            ),
            norm_eps=1e-6, sliding_window=5, layer_types=("full_attention", "sliding_attention"),
            qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, tie_embeddings=True,
            attend_across_documents=True, attention_kernel="plain",
            init_std=1e-22, param_dtype="bfloat16", compute_dtype="float32", remat="none",
            matmul_dtype="float8", float8_exempt=("wo",),
            experts=ExpertsConfig(
                num_experts=8, first_dense_layers=1, layer_step=2, top_k=3, mlp_dim=7, gated=False, latent_dim=16,
                shared_mlp_dim=5, shared_gate=True, scores="sigmoid", normalize=False, weight_scale=2.5, num_groups=4,
                top_groups=2, balance_loss=0.01, balance_over="row", bias_update_rate=1e-3, z_loss=1e-4, capacity_factor=1.5,
                kernel="plain",
            ),
        ),
        data=DataConfig(
            sources=(
                SourceConfig(kind="text", paths=("a b/**/*.txt", "*", "no", "1:30", "null", "- x: 'y\"", "ü\n z\x85 ")),
                SourceConfig(kind="jsonl", paths=("x.jsonl.zst",), text_key="1e3", weight=0.1),
                SourceConfig(
                    kind="chat", paths=("y",), chat_format="alpaca", max_bad_records=8, max_epochs=3.5, train_on="last",
                    fields=FieldNames(instruction="1", input="2", output="no", history="~"),
                ),
                SourceConfig(kind="megatron", paths=("z",), split="969,30,1"),
                SourceConfig(
                    kind="chat", paths=("y",),
                    fields=FieldNames(
                        messages="a.b", role="1", content="2", reasoning="3", tool_calls="4", train="5", system="6",
                        tools="7",
                    ),
                    roles=RoleNames(
                        system=("1",), user=("2", "no"), assistant=("3",), tool=("4",), function_call=("5",)
                    ),
                ),
                SourceConfig(
                    kind="chat", paths=("y",), chat_format="prompt_completion", fields=FieldNames(prompt="1", completion="2")
                ),
                SourceConfig(
                    kind="tokenized", paths=("y",), fields=FieldNames(input_ids="1", labels="2", attention_mask="3")
                ),
            ),
            seq_len=900,
            stages=(
                StageConfig(from_step=8_000_000, weights=(0.1, 0.0, 1e-05, 2.0, 0.0, 0.0, 0.0), name="1e3"),
                StageConfig(from_step=9_000_000, seq_len=996),
            ),
            cleaning=CleaningConfig(
                filters=FilterConfig(
                    c4_lines=True, min_chars=1, max_chars=2, min_words=3, max_words=4, min_mean_word_length=0.5,
                    max_mean_word_length=6.0, max_symbols_per_word=0.1, max_ellipsis_lines=0.2, max_bullet_lines=0.3,
                    min_alphabetic_words=0.4, min_stop_words=1, stop_words=("y",), min_sentences=5, lorem_ipsum=True,
                    curly_braces=True, bad_words="~", max_repeated_lines=0.6, max_repeated_line_chars=0.7,
                    max_repeated_paragraphs=0.8, max_repeated_paragraph_chars=0.9, repeated_ngrams=True,
                    min_compression=1e-9, max_compression=8.0,
                ),
                languages=LanguageConfig(keep=("no", "en"), min_probability=1e-3),
                decontamination=DecontaminationConfig(paths=("b",), text_keys=("1",), ngram=3, min_hits=4, min_share=0.25),
                exact_duplicates=True,
                near_duplicates=NearDuplicateConfig(
                    enabled=True, threshold=0.75, ngram=2, num_permutations=64, signature_seed=4_294_967_295
                ),
                max_examples=0,
            ),
            tokenizer=TokenizerConfig(path="3e-4", train_max_bytes=5, gigatoken=False),
            mean_document_length=1e3, chat_template="true", held_out_fraction=1e-05, cache_dir="~", prefetch_steps=7,
        ),
        train=TrainConfig(
            num_steps=12_345_678, global_batch_size=12, grad_accum_steps=3, grad_accum_dtype="bfloat16", z_loss_weight=1e-4,
            max_nonfinite_steps=1, frozen=("head",), eval_every=5, eval_batches=2,
            global_batch_ramp=BatchRampConfig(start=4, increment=8, sequences=9),
        ),
        optimizer=OptimizerConfig(
            name="of_my_own", learning_rate=3e-4, schedule="wsd", warmup_steps=3, decay_steps=4, min_lr_ratio=0.0, b1=0.8,
            b2=0.5, eps=1e-300, weight_decay=1e16, no_weight_decay=(), grad_clip_norm=None, moment_dtype="bfloat16",
        ),
        init_from="0x1",
        init_changes=("rope_theta",),
        seed=4_294_967_295,
        mesh=MeshConfig(pipeline=2, data=2, fsdp=1, expert=2, sequence=2, tensor=-1, stages=(9, 8), num_cpu_devices=4),
        offload=OffloadConfig(
            activations="auto", optimizer="auto", parameters="auto", gradient_dtype="bfloat16",
            tiers=TiersConfig(host_bytes=1e12),
        ),
        parallel=ParallelConfig(
            stack="prefetch", zero=2, zero_data=1, grad_reduce="step", sequence="ring", tensor="ring",
            pipeline="interleaved", pipeline_chunks=2, pipeline_head="last", expert_slots=2.0, expert_parts=3,
            expert_exchange="blocks",
        ),
        distributed=DistributedConfig(
            enabled=True, coordinator_address="host:1", num_processes=2, process_id=1, heartbeat_timeout_s=9,
            initialization_timeout_s=8,
        ),
        checkpoint=CheckpointConfig(
            save_every=4, keep_last=9, keep_every=8, async_save=False, allow_changes=("train.num_steps",), local_dir="1e3",
            local_every=2,
        ),
        recovery=RecoveryConfig(max_rollbacks=1, spike_zscore=1e-5, spike_window=16, checksum_every=7),
        metrics=MetricsConfig(
            log_every=1, straggler_ratio=1e6, tensorboard=True, wandb=True, wandb_project="true", wandb_entity="no",
            wandb_name="1e3", wandb_tags=("2024", "on"),
        ),
        hardware=HardwareConfig(
            gpu="h200", nodes=3, gpus_per_node=4, gpu_bandwidth=1e9, node_bandwidth=2.5, price_per_gpu_hour=0.1,
            token_budget=1e12, calibration="1e3", domain_bandwidth=1e9, host_memory=1e12, host_bandwidth=2e10,
            gpus_per_host_link=2, nvme_bandwidth=6e9, expert_imbalance=1.5,
            domains=(
                DomainConfig(name="1e3", network="ethernet", nodes=1, node_bandwidth=2e9, env=("NCCL_NET=Socket",)),
                DomainConfig(name="no", network="roce", nodes=2),
            ),
        ),
        xla=XlaConfig(
            latency_profile="costs.pbtxt", compilation_cache="~/programs", deterministic=True,
            flags=("xla_a=true", "xla_b=1e3"),
        ),
        watchdog=WatchdogConfig(
            enabled=False, factor=1.5, start_s=0.5, compile_s=1e9, load_s=2.0, step_s=3.0, save_s=4.0, evaluate_s=5.0,
            rollout_s=6.0,
        ),
        profile=ProfileConfig(start_step=1, num_steps=2),
        sample=SampleConfig(prompt="Once: upon # a time ", max_tokens=3, temperature=0.0),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


EDITS = [
    # Keys that do not exist or are not there.
    ("num_layers: 2", "num_layer: 2", "6: unknown key 'model.num_layer'; did you mean 'model.num_layers'?"),
    ("optimizer:", "optimiser:", "17: unknown key 'optimiser'; did you mean 'optimizer'?"),
    ("num_steps: 100", "num_steps: 100\n  seed: 1", "16: unknown key 'train.seed'; did you mean 'seed'?"),
    ("", "  Eps: 1\n", "19: unknown key 'optimizer.Eps'; did you mean 'optimizer.eps'?"),
    ("", "  xyzzy: 1\n", "19: unknown key 'optimizer.xyzzy'; optimizer has name, learning_rate, schedule,"),
    ("", "zzz: 1\n", "19: unknown key 'zzz'; a configuration has run_dir, model, data,"),
    ("", "num_steps: 1\n", "19: unknown key 'num_steps'; did you mean 'train.num_steps' or 'profile.num_steps'?"),
    ("- kind: stdlib", "- {kind: stdlib,\n       wieght: 2}", "13: unknown key 'data.sources.0.wieght'; did you mean 'data"),
    ("  head_dim: 8", "  head_dim: 8\n  rope_scaling:\n    facter: 2.0", "11: unknown key 'model.rope_scaling.facter'; "),
    ("  learning_rate: 3e-4", "  <<: {learning_rate: 1}\n  learning_rate: 1", "18: unknown key 'optimizer.<<'"),
    ("  embed_dim: 64\n", "", "2: model.embed_dim: required, but missing"),
    ("optimizer:\n  learning_rate: 3e-4\n", "", "1: optimizer: required, but missing"),
    ("kind: stdlib", "weight: 1", "12: data.sources.0.kind: required, but missing"),
    # Values of the wrong type.
    ("3e-4", '"3e-4"', "18: optimizer.learning_rate: must be a number, but quotes make 3e-4 text; remove them"),
    ("3e-4", "fast", "18: optimizer.learning_rate: must be a number (finite, such as 0.1 or 3e-4), not fast"),
    ("3e-4", ".nan", "18: optimizer.learning_rate: must be a number (finite"),
    ("3e-4", "-.inf", "18: optimizer.learning_rate: must be a number (finite"),
    ("3e-4", "1e999", "18: optimizer.learning_rate: must be a number (finite"),
    ("3e-4", "1:30:00", "18: optimizer.learning_rate: must be a number (finite"),
    ("3e-4", "true", "18: optimizer.learning_rate: must be a number (finite"),
    ("3e-4", "1_00", "18: optimizer.learning_rate: must be a number (finite"),
    ("3e-4", "٣", "18: optimizer.learning_rate: must be a number (finite"),
    ("3e-4", "", "18: optimizer.learning_rate: must be a number, not nothing"),
    ("3e-4", "[3e-4]", "18: optimizer.learning_rate: must be a number, not a list"),
    ("num_layers: 2", "num_layers: 1e3", "6: model.num_layers: must be a whole number, not 1e3; write 1000"),
    ("num_layers: 2", "num_layers: 2.0", "6: model.num_layers: must be a whole number, not 2.0; write 2"),
    ("num_layers: 2", "num_layers: 2.5", "6: model.num_layers: must be a whole number, not 2.5"),
    ("num_layers: 2", "num_layers: 1e400", "6: model.num_layers: must be a whole number, not 1e400"),
    ("num_layers: 2", "num_layers: 017", "6: model.num_layers: must be a whole number, not 017; a leading zero"),
    ("num_layers: 2", "num_layers: 0x10", "6: model.num_layers: must be a whole number, not 0x10"),
    ("num_layers: 2", "num_layers: 1:30", "6: model.num_layers: must be a whole number, not 1:30"),
    ("num_layers: 2", "num_layers: true", "6: model.num_layers: must be a whole number, not true"),
    ("num_layers: 2", "num_layers: null", "6: model.num_layers: must be a whole number, not null"),
    ("num_layers: 2", "num_layers: '2'", "6: model.num_layers: must be a whole number, but quotes make 2 text"),
    ("num_layers: 2", "num_layers: {a: 1}", "6: model.num_layers: must be a whole number, not keys and values"),
    ("num_layers: 2", "num_layers: a\n    b", "6: model.num_layers: must be a whole number, not a b"),
    ("num_layers: 2", "num_layers: " + "9" * 9999, "6: model.num_layers: must be a whole number below 2**63"),
    ("num_layers: 2", "num_layers: 9223372036854775808", "6: model.num_layers: must be a whole number below 2**63"),
    ("  head_dim: 8", "  head_dim: 8\n  tie_embeddings: yes", "10: model.tie_embeddings: must be true or false, not yes"),
    ("  head_dim: 8", "  head_dim: 8\n  tie_embeddings: True", "10: model.tie_embeddings: must be true or false, not True"),
    ("  head_dim: 8", "  head_dim: 8\n  tie_embeddings: 1", "10: model.tie_embeddings: must be true or false, not 1"),
    ("  head_dim: 8", "  head_dim: 8\n  tie_embeddings: 'true'", "10: model.tie_embeddings: must be true or false, but"),
    ("  head_dim: 8", "  head_dim: 8\n  remat: ful", "10: model.remat: must be one of auto, none, save_attention_qkv_mlp, "),
    ("kind: stdlib", "kind: stdlb",
     "12: data.sources.0.kind: must be one of text, jsonl, parquet, arrow, stdlib, chat, preference, prompt, tokenized,"),
    ("runs/tiny", "2024", '1: run_dir: must be text, but YAML reads 2024 as int; write "2024"'),
    ("runs/tiny", "1e3", '1: run_dir: must be text, but YAML reads 1e3 as float; write "1e3"'),
    ("runs/tiny", "no", '1: run_dir: must be text, but YAML reads no as bool; write "no"'),
    ("runs/tiny", "2024-01-01", "1: run_dir: must be text, but YAML reads 2024-01-01 as timestamp;"),
    ("runs/tiny", "null", "1: run_dir: must be text, not null"),
    ("runs/tiny", '"a\\0b"', "1: run_dir: must be text, but 'a\\x00b' contains an invalid character"),
    ("runs/tiny", '"\\uD800"', "1: run_dir: must be text, but '\\ud800' contains an invalid character"),
    ("    - kind: stdlib", "    stdlib", "11: data.sources: must be a list, not stdlib; write [stdlib]"),
    ("    - kind: stdlib", "    kind: stdlib", "11: data.sources: must be a list, not keys and values"),
    ("- kind: stdlib", "- stdlib", "12: data.sources.0: must be a section with keys of its own, not stdlib"),
    ("", "mesh:\n", "19: mesh: must be a section with keys of its own, not nothing"),
    ("", "mesh: [1, 8]\n", "19: mesh: must be a section with keys of its own, not a list"),
    # Rules of one section.
    ("num_steps: 100", "num_steps: -100", "15: train.num_steps: -100 must not be negative"),
    ("num_heads: 8", "num_heads: 6", "8: model.num_kv_heads: 4 must divide num_heads=6"),
    ("  head_dim: 8", "  head_dim: 7", "9: model.head_dim: 7 must be even"),
    ("  head_dim: 8", "  head_dim: 8\n  rope_scaling: {factor: 8}", "10: model.rope_scaling.factor: 8.0 has no effect"),
    ("    - kind: stdlib", "    []", "11: data.sources: must not be empty; name at least one"),
    ("kind: stdlib", "kind: jsonl", "12: data.sources.0.paths: kind=jsonl needs them; name the files or globs to read"),
    ("kind: stdlib", "{kind: stdlib, paths: [a]}", "12: data.sources.0.paths: kind=stdlib finds its own files"),
    ("kind: stdlib", "{kind: stdlib, weight: 0}", "12: data.sources.0.weight: 0.0 must be positive"),
    ("size: 16", "size: 16\n  grad_accum_steps: 3", "17: train.grad_accum_steps: 3 must divide global_batch_size=16"),
    ("", "  name: adam\n", "19: optimizer.name: adam must be one of adamw; llamajax.step.optim.register adds"),
    ("", "  schedule: wsd\n", "19: optimizer.schedule: wsd needs decay_steps; set it to the steps of the final decay"),
    ("", "  decay_steps: 5\n", "19: optimizer.decay_steps: 5 has no effect with schedule=cosine; use wsd or remove it"),
    ("", "  b2: 0.999\n  moment_dtype: bfloat16\n", "20: optimizer.moment_dtype: bfloat16 loses b2=0.999"),
    ("", "mesh: {data: -1}\n", "19: mesh.data: data and fsdp are both -1; only one axis can take the rest"),
    ("", "mesh: {tensor: 0}\n", "19: mesh.tensor: 0 must be positive, or -1 for the rest"),
    ("", "distributed: {num_processes: 2}\n", "19: distributed.num_processes: has no effect unless enabled is true"),
    ("", "checkpoint:\n  keep_every: 1500\n", "20: checkpoint.keep_every: 1500 must be a multiple of save_every=1000"),
    # Rules between sections.
    ("seq_len: 128", "seq_len: 8192", "13: data.seq_len: 8192 is above model.max_seq_len=4096; shorten the rows or"),
    ("", "  warmup_steps: 101\n", "19: optimizer.warmup_steps: warm-up and decay take 101 steps, above train.num_steps=100"),
    ("", "profile: {start_step: 99}\n", "19: profile.start_step: steps 99 to 101 reach beyond train.num_steps=100"),
    ("", "seed: -1\n", "19: seed: -1 must be at least 0 and below 2**32"),
    ("runs/tiny", '""', "1: run_dir: must not be empty"),
    ("", "mesh: {num_cpu_devices: 8, data: 3}\n", "19: mesh: pipeline(1) x data(3) x expert(1) x sequence(1)"),
    ("", "mesh: {num_cpu_devices: 8, fsdp: 2}\n", "19: mesh: pipeline(1) x data(1) x fsdp(2) x expert(1)"),
    ("", "mesh: {num_cpu_devices: 16, tensor: 16}\n", "8: model.num_kv_heads: 4 must be divisible by mesh.tensor=16"),
    ("", "mesh: {num_cpu_devices: 32}\n", "16: train.global_batch_size: 16 / grad_accum_steps(1) = 16 sequences cannot"),
    # Files that are named and do not exist.
    ("seq_len: 128", "seq_len: 128\n  tokenizer: {path: no.model}", "14: data.tokenizer.path: no file matches no.model;"),
    ("kind: stdlib", "kind: text\n      paths:\n        - '*.yaml'\n        - no/**/*.txt", "15: data.sources.0.paths.1: "),
    ("", "hardware: {calibration: .}\n", "19: hardware.calibration: no file matches .; it is a directory; name"),
    ("runs/tiny", "my.yaml", "1: run_dir: my.yaml is not a directory; choose another"),
    ("", "xla: {compilation_cache: my.yaml}\n", "19: xla.compilation_cache: my.yaml is not a directory; choose another"),
    ("runs/tiny", "~nobody-of-that-name/run", "1: run_dir: ~nobody-of-that-name/run is in no known home directory;"),
    # Text that is not the YAML of a configuration.
    ("", "run_dir: b\n", "19: duplicate key 'run_dir', also at my.yaml:1; keep one"),
    ("  embed_dim: 64", "  vocab_size: 1\n  embed_dim: 64", "4: duplicate key 'vocab_size', also at my.yaml:3"),
    ("", "[1, 2]: 3\n", "19: a key must be a name, not a list"),
    ("kind: stdlib", "kind: [stdlib", "13: not valid YAML: while parsing a flow sequence"),
    ("num_layers: 2", "num_layers: 2: 3", "6: not valid YAML: mapping values are not allowed here; check the"),
    ("  num_layers: 2", "\tnum_layers: 2", "6: not valid YAML: while scanning for the next token, found character '\\t'"),
    ("kind: stdlib", "{kind: text, paths: [*.txt]}", "12: not valid YAML: while scanning an alias"),
    ("runs/tiny", "&a runs/tiny", "1: anchors and aliases are not supported"),
    ("runs/tiny", "!!python/object/apply:os.getcwd []", "1: the tag !!python/object/apply:os.getcwd is not"),
    ("runs/tiny", "!!str x", "1: the tag !!str is not supported"),
    ("", "# \0\n", "19: not valid YAML: character '\\x00' is not allowed"),
    ("", 'sample: {prompt: "\\UFFFFFFFF"}\n', "19: not valid YAML: "),
]  # fmt: skip
"""Text of `MINIMAL` (none: its end), what stands there instead, and the problem after the name of the file."""

TEXTS = [
    ("", "my.yaml:1: holds no settings"),
    ("# later\n", "my.yaml:2: holds no settings"),
    ("---\n", "my.yaml:2: must hold sections with keys, not nothing"),
    ("- run_dir: x\n", "my.yaml:1: must hold sections with keys, not a list"),
    ("run_dir\n", "my.yaml:1: must hold sections with keys, not run_dir"),
    (MINIMAL + "---\n" + MINIMAL, "my.yaml:19: a second document starts here; keep one of them"),
    ("a: &a [x]\nb: [" + "*a," * 349_000 + "]\n", "my.yaml:1: anchors and aliases are not supported"),
    ("a: " + "[" * 100_000, "my.yaml:1: nested deeper than 20 levels"),
    ("a: [" + "1," * 100_000 + "]", "my.yaml:1: more than 10,000 values, so this cannot be a configuration"),
    ("#" * (2**20 + 1), "my.yaml: is larger than 1 MiB, so this cannot be a configuration"),
    (MINIMAL.encode() + b"# caf\xe9\n", "my.yaml:19: byte 0xe9 is not UTF-8 text; save the file as UTF-8"),
    (MINIMAL.encode("utf-16"), "my.yaml:1: byte 0xff is not UTF-8 text; save the file as UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), EDITS, ids=range(len(EDITS)))
def test_a_mistake_in_the_file_is_one_line_with_its_place(capsys, old, new, expected):
    (line,) = refuse(capsys, changed(old, new) if old else MINIMAL + new)
    assert line.startswith(f"my.yaml:{expected}")
    assert len(line) < 400


@pytest.mark.parametrize(("text", "expected"), TEXTS, ids=range(len(TEXTS)))
def test_a_file_that_is_no_configuration_is_one_line(capsys, text, expected):
    (line,) = refuse(capsys, text)
    assert line.startswith(expected)


def test_all_mistakes_are_told_at_once_in_the_order_of_their_lines(capsys):
    text = (
        changed("num_layers: 2", "num_layer: 2")
        .replace("  mlp_dim: 128\n", "")
        .replace("head_dim: 8", "head_dim: 8.0")
        .replace("seq_len: 128", "seq_len: -128")
        .replace("num_steps: 100", "num_steps: 0\n  num_steps: 1")
        .replace("learning_rate: 3e-4", "learning_rate: 0")
    )
    assert refuse(capsys, text, "--seed", "x", "--mesh.dta", "2", "stray") == [
        "stray: is not an option; write --config FILE, and settings as --key VALUE",
        "my.yaml:2: model.mlp_dim: required, but missing",
        "my.yaml:5: unknown key 'model.num_layer'; did you mean 'model.num_layers'?",
        "my.yaml:8: model.head_dim: must be a whole number, not 8.0; write 8",
        "my.yaml:12: data.seq_len: -128 must be positive",
        "my.yaml:14: train.num_steps: 0 must be positive; set it, or num_epochs",
        "my.yaml:15: duplicate key 'num_steps', also at my.yaml:14; keep one",
        "my.yaml:18: optimizer.learning_rate: 0.0 must be positive",
        "--seed: must be a whole number, not x",
        "--mesh.dta: unknown key 'mesh.dta'; did you mean 'mesh.data'?",
    ]


def test_rules_between_sections_are_told_at_once(capsys):
    text = (
        changed("seq_len: 128", "seq_len: 8191") + "  warmup_steps: 101\nseed: -1\nmesh: {num_cpu_devices: 8, sequence: 2}\n"
    )
    assert [line.partition(": ")[0] for line in refuse(capsys, text)] == ["my.yaml:13"] * 2 + ["my.yaml:19", "my.yaml:20"]


def test_a_file_that_is_all_wrong_does_not_flood_the_screen(capsys):
    lines = refuse(capsys, "".join(f"key{i}: 1\n" for i in range(4000)))
    assert len(lines) == 51
    assert lines[-1] == "my.yaml:50: more mistakes follow; fix these first"


def test_a_file_that_cannot_be_read_is_one_line(capsys):
    Path("my.yaml").write_text(MINIMAL)
    Path("folder").mkdir()
    for path, expected in (
        ("mine.yaml", "mine.yaml: no such file; did you mean my.yaml?"),
        ("folder/x", "folder/x: no such file"),
        ("nowhere/x", "nowhere/x: no such file"),
        (f"{'nowhere/' * 20}my.yaml", f"{'nowhere/' * 20}my.yaml: no such file"),
        ("folder", "folder: cannot be read: Is a directory; name a YAML file that you may read"),
        ("my.yaml/x", "my.yaml/x: cannot be read: Not a directory; name a YAML file that you may read"),
        ("a\0b", "'a\\x00b': cannot be read: embedded null byte; name a YAML file that you may read"),
        ("", "--config: needs a value; write --config FILE, or --help for the settings"),
    ):
        assert refuse(capsys, None, "--config", path) == [expected]
    assert refuse(capsys, None) == ["--config: required; write --config FILE, or --help for the settings"]


def test_values_may_be_written_as_people_do():
    text = (
        changed("3e-4", "+.5E-3").replace("num_steps: 100", "num_steps: 1_000_000").replace("runs/tiny", "'2024'")
        + "  b2: 0\nsample:\n  prompt: |\n    no\n  temperature: 1.\ncheckpoint: {save_every: ~, async_save: false}\n"
    )
    Path("my.yaml").write_text("\ufeff" + text, newline="\r\n")  # as some editors write it
    config = load_config("my.yaml")
    assert config.optimizer == OptimizerConfig(learning_rate=5e-4, b2=0.0)
    assert type(config.optimizer.b2) is float
    assert config.train.num_steps == 1_000_000
    assert config.run_dir == "2024"
    assert config.sample == SampleConfig(prompt="no\n", temperature=1.0)
    assert config.checkpoint == CheckpointConfig(save_every=None, async_save=False)


def test_the_devices_of_several_processes_are_not_judged_by_one():
    text = MINIMAL + "mesh: {num_cpu_devices: 2, tensor: 4}\ndistributed: {enabled: true}\n"
    Path("my.yaml").write_text(text)
    assert load_config("my.yaml").mesh.tensor == 4


def test_a_dumped_configuration_is_complete_and_loads_to_an_equal_one(everything):
    for key, _, field in keys(Config):
        value: Any = everything
        for name in key.split("."):
            value = value[int(name)] if name.isdecimal() else getattr(value, name)
        several = {
            "sources": everything.data.sources,
            "stages": everything.data.stages,
            "domains": everything.hardware.domains,
        }
        items = several[key.split(".")[1]] if ".0." in key else ()
        values = [operator.attrgetter(key.partition(".0.")[2])(item) for item in items] or [value]
        # A complete configuration has other settings instead of these, or some that adapters or experts exclude.
        if (
            key not in ("model.preset", "model.head", "model.qk_norm_across_heads", "train.num_epochs", "offload.fraction")
            and not key.startswith(("adapters.", "objective.", "offload.tiers.nvme_"))
            and (not key.endswith((".chosen", ".rejected", ".label")))
        ):
            assert any(value != field.default for value in values), f"{key} is as by default"
    text = dump_config(everything)
    Path("my.yaml").write_text(text)
    assert load_config("my.yaml") == everything
    assert yaml.safe_load(text) == config_to_dict(everything)
    assert "eps: 1.0e-300" in text
    assert 'path: "3e-4"' in text


def test_adapters_are_dumped_and_loaded():
    adapters = {"kind": "dora", "rank": 4, "alpha": 8.0, "dropout": 0.1, "targets": ("q",), "base": "float32"}
    Path("base.yaml").write_text(MINIMAL)
    config = load_config("base.yaml").changed(
        {"init_from": "model", "adapters": AdaptersConfig(**adapters, double_quantization=False)}
    )
    Path("my.yaml").write_text(dump_config(config))
    assert load_config("my.yaml") == config


def test_objectives_are_dumped_and_loaded():
    fields = FieldNames(chosen="1", rejected="2", label="3")
    sources = (SourceConfig(kind="preference", paths=("x",), fields=fields),)
    dpo = {"kind": "dpo", "beta": 0.2, "label_smoothing": 0.1, "length_normalized": True, "nll_weight": 0.5}
    kto = {"kind": "kto", "desirable_weight": 2.0, "undesirable_weight": 0.5, "reference": "cached"}
    Path("base.yaml").write_text(MINIMAL)
    for objective in (ObjectiveConfig(**dpo), ObjectiveConfig(**kto), ObjectiveConfig(kind="simpo", margin=1.0)):
        changes = {"init_from": "model", "data.sources": sources, "objective": objective}
        config = load_config("base.yaml").changed(changes)
        Path("my.yaml").write_text(dump_config(config))
        assert load_config("my.yaml") == config


@pytest.mark.parametrize("num_files", [500, pytest.param(2000, marks=pytest.mark.long)])
def test_whatever_the_file_holds_is_a_configuration_or_a_mistake(everything, num_files):
    rng = np.random.default_rng(0)
    sample = "sample:\n  prompt: Once upon a time there was a quick brown fox that wrote a configuration\n"
    seeds = [MINIMAL + sample] * 9 + [dump_config(everything)]
    num_good = 0
    for _ in range(num_files):
        Path("my.yaml").write_bytes(mutated(seeds[rng.integers(len(seeds))], rng))
        with contextlib.suppress(ConfigError):
            read(Path("my.yaml"))
            num_good += 1
    assert num_good > num_files // 100
