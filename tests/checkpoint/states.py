"""A small state of every kind of array, and runs that save it."""

import dataclasses
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import P

from llamajax.checkpoint.write import Checkpointer
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import CheckpointConfig
from llamajax.parallel import mesh
from llamajax.parallel.arrays import concretise

CONFIG = CheckpointConfig(keep_last=2)
TOKENIZER = random.Random(0).randbytes(5000)
META = {"data": {"position": 640}, "config": "run_dir: runs/tiny\n", "mesh": {"fsdp": 8}}


class Tiny(nnx.Module):
    def __init__(self, key: jax.Array, width: int, dtype: jnp.dtype):
        up, down = jax.random.split(key)
        self.up = nnx.Param(jax.random.normal(up, (width, 32), dtype, out_sharding=P("fsdp", "tensor")))
        self.down = nnx.Param(jax.random.normal(down, (32, width), dtype, out_sharding=P("tensor", "fsdp")))
        self.norm = nnx.Param(jnp.full((width,), 1 / 3, jnp.bfloat16))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TinyState:
    model: Tiny
    opt_state: Any
    step: jax.Array
    key: jax.Array


def init(seed: int, width: int = 16, dtype: jnp.dtype = jnp.float32) -> TinyState:
    key, rest = jax.random.split(jax.random.key(seed))
    model = Tiny(key, width, dtype)
    weights: Any = model  # optax's types know dicts and tuples only
    opt_state = optax.adam(1e-3).init(weights)
    opt_state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype) / 3 if x.dtype == jnp.float32 else x, opt_state)
    return TinyState(model, opt_state, jnp.int32(seed), rest)


def state_of(seed: int) -> TinyState:
    return jax.jit(init)(seed)


def abstract(**options) -> TinyState:
    return concretise(jax.eval_shape(partial(init, **options), 0))


def use_mesh(**sizes: Any) -> None:
    jax.set_mesh(mesh.make_mesh(MeshConfig(**sizes)))


def bits(tree) -> list[bytes]:
    """The exact content of every leaf, typed keys included."""
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(x).tobytes() for x in leaves]


def save(
    run_dir: Path, steps: list[int], config: CheckpointConfig = CONFIG, files: Mapping[str, bytes] = MappingProxyType({})
) -> None:
    with Checkpointer(run_dir, config) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), META | {"step": step}, files)


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def save_two_steps(run_dir: Path) -> Path:
    """A run with steps 10 and 20, in `run_dir`."""
    use_mesh()
    save(run_dir, [10, 20], files={"tokenizer.model": TOKENIZER})
    return run_dir
