"""Chat-shaped data for tests: questions about the Python standard library, answered by its own help texts."""

import functools
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

MODULES = (
    "argparse", "base64", "bisect", "calendar", "collections", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "email.message", "enum", "fnmatch", "fractions", "functools", "glob", "gzip",
    "hashlib", "heapq", "html", "inspect", "io", "ipaddress", "itertools", "json", "logging", "math", "operator", "os",
    "pathlib", "pickle", "pprint", "queue", "random", "re", "sched", "shlex", "shutil", "socket", "statistics", "string",
    "struct", "subprocess", "tempfile", "textwrap", "threading", "time", "tokenize", "unittest", "urllib.parse",
    "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip


@functools.cache
def questions_and_answers() -> tuple[tuple[str, str], ...]:
    """A question and the first paragraph that answers it, for every function and class that says what it does."""
    # A process of its own: libraries add methods to the standard library's classes where they are imported.
    command = [sys.executable, "-I", "-S", __file__]
    pairs = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return tuple((question, answer) for question, answer in pairs)


def read_help_texts() -> list[tuple[str, str]]:
    found = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        members = [
            (f"{module_name}.{name}", member)
            for name, member in sorted(vars(module).items())
            if not name.startswith("_") and (inspect.isroutine(member) or inspect.isclass(member))
        ]
        methods = [
            (f"{name}.{method_name}", method)
            for name, member in members
            if inspect.isclass(member)
            for method_name, method in sorted(vars(member).items())
            if not method_name.startswith("_") and inspect.isroutine(method)
        ]
        for name, member in members + methods:
            paragraph = " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())
            if 20 < len(paragraph) < 400 and paragraph not in found:
                found[paragraph] = f"What is {name}?" if inspect.isclass(member) else f"What does {name} do?"
    return [(question, answer) for answer, question in found.items()]


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Messages of `count` conversations of one to three questions, some after a system message; always the same ones."""
    pairs = questions_and_answers()
    made, at = [], 0
    for index in range(count):
        messages = [{"role": "system", "content": "Answer in one paragraph."}] if index % 3 == 0 else []
        for _ in range(1 + index % 3):
            question, answer = pairs[at % len(pairs)]
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            at += 1
        made.append(messages)
    return made


def write_chat_jsonl(path: Path, count: int, chat_format: str = "messages") -> list[list[dict[str, str]]]:
    """Writes `count` conversations to a JSONL file and returns their messages; those of `alpaca` and
    `prompt_completion` have one question."""
    made = conversations(count)
    if chat_format in ("alpaca", "prompt_completion"):
        made = [messages[:2] if messages[0]["role"] == "user" else messages[:3] for messages in made]
    path.write_text("".join(json.dumps(record_of(messages, chat_format)) + "\n" for messages in made))
    return made


def record_of(messages: list[dict[str, str]], chat_format: str) -> dict[str, object]:
    """A conversation as a line of the format has it."""
    if chat_format == "messages":
        return {"messages": messages}
    if chat_format == "sharegpt":
        names = {"user": "human", "assistant": "gpt", "system": "system"}
        return {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in messages]}
    contents = {turn["role"]: turn["content"] for turn in messages}
    if chat_format == "prompt_completion":
        return {"prompt": contents["user"], "completion": contents["assistant"], "system": contents.get("system")}
    return {"instruction": contents["user"], "input": "", "output": contents["assistant"], "system": contents.get("system")}


if __name__ == "__main__":
    json.dump(read_help_texts(), sys.stdout)
