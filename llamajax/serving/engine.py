"""Continuous batching: read `Engine.step` first. Each step reads a part of the waiting prompts and one token in every slot.

A long prompt is read in parts between the others' tokens, so it delays each of these by the time of one part. A sequence
starts with the tokens that it shares with the contents of a slot. The devices run one step ahead of the host, which reads
the tokens of the last one; a sequence that turns out to have ended has one token too many computed, which is dropped.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from llamajax.config.parallel import num_parts
from llamajax.generation.sampling import Choices, RowSampling, Sampling
from llamajax.model import Llama
from llamajax.serving.programs import Part, State, copy, decode, read
from llamajax.serving.sequences import Continuation, TokenScore

LEAST_SHARED = 16
"""Number of shared tokens from which a slot is copied rather than read."""
SHORTEST_PART = 16
"""Number of tokens per row of the smallest program that reads prompts."""
_GREEDY: tuple[Sampling, int, int] = (Sampling(), 0, 0)


@dataclass(eq=False)
class Slot:
    """A slot of the cache, as the host knows it."""

    number: int
    shard: int
    """Number of the devices that have it."""
    tokens: np.ndarray
    """Known tokens, [max_seq_len] int32: the prompt and the new tokens that the host has read."""
    num_known: int = 0
    num_read: int = 0
    """Number of tokens in the cache, once the devices have done what they were asked for."""
    work: Continuation | None = None
    last_used: int = 0
    """Number of the continuation that used it last, counted over all of the engine."""

    @property
    def is_reading(self) -> bool:
        """Whether a part of the prompt is still to be read."""
        return self.work is not None and self.num_read < len(self.work.prompt)

    @property
    def is_writing(self) -> bool:
        """Whether another token is to be computed."""
        return self.work is not None and not self.is_reading and self.work.num_dispatched < self.work.limit

    def shares(self, prompt: np.ndarray) -> int:
        """Returns the number of first tokens that the contents share with a prompt, read or not."""
        count = min(self.num_known, len(prompt))
        differ = self.tokens[:count] != prompt[:count]
        return int(differ.argmax()) if differ.any() else count


@dataclass(frozen=True)
class _Asked:
    """Results that the devices were asked for: which rows of them are whose."""

    rows: Sequence[tuple[int, Slot, Continuation]]
    """Rows with a new token."""
    scored: Sequence[tuple[int, Continuation, np.ndarray]]
    """Rows with scores of a prompt, and the tokens that they are of."""
    choices: Choices
    scores: tuple[jax.Array, ...] | None


@dataclass
class Totals:
    """Tokens and steps of an engine so far."""

    prompt_tokens: int = 0
    """Tokens of prompts, shared ones included."""
    shared_tokens: int = 0
    """Tokens of prompts that were copied, or were in their slot already."""
    new_tokens: int = 0
    steps: int = 0


class Engine:
    """A model with its slots. All calls come from one thread, with the engine's mesh as the current one."""

    def __init__(
        self, model: Llama, *, vocab_size: int, num_slots: int, max_seq_len: int, tokens_per_step: int, shares: bool = True
    ) -> None:
        """Creates empty slots on the current mesh.

        Args:
            model: the weights, on the current mesh.
            vocab_size: exclusive upper limit of ids that are chosen.
            num_slots: number of sequences at once; rounded up to a multiple of the devices that share a batch.
            max_seq_len: maximum number of tokens of a prompt with its continuation.
            tokens_per_step: maximum number of tokens of prompts that a step reads, per device that has slots of its own.
            shares: whether sequences start with what they share with a slot.
        """
        self.totals, self.max_seq_len = Totals(), max_seq_len
        self.mesh = jax.sharding.get_mesh()
        self._model, self._vocab_size, self._shares = model, vocab_size, shares
        self._shards = num_parts("batch", self.mesh.shape)
        per_shard = -(-num_slots // self._shards)
        known = np.zeros((per_shard * self._shards, max_seq_len), np.int32)
        self.slots = [Slot(number, number // per_shard, tokens) for number, tokens in enumerate(known)]
        self.waiting: deque[Continuation] = deque()
        self._asked: list[_Asked] = []
        self._num_placed = 0
        longest = min(tokens_per_step, max_seq_len)
        # Few rows of many tokens or many rows of few, so that one size costs about what another does.
        lengths = {longest, *(n for n in (longest // 4, longest // 16) if n >= SHORTEST_PART)}
        self._sizes = [(min(per_shard, max(1, longest // T)), T) for T in sorted(lengths)]
        """(rows per device that has slots of its own, tokens per row), shortest first."""
        self._state = jax.jit(State.empty, static_argnums=(1, 2))(model, len(self.slots), max_seq_len)
        self._sampling: RowSampling | None = None

    @property
    def cache_bytes(self) -> int:
        """Size of all slots, over all devices."""
        return self._state.keys.nbytes + self._state.values.nbytes

    def compile(self) -> None:
        """Runs every program once, without effect."""
        for rows, T in self._sizes:
            self._read([[] for _ in range(self._shards)], rows, T)
        self._copy(0, self.slots[0], self.slots[0])
        self._decode([])
        jax.block_until_ready(self._state)

    def submit(self, work: Continuation) -> None:
        """Adds a continuation to the queue. Its prompt must leave room for its limit in `max_seq_len`."""
        assert 0 < len(work.prompt) <= len(work.prompt) + work.limit <= self.max_seq_len
        self.waiting.append(work)

    def cancel(self, work: Continuation) -> None:
        """Ends a continuation without another event; does nothing if it has ended."""
        work.is_done = True
        if work in self.waiting:
            self.waiting.remove(work)
        for slot in self.slots:
            if slot.work is work:
                slot.work = None

    @property
    def num_running(self) -> int:
        """Number of slots in use."""
        return sum(slot.work is not None for slot in self.slots)

    @property
    def is_busy(self) -> bool:
        """Whether another step has something to do."""
        return bool(self._asked or self.waiting or self.num_running)

    def step(self) -> None:
        """Does one step."""
        self.totals.steps += 1
        self._admit()
        asked = []
        if any(slot.is_reading for slot in self.slots):
            asked.append(self._read_some())
        if writing := [slot for slot in self.slots if slot.is_writing]:
            asked.append(self._decode(writing))
        before, self._asked = self._asked, asked
        for each in before:
            self._take(each)

    def _admit(self) -> None:
        """Gives free slots to waiting continuations, in order. One with a beginning that is just being read for another one
        waits for it."""
        for work in list(self.waiting):
            free = [slot for slot in self.slots if slot.work is None]
            if not free:
                return
            prompt = np.array(work.prompt, np.int32)
            # The last token is always read, because its logits are needed; a prompt that is scored is read as a whole.
            usable = len(prompt) - 1 if self._shares and not work.scores_prompt else 0
            shared = [min(slot.shares(prompt), usable) if usable else 0 for slot in self.slots]
            both = list(zip(self.slots, shared, strict=True))
            if any(slot.is_reading and n >= LEAST_SHARED and n > slot.num_read for slot, n in both):
                continue
            self.waiting.remove(work)
            self._place(work, prompt, free, [min(n, slot.num_read) for slot, n in both])

    def _place(self, work: Continuation, prompt: np.ndarray, free: Sequence[Slot], shared: Sequence[int]) -> None:
        """Gives a continuation one of the free slots, with what it shares: that slot itself if it holds nothing else, or a
        copy of another slot of the same devices."""
        oldest = {slot.shard: slot for slot in sorted(free, key=lambda slot: -slot.last_used)}
        for source in sorted(self.slots, key=lambda slot: (-shared[slot.number], -slot.last_used)):
            count = shared[source.number]
            if source.work is None and count > 0 and count == min(source.num_known, source.num_read):
                target = source
                break
            if source.shard in oldest and count >= LEAST_SHARED:
                target = oldest[source.shard]
                if target is not source:
                    self._copy(source.shard, source, target)
                break
        else:
            target, count = min(free, key=lambda slot: slot.last_used), 0
        target.tokens[: len(prompt)] = prompt
        self._num_placed += 1
        target.num_known, target.num_read, target.work, target.last_used = len(prompt), count, work, self._num_placed
        self._sampling = None
        self.totals.prompt_tokens += len(prompt)
        self.totals.shared_tokens += count

    def _copy(self, shard: int, source: Slot, target: Slot) -> None:
        per_shard = len(self.slots) // self._shards
        sources = np.arange(self._shards, dtype=np.int32) * per_shard
        targets = sources.copy()
        sources[shard], targets[shard] = source.number, target.number
        self._state = copy(self._state, sources, targets)

    def _read_some(self) -> _Asked:
        """Reads parts of prompts, of those that began first; the first one decides on the length of the parts."""
        reading = sorted((slot for slot in self.slots if slot.is_reading), key=lambda slot: slot.last_used)
        assert reading[0].work is not None
        left = len(reading[0].work.prompt) - reading[0].num_read
        rows, T = next((size for size in self._sizes if size[1] >= left), self._sizes[-1])
        by_shard = [[slot for slot in reading if slot.shard == shard][:rows] for shard in range(self._shards)]
        return self._read(by_shard, rows, T)

    def _read(self, by_shard: Sequence[Sequence[Slot]], rows: int, T: int) -> _Asked:
        R, per_shard = rows * self._shards, len(self.slots) // self._shards
        zeros: Any = np.zeros
        part = Part(
            tokens=zeros((R, T), np.int32),
            counts=zeros(R, np.int32),
            slots=zeros(R, np.int32) + np.repeat(np.arange(self._shards, dtype=np.int32) * per_shard, rows),
            is_last=zeros(R, bool),
            targets=zeros((R, T), np.int32),
        )
        settings: list[tuple[Sampling, int, int]] = [_GREEDY] * R
        lengths = self._lengths()
        drawn, scored = [], []
        for row, slot in ((shard * rows + i, slot) for shard, some in enumerate(by_shard) for i, slot in enumerate(some)):
            work, start = slot.work, slot.num_read
            assert work is not None
            end = min(start + T, len(work.prompt))
            part.tokens[row, : end - start] = slot.tokens[start:end]
            part.counts[row], part.slots[row], part.is_last[row] = end - start, slot.number, end == len(work.prompt)
            settings[row] = (work.sampling, work.seed, work.row_seed)
            if work.scores_prompt:
                targets = slot.tokens[start + 1 : min(end + 1, len(work.prompt))].copy()
                part.targets[row, : len(targets)] = targets
                scored.append((row, work, targets))
            slot.num_read = end
            if part.is_last[row]:
                work.num_dispatched = 1
                drawn.append((row, slot, work))
        efforts, with_top = [work.effort for *_, work in drawn], any(work.num_top for *_, work in drawn)
        flags = np.int32(max(efforts, default=0)), np.bool_(with_top), np.bool_(bool(scored))
        run = partial(read, vocab_size=self._vocab_size)
        self._state, choices, scores = run(self._model, self._state, lengths, part, RowSampling.of(settings), *flags)
        return _Asked(drawn, scored, choices, scores if scored else None)

    def _decode(self, writing: Sequence[Slot]) -> _Asked:
        works = {slot.number: slot.work for slot in writing if slot.work is not None}
        if self._sampling is None:
            settings = [
                _GREEDY if slot.work is None else (slot.work.sampling, slot.work.seed, slot.work.row_seed)
                for slot in self.slots
            ]
            self._sampling = jax.device_put(RowSampling.of(settings), jax.P(None))
        effort = max((work.effort for work in works.values()), default=0)
        with_top = any(work.num_top for work in works.values())
        run = partial(decode, vocab_size=self._vocab_size)
        self._state, choices = run(
            self._model, self._state, self._lengths(), self._sampling, np.int32(effort), np.bool_(with_top)
        )
        for number, work in works.items():
            self.slots[number].num_read += 1
            work.num_dispatched += 1
        return _Asked([(number, self.slots[number], work) for number, work in works.items()], [], choices, None)

    def _lengths(self) -> np.ndarray:
        return np.array([slot.num_read for slot in self.slots], np.int32)

    def _take(self, asked: _Asked) -> None:
        """Waits for results and tells them."""
        scored = [entry for entry in asked.scored if not entry[1].is_done]
        if scored and asked.scores is not None:
            logprobs, top_tokens, top_logprobs = (np.asarray(x) for x in asked.scores)
            for row, work, targets in scored:
                if not work.prompt_scores:
                    work.prompt_scores.append(TokenScore(int(work.prompt[0]), None, ()))
                for t, token in enumerate(targets.tolist()):
                    top = _likeliest(top_tokens[row, t], top_logprobs[row, t], work.num_top)
                    work.prompt_scores.append(TokenScore(token, float(logprobs[row, t]), top))
        rows = [entry for entry in asked.rows if not entry[2].is_done]
        if not rows:
            return
        tokens, logprobs = np.asarray(asked.choices.tokens).tolist(), np.asarray(asked.choices.logprobs).tolist()
        with_top = any(work.num_top for *_, work in rows)
        top = [np.asarray(x) for x in asked.choices[2:]] if with_top else None
        for row, slot, work in rows:
            if work.limit == 0:
                work.end_without_tokens()
            else:
                likeliest = () if top is None else _likeliest(top[0][row], top[1][row], work.num_top)
                if slot.num_known < self.max_seq_len:
                    slot.tokens[slot.num_known] = tokens[row]
                    slot.num_known += 1
                self.totals.new_tokens += 1
                work.take(TokenScore(tokens[row], logprobs[row], likeliest))
            if work.is_done:
                slot.work = None


def _likeliest(tokens: np.ndarray, logprobs: np.ndarray, count: int | None) -> tuple[tuple[int, float], ...]:
    return tuple(zip(tokens[: count or 0].tolist(), logprobs[: count or 0].tolist(), strict=True))
