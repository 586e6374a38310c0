"""Reads the command line of the entry points: `--config FILE`, dotted settings, the command's own options, `--help`.

A setting of type true|false needs no value to be true. A field with `metadata={"repeatable": True}` is a list of
texts. Its option may be given several times; each occurrence adds its text unchanged.
"""

import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from llamajax.config.file import Root, dump_config, read_config
from llamajax.config.help import FLAGS, help_text, topic_of
from llamajax.config.run import Config
from llamajax.config.yaml_text import Place, Problems
from llamajax.errors import UserError, show, show_any_text


@dataclass(frozen=True)
class Arguments(Generic[Root]):
    """A command line without mistakes."""

    config: Root
    options: Mapping[str, str]
    """The command's own options that were given, such as `--json`, and their values; a flag has an empty value."""


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    root: type[Root],
    options: Mapping[str, str] | None = None,
    check: Callable[[Root], list[str]] | None = None,
) -> Arguments[Root]:
    """Reads the command line of an entry point.

    Exits with code 2 after printing every mistake to stderr, one line each, and with code 0 after `--help` and
    `--print_config`.

    Args:
        argv: the arguments; None: those of this process.
        prog: the command as people type it, such as `python -m llamajax.train`.
        root: the dataclass of the settings; `--config` is required if it is `Config`.
        options: the command's own options and their meaning, such as `--json FILE`, or `--dry_run` without a value.
        check: returns what this machine lacks for settings that break no rule, one `key: rule; remedy` line each.
    """
    show_any_text()
    arguments, own = sys.argv[1:] if argv is None else argv, options or {}
    try:
        if (topic := topic_of(arguments)) is not None:
            _end_with(f"{help_text(prog, root, own, topic)}\n")
        problems = Problems()
        known = {option: value for option, _, value in (option.partition(" ") for option in (*FLAGS, *own))}
        path, overrides, given = _split(arguments, root, known, problems)
        config = read_config(root, path, overrides, problems, check=None if "--print_config" in given else check)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    if "--print_config" in given:
        _end_with(dump_config(config))
    return Arguments(config, given)


def _end_with(text: str) -> typing.NoReturn:
    """Prints a text and ends with code 0, even when the reader, such as `head`, has closed the pipe."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter would try again
    sys.exit(0)


TRAIN_OPTIONS = {
    "--dry_run": "Check the data without tokenizing it, compile, report everything, then stop before the first step.",
    "--rewards FILE": "Python file with the reward functions of objective.kind=grpo. Its code runs as part of the command.",
}


def parse_run(
    argv: Sequence[str] | None = None, *, prog: str = "python -m llamajax.train", options: Mapping[str, str] = TRAIN_OPTIONS
) -> Arguments[Config]:
    """Reads the command line of a command that needs the files of a run; see `parse_args`."""
    return parse_args(argv, prog=prog, root=Config, options=options, check=Config.file_problems)


def _split(
    arguments: Sequence[str], root: type, known: Mapping[str, str], problems: Problems
) -> tuple[str | None, list[tuple[str, str | None]], dict[str, str]]:
    """Returns the value of `--config`, the (key, text) overrides, with None for a missing text, and the options given.

    Not argparse, nor what builds on it: those stop at the first mistake and let the last of two equal options win.
    """
    paths: list[str | None] = []
    overrides: list[tuple[str, str | None]] = []
    options: dict[str, str] = {}
    settings = [field.name for field in dataclasses.fields(root)]
    rest = list(reversed(arguments))
    while rest:
        option, equals, text = rest.pop().partition("=")
        place, name = Place(0, show(option)), option.removeprefix("--")
        if known.get(option) == "":
            options[option] = ""
            if equals:
                problems.add(place, "takes no value; remove it")
            continue
        if name == option:
            problems.add(place, "is not an option; write --config FILE, and settings as --key VALUE")
            continue
        value = text if equals else rest.pop() if rest and not rest[-1].startswith("--") else None
        if option == "--config":
            paths.append(value)
        elif option in known and not value:
            problems.add(place, f"needs a value; write {option} {known[option]}")
        elif option in options:
            problems.add(place, "given twice; keep one")
        elif option in known:
            options[option] = value or ""
        elif name.partition(".")[0] not in settings and (
            close := difflib.get_close_matches(option, ["--config", *known], n=1, cutoff=0.8)
        ):
            problems.add(place, f"is not an option; did you mean {close[0]}?")
        else:
            overrides.append((name, value))
    path = paths[0] if len(paths) == 1 else None
    if not path and (paths or root is Config):
        rule = "required" if not paths else "given more than once" if all(paths) else "needs a value"
        problems.stop(Place(0, "--config"), f"{rule}; write --config FILE, or --help for the settings")
    return path, overrides, options
