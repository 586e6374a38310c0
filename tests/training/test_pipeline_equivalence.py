"""Pipelines give the numbers of one device: losses, gradients and weights of five steps, in every form and pair of forms."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.parallel.mesh import make_mesh
from llamajax.step.step import eval_step
from tests.tiny import random_rows, single_device_mesh, tiny_config, to_device
from tests.training.test_mesh_equivalence import ROUNDED, first_state, initial_state, reference, run_steps

# Deep models double what one device rounds, layer by layer and step by step. With weights four times as large, eight
# micro-batches of 32 layers on one device differ from one micro-batch by 4e-5, and with these by 1.4e-6.
BASE = tiny_config().changed(ROUNDED | {"model.init_std": 0.05})
Values = dict[str, dict[str, Any]]
FACTORS: dict[str, Values] = {
    "stages": {
        f"p {p}, {times} p micro-batches": {"mesh.pipeline": p, "train.grad_accum_steps": times * p}
        for p, times in itertools.product((2, 4, 8), (1, 2, 4))
    },
    "layers": {
        "even": {"per_chunk": 1},
        "uneven": {"per_chunk": 2, "missing": 1},
        "2 chunks": {"per_chunk": 1, "parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 2},
        "4 chunks": {"per_chunk": 1, "parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 4},
        "2 uneven chunks": {
            "per_chunk": 2, "missing": 2, "parallel.pipeline": "interleaved", "parallel.pipeline_chunks": 2,
        },
    },
    "mesh": {
        "alone": {},
        "fsdp": {"mesh.fsdp": 2},
        "data": {"mesh.data": 2},
        "data split": {"mesh.data": 2, "mesh.fsdp": 2, "parallel.zero_data": 1},
        "tensor": {"mesh.fsdp": 2, "mesh.tensor": 2},
        "tensor ring": {"mesh.tensor": 2, "parallel.tensor": "ring"},
        "gather": {"mesh.sequence": 2, "parallel.sequence": "gather"},
        "ring": {"mesh.sequence": 2, "parallel.sequence": "ring"},
        "ulysses": {"mesh.sequence": 2, "mesh.tensor": 2, "parallel.sequence": "ulysses"},
    },
    "remat": {
        remat: {"model.remat": remat}
        for remat in ("full", "save_attention", "save_attention_qkv", "save_attention_qkv_mlp", "none")
    },
    "head": {head: {"parallel.pipeline_head": head} for head in ("shared", "last")},
    "model": {
        "plain": {},
        "tied": {"model.tie_embeddings": True},
        "odd": {
            "model.vocab_size": 61, "model.num_kv_heads": 1, "model.num_heads": 8, "model.qkv_bias": True,
            "model.output_bias": True, "model.mlp_bias": True, "model.qk_norm": True, "data.seq_len": 20,
        },
        "frozen": {"train.frozen": ("layers.attention", "embedding")},
        "frozen head": {"train.frozen": ("head", "final_norm")},
        "window": {"model.sliding_window": 5},
        "whole rows": {"model.attend_across_documents": True},
        "float8": {"model.matmul_dtype": "float8_unrounded"},
    },
}  # fmt: skip
"""Choices that may be combined at will, by what they are about."""


def settings(**chosen: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the run on one device, and what a mesh changes."""
    values = {key: value for name, choice in chosen.items() for key, value in FACTORS[name][choice].items()}
    chunks, per_chunk, missing = values.get("parallel.pipeline_chunks", 1), values.pop("per_chunk"), values.pop("missing", 0)
    values["model.num_layers"] = values["mesh.pipeline"] * chunks * per_chunk - missing
    sizes = {axis: values.get(f"mesh.{axis}", 1) for axis in ("pipeline", "data", "fsdp", "sequence", "tensor")}
    values |= {f"mesh.{axis}": size for axis, size in sizes.items()}
    values["mesh.num_cpu_devices"] = int(np.prod(list(sizes.values())))
    values["train.global_batch_size"] = sizes["data"] * sizes["fsdp"] * values["train.grad_accum_steps"]
    values["parallel.zero"] = 1
    of_mesh = {key: value for key, value in values.items() if key.startswith(("mesh.", "parallel.")) or "remat" in key}
    of_mesh["train.grad_accum_steps"] = values.pop("train.grad_accum_steps")
    return {key: value for key, value in values.items() if key not in of_mesh}, of_mesh


def fits(chosen: dict[str, str]) -> bool:
    """Whether eight devices hold the mesh and their rules allow the pair."""
    of_run, of_mesh = settings(**chosen)
    if of_mesh["mesh.num_cpu_devices"] > 8:
        return False
    try:
        BASE.changed({"mesh.num_cpu_devices": 1} | of_run).changed(of_mesh)
    except ConfigError:
        return False
    return True


def all_pairs() -> Iterator[dict[str, str]]:
    """Few combinations in which every two choices that go together meet, chosen greedily; always the same ones."""
    plain = {name: next(iter(choices)) for name, choices in FACTORS.items()}
    pairs = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(FACTORS, 2)
        for a, b in itertools.product(FACTORS[one], FACTORS[other])
        if fits(plain | {one: a, other: b})
    }
    while pairs:
        first = min(pairs)
        chosen = plain | dict(first)
        for name in FACTORS:
            if name in dict(first):
                continue
            candidates = [chosen | {name: choice} for choice in FACTORS[name]]
            chosen = max(filter(fits, candidates), key=lambda own: len(pairs & met(own)), default=chosen)
        assert first in met(chosen)
        pairs -= met(chosen)
        yield chosen


def met(chosen: dict[str, str]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations(chosen.items(), 2))


EVERYDAY = {
    "stages": "p 2, 2 p micro-batches", "layers": "uneven", "mesh": "tensor", "remat": "save_attention_qkv",
    "head": "shared", "model": "tied",
}  # fmt: skip
SAMPLED = [
    ("p 4, 1 p micro-batches", "even", "fsdp", "full", "last", "odd"),
    ("p 2, 2 p micro-batches", "2 uneven chunks", "data split", "save_attention_qkv_mlp", "last", "frozen"),
    ("p 2, 1 p micro-batches", "even", "tensor ring", "none", "shared", "float8"),
    ("p 2, 4 p micro-batches", "even", "ulysses", "save_attention_qkv", "shared", "whole rows"),
]
MORE = [
    ("p 8, 1 p micro-batches", "even", "alone", "save_attention", "shared", "window"),
    ("p 2, 1 p micro-batches", "2 chunks", "ring", "full", "shared", "plain"),
    ("p 2, 1 p micro-batches", "2 chunks", "alone", "save_attention", "last", "float8"),
]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(EVERYDAY, id="everyday"),
        *(
            pytest.param(dict(zip(FACTORS, choices, strict=True)), id=", ".join(choices), marks=mark)
            for mark, sampled in ((pytest.mark.slow, SAMPLED), (pytest.mark.long, MORE))
            for choices in sampled
        ),
    ],
)
def test_a_pipeline_equals_one_device(chosen):
    check(chosen)


@pytest.mark.long
@pytest.mark.parametrize("part", range(12))
def test_all_pairs_of_forms_equal_one_device(part):
    for chosen in itertools.islice(all_pairs(), part, None, 12):
        check(chosen)


def check(chosen: dict[str, str]) -> None:
    of_run, of_mesh = settings(**chosen)
    alone = BASE.changed({"mesh.num_cpu_devices": 1, "train.num_steps": 5} | of_run)
    config = alone.changed(of_mesh)
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.num_cpu_devices])
    for step, (ours, theirs) in enumerate(zip(run_steps(config, mesh), reference(alone), strict=True)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-5, err_msg=f"{chosen}: step {step}: {name}")


@pytest.mark.parametrize("num_layers", [pytest.param(4, marks=pytest.mark.slow), 3])
def test_an_evaluation_through_the_stages_equals_one_device(num_layers):
    alone = BASE.changed({"mesh.num_cpu_devices": 1, "model.num_layers": num_layers})
    sizes = {"mesh.pipeline": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.num_cpu_devices": 8, "parallel.zero": 1}
    token_bytes = np.arange(alone.model.vocab_size)

    def evaluated(config: Config, mesh: jax.sharding.Mesh) -> list[np.ndarray]:
        first_state(config)
        jax.set_mesh(mesh)
        batch = to_device(config, random_rows(config, 0))
        (loss, cross_entropy, num_tokens), num_bytes = eval_step(
            initial_state(config).model, batch, jnp.asarray(token_bytes)
        )
        return [np.asarray(value) for value in (loss, cross_entropy, num_tokens, num_bytes)]

    config = alone.changed(sizes | {"train.grad_accum_steps": 4})
    found = evaluated(config, make_mesh(config.mesh))
    np.testing.assert_allclose(found, evaluated(alone, single_device_mesh()), rtol=1e-6)
