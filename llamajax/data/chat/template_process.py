"""Runs one chat template in its own process: a script that `chat_template.py` starts. It imports jinja2 but not llamajax.

Chat templates are programs that come with downloaded weights. Jinja's sandbox keeps them from reading or calling anything,
but not from looping forever or filling the memory, often in one uninterruptible operation; the process limits do.

The first line of stdin is JSON with `template`, `special_tokens` (its constants), `max_cpu_s` (for the answer to a request),
`max_memory_bytes` and `max_chars` (of a text). Every other line is a request with `messages`, `variables` (further variables
of the template), `renders` (a list of [number of messages, add_generation_prompt]) and `date` (ISO, or null for today).

The answer to the first line is `{}`. The answer to a request has `texts` (a text that the first one begins with is given as
its length) and `marks` ([start, end] of each text's `{% generation %}` blocks). Either may be `error` instead. A request
that takes too long ends the process.
"""

import datetime
import json
import resource
import secrets
import sys
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

_START, _END = (f"\ue000{secrets.randbits(128)}{side}\ue001" for side in "<>")
"""Marks around generation blocks, which are removed again; random, so that no message contains them."""


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, which templates put around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line) for mark in (_START, _END))
        return [start, *body, end]


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses private names. Jinja's own accepts `__html__`, which is called outside the sandbox."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name}")
        super().__setitem__(name, value)


def _environment(now: Callable[[], datetime.datetime]) -> jinja2.Environment:
    """Returns the environment that Hugging Face's templates expect."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: now().strftime(format),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": _Namespace,
    }
    return environment


def _take_marks_out(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text without marks, and the places of the marked stretches in it."""
    first, *rest = text.split(_START)
    clean, marks = first, []
    for part in rest:
        inside, _, after = part.partition(_END)
        marks.append((len(clean), len(clean) + len(inside)))
        clean += inside + after
    return clean, marks


def _render(template: jinja2.Template, max_chars: int, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    parts, size = [], 0
    for part in template.generate(variables):
        parts.append(part)
        size += len(part)
        if size > max_chars:
            raise ValueError(f"it writes more than {max_chars:,} characters")
    return _take_marks_out("".join(parts))


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _allow_cpu_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + seconds)


def _reason(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    if isinstance(error, RecursionError):
        return "it recurses without end"
    if isinstance(error, MemoryError):
        return "it needs too much memory"
    return str(error) or type(error).__name__


def main() -> None:
    """Answers requests until stdin ends."""
    setup = json.loads(sys.stdin.readline())
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, setup["max_memory_bytes"])
    _allow_cpu_time(setup["max_cpu_s"])
    now = datetime.datetime.now()
    try:
        template = _environment(lambda: now).from_string(setup["template"], setup["special_tokens"])
    except Exception as error:  # a template can cause any
        print(json.dumps({"error": _reason(error)}))
        return
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        now = datetime.datetime.fromisoformat(request["date"]) if request["date"] else datetime.datetime.now()
        _allow_cpu_time(setup["max_cpu_s"])
        try:
            texts, marks = [], []
            for count, prompt in request["renders"]:
                variables = {"tools": None, "documents": None, **request["variables"]}
                variables |= {"messages": request["messages"][:count], "add_generation_prompt": prompt}
                text, marks_of_text = _render(template, setup["max_chars"], variables)
                texts.append(len(text) if texts and texts[0].startswith(text) else text)
                marks.append(marks_of_text)
            answer = {"texts": texts, "marks": marks}
        except Exception as error:
            answer = {"error": _reason(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
