"""/v1/completions: texts that continue prompts."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from llamajax.serving.answers import Answer, Answers, Limits, continuations
from llamajax.serving.fields import RequestError
from llamajax.serving.models import Served
from llamajax.serving.sequences import Continuation, TokenScore
from llamajax.serving.token_texts import TokenTexts

DEFAULT_TOKENS = 16
"""New tokens of a continuation if a request does not say, as at OpenAI."""


class CompletionRequest:
    """A request for completions, ready to run: its continuations, and how they become choices."""

    object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, served: Served, values: Mapping[str, Any], prompts: Sequence[str | list[int]], works: Sequence[Continuation]
    ) -> None:
        """See `read`."""
        self.served, self.values, self.works = served, values, works
        self._per_prompt = len(works) // len(prompts)
        texts = [prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt) for prompt in prompts]
        self._echoed = [texts[number // self._per_prompt] if values["echo"] else "" for number in range(len(works))]

    @classmethod
    async def read(cls, served: Served, values: Mapping[str, Any], limits: Limits) -> "CompletionRequest":
        """Encodes the prompts and checks what is asked for.

        Raises:
            RequestError: the request cannot be answered.
        """
        given = values["prompt"]
        prompts = list(given) if isinstance(given, list) and not isinstance(given[0], int) else [given]
        n, best_of = values["n"], values["best_of"] or values["n"]
        if best_of < n:
            raise RequestError(f"best_of: {best_of} must be at least n={n}", param="best_of")
        if values["stream"] and best_of > n:
            raise RequestError("best_of: the best are known at the end; leave it or stream out", param="best_of")
        if len(prompts) > limits.max_queue + len(served.engine.slots):
            raise RequestError(f"prompt: {len(prompts):,} prompts are too many for the queue; send fewer", param="prompt")
        places = ["prompt" if len(prompts) == 1 else f"prompt[{index}]" for index in range(len(prompts))]
        encoded = [await served.encode_prompt(prompt, place) for prompt, place in zip(prompts, places, strict=True)]
        works = continuations(
            served,
            encoded,
            values,
            limits,
            num_samples=best_of,
            max_tokens=values["max_tokens"],
            default_tokens=DEFAULT_TOKENS,
            num_top=values["logprobs"],
            scores_prompt=values["echo"] and values["logprobs"] is not None,
        )
        return cls(served, values, prompts, works)

    def choices(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Returns the choices of finished continuations: the best of each prompt first where `best_of` asks for more."""
        n, chosen = self.values["n"], []
        for start in range(0, len(answers), self._per_prompt):
            numbers = list(range(start, start + self._per_prompt))
            if self._per_prompt > n:
                numbers.sort(key=lambda number: -answers[number].mean_logprob)
            chosen += numbers[:n]
        return [
            self._choice(index, number, self._echoed[number] + answers[number].text, answers[number], self._texts(number), 0)
            for index, number in enumerate(chosen)
        ]

    async def chunks(self, answers: Answers) -> AsyncIterator[list[dict[str, Any]]]:
        """Yields the choices of each chunk of a stream."""
        texts = [self._texts(number) for number in range(len(self.works))]
        held, sent, first = [Answer() for _ in self.works], [0] * len(self.works), [*self._echoed]
        async with aclosing(answers.events()) as events:
            async for number, event in events:
                news = held[number]
                news.add(event)
                text, first[number] = first[number] + news.text, ""
                # Tokens without certain text yet wait for it: they may belong to a stop text.
                if text or news.finish_reason is not None:
                    yield [self._choice(number, number, text, news, texts[number], sent[number])]
                    held[number], sent[number] = Answer(), sent[number] + len(text)

    def _texts(self, number: int) -> TokenTexts:
        before = () if self.values["echo"] else self.works[number].prompt
        return TokenTexts(self.served.tokenizer, before)

    def _choice(self, index: int, number: int, text: str, news: Answer, texts: TokenTexts, num_sent: int) -> dict[str, Any]:
        logprobs = None
        if self.values["logprobs"] is not None:
            scores: list[TokenScore] = [*news.prompt_scores, *news.scores]
            stopped = news.finish_reason is not None and self.works[number].stream.stopped
            logprobs = texts.completion(scores, num_sent + len(text) if stopped else None)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": news.finish_reason}
