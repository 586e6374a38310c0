"""The command line of the entry points: `--config FILE`, dotted settings, `--help` from the fields' docstrings.

A setting of type true|false needs no value to be true. A field with `metadata={"repeatable": True}` is a list of texts whose
option may be given several times, each adding its text as it is.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import os
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Union

from llamajax.config.file import Root, dump_config, read_config
from llamajax.config.keys import keys
from llamajax.config.run import Config
from llamajax.config.yaml_text import Place, Problems
from llamajax.errors import UserError, show, show_any_text

_FLAGS = {
    "--print_config": "Print the resulting configuration, which is itself a valid FILE, and stop.",
    "--help": "Print this text and stop.",
}


@dataclass(frozen=True)
class Arguments(Generic[Root]):
    """A command line without mistakes."""

    config: Root
    options: Mapping[str, str]
    """Those of the entry point's own options that were given, such as `--json`, and their values; of a flag, none."""


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    root: type[Root],
    options: Mapping[str, str] | None = None,
    check: Callable[[Root], list[str]] | None = None,
) -> Arguments[Root]:
    """Reads the command line of an entry point.

    Exits with code 2 after naming every mistake on stderr, one line each, and with code 0 after `--help` and
    `--print_config`.

    Args:
        argv: the arguments; None: those of this process.
        prog: the command as people type it, such as `python -m llamajax.train`.
        root: the dataclass of the settings; `--config` may be left out unless it is `Config`.
        options: the entry point's own, `--json FILE` or without a value, as `--dry_run`, and their meaning.
        check: gives what this machine lacks for settings that break no rule, a `key: rule; remedy` line each.
    """
    show_any_text()
    arguments, own = sys.argv[1:] if argv is None else argv, options or {}
    if "--help" in arguments or "-h" in arguments:
        _end_with(f"{_help(prog, root, own)}\n")
    try:
        problems = Problems()
        known = {option: value for option, _, value in (option.partition(" ") for option in (*_FLAGS, *own))}
        path, overrides, given = _split(arguments, root, known, problems)
        config = read_config(root, path, overrides, problems, check=None if "--print_config" in given else check)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    if "--print_config" in given:
        _end_with(dump_config(config))
    return Arguments(config, given)


def _end_with(text: str) -> typing.NoReturn:
    """Prints what was asked for, and ends; who reads no further, as `head`, has what they wanted."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter would try again
    sys.exit(0)


DRY_RUN = {"--dry_run": "Build, compile and report everything, then stop before the first step."}


def parse_run(
    argv: Sequence[str] | None = None, *, prog: str = "python -m llamajax.train", options: Mapping[str, str] = DRY_RUN
) -> Arguments[Config]:
    """Reads the command line of a training run, or of what is done for one; see `parse_args`."""
    return parse_args(argv, prog=prog, root=Config, options=options, check=Config.file_problems)


def _split(
    arguments: Sequence[str], root: type, known: Mapping[str, str], problems: Problems
) -> tuple[str | None, list[tuple[str, str | None]], dict[str, str]]:
    """The value of `--config`, the (key, text) overrides, where None is a text that was forgotten, and the options given.

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
                problems.add(place, "takes no value")
            continue
        if name == option:
            problems.add(place, "is no option; write --config FILE, and settings as --key VALUE")
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
            problems.add(place, f"is no option; did you mean {close[0]}?")
        else:
            overrides.append((name, value))
    path = paths[0] if len(paths) == 1 else None
    if not path and (paths or root is Config):
        rule = "required" if not paths else "given more than once" if all(paths) else "needs a value"
        problems.stop(Place(0, "--config"), f"{rule}; write --config FILE, or --help for every setting")
    return path, overrides, options


def _help(prog: str, root: type, options: Mapping[str, str]) -> str:
    """All options and settings, by section, with types, defaults and meaning."""
    width = min(shutil.get_terminal_size().columns, 120)

    def entry(option: str, text: str) -> list[str]:
        return [f"  {option}", *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]

    file, number, several, top = "[--config FILE]", "", "", "settings"
    if is_run := root is Config:
        file, top = "--config FILE", "the run"
        number, several = ": --train.num_steps 100", ": --data.sources '[{kind: stdlib}]'"
    flags = _FLAGS | {option: text for option, text in options.items() if " " not in option}
    own = {
        "--config FILE": "The YAML file of the run." if is_run else "A YAML file with any of the settings below.",
        "--KEY VALUE, --KEY=VALUE": f"Any setting below, over what FILE says{number}. Lists and whole sections are written"
        f" as YAML{several}. null leaves a setting unset.",
        **{option: text for option, text in options.items() if " " in option},
        **flags,
    }
    lines = [f"usage: {prog} {file} [--KEY VALUE ...] {' '.join(f'[{flag}]' for flag in flags)}", ""]
    lines += itertools.chain.from_iterable(entry(option, text) for option, text in own.items())
    docs: dict[tuple[str, str], str] = {}
    sections: dict[str, list[str]] = {}
    for key, section, field in keys(root):
        docs |= _docstrings(section.__module__)
        above = key.rpartition(".")[0]
        title = textwrap.fill(f"{above or top}: {docs[section.__name__, '']}", width, subsequent_indent=" " * 6)
        settings = sections.setdefault(above, ["", title])
        if not dataclasses.is_dataclass(field.type):
            settings += entry(
                f"--{key} {_show_type(field.type)}  ({_show_default(field)})", docs[section.__name__, field.name]
            )
    return "\n".join(itertools.chain(lines, *sections.values()))


@functools.cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """The docstrings of the sections, by (class, ""), and of their fields, which Python itself does not keep."""
    docs = {}
    for cls in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(cls, ast.ClassDef):
            docs[cls.name, ""] = ast.get_docstring(cls)
            for field, text in itertools.pairwise(cls.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    docs[cls.name, ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return docs


def _show_type(kind: Any) -> str:
    if typing.get_origin(kind) is Annotated:
        return _show_type(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (Union, types.UnionType):
        return "|".join(map(_show_type, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"[{_show_type(typing.get_args(kind)[0])}, ...]"
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    names = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT", types.NoneType: "null"}
    return names.get(kind, "SECTION")


def _show_default(field: dataclasses.Field[Any]) -> str:
    if "repeatable" in field.metadata:
        return "may be given several times"
    if field.default is dataclasses.MISSING:
        return "required"
    return f"default: {json.dumps(field.default).strip(chr(34))}"
