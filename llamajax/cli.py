"""The command line of the entry points: `--config FILE`, dotted overrides, `--help` from the fields' docstrings."""

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llamajax.config
from llamajax.config import Config
from llamajax.config_file import config_to_dict, dump_config, keys, load_config, read_config
from llamajax.errors import ConfigError
from llamajax.yaml_text import Place, Problems, show

__all__ = ["Arguments", "config_to_dict", "dump_config", "load_config", "parse_args"]

_FLAGS = {
    "--print_config": "Print the resulting configuration, which is itself a valid FILE, and stop.",
    "--dry_run": "Build, compile and report everything, then stop before the first step.",
    "--help": "Print this text and stop.",
}


@dataclass(frozen=True)
class Arguments:
    """A command line without mistakes."""

    config: Config
    dry_run: bool


def parse_args(argv: Sequence[str] | None = None, *, prog: str) -> Arguments:
    """Reads the command line of an entry point.

    Exits with code 2 after naming every mistake on stderr, one line each, and with code 0 after `--help` and
    `--print_config`.

    Args:
        argv: the arguments; None: those of this process.
        prog: the command as people type it, such as `python -m llamajax.train`.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if "--help" in arguments or "-h" in arguments:
        print(_help(prog))
        sys.exit(0)
    try:
        problems = Problems()
        path, overrides, flags = _split(arguments, problems)
        config = read_config(path, overrides, problems, check_files="--print_config" not in flags)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    if "--print_config" in flags:
        print(dump_config(config), end="")
        sys.exit(0)
    return Arguments(config, dry_run="--dry_run" in flags)


def _split(arguments: Sequence[str], problems: Problems) -> tuple[str, list[tuple[str, str | None]], set[str]]:
    """The value of `--config`, the (key, text) overrides and the flags; a text that was forgotten is None.

    Not argparse, nor what builds on it: those stop at the first mistake and let the last of two equal options win.
    """
    paths: list[str | None] = []
    overrides: list[tuple[str, str | None]] = []
    flags: set[str] = set()
    settings = [field.name for field in dataclasses.fields(Config)]
    rest = list(reversed(arguments))
    while rest:
        option, equals, text = rest.pop().partition("=")
        place, name = Place(0, show(option)), option.removeprefix("--")
        if option in _FLAGS:
            flags.add(option)
            if equals:
                problems.add(place, "takes no value")
            continue
        if name == option:
            problems.add(place, "is no option; write --config FILE, and settings as --key VALUE")
            continue
        value = text if equals else rest.pop() if rest and not rest[-1].startswith("--") else None
        if option == "--config":
            paths.append(value)
        elif name.partition(".")[0] not in settings and (
            close := difflib.get_close_matches(option, ["--config", *_FLAGS], n=1, cutoff=0.8)
        ):
            problems.add(place, f"is no option; did you mean {close[0]}?")
        else:
            overrides.append((name, value))
    path = paths[0] if len(paths) == 1 else None
    if not path:
        rule = "required" if not paths else "given more than once" if all(paths) else "needs a value"
        problems.stop(Place(0, "--config"), f"{rule}; write --config FILE, or --help for every setting")
    return path, overrides, flags


def _help(prog: str) -> str:
    """All options and settings, by section, with types, defaults and meaning."""
    width = min(shutil.get_terminal_size().columns, 120)

    def entry(option: str, text: str) -> list[str]:
        return [f"  {option}", *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]

    lines = [f"usage: {prog} --config FILE [--KEY VALUE ...] [--print_config] [--dry_run]", ""]
    lines += entry("--config FILE", "The YAML file of the run.")
    lines += entry(
        "--KEY VALUE, --KEY=VALUE",
        "Any setting below, over what FILE says: --train.num_steps 100. Lists and whole sections are written as YAML:"
        " --data.sources '[{kind: stdlib}]'. null leaves a setting unset.",
    )
    for flag, text in _FLAGS.items():
        lines += entry(flag, text)
    docs = _docstrings()
    sections: dict[str, list[str]] = {}
    for key, section, field in keys():
        above = key.rpartition(".")[0]
        title = textwrap.fill(f"{above or 'the run'}: {docs[section.__name__, '']}", width, subsequent_indent=" " * 6)
        settings = sections.setdefault(above, ["", title])
        if not dataclasses.is_dataclass(field.type):
            settings += entry(
                f"--{key} {_show_type(field.type)}  ({_show_default(field)})", docs[section.__name__, field.name]
            )
    return "\n".join(itertools.chain(lines, *sections.values()))


def _docstrings() -> dict[tuple[str, str], str]:
    """The docstrings of the sections, by (class, ""), and of their fields, which Python itself does not keep."""
    docs = {}
    for cls in ast.parse(inspect.getsource(llamajax.config)).body:
        if isinstance(cls, ast.ClassDef):
            docs[cls.name, ""] = ast.get_docstring(cls)
            for field, text in itertools.pairwise(cls.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    docs[cls.name, ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return docs


def _show_type(kind: Any) -> str:
    if isinstance(kind, types.UnionType):
        return "|".join(map(_show_type, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"[{_show_type(typing.get_args(kind)[0])}, ...]"
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    names = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT", types.NoneType: "null"}
    return names.get(kind, "SECTION")


def _show_default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return f"default: {json.dumps(field.default).strip(chr(34))}"
