"""Continues prompts: the token loop over a cache, the end of a text, and the conversion of tokens to text as they arrive."""

import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import jax
import numpy as np

from llamajax.config.parallel import num_parts
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import DataError
from llamajax.generation.sampling import Sampling, next_tokens
from llamajax.model import Llama
from llamajax.model.kv_cache import KVCache
from llamajax.parallel.sharding import spec
from llamajax.step.batch import check_ids

_CONTEXT_TOKENS = 8
"""Number of prompt tokens decoded along with the first new ones, which determine whether these start with a space."""


@dataclass(frozen=True)
class Completion:
    """A finished continuation."""

    text: str
    """Text of the continuation, without the stop text."""
    tokens: tuple[int, ...]
    """All generated tokens, including the end token or the tokens of the stop text."""
    finish_reason: Literal["stop", "length"]
    """`stop`: an end token or a stop text; `length`: `max_tokens`, or no room left in `max_seq_len`."""
    logprob: float
    """Sum over the tokens of their log probability under the model, independent of the sampling."""


@dataclass(frozen=True)
class Piece:
    """Text that a row has produced since its last piece."""

    row: int
    """Row number; sample s of prompt p is row p * num_samples + s."""
    text: str
    """Text of the piece. Often empty: a character comes with its last byte, and a possible stop text once it is ruled
    out."""
    completion: Completion | None
    """The whole continuation, with the last piece only."""


@dataclass
class Stats:
    """Time and tokens of generation so far."""

    prompt_tokens: int = 0
    """Number of prompt tokens read."""
    prefill_s: float = 0.0
    """Seconds of reading prompts, which includes the first new tokens."""
    decoded_tokens: int = 0
    """Number of tokens generated after the first ones."""
    decode_s: float = 0.0
    """Seconds of generating them, including what the caller did with the pieces meanwhile."""
    compile_s: float = 0.0
    """Seconds of compiling, which the other times exclude."""


class TextStream:
    """Converts the tokens of a continuation to text as they arrive."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        """Starts the text that follows `prompt` and ends before the first of the texts in `stop`."""
        self.stopped = False
        """Whether a stop text was generated; it and the text after it are not returned."""
        self._tokenizer = tokenizer
        self._stop = stop
        # Decoding starts at the last complete text, so that a long text does not take longer and longer.
        self._context = list(prompt[-_CONTEXT_TOKENS:])
        self._incomplete: list[int] = []
        self._held = ""

    def push(self, token: int) -> str:
        """Adds a token and returns the text that is now certain."""
        self._incomplete.append(token)
        text = self._decode()
        # The bytes of an incomplete character are decoded as this.
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._context, self._incomplete = self._incomplete, []
            self._held += text
        return self._release(last=False)

    def finish(self) -> str:
        """Returns the rest of the text when no token follows."""
        self._held += self._decode()
        return self._release(last=True)

    def _decode(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._incomplete)[len(before) :]

    def _release(self, *, last: bool) -> str:
        # The stop text that is complete first wins, so that the division of the text into tokens does not matter.
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        begun = (n for stop in self._stop for n in range(1, len(stop)) if self._held.endswith(stop[:n]))
        cut = len(self._held) - (0 if last else max(begun, default=0))
        text, self._held = self._held[:cut], self._held[cut:]
        return text


class _Row:
    """A continuation in progress."""

    def __init__(self, number: int, sample: int, prompt: Sequence[int], limit: int, stream: TextStream) -> None:
        self.number, self.prompt, self.limit = number, prompt, limit
        # Draws differ between samples of a prompt and between prompts, but not with the position of the row.
        self.seed = zlib.crc32(np.array([sample, *prompt], "<i4").tobytes())
        self._stream = stream
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprob = 0.0

    def take(self, token: int, logprob: float, end_ids: Collection[int]) -> Piece:
        """Adds a token and returns the new piece."""
        self._tokens.append(token)
        self._logprob += logprob
        ended = token in end_ids
        text = "" if ended else self._stream.push(token)
        last = ended or self._stream.stopped or len(self._tokens) == self.limit
        if last and not self._stream.stopped:
            text += self._stream.finish()
        self._texts.append(text)
        if not last:
            return Piece(self.number, text, None)
        reason = "stop" if ended or self._stream.stopped else "length"
        return Piece(self.number, text, Completion("".join(self._texts), tuple(self._tokens), reason, self._logprob))


@partial(jax.jit, static_argnames=("sampling", "vocab_size", "max_seq_len"))
def _prefill(
    model: Llama,
    key: jax.Array,
    row_seeds: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    sampling: Sampling,
    vocab_size: int,
    max_seq_len: int,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Reads prompts; returns each row's first new token and its log probability, [B], and the cache."""
    logits, cache = model.prefill(tokens, lengths, KVCache.empty(model.config, tokens.shape[0], max_seq_len))
    return *next_tokens(logits[:, :vocab_size], row_seeds, cache.lengths, key, sampling), cache


@partial(jax.jit, static_argnames=("sampling", "vocab_size"), donate_argnames="cache")
def _decode(
    model: Llama,
    key: jax.Array,
    row_seeds: jax.Array,
    tokens: jax.Array,
    cache: KVCache,
    *,
    sampling: Sampling,
    vocab_size: int,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Reads each row's newest token and returns the next one, in the same form."""
    logits, cache = model.decode(jax.reshard(tokens, spec("batch")), cache)
    return *next_tokens(logits[:, :vocab_size], row_seeds, cache.lengths, key, sampling), cache


class Completer:
    """A model that generates: its two steps, each compiled for every new size, and the time they took.

    Sizes are powers of two: the longest prompt of a call for the first step, and that plus `max_tokens` for the cache. Calls
    of equal sizes reuse the compiled steps.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer,
        *,
        sampling: Sampling,
        key: jax.Array,
        max_seq_len: int,
        end_ids: Collection[int],
    ) -> None:
        """Prepares generation.
        Args:
            model: the model, on the current mesh.
            tokenizer: tokenizer of the model; ids that it does not have are never generated.
            sampling: settings for choosing tokens.
            key: a PRNG key that all draws come from.
            max_seq_len: maximum number of tokens of prompt and continuation together.
            end_ids: tokens that end a text.
        """
        self.stats = Stats()
        self._model, self._tokenizer, self._key = model, tokenizer, key
        self._choice = {"sampling": sampling, "vocab_size": tokenizer.vocab_size}
        self._max_seq_len, self._end_ids = max_seq_len, end_ids
        self._programs: dict[tuple[Any, ...], jax.stages.Compiled] = {}

    def with_model(self, model: Llama, key: jax.Array) -> Self:
        """Sets other weights of the same types and shardings, and another key; returns the completer."""
        self._model, self._key = model, key
        return self

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        num_samples: int = 1,
        batch_size: int = 1,
        apart: bool = False,
    ) -> Iterator[Piece]:
        """Continues every prompt; batches come in order, the rows of a batch interleaved.

        Args:
            prompts: token ids, at least one per prompt.
            max_tokens: maximum number of tokens of each continuation.
            stop: texts that end a continuation and are not returned.
            num_samples: continuations per prompt.
            batch_size: rows generated at once; rounded up to a multiple of the devices that share a batch.
            apart: equal prompts have draws of their own, in order; otherwise they draw alike.

        Raises:
            DataError: a prompt leaves no room in `max_seq_len`, or has tokens that the model lacks.
        """
        check_prompts(prompts, self._max_seq_len, self._model.config.vocab_size)
        times = dict[tuple[int, ...], int]()
        first = [0] * len(prompts)
        if apart:
            for p, prompt in enumerate(map(tuple, prompts)):
                first[p] = times.get(prompt, 0)
                times[prompt] = first[p] + num_samples
        rows = [
            _Row(
                number=p * num_samples + sample,
                sample=first[p] + sample,
                prompt=prompt,
                limit=min(max_tokens, self._max_seq_len - len(prompt)),
                stream=TextStream(self._tokenizer, prompt, stop),
            )
            for p, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]
        longest = max((len(prompt) for prompt in prompts), default=1)
        batch_shards, seq_shards = (num_parts(dim, jax.sharding.get_mesh().shape) for dim in ("batch", "seq"))
        B = _round_up(max(1, min(batch_size, len(rows))), batch_shards)
        T = _round_up(min(_power_of_two(longest), self._max_seq_len), seq_shards)
        S = max(T, min(_power_of_two(longest + max_tokens), self._max_seq_len))
        for start in range(0, len(rows), B):
            yield from self._complete_batch(rows[start : start + B], B, T, S)

    def _complete_batch(self, rows: Sequence[_Row], B: int, T: int, S: int) -> Iterator[Piece]:
        tokens, lengths, seeds = np.zeros((B, T), np.int32), np.ones(B, np.int32), np.zeros(B, np.uint32)
        for b, row in enumerate(rows):
            tokens[b, : len(row.prompt)], lengths[b], seeds[b] = row.prompt, len(row.prompt), row.seed
        row_seeds = jax.device_put(seeds, spec("batch"))
        prompts = jax.device_put(tokens, spec("batch", "seq")), jax.device_put(lengths, spec("batch"))

        prefill = self._compile(_prefill, (B, T, S), row_seeds, *prompts, max_seq_len=S)
        started = time.monotonic()
        drawn, logprobs, cache = jax.block_until_ready(prefill(self._model, self._key, row_seeds, *prompts))
        self.stats.prompt_tokens += sum(len(row.prompt) for row in rows)
        self.stats.prefill_s += time.monotonic() - started

        decode = self._compile(_decode, (B, S), row_seeds, drawn, cache)
        unfinished, num_written = dict(enumerate(rows)), 0
        last_time = time.monotonic()
        while unfinished:
            num_written += 1
            values = drawn, logprobs
            # The device continues while the host reads; in vain if all rows turn out to have ended.
            if num_written < max(row.limit for row in unfinished.values()):
                drawn, logprobs, cache = decode(self._model, self._key, row_seeds, drawn, cache)
            ids, row_logprobs = (np.asarray(value) for value in values)
            now = time.monotonic()
            if num_written > 1:
                self.stats.decoded_tokens += len(unfinished)
                self.stats.decode_s += now - last_time
            last_time = now
            for b, row in list(unfinished.items()):
                piece = row.take(int(ids[b]), float(row_logprobs[b]), self._end_ids)
                if piece.completion is not None:
                    del unfinished[b]
                yield piece

    def _compile(self, step: Any, sizes: tuple[int, ...], *arguments: Any, **static: Any) -> jax.stages.Compiled:
        if (step, sizes) not in self._programs:
            started = time.monotonic()
            lowered = step.lower(self._model, self._key, *arguments, **static, **self._choice)
            self._programs[step, sizes] = lowered.compile()
            self.stats.compile_s += time.monotonic() - started
        return self._programs[step, sizes]


def _power_of_two(size: int) -> int:
    """Returns the smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def check_prompts(prompts: Sequence[Sequence[int]], max_seq_len: int, vocab_size: int) -> None:
    """Rejects prompts without room for a continuation within `max_seq_len` tokens, or with tokens that a model of
    `vocab_size` rows has no embedding for.

    Raises:
        DataError: a prompt is invalid; the message names the first one, counted from 1.
    """
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) >= max_seq_len:
            raise DataError(f"prompt {number}: {len(prompt)} tokens leave no room in max_seq_len={max_seq_len}; shorten it")
        check_ids(prompt, vocab_size, f"prompt {number}", "the tokenizer has tokens that the model lacks")


def encode_prompt(tokenizer: Tokenizer, prompt: str, seq_len: int) -> list[int]:
    """Returns the tokens of a run's sample prompt.

    Raises:
        DataError: the tokens leave no room in a row of `seq_len`.
    """
    tokens = tokenizer.encode_prompt(prompt)
    if len(tokens) >= seq_len:
        raise DataError(f"sample.prompt: {len(tokens)} tokens leave no room in rows of {seq_len}; shorten the prompt")
    return tokens


def stream_text(
    model: Llama, tokenizer: Tokenizer, prompt: str, *, max_tokens: int, temperature: float, key: jax.Array, seq_len: int
) -> Iterator[str]:
    """Yields the continuation of a run's sample prompt in pieces, as the model generates it.

    Generation ends at the tokenizer's end-of-text, after `max_tokens`, or when a row of `seq_len` is full.

    Raises:
        DataError: the prompt leaves no room in the row.
    """
    prompt_tokens = encode_prompt(tokenizer, prompt, seq_len)
    sampling, end_ids = Sampling(temperature=temperature), (tokenizer.eos_id,)
    completer = Completer(model, tokenizer, sampling=sampling, key=key, max_seq_len=seq_len, end_ids=end_ids)
    return (piece.text for piece in completer.complete([prompt_tokens], max_tokens=max_tokens))
