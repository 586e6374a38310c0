"""Sampling: greedy text is the argmax of the model's own logits, seeds repeat, and ends are respected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config import MeshConfig
from llamajax.errors import DataError
from llamajax.generate import encode_prompt, stream_text
from llamajax.mesh import make_mesh
from llamajax.step import init_state
from tests.tiny import tiny_config

CONFIG = tiny_config()


class Letters:
    """A tokenizer of one token per letter: BOS 1, EOS 2, `a` 3 and so on."""

    bos_id, eos_id = 1, 2

    def encode_batch(self, texts):
        return [np.array([ord(letter) - ord("a") + 3 for letter in text]) for text in texts]

    def decode(self, ids):
        return "".join(chr(int(i) - 3 + ord("a")) for i in ids)


@pytest.fixture(scope="module")
def model():
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))
    return init_state(CONFIG).model


def write(model, *, temperature: float, max_tokens: int = 8, seed: int = 0) -> str:
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))
    key, settings = jax.random.key(seed), {"max_tokens": max_tokens, "temperature": temperature}
    return "".join(stream_text(model, Letters(), "abc", key=key, seq_len=16, batch_size=2, **settings))


def test_greedy_text_follows_the_logits(model):
    """Against logits of the growing row alone, without what comes after it."""
    text = write(model, temperature=0.0)
    tokens, forward = [1, 3, 4, 5], jax.jit(lambda model, row: model(row))
    for _ in range(8):
        row = np.zeros((2, 16), np.int32)
        row[:, : len(tokens)] = tokens
        logits = np.asarray(forward(model, jnp.asarray(row)), np.float32)
        tokens.append(int(logits[0, len(tokens) - 1].argmax()))
    expected = tokens[4:] if 2 not in tokens[4:] else tokens[4 : tokens.index(2, 4)]
    assert text == Letters().decode(expected)
    assert text


def test_a_seed_repeats_its_text_and_another_does_not(model):
    assert write(model, temperature=1.0, seed=1) == write(model, temperature=1.0, seed=1)
    assert len({write(model, temperature=5.0, seed=seed) for seed in range(4)}) > 1


def test_a_full_row_ends_the_text(model):
    assert len(write(model, temperature=0.0, max_tokens=1000)) <= 16 - 4


def test_a_prompt_without_room_is_refused():
    assert encode_prompt(Letters(), "abc", 5) == [1, 3, 4, 5]
    with pytest.raises(DataError, match="4 tokens leave no room in rows of 4"):
        encode_prompt(Letters(), "abc", 4)
