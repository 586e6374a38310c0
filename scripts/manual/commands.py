"""The page of every command, and the table with which shells complete command lines, from the commands' own options."""

import argparse
import ast
import importlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from converters import arguments
from llamajax import completion, doctor, report
from llamajax.commands import complete, verbs
from llamajax.config import help as help_texts
from llamajax.config.command import TRAIN_OPTIONS
from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.generate import GenerateConfig
from llamajax.config.launch import LaunchConfig
from llamajax.config.run import Config
from llamajax.config.serve import ServeConfig
from scripts.manual.markdown import EXAMPLE, NOTE, ROOT, docstring, page, prose

COMMANDS: dict[str, tuple[str, type | None, str]] = {
    "train": ("Trains a run, or continues it from its newest checkpoint.", Config, "--config quickstart --dry_run"),
    "launch": (
        "Starts the processes of this host together, ends them together, and restarts them when that can help.",
        LaunchConfig,
        "-n 8 -- --config llama3_1_8b_8xh200",
    ),
    "preprocess": ("Tokenizes and packs a run's data ahead of it.", Config, "--config quickstart"),
    "plan": (
        "Predicts memory, time, communication and price of a run on a cluster, without a GPU (extra `plan`).",
        Config,
        "--config llama2_70b_512xa100_40gb --picture runs/plan.html",
    ),
    "verify": (
        "Certifies on this machine that a run's mesh and forms train the same model as one device.",
        Config,
        "--config llama2_70b_512xa100_40gb --page runs/verify.html",
    ),
    "generate": (
        "Writes texts from a model. Texts go to standard output, everything else to standard error.",
        GenerateConfig,
        '--model runs/quickstart --prompt "def read_file(path):" --max_tokens 60',
    ),
    "serve": (
        "Serves models over HTTP, in the form of OpenAI's API (extra `serve`).",
        ServeConfig,
        "--model runs/quickstart",
    ),
    "evaluate": (
        "Evaluates a model: its loss on documents it was not trained on, or its results in lm-evaluation-harness.",
        EvaluateConfig,
        "--model runs/quickstart",
    ),
}
"""Commands that take settings: what each does, the class of its settings, and the options of an example."""
PARSERS: dict[str, tuple[str, Callable[[Sequence[str]], object], str]] = {
    "llamajax.report": ("Writes one page about a run, or prints its figures.", report.main, "runs/quickstart"),
    "llamajax.doctor": (
        "Checks the machine, and what a run needs of it, with a remedy for each problem. Exits with 4 if a check fails.",
        doctor.main,
        "--config quickstart",
    ),
    "llamajax.completion": (
        "Prints the script with which bash, zsh or fish completes command lines of `llamajax`.",
        completion.main,
        "bash",
    ),
    "converters.hf": (
        "Converts models from and to Hugging Face.",
        arguments.hf_arguments,
        "export runs/quickstart runs/quickstart_hf",
    ),
    "converters.tokenizer": (
        "Adds pieces, learned from your texts, to a model's tokenizer.",
        arguments.tokenizer_arguments,
        "grow runs/quickstart_hf runs/grown --corpus README.md --num_pieces 64",
    ),
    "converters.megatron": (
        "Writes and checks the token files of Megatron-LM.",
        arguments.megatron_arguments,
        "export runs/quickstart_tokens --config quickstart",
    ),
}
"""Commands without settings: what each does, the function that parses its arguments, and the options of an example."""
TAKE_SETTINGS = ("doctor", "convert megatron export")
"""Verbs among them that also take the settings of a run."""


def commands() -> str:
    """Returns the page of every command."""
    lines = [
        "# Commands",
        "",
        NOTE,
        "",
        "`llamajax` lists the commands. `llamajax train` is `python -m llamajax.train`, and so for all of them;"
        " `llamajax convert hf` is `python -m converters.hf`. [Shells complete](../how-to/completion.md) their options.",
        "",
        "Commands that take settings share these options:",
    ]
    lines += ["", "| option | meaning |"]
    lines += ["|---|---|"]
    shared = {
        "--config FILE": "YAML file, or the name of a shipped configuration, such as `quickstart`. `train`, `preprocess`,"
        " `plan` and `verify` require it.",
        "--KEY VALUE, --KEY=VALUE": "Any [setting](settings.md), over what the file says. Lists and sections are written as"
        " YAML. `null` unsets a setting.",
        **help_texts.FLAGS,
    }
    lines += [f"| `{option}` | {text if '`' in text else prose(text)} |" for option, text in shared.items()]
    lines += ["", "[Exit codes](exit-codes.md) are the same for all commands."]
    for name, (text, root, example) in COMMANDS.items():
        options = _options(name)
        prog = f"python -m llamajax.{name}"
        assert root is not None
        usage = help_texts.help_text(prog, root, options).partition("\n")[0]
        lines += _command(f"llamajax.{name}", text, usage, example, options)
    for name, (text, parse, example) in PARSERS.items():
        parser = _parser(parse)
        lines += _command(name, text, "", example, {})
        for title, one in _subparsers(parser):
            lines += ["", f"`python -m {name} {title}`".replace(" `", "`"), "", "| argument | meaning |", "|---|---|"]
            lines += [_argument(action) for action in one._actions if not isinstance(action, argparse._HelpAction)]
    for title, module in {
        "JSON of a plan": "llamajax/planning/report/figures.py",
        "JSON of a verification": "llamajax/verification/figures.py",
    }.items():
        lines += ["", f"## {title}", "", docstring(ast.parse((ROOT / module).read_text()))]
    return page(lines)


def _command(name: str, text: str, usage: str, example: str, options: dict[str, str]) -> list[str]:
    """Returns the beginning of a command's section, with its own options."""
    lines = ["", f"## `{name}`", "", text, ""]
    if usage:
        lines += ["```text", usage, "```", ""]
    lines += [EXAMPLE, "```sh"]
    lines += [f".venv/bin/python -m {name} {example}", "```"]
    if options:
        rows = [f"| `{option}` | {prose(meaning)} |" for option, meaning in options.items()]
        lines += ["", "| option | meaning |", "|---|---|", *rows]
    return lines


class _FoundParserError(Exception):
    """Carries a parser out of the function that builds it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def _parser(parse: Callable[[Sequence[str]], object]) -> argparse.ArgumentParser:
    """Returns the parser that a function builds before it parses."""

    def find(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _FoundParserError(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", find):
        try:
            parse(["--any"])
        except _FoundParserError as found:
            return found.parser
    raise AssertionError(f"{parse} parses nothing")


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    several = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if several:
        yield from several[0].choices.items()
    else:
        yield "", parser


def _subparser_help(parser: argparse.ArgumentParser) -> dict[str, str]:
    several = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {choice.dest: choice.help or "" for action in several for choice in action._choices_actions}


def _argument(action: argparse.Action) -> str:
    name = " ".join(action.option_strings).replace(" ", ", ") or str(action.metavar)
    if action.option_strings and action.nargs != 0:
        choices = None if action.choices is None else "{" + ",".join(action.choices) + "}"
        name += "" if isinstance(action, argparse.BooleanOptionalAction) else f" {action.metavar or choices or ''}".rstrip()
    needed = " Required." if action.option_strings and action.required else ""
    return f"| `{name}` | {_sentence(action.help or '')}{needed} |"


def _sentence(text: str) -> str:
    """Returns the help of an argument as a sentence."""
    text = prose(text)
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", ")")) else ".")


def completions() -> str:
    """Returns the table of `llamajax.commands.complete` as JSON: options and settings with their types and meanings, a line
    for each."""
    found: dict[str, dict[str, Any]] = {}
    for name, verb in verbs.verbs().items():
        if name in COMMANDS:
            _, root, _ = COMMANDS[name]
            own = {"--config FILE": "YAML file, or the name of a shipped configuration."} | _options(name) | help_texts.FLAGS
            parts = [(*option.partition(" "), text) for option, text in own.items()]
            options = {option: _told(value, text) for option, _, value, text in parts if option != "--"}
            found[name] = {
                "text": verb.about,
                "settings": getattr(root, "__name__", ""),
                "positional": [],
                "options": options,
            }
            continue
        whole = _parser(PARSERS[verb.module][1])
        for title, parser in dict([("", whole), *_subparsers(whole)]).items():
            actions = [(option, it) for it in parser._actions for option in it.option_strings]
            positional = [it.choices or (complete.FILES,) for it in parser._actions if not it.option_strings]
            about = _subparser_help(whole).get(title, verb.about)
            found[f"{name} {title}".strip()] = {
                "text": about,
                "settings": "Config" if f"{name} {title}".strip() in TAKE_SETTINGS else "",
                "positional": list(dict.fromkeys(itertools.chain.from_iterable(positional))),
                "options": {option: _told(_value(action), _sentence(action.help or "")) for option, action in actions},
            }
    roots = {root.__name__: root for _, root, _ in COMMANDS.values() if root is not None}
    settings_of = {
        name: {
            it.key: _told(it.kind, it.section_text if it.kind == "SECTION" else it.text) for it in help_texts.settings(root)
        }
        for name, root in roots.items()
    }
    return json.dumps({"verbs": found, "settings": settings_of}, indent=1, ensure_ascii=False) + "\n"


def _told(kind: str, text: str) -> str:
    """Returns a type and the first sentence of a meaning."""
    return f"{kind}\t{re.split(r'(?<=[.])[ ]', text, maxsplit=1)[0]}"


def _value(action: argparse.Action) -> str:
    """Returns what an option takes, such as `FILE` or its choices; empty: nothing."""
    if action.nargs == 0:
        return ""
    return "|".join(action.choices) if action.choices else str(action.metavar or "TEXT")


def _options(name: str) -> dict[str, str]:
    """Returns the own options of a command that takes settings."""
    return TRAIN_OPTIONS if name == "train" else getattr(importlib.import_module(f"llamajax.{name}"), "OPTIONS", {})
