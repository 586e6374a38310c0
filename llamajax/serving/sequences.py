"""A continuation that an engine writes for a request, and the events by which it says what is new."""

import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from llamajax.generation.completion import TextStream
from llamajax.generation.sampling import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenScore:
    """A token, and how likely the model itself finds it and others in its place."""

    token: int
    logprob: float | None
    """None for the first token of a prompt."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log probabilities, likeliest first, as many as were asked for."""


@dataclass(frozen=True)
class Event:
    """News of a continuation."""

    text: str
    """Text since the last event."""
    scores: tuple[TokenScore, ...] = ()
    """The tokens since the last event."""
    prompt_scores: tuple[TokenScore, ...] = ()
    """All tokens of the prompt, with the first event, if they were asked for."""
    finish_reason: FinishReason | None = None
    """Set in the last event; see `llamajax.generation.completion.Completion`."""


@dataclass(eq=False, kw_only=True)
class Continuation:
    """A continuation, and how far it is written. One engine writes it, in one thread."""

    prompt: Sequence[int]
    limit: int
    """Maximum number of new tokens; may be 0, which only scores the prompt."""
    stream: TextStream
    """Text of the new tokens; it knows the stop texts."""
    tell: Callable[[Event], object] = lambda event: None
    """Takes each event, in the engine's thread."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Seed of the draws, at least 0 and below 2**32."""
    sample: int = 0
    """Number among the continuations of the same prompt, which draw differently."""
    end_ids: Collection[int] = ()
    num_top: int | None = None
    """How many of the likeliest tokens to tell beside each token; None: no log probabilities at all."""
    scores_prompt: bool = False
    """Whether the prompt's tokens are scored too."""
    num_dispatched: int = 0
    """Number of new tokens that the devices have been asked for."""
    num_tokens: int = 0
    """Number of new tokens so far."""
    is_done: bool = False
    prompt_scores: list[TokenScore] = field(default_factory=list)

    @property
    def row_seed(self) -> int:
        """Seed that the draws depend on beside `seed`: that of `generate` for the same prompt and sample."""
        return zlib.crc32(np.array([self.sample, *self.prompt], "<i4").tobytes())

    @property
    def effort(self) -> int:
        """See `llamajax.generation.sampling.choose_by_row`."""
        s = self.sampling
        return 0 if s.temperature == 0 else 1 if (s.top_k, s.top_p, s.min_p) == (None, None, None) else 2

    def take(self, score: TokenScore) -> None:
        """Adds a new token and tells the news."""
        self.num_tokens += 1
        ended = score.token in self.end_ids
        text = "" if ended else self.stream.push(score.token)
        self.is_done = ended or self.stream.stopped or self.num_tokens == self.limit
        if self.is_done and not self.stream.stopped:
            text += self.stream.finish()
        reason: FinishReason = "stop" if ended or self.stream.stopped else "length"
        self._tell(text, (score,), reason if self.is_done else None)

    def end_without_tokens(self) -> None:
        """Ends a continuation of which only the prompt is wanted."""
        self.is_done = True
        self._tell("", (), "length")

    def _tell(self, text: str, scores: tuple[TokenScore, ...], reason: FinishReason | None) -> None:
        prompt_scores, self.prompt_scores = self.prompt_scores, []
        self.tell(Event(text, scores, tuple(prompt_scores), reason))
