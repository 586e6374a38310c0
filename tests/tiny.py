"""The tiny run that tests of whole steps share: every mesh of eight devices divides it."""

import jax
import numpy as np

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.step.resolve import ResolvedRun, resolve


def tiny_config(run_dir: str = "unused", **sections) -> Config:
    """A complete configuration of a model with 30 thousand parameters; `sections` replace whole sections."""
    defaults = {
        "model": ModelConfig(
            vocab_size=64, embed_dim=32, mlp_dim=64, num_layers=2, num_heads=16, num_kv_heads=8, head_dim=4,
            compute_dtype="float32", remat="none", init_std=0.2,
        ),
        "data": DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=16),
        "train": TrainConfig(num_steps=10, global_batch_size=32),
        "optimizer": OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
        "mesh": MeshConfig(num_cpu_devices=8),
    }  # fmt: skip
    return Config(run_dir=run_dir, **(defaults | sections))


def resolved(config: Config) -> ResolvedRun:
    """The run on the current mesh."""
    return resolve(config, jax.sharding.get_abstract_mesh().shape)


def single_device_mesh() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


def random_rows(config: Config, step: int) -> dict[str, np.ndarray]:
    """A batch [B, T] of packed documents of random lengths; rows end in uneven stretches of padding."""
    rng = np.random.default_rng((config.seed, step))
    B, T = config.train.global_batch_size, config.data.seq_len
    tokens = rng.integers(1, config.model.vocab_size, (B, T), dtype=np.int32)
    targets = rng.integers(1, config.model.vocab_size, (B, T), dtype=np.int32)
    starts = rng.random((B, T)) < 0.2
    starts[:, 0] = True
    segment_ids = np.cumsum(starts, axis=1, dtype=np.int32)
    index = np.arange(T, dtype=np.int32)
    positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    padding = index >= rng.integers(1, T + 1, (B, 1))
    segment_ids[padding], targets[padding] = 0, -1
    return {"tokens": tokens, "targets": targets, "segment_ids": segment_ids, "positions": positions.astype(np.int32)}


def to_device(config: Config, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Rows [B, T] as the batch of micro-batches that a step takes, on the current mesh."""
    A = config.train.grad_accum_steps
    return {
        name: jax.device_put(x.reshape(A, x.shape[0] // A, x.shape[1]), spec(None, "micro_batch", "seq"))
        for name, x in rows.items()
    }
