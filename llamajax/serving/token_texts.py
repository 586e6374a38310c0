"""Log probabilities in the two forms of OpenAI: that of /v1/completions and that of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.generation.completion import TextStream
from llamajax.serving.sequences import TokenScore

_CONTEXT_TOKENS = 8
"""Number of earlier tokens that decide on a token's text, such as whether it starts with a space."""


class TokenTexts:
    """Names the tokens of a text one after the other, and knows where in the text each begins."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), offset: int = 0) -> None:
        """Starts after the tokens `before`, `offset` characters into the text."""
        self._tokenizer, self._before, self._offset = tokenizer, list(before[-_CONTEXT_TOKENS:]), offset
        self._stream = TextStream(tokenizer, before, ())

    def completion(self, scores: Sequence[TokenScore], end: int | None) -> dict[str, list[Any]]:
        """Returns tokens in the form of /v1/completions, without those that begin at or after `end`."""
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for score in scores:
            top = {}
            for token, logprob in (*score.top, *([] if score.logprob is None else [(score.token, score.logprob)])):
                top.setdefault(self._name(token), logprob)
            if end is not None and self._offset >= end:
                break
            found["text_offset"].append(self._offset)
            found["token_logprobs"].append(score.logprob)
            found["tokens"].append(self._name(score.token))
            found["top_logprobs"].append(None if score.logprob is None else top if score.top else {})
            self._pass(score.token)
        return found

    def chat(self, scores: Sequence[TokenScore], end: int | None) -> list[dict[str, Any]]:
        """Returns tokens in the form of /v1/chat/completions, without those that begin at or after `end`."""
        found = []
        for score in scores:
            assert score.logprob is not None
            if end is not None and self._offset >= end:
                break
            top = [self._entry(token, logprob) for token, logprob in score.top]
            found.append(self._entry(score.token, score.logprob) | {"top_logprobs": top})
            self._pass(score.token)
        return found

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

    def _name(self, token: int) -> str:
        """Returns the text of a token after those before it; `token_id:N` of one that alone is no text."""
        before, after = (self._tokenizer.decode(ids) for ids in (self._before, [*self._before, token]))
        text = after[len(before) :] if after.startswith(before) else ""
        return f"token_id:{token}" if not text or "\N{REPLACEMENT CHARACTER}" in text else text

    def _pass(self, token: int) -> None:
        self._offset += len(self._stream.push(token))
        self._before = [*self._before, token][-_CONTEXT_TOKENS:]
