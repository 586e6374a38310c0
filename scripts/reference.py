"""Writes the generated pages of the manual's reference, docs/reference/, from the code that they describe; and the table of
options with which `llamajax completion` completes command lines.

    python scripts/reference.py           # writes them
    python scripts/reference.py --check   # names the files that are out of date, and exits with 1

Settings come from the docstrings that make `--help`, commands from their options, Python from signatures and docstrings,
GPUs from their data sheets. The meanings of exit codes are written here, and checked against the codes that exist.
"""

import argparse
import ast
import importlib
import inspect
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import llamajax
from converters import arguments
from llamajax import completion, doctor, errors, report
from llamajax.commands import complete, verbs
from llamajax.config import help as help_texts
from llamajax.config.command import TRAIN_OPTIONS
from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.generate import GenerateConfig
from llamajax.config.launch import LaunchConfig
from llamajax.config.run import Config
from llamajax.config.serve import ServeConfig
from llamajax.estimates.gpus import GPUS, Gpu

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
EXAMPLE = "<!-- not run: an example; tutorials and how-to pages run what it shows -->"
NOTE = "<!-- Written by scripts/reference.py from the code. Edit the code, then run the script. -->"

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

EXIT_CODES = {
    0: "The command is done, or a signal stopped it and it saved its state.",
    1: "`verify` found a difference.",
    2: "The configuration or the command line is wrong. One line per mistake.",
    3: "Data cannot be read as the configuration says.",
    4: "The machine or the processes are not what the configuration needs: devices, packages, hosts; or `doctor` found a"
    " failure.",
    5: "A device ran out of memory.",
    6: "A device computes or keeps wrong numbers, again and again. Restart without that host.",
    65: "No usable checkpoint exists, or `run_dir` holds another run, is written by another process, or cannot be written.",
    69: "A device or the network failed, as jax's runtime reports it.",
    70: "A defect of llamajax. Please report it with the traceback.",
    74: "The disk, or the store of a remote source, failed; or the last state could not be saved.",
    75: "A process was lost or stuck.",
    93: "The run gave up: steps kept going wrong after rollbacks, or restarts made no progress.",
    130: "A second Ctrl-C, more than two seconds after the first. It waits for nothing.",
    143: "A second SIGTERM, more than two seconds after the first. It waits for nothing.",
}
"""Meaning of each exit code."""

EXIT_TEXT = """\
Every command ends with one of these codes. A mistake of the user's is one line on standard error: what is wrong, where
(`file:line` or the setting), the rule, the remedy. In Python the same line is the text of the error."""
LAUNCHERS_TEXT = """\
All hosts of a run end with the code of the process that failed, or with 75 if a process was lost, so that all launchers
decide alike. After a signal that nobody sent to the launcher, such as SIGKILL by the system, it restarts too.
`max_restarts` restarts in a row without a new checkpoint end with 93. `python -m llamajax.launch --stopped_code 75`
ends a run that a signal stopped with another code than 0, for clusters that take 0 for done."""
GPUS_TEXT = """\
Plans have figures for these GPUs. `hardware.gpu` names one, and a cluster has `hardware.nodes` nodes of
`hardware.gpus_per_node`. The peak is dense bfloat16 with sums in float32. The last bandwidth is that of the network of
a node of eight, each way."""
GPUS_NOTES = """\
- NVLink joins all eight GPUs of a node. A rack GB200 NVL72 is one node: `gpus_per_node: 72`, or the 64 that a run takes
  of it.
- Cards in PCIe slots use PCIe 4, and the RTX 5090 PCIe 5. GeForce cards have no peer-to-peer: what one sends another
  goes through the host's memory. They have no usual network either, so more than one node needs
  `hardware.node_bandwidth`.
- Attention lists the kernels that are compiled for the GPU. Pallas and Triton are llamajax's own. Triton and tokamax
  are extras, which a configuration names with `model.attention_kernel`.
- A run on another GPU measures its peak. A plan of such a GPU is not possible.

The sources of every figure are in `llamajax/estimates/gpus.py` and `llamajax/estimates/machine.py`. If a figure of a
GPU is not published, a plan takes it from another GPU and says so in a line `remark`. [How accurate plans
are](../plan_accuracy.md) compares them with published runs. llamajax itself has measured nothing on a GPU yet."""

RESULTS = {
    "results.py": ("TrainResult", "Plan", "Verification", "Model"),
    "checkpoint/read.py": ("Saved", "Restored"),
    "training/own_loop.py": ("OwnLoop",),
}
"""Classes that the library's functions return, by file."""
CONFIG_METHODS = ("changed",)
"""Methods of a configuration for users."""


def settings() -> str:
    """Returns the page of every setting of every command."""
    roots = [
        ("Runs", Config, "", "`train`, `preprocess`, `plan` and `verify` take these settings."),
        ("Launching", LaunchConfig, "launch.", "`launch` takes these settings before `--`."),
        ("Generating", GenerateConfig, "generate.", "`generate` takes these settings."),
        ("Serving", ServeConfig, "serve.", "`serve` takes these settings."),
        ("Evaluating", EvaluateConfig, "evaluate.", "`evaluate` takes these settings."),
    ]
    common = ", ".join(f"[`{key}`](#{key})" for key in help_texts.COMMON)
    lines = [
        "# Settings",
        "",
        NOTE,
        "",
        "Every setting can be in a YAML file and on the command line: `--train.num_steps 100`. `--help SETTING` and"
        " `--help SECTION` print the same text as this page. Settings without a default are required.",
        "",
        f"The settings that most people change: {common}.",
    ]
    for title, root, prefix, text in roots:
        lines += ["", f"## {title}", "", text]
        everything = help_texts.settings(root)
        sections = [setting for setting in everything if setting.is_section]
        lines += _table([setting for setting in everything if not setting.above], prefix)
        for section in sections:
            inside = [it for it in everything if _without_items(it.above) == section.topic]
            items = ", each item" if section.kind.startswith("[") else ""
            of = f" of `{prefix.removesuffix('.')}`" if prefix else ""
            lines += ["", f'<a id="{prefix}{section.topic}"></a>', "", f"### `{section.topic}`{items}{of}", ""]
            lines += [_prose(section.section_text), *_table(inside, prefix)]
    return _page(lines)


def _table(several: Sequence[help_texts.Setting], prefix: str) -> list[str]:
    """Returns the table of a section's own settings."""
    rows = [
        f"| {_name(it, prefix)} | {_kind(it.kind)} | {_default(it.default)} | {_prose(it.text)} |"
        for it in several
        if not it.is_section or it.kind.startswith("[")
    ]
    return ["", "| setting | type | default | meaning |", "|---|---|---|---|", *rows] if rows else []


def _name(setting: help_texts.Setting, prefix: str) -> str:
    """Returns the key as the anchor of a setting, or as a link to a section."""
    if setting.is_section:
        return f"[`{setting.key}`](#{prefix}{setting.topic})"
    return f'<a id="{prefix}{setting.topic}"></a>`{setting.key}`'


def _without_items(key: str) -> str:
    return re.sub(r"\.0(?=\.|$)", "", key)


def _kind(kind: str) -> str:
    """Returns a type as `--help` shows it, without the bars that would end a cell."""
    if kind.startswith("["):
        inner = kind.removeprefix("[").partition(", ...]")[0]
        null = " or `null`" if kind.endswith("|null") else ""
        return f"list of {'sections' if inner == 'SECTION' else _kind(inner)}{null}"
    return " or ".join(f"`{one}`" for one in kind.split("|"))


def _default(default: str) -> str:
    text = default.removeprefix("(").removesuffix(")")
    value = text.removeprefix("default: ")
    return text if value == text else f"`{value}`" if value else "empty"


def _prose(text: str) -> str:
    """Returns text for a cell of a table, with markup escaped outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    escaped = [part if part.startswith("`") else re.sub(r"([<|*\[\]])", r"\\\1", part) for part in parts]
    assert not any("|" in part for part in parts if part.startswith("`")), text
    return "".join(escaped)


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
    lines += [f"| `{option}` | {text if '`' in text else _prose(text)} |" for option, text in shared.items()]
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
        lines += ["", f"## {title}", "", _docstring(ast.parse((ROOT / module).read_text()))]
    return _page(lines)


def _command(name: str, text: str, usage: str, example: str, options: dict[str, str]) -> list[str]:
    """Returns the beginning of a command's section, with its own options."""
    lines = ["", f"## `{name}`", "", text, ""]
    if usage:
        lines += ["```text", usage, "```", ""]
    lines += [EXAMPLE, "```sh"]
    lines += [f".venv/bin/python -m {name} {example}", "```"]
    if options:
        rows = [f"| `{option}` | {_prose(meaning)} |" for option, meaning in options.items()]
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
    text = _prose(text)
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


def exit_codes() -> str:
    """Returns the page of exit codes."""
    from llamajax.launching import child

    classes: dict[int, list[str]] = {}
    for name, cls in vars(errors).items():
        if inspect.isclass(cls) and issubclass(cls, errors.UserError) and cls is not errors.UserError:
            classes.setdefault(cls.exit_code, []).append(name)
    known = {*classes, *child._MEANINGS, *errors.CAN_HELP, errors.OUT_OF_MEMORY, errors.INTERNAL_ERROR, errors.GIVE_UP}
    assert known <= EXIT_CODES.keys(), known - EXIT_CODES.keys()
    lines = ["# Exit codes", "", NOTE, "", EXIT_TEXT, "", "| code | meaning | error in Python | the launcher restarts |"]
    lines += ["|---|---|---|---|"]
    for code, meaning in EXIT_CODES.items():
        names = ", ".join(f"`{name}`" for name in classes.get(code, []))
        lines.append(f"| {code} | {meaning} | {names} | {'yes' if code in errors.CAN_HELP else ''} |")
    return _page([*lines, "", LAUNCHERS_TEXT])


def gpus() -> str:
    """Returns the page of the GPUs that plans have figures for."""
    columns = "`hardware.gpu`", "peak, TFLOP/s", "memory, GiB", "memory, GB/s", "joined by", "GPU to GPU, GB/s", "node, GB/s"
    header = f"| {' | '.join(columns)} | attention | float8 |"
    lines = ["# GPUs", "", NOTE, "", GPUS_TEXT, "", header, "|---|---|---|---|---|---|---|---|---|"]
    return _page([*lines, *map(_gpu, GPUS), "", GPUS_NOTES])


def _gpu(gpu: Gpu) -> str:
    kernels = ["cuDNN", "Pallas"]
    kernels += ["Triton"] if gpu.compute_capability in ((8, 0), (9, 0)) else []
    kernels += ["tokamax"] if gpu.compute_capability == (9, 0) else []
    node = "" if gpu.node_bandwidth is None else f"{gpu.node_bandwidth / 1e9:g}"
    return (
        f"| `{gpu.name.lower()}` | {gpu.peak_flops / 1e12:g} | {gpu.memory_bytes / 2**30:.1f}"
        f" | {gpu.memory_bandwidth / 1e9:,.0f} | {gpu.link} | {gpu.gpu_bandwidth / 1e9:g} | {node} | {', '.join(kernels)}"
        f" | {'yes' if gpu.compute_capability >= (8, 9) else 'no'} |"
    )


def python() -> str:
    """Returns the page of the library."""
    package = ROOT / "llamajax"
    lines = ["# Python", "", NOTE, "", _docstring(ast.parse((package / "library.py").read_text()))]
    homes: dict[str, str] = vars(llamajax)["_HOMES"]
    functions, classes = [], []
    for name in homes:
        node = _definition(ROOT / f"{homes[name].replace('.', '/')}.py", name)
        (classes if isinstance(node, ast.ClassDef) else functions).append(node)
    lines += ["", "## Functions"]
    for node in functions:
        lines += _function(node, f"llamajax.{node.name}", "###")
    lines += ["", "## Classes"]
    for node in classes:
        lines += _class(node, f"llamajax.{node.name}", CONFIG_METHODS)
    lines += ["", "## Results"]
    for file, names in RESULTS.items():
        for name in names:
            lines += _class(_definition(package / file, name), name)
    return _page(lines)


def _definition(path: Path, name: str) -> Any:
    """Returns the function or class `name` of a file."""
    (node,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    return node


def _class(node: ast.ClassDef, title: str, methods: Sequence[str] | None = None) -> list[str]:
    """Returns a class with its fields, properties and public methods, or those methods only."""
    bases = ", ".join(ast.unparse(base) for base in node.bases if not isinstance(base, ast.Subscript))
    lines = ["", f"### `{title}`", "", *([f"A subclass of `{bases}`.", ""] if bases else []), _docstring(node)]
    values = []
    body = node.body
    for field, text in zip(body, [*body[1:], None], strict=True):
        if methods is not None:
            break
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            values.append((ast.unparse(field.target), str(text.value.value)))
        if isinstance(field, ast.FunctionDef) and _is_property(field):
            values.append((field.name, (ast.get_docstring(field) or "").partition("\n\n")[0]))
    values = [(name, text) for name, text in values if not name.startswith("_")]
    if values:
        lines += ["", "| attribute | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {_prose(text)} |" for name, text in values]
    for method in body:
        if not isinstance(method, ast.FunctionDef) or _is_property(method):
            continue
        is_public = not method.name.startswith("_") or method.name == "__call__"
        if is_public and (methods is None or method.name in methods):
            lines += _function(method, f"{title.rpartition('.')[2]}.{method.name}", "####")
    return lines


def _is_property(function: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def _function(node: ast.FunctionDef, title: str, heading: str) -> list[str]:
    """Returns a function with its signature, in one line or a line for each parameter."""
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for argument in [*named, *(it for it in (arguments.vararg, arguments.kwarg) if it is not None)]:
        argument.annotation = _unquoted(argument.annotation)
    returns = f" -> {ast.unparse(returned)}" if (returned := _unquoted(node.returns)) else ""
    given = ast.unparse(arguments).removeprefix("self").removeprefix(", ")
    name = title.rpartition(".")[2]
    signature = f"{name}({given}){returns}"
    if len(signature) > 100:
        parts = "".join(f"    {part},\n" for part in re.split(r", (?=[\w*]+(?::|,|$))", given))
        signature = f"{name}(\n{parts}){returns}"
    return ["", f"{heading} `{title}`", "", "```text", signature, "```", "", _docstring(node)]


def _unquoted(annotation: ast.expr | None) -> ast.expr | None:
    """Returns an annotation without the quotes of a string annotation."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation


def _docstring(node: Any) -> str:
    """Returns a docstring as Markdown: its sections of arguments, results, errors and examples as paragraphs and lists."""
    lines: list[str] = []
    section = ""
    for paragraph in re.split(r"\n\n(?! )|\n(?=(?:Args|Returns|Yields|Raises|Example):\n)", ast.get_docstring(node) or ""):
        section, _, rest = paragraph.partition(":\n")
        if section in ("Args", "Raises"):
            items = re.split(r"\n(?=\S)", inspect.cleandoc(f"\n{rest}"))
            told = [" ".join(item.split()).partition(": ") for item in items]
            title = {"Args": "Parameters", "Raises": "Raises"}[section]
            lines += [f"{title}:", "", *(f"- `{name}`: {text}" for name, _, text in told), ""]
        elif section in ("Returns", "Yields"):
            lines += [f"{section}: {' '.join(rest.split())}", ""]
        elif section == "Example":
            lines += ["```text", re.sub(r"  # doctest:.*", "", inspect.cleandoc(f"\n{rest}")), "```", ""]
        else:
            lines += [f"{EXAMPLE}\n{paragraph}" if paragraph.startswith(("```python", "```sh")) else paragraph, ""]
    return "\n".join(lines).strip()


def _page(lines: list[str]) -> str:
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


FILES: dict[Path, Callable[[], str]] = {
    FOLDER / "settings.md": settings,
    FOLDER / "commands.md": commands,
    FOLDER / "exit-codes.md": exit_codes,
    FOLDER / "python.md": python,
    FOLDER / "gpus.md": gpus,
    complete.TABLE: completions,
}
"""Written files, and the function that returns the text of each."""


def main() -> int:
    """Writes or checks the files. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the generated pages of the reference, and the table of completion.")
    parser.add_argument("--check", action="store_true", help="name the files that are out of date; write nothing")
    check = parser.parse_args().check
    if (imported := Path(llamajax.__file__).parents[1]) != ROOT:
        parser.error(f"llamajax is imported from {imported}, not from {ROOT}; set PYTHONPATH to that")
    stale = []
    for path, make in FILES.items():
        text = make()
        if not path.is_file() or path.read_text() != text:
            stale.append(path.name)
            if not check:
                path.write_text(text)
    for name in stale:
        print(f"{name}: {'out of date; run python scripts/reference.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
