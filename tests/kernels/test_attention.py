"""The door to attention: which kernel it takes, and what it refuses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.errors import ConfigError
from llamajax.kernels import attention, cudnn, pallas, plain, ring, ulysses
from llamajax.kernels.plain import Mask
from llamajax.model import Llama
from tests.kernels.test_cudnn import H100, mesh_of
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    ("dtype", "mask", "how", "taken"),
    [
        ("bfloat16", Mask(), {}, cudnn),
        ("bfloat16", Mask(window=4), {"kernel": "cudnn"}, cudnn),
        ("bfloat16", Mask(), {"kernel": "plain"}, plain),
        ("bfloat16", Mask(), {"kernel": "pallas"}, pallas),
        ("bfloat16", Mask(segment_ids=jnp.ones((2, 4), jnp.int32)), {}, pallas),
        ("bfloat16", Mask(), {"with_lse": True}, pallas),
        ("float32", Mask(), {}, plain),
    ],
)
def test_the_first_kernel_that_can_is_taken(monkeypatch, dtype: str, mask: Mask, how: dict[str, Any], taken: Any):
    q, kv = jnp.zeros((2, 4, 2, 3, 8), dtype), jnp.zeros((2, 4, 2, 8), dtype)
    outs = {kernel: jnp.full_like(q, number) for number, kernel in enumerate((cudnn, pallas, plain))}
    monkeypatch.setattr(cudnn, "attend", lambda *_: outs[cudnn])
    monkeypatch.setattr(pallas, "attend", lambda *_, interpret, language: (outs[pallas], None))
    monkeypatch.setattr(plain, "attend", lambda *_, with_lse: (outs[plain], None))
    with jax.sharding.use_abstract_mesh(mesh_of(H100, fsdp=8)):
        out, _ = attention.attend(q, kv, kv, mask, 1.0, **how)
    np.testing.assert_array_equal(out, outs[taken])


@pytest.mark.parametrize(
    ("sequence", "devices", "dtype", "taken", "kernel"),
    [
        ("auto", 8, "float32", plain, None),
        ("gather", 8, "bfloat16", pallas, None),
        ("ring", 8, "float32", ring, "plain"),
        ("ring", 8, "bfloat16", ring, "pallas"),
        ("ulysses", 8, "float32", ulysses, "plain"),
        ("ulysses", 8, "bfloat16", ulysses, "cudnn"),
        ("ring", 1, "float32", plain, None),
        ("ulysses", 1, "float32", plain, None),
    ],
)
def test_split_rows_are_seen_in_the_form_that_is_asked_for(
    monkeypatch, sequence: Any, devices: int, dtype: str, taken: Any, kernel: str | None
):
    q, kv = jnp.zeros((2, 4, 2, 3, 8), dtype), jnp.zeros((2, 4, 2, 8), dtype)
    calls = []
    for module in (pallas, plain, ring, ulysses):
        monkeypatch.setattr(module, "attend", lambda *_, module=module, **how: (calls.append((module, how)), (q, None))[1])
    with jax.sharding.use_abstract_mesh(mesh_of(H100, fsdp=8 // devices, sequence=devices)):
        attention.attend(q, kv, kv, Mask(), 1.0, sequence=sequence)
    ((module, how),) = calls
    assert (module, how.get("kernel")) == (taken, kernel)


def test_what_cudnn_cannot_give_is_told_in_one_line():
    q, kv = jnp.zeros((2, 4, 2, 3, 8), "bfloat16"), jnp.zeros((2, 4, 2, 8), "bfloat16")
    with (
        jax.sharding.use_abstract_mesh(mesh_of(H100, fsdp=8)),
        pytest.raises(ConfigError, match=r"cudnn cannot be used: jax returns its log-sum-exp in 16 bits .*; or set auto$"),
    ):
        attention.attend(q, kv, kv, Mask(), 1.0, kernel="cudnn", with_lse=True)


def test_a_cpu_has_no_cudnn():
    config = dataclasses.replace(tiny_config().model, attention_kernel="cudnn", attend_across_documents=True)
    message = r"model.attention_kernel: cudnn cannot be used: it needs NVIDIA GPUs; or set auto"
    with pytest.raises(ConfigError, match=message):
        Llama(config, jax.random.key(0))(jnp.zeros((8, 16), jnp.int32))
