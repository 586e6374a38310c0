"""/v1/chat/completions: answers in conversations."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from llamajax.serving.answers import Answer, Answers, Limits, continuations
from llamajax.serving.fields import RequestError
from llamajax.serving.models import Served
from llamajax.serving.sequences import Continuation
from llamajax.serving.token_texts import TokenTexts
from llamajax.serving.tool_calls import certain_text, find_calls, format_of


class ChatRequest:
    """A request for an answer, ready to run: its continuations, and how they become choices."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, served: Served, values: Mapping[str, Any], works: Sequence[Continuation]) -> None:
        """See `read`."""
        self.served, self.values, self.works = served, values, works
        calls_tools = bool(values["tools"]) and values["tool_choice"] != "none" and served.template is not None
        self._format = format_of(served.template.text) if calls_tools and served.template is not None else None

    @classmethod
    async def read(cls, served: Served, values: Mapping[str, Any], limits: Limits) -> "ChatRequest":
        """Encodes the conversation and checks what is asked for.

        Raises:
            RequestError: the request cannot be answered.
        """
        if values["top_logprobs"] is not None and not values["logprobs"]:
            raise RequestError("top_logprobs: has no effect unless logprobs is true", param="top_logprobs")
        fields = {key: values[key] for key in ("messages", "chat_template_kwargs") if values[key]}
        if values["tools"] and values["tool_choice"] != "none":
            fields["tools"] = values["tools"]
        given = [values[key] for key in ("max_completion_tokens", "max_tokens") if values[key] is not None]
        works = continuations(
            served,
            [await served.encode_messages(fields)],
            values,
            limits,
            num_samples=values["n"],
            max_tokens=given[0] if given else None,
            num_top=(values["top_logprobs"] or 0) if values["logprobs"] else None,
        )
        return cls(served, values, works)

    def choices(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Returns the choices of finished continuations."""
        found = []
        for index, answer in enumerate(answers):
            content, calls = find_calls(answer.text, self._format)
            message: dict[str, Any] = {"role": "assistant", "content": content or None if calls else content}
            if calls:
                message["tool_calls"] = calls
            found.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(index, self._texts(index), answer, len(answer.text)),
                    "finish_reason": "tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason,
                }
            )
        return found

    async def chunks(self, answers: Answers) -> AsyncIterator[list[dict[str, Any]]]:
        """Yields the choices of each chunk of a stream; calls of tools come whole, at the end."""
        yield [_chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self.works))]
        texts = [self._texts(index) for index in range(len(self.works))]
        held, whole, sent = [Answer() for _ in self.works], [""] * len(self.works), [0] * len(self.works)
        async with aclosing(answers.events()) as events:
            async for index, event in events:
                news = held[index]
                news.add(event)
                whole[index] += event.text
                is_last = news.finish_reason is not None
                content, calls = find_calls(whole[index], self._format) if is_last else (whole[index], [])
                certain = (certain_text(whole[index], self._format) if calls or not is_last else content)[sent[index] :]
                if not certain and not is_last:
                    continue
                delta: dict[str, Any] = {"content": certain} if certain else {}
                if calls:
                    delta["tool_calls"] = [{"index": number} | call for number, call in enumerate(calls)]
                sent[index] += len(certain)
                reason = "tool_calls" if calls and news.finish_reason == "stop" else news.finish_reason
                yield [_chunk(index, delta, self._logprobs(index, texts[index], news, len(whole[index])), reason)]
                held[index] = Answer()

    def _texts(self, index: int) -> TokenTexts:
        return TokenTexts(self.served.tokenizer, self.works[index].prompt)

    def _logprobs(self, index: int, texts: TokenTexts, news: Answer, length: int) -> dict[str, Any] | None:
        if not self.values["logprobs"]:
            return None
        stopped = news.finish_reason is not None and self.works[index].stream.stopped
        return {"content": texts.chat(news.scores, length if stopped else None), "refusal": None}


def _chunk(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
