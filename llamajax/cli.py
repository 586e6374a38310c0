"""The front door: a YAML file and dotted overrides become a `Config`, or every mistake in them is named.

Ordinary YAML loading changes what people wrote without a word (`017` is 15, `1:30` is 90, `no` is False,
`3e-4` is text, the second of two equal keys wins) and forgets where it stood. Here every value stays text
with its line until its field says which type it should have.
"""

import ast
import dataclasses
import difflib
import glob
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import yaml

import llamajax.config
from llamajax.config import Config
from llamajax.errors import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_VALUES = 10_000
MAX_DEPTH = 20
MAX_PROBLEMS = 50

_OPTIONS = {
    "--config FILE": "The YAML file of the run. Required.",
    "--KEY VALUE": "Any key below, over the file's value; also --KEY=VALUE. Numbers, true, false and text as they are; null"
    " unsets; lists and sections as YAML, for example --data.sources '[{kind: stdlib}]'.",
    "--print_config": "Print the resulting configuration, which is itself a valid FILE, and exit.",
    "--dry_run": "Do everything but train: build, compile and report, then exit.",
    "--help": "Print this text and exit.",
}


@dataclass(frozen=True)
class Arguments:
    """A command line that holds no mistakes."""

    config: Config
    dry_run: bool


def parse_args(argv: Sequence[str] | None = None, *, prog: str) -> Arguments:
    """The command line of an entry point; exits with code 2 after naming every mistake on stderr.

    Args:
        argv: the arguments; None: those of this process.
        prog: the command as people type it, such as `python -m llamajax.train`.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if "--help" in arguments or "-h" in arguments:
        print(_help(prog))
        sys.exit(0)
    problems = _Problems()
    try:
        path, overrides, flags = _scan(arguments, problems)
        if path is None:
            problems.add(_Place(0, "--config"), f"required; write {prog} --config FILE, or --help for every setting")
            problems.stop()
        config, tree = _load(path, overrides, problems)
        if "print_config" in flags:
            print(dump_config(config), end="")
            sys.exit(0)
        problems.add_rules(tree, _missing_files(config))
        problems.stop_if_any()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    return Arguments(config, dry_run="dry_run" in flags)


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file, with overrides such as `"train.num_steps=10"`.

    Whether the files it names exist is not looked at, so that another machine's configuration can be read.

    Raises:
        ConfigError: one `file:line: key: rule; remedy` line for every mistake.
    """
    return _load(os.fspath(path), [(key, text if sep else None) for key, sep, text in map(_split, overrides)], _Problems())[0]


def config_to_dict(config: Config) -> dict[str, Any]:
    """Every field as plain dicts, lists, numbers and text, ready for JSON and YAML."""
    return dataclasses.asdict(
        config, dict_factory=lambda items: {name: list(v) if isinstance(v, tuple) else v for name, v in items}
    )
