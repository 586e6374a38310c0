"""Runs the continuations of one request: room in the queue, tokens of each prompt, events, time limit, end."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from llamajax.generation.completion import TextStream
from llamajax.serving.fields import RequestError, sampling_of, stops_of
from llamajax.serving.metrics import Metrics
from llamajax.serving.models import Served
from llamajax.serving.sequences import Continuation, Event, FinishReason, TokenScore
from llamajax.serving.worker import News, Worker

_RETRY_S = 1


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one request."""

    max_body_bytes: int
    max_tokens: int | None
    """New tokens of a continuation; None: as many as there is room for."""
    max_queue: int
    """Continuations of a model that wait for a slot."""
    max_time_s: float
    """From the request to the last token."""


@dataclass(kw_only=True)
class Answer:
    """A finished continuation."""

    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, event: Event) -> None:
        """Adds the news of an event."""
        self.text += event.text
        self.scores += event.scores
        self.prompt_scores += event.prompt_scores
        self.finish_reason = event.finish_reason

    @property
    def mean_logprob(self) -> float:
        """Log probability per token."""
        logprobs = [score.logprob for score in self.scores if score.logprob is not None]
        return sum(logprobs) / max(1, len(logprobs))


class Answers:
    """The continuations of one request: `events` once, or `all`; then `close`, also if it fails."""

    def __init__(
        self, worker: Worker, served: Served, works: Sequence[Continuation], limits: Limits, metrics: Metrics
    ) -> None:
        """Queues the continuations.

        Raises:
            RequestError: the queue is full.
        """
        room = len(served.engine.slots) + limits.max_queue
        if served.num_open + len(works) > room:
            metrics.refused.inc()
            raise RequestError(
                f"{served.num_open} continuations are in work or wait, and {len(works)} more exceed {room}; try again later",
                status=429,
                retry_after=_RETRY_S,
                code="queue_full",
            )
        self.works, self.started, self.first_s, self.num_tokens = works, time.monotonic(), None, 0
        self._worker, self._served, self._limits, self._metrics = worker, served, limits, metrics
        self._news: News = asyncio.Queue()
        served.num_open += len(works)
        worker.submit(served.engine, works, self._news)

    async def events(self) -> AsyncGenerator[tuple[int, Event], None]:
        """Yields the events of all continuations, each with the number of its continuation.

        Raises:
            RequestError: the time limit is reached, or the engine has failed.
        """
        num_left, deadline = len(self.works), self.started + self._limits.max_time_s
        while num_left:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    news = await self._news.get()
            except TimeoutError as error:
                raise RequestError(
                    f"the request took longer than {self._limits.max_time_s:g} s", status=504, code="timeout"
                ) from error
            if news is None:
                raise RequestError("the engine has failed; see its log", status=503, code="engine_failed")
            number, event = news
            self.num_tokens += len(event.scores)
            if self.first_s is None:
                self.first_s = time.monotonic() - self.started
                self._metrics.first_token_s.observe(self.first_s)
            num_left -= event.finish_reason is not None
            yield number, event

    async def all(self) -> list[Answer]:
        """Returns the finished continuations."""
        answers = [Answer() for _ in self.works]
        async with aclosing(self.events()) as events:
            async for number, event in events:
                answers[number].add(event)
        return answers

    def close(self) -> None:
        """Gives up what has not ended, and the room in the queue."""
        self._served.num_open -= len(self.works)
        self._worker.forget(self._served.engine, self.works, self._news)
        self._metrics.request_s.observe(time.monotonic() - self.started)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts; several continuations of a prompt count it once."""
        return sum(len(work.prompt) for work in self.works if work.sample == 0)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens so far, as OpenAI counts them."""
        prompt, new = self.prompt_tokens, self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    @property
    def about(self) -> str:
        """Tokens and times, for the log."""
        seconds = time.monotonic() - self.started
        first = "" if self.first_s is None else f", first after {self.first_s:.3f} s"
        return f"{self.prompt_tokens:,} + {self.num_tokens:,} tokens in {seconds:.3f} s{first}"


def continuations(
    served: Served,
    prompts: Sequence[Sequence[int]],
    values: Mapping[str, Any],
    limits: Limits,
    *,
    num_samples: int,
    max_tokens: int | None,
    num_top: int | None,
    default_tokens: int | None = None,
    scores_prompt: bool = False,
) -> list[Continuation]:
    """Returns the continuations that a request asks for, sample by sample of each prompt.

    Args:
        served: the model.
        prompts: tokens of each prompt.
        values: parameters of the request.
        limits: limits of the server.
        num_samples: continuations of each prompt.
        max_tokens: new tokens of each continuation; None: at most `default_tokens`, and as many as there is room for.
        num_top: see `Continuation`.
        default_tokens: see `max_tokens`; None: no other limit.
        scores_prompt: see `Continuation`.

    Raises:
        RequestError: a prompt with its continuation is longer than the model or the server takes.
    """
    seed = secrets.randbits(32) if values["seed"] is None else values["seed"] % 2**32
    sampling, stops, works = sampling_of(values), stops_of(values), []
    room = len(served.engine.slots) + limits.max_queue
    if len(prompts) * num_samples > room:
        raise RequestError(f"the request asks for {len(prompts) * num_samples:,} continuations; at most {room:,} may wait")
    for prompt in prompts:
        longest = served.engine.max_seq_len
        if len(prompt) + (max_tokens or 0) > longest or (len(prompt) == longest and max_tokens != 0):
            asked = "" if max_tokens is None else f" and {max_tokens:,} new ones"
            raise RequestError(
                f"the prompt's {len(prompt):,} tokens{asked} exceed the {longest:,} that the model takes; shorten one",
                code="context_length_exceeded",
                param="messages" if "messages" in values else "prompt",
            )
        if max_tokens is not None and limits.max_tokens is not None and max_tokens > limits.max_tokens:
            raise RequestError(f"max_tokens: {max_tokens:,} exceeds the server's {limits.max_tokens:,}", param="max_tokens")
        room = [longest - len(prompt), limits.max_tokens, default_tokens]
        limit = min(most for most in room if most is not None) if max_tokens is None else max_tokens
        works += [
            Continuation(
                prompt=prompt,
                limit=limit,
                stream=TextStream(served.tokenizer, prompt, stops),
                sampling=sampling,
                seed=seed,
                sample=sample,
                end_ids=() if values["ignore_eos"] else served.end_ids,
                num_top=num_top,
                scores_prompt=scores_prompt,
            )
            for sample in range(num_samples)
        ]
    return works
