"""Text from a model: sample the next token, append it, repeat."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from llamajax.data.tokenizer import Tokenizer
from llamajax.errors import DataError
from llamajax.model import Llama
from llamajax.sharding import gather, spec


@functools.partial(jax.jit, static_argnames="temperature")
def _next_token(model: Llama, tokens: jax.Array, length: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """The token after the first `length` of `tokens` [B, T], drawn per row; int32 [B], replicated."""
    hidden = model.hidden(tokens)
    is_last = jnp.arange(tokens.shape[1]) == length - 1
    last = jnp.einsum("BTD,T->BD", hidden.astype(jnp.float32), is_last.astype(jnp.float32), out_sharding=spec("batch", None))
    weight = gather(model.output_weight(), "vocab", None, dtype=hidden.dtype)
    logits = jnp.einsum("BD,VD->BV", last, weight.astype(jnp.float32), out_sharding=P(None, None))
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature).astype(jnp.int32)


def encode_prompt(tokenizer: Tokenizer, prompt: str, seq_len: int) -> list[int]:
    """The tokens of a prompt, after the one that begins every text.

    Raises:
        DataError: they leave no room in a row of `seq_len`.
    """
    tokens = [tokenizer.bos_id, *tokenizer.encode_batch([prompt])[0]]
    if len(tokens) >= seq_len:
        raise DataError(f"sample.prompt: {len(tokens)} tokens leave no room in rows of {seq_len}; shorten the prompt")
    return tokens


def stream_text(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    key: jax.Array,
    seq_len: int,
    batch_size: int,
) -> Iterator[str]:
    """The continuation of `prompt` in pieces, as the model writes it.

    Every token runs the whole row of `seq_len` positions again, so this is for samples, not for serving. The row is
    repeated `batch_size` times, which must be a multiple of the mesh's data-parallel devices; the first is told.
    Writing ends at the tokenizer's end-of-text, after `max_tokens`, or when the row is full.

    Raises:
        DataError: the prompt leaves no room in the row.
    """
    written = encode_prompt(tokenizer, prompt, seq_len)
    prompt_length = len(written)
    shown = tokenizer.decode(written[1:])
    for step in range(min(max_tokens, seq_len - prompt_length)):
        row = np.zeros(seq_len, np.int32)
        row[: len(written)] = written
        tokens = jax.device_put(np.tile(row, (batch_size, 1)), spec("batch", "seq"))
        next_tokens = _next_token(model, tokens, np.int32(len(written)), jax.random.fold_in(key, step), temperature)
        token = int(next_tokens[0])
        if token == tokenizer.eos_id:
            return
        written.append(token)
        text = tokenizer.decode(written[1:])
        # A character of several bytes is shown once its last byte is there.
        if text.startswith(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
