"""Reads the bodies of requests: which parameters there are, what they may be, and what is refused, by one table each."""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from llamajax.generation.sampling import NUM_TOP, Sampling


class RequestError(Exception):
    """A request that is refused, in the form of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Creates the error; `retry_after` is in seconds."""
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.retry_after = message, status, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a request."""

    holds: Callable[[Any], bool]
    rule: str
    default: Any = None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _integer(least: int, most: int, default: int | None = None) -> Parameter:
    rule = f"must be an integer from {least} to {most}" if most < 2**53 else f"must be an integer of at least {least}"
    return Parameter(lambda value: _is_int(value) and least <= value <= most, rule, default)


def _only(*values: Any) -> Parameter:
    """A parameter that clients send with a value that changes nothing; others are not supported."""
    named = " or ".join(orjson.dumps(value).decode() for value in values)
    return Parameter(lambda value: value in values, f"is not supported, except as {named}; leave it out")


_ANY = Parameter(lambda value: True, "")
_FLAG = Parameter(lambda value: isinstance(value, bool), "must be true or false", False)
_TEXT = Parameter(lambda value: isinstance(value, str), "must be text")
_MOST = 2**63 - 1
MAX_CHOICES = 128
"""Maximum of `n` and `best_of`, as at OpenAI."""
MAX_STOPS, MAX_STOP_CHARS = 16, 1000


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and len(texts) <= MAX_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in texts)
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_int, value))


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _is_ids(value):
        return True
    return isinstance(value, list) and bool(value) and (all(isinstance(x, str) for x in value) or all(map(_is_ids, value)))


def _is_stream_options(value: Any) -> bool:
    known = ("include_usage", "include_obfuscation")
    return isinstance(value, dict) and value.keys() <= set(known) and all(isinstance(x, bool) for x in value.values())


_SHARED = {
    "model": _TEXT,
    "n": _integer(1, MAX_CHOICES, 1),
    "stream": _FLAG,
    "stream_options": Parameter(_is_stream_options, 'must be {"include_usage": true|false}'),
    "stop": Parameter(
        _is_stop, f"must be a text that is not empty, or a list of up to {MAX_STOPS} of at most {MAX_STOP_CHARS}"
    ),
    "seed": Parameter(_is_int, "must be an integer"),
    "temperature": Parameter(lambda value: _is_number(value) and 0 <= value <= 100, "must be a number from 0 to 100", 1.0),
    "top_p": Parameter(lambda value: _is_number(value) and 0 < value <= 1, "must be a number above 0 and at most 1", 1.0),
    "top_k": Parameter(
        lambda value: _is_int(value) and -1 <= value < 2**31, "must be a positive integer, or 0 or -1 for all tokens", 0
    ),
    "min_p": Parameter(lambda value: _is_number(value) and 0 <= value <= 1, "must be a number from 0 to 1", 0.0),
    "ignore_eos": _FLAG,
    "frequency_penalty": _only(0),
    "presence_penalty": _only(0),
    "repetition_penalty": _only(1),
    "logit_bias": _only({}),
    # These change nothing here: who asks, where answers are kept, and how they are billed.
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"), _ANY),
    "prompt_cache_retention": _ANY,
}
COMPLETION = _SHARED | {
    "prompt": Parameter(_is_prompt, "must be text, a list of texts, a list of token ids, or a list of such lists"),
    "max_tokens": _integer(0, _MOST),
    "best_of": _integer(1, MAX_CHOICES),
    "echo": _FLAG,
    "logprobs": _integer(0, NUM_TOP),
    "suffix": _only(""),
}
"""Parameters of /v1/completions; null is the same as to leave one out."""
CHAT = _SHARED | {
    "messages": Parameter(lambda value: isinstance(value, list) and bool(value), "must be a list of messages"),
    "max_tokens": _integer(1, _MOST),
    "max_completion_tokens": _integer(1, _MOST),
    "logprobs": _FLAG,
    "top_logprobs": _integer(0, NUM_TOP),
    "tools": Parameter(
        lambda value: isinstance(value, list) and all(isinstance(tool, dict) for tool in value), "must be a list of objects"
    ),
    "tool_choice": _only("auto", "none"),
    "parallel_tool_calls": _ANY,
    "chat_template_kwargs": Parameter(lambda value: isinstance(value, dict), "must be an object"),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
}
"""Parameters of /v1/chat/completions."""


def read_body(body: bytes, parameters: Mapping[str, Parameter], required: str) -> dict[str, Any]:
    """Returns the value of every parameter, or its default.

    Raises:
        RequestError: the body is not JSON, or has a parameter that is missing, unknown or out of bounds.
    """
    try:
        given: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError(f"the body must be a JSON object, not {type(given).__name__}")
    given = {name: value for name, value in given.items() if value is not None}
    for name in given.keys() - parameters.keys():
        close = difflib.get_close_matches(name[:60], parameters, n=1)
        hint = f"did you mean {close[0]}?" if close else "remove it"
        raise RequestError(f"{_shown(name)}: is not a parameter of this address; {hint}", param=_shown(name))
    if required not in given:
        raise RequestError(f"{required}: is required", param=required)
    for name, value in given.items():
        if not parameters[name].holds(value):
            raise RequestError(f"{name}: {_shown(_json(value))} {parameters[name].rule}", param=name)
    if given.get("stream_options") is not None and not given.get("stream"):
        raise RequestError("stream_options: has no effect unless stream is true; remove it", param="stream_options")
    return {name: given.get(name, parameter.default) for name, parameter in parameters.items()}


def sampling_of(values: Mapping[str, Any]) -> Sampling:
    """Returns how tokens are chosen; a temperature of 0 ignores the filters, as at OpenAI."""
    if values["temperature"] == 0:
        return Sampling()
    return Sampling(
        temperature=float(values["temperature"]),
        top_k=values["top_k"] if values["top_k"] > 0 else None,
        top_p=float(values["top_p"]) if values["top_p"] < 1 else None,
        min_p=float(values["min_p"]) or None,
    )


def stops_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the texts that end a continuation."""
    stop = values["stop"] or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def _shown(text: str) -> str:
    """Returns a text of a request, short and on one line."""
    return re.sub(r"[^\x20-\x7e]", "?", text if len(text) <= 60 else f"{text[:57]}...")
