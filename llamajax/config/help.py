"""The text of `--help`: a short one, and on request one section, one setting or everything, from the fields' docstrings."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union

from llamajax.config import shipped
from llamajax.config.keys import general, keys
from llamajax.config.run import Config
from llamajax.errors import ConfigError, show

COMMON = (
    "run_dir", "init_from", "seed",
    "model.max_seq_len", "model.remat", "model.attention_kernel", "model.matmul_dtype",
    "data.sources", "data.seq_len", "data.tokenizer.path", "data.chat_template", "data.held_out_fraction", "data.cache_dir",
    "train.num_steps", "train.num_epochs", "train.global_batch_size", "train.grad_accum_steps", "train.eval_every",
    "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup_steps", "optimizer.weight_decay",
    "optimizer.grad_clip_norm",
    "mesh.data", "mesh.fsdp", "mesh.sequence", "mesh.tensor", "mesh.num_cpu_devices", "parallel.zero",
    "offload.activations", "offload.optimizer",
    "checkpoint.save_every", "checkpoint.keep_last", "checkpoint.local_dir", "checkpoint.allow_changes",
    "recovery.spike_zscore", "metrics.log_every", "metrics.tensorboard", "metrics.wandb", "profile.start_step",
    "sample.prompt", "hardware.gpu", "hardware.nodes",
)  # fmt: skip
"""Settings of a run that most people change, for the short help."""

FLAGS = {
    "--print_config": "Print the complete configuration, which is itself a valid FILE, and stop.",
    "--help": "Print this text and stop. --help data: one section; --help train.num_steps: one setting; --help all:"
    " everything.",
}
"""Options without a value that every command has."""
_COLUMN = 36
"""First column of the meanings in the short help."""


@dataclass(frozen=True)
class Setting:
    """A section or a setting, as `--help` and the manual describe it."""

    key: str
    """Dotted key, with 0 for the items of lists."""
    is_section: bool
    """Whether it is a section, or a list of sections."""
    kind: str
    """Type, such as INT or `true|false`."""
    default: str
    """Default in parentheses, such as `(default: 1)`."""
    text: str
    """Docstring of the field, in one line."""
    section_text: str
    """Docstring of the section, or of the items of a list of sections; empty for a setting."""

    @property
    def topic(self) -> str:
        """The key as people may write it behind `--help`, without numbers."""
        return _without_numbers(self.key)

    @property
    def above(self) -> str:
        """Key of the section that it is in; empty at the top."""
        return self.key.rpartition(".")[0]


@functools.cache
def settings(root: type) -> tuple[Setting, ...]:
    """Returns all sections and settings of a class, sections before their own settings."""
    return tuple(_settings(root))


def _settings(root: type) -> Iterator[Setting]:
    for key, section, field in keys(root):
        kind = field.type
        inner: Any = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
        section_text = _docstrings(inner.__module__).get((inner.__name__, "")) if _is_section(inner) else None
        yield Setting(
            key=key,
            is_section=section_text is not None,
            kind=_show_type(kind),
            default=_show_default(field),
            text=_docstrings(section.__module__)[section.__name__, field.name],
            section_text=section_text or "",
        )


def _is_section(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def topic_of(arguments: Iterable[str]) -> str | None:
    """Returns what follows `--help` on a command line, empty if nothing does; None: the line does not ask for help."""
    several = list(arguments)
    for argument, following in itertools.zip_longest(several, several[1:], fillvalue="-"):
        option, _, topic = argument.partition("=")
        if option in ("--help", "-h"):
            return topic or ("" if following.startswith("-") else following)
    return None


def help_text(prog: str, root: type, options: Mapping[str, str], topic: str = "") -> str:
    """Returns the text of `--help TOPIC`.

    Args:
        prog: the command as people type it.
        root: the dataclass of its settings.
        options: the command's own options and their meaning.
        topic: a section or setting; `all`: everything; empty: the short help.

    Raises:
        ConfigError: no section or setting has this name.
    """
    width = min(shutil.get_terminal_size().columns, 120)
    if topic == "all":
        lines = [*_head(prog, root, options, width, full=True), *_everything(root, width)]
    elif topic:
        lines = _about(root, topic, width)
    else:
        lines = [*_head(prog, root, options, width, full=False), *_short(root, width)]
    return "\n".join([*lines, "", f"manual: {shipped.MANUAL}"])


def _head(prog: str, root: type, options: Mapping[str, str], width: int, *, full: bool) -> list[str]:
    """Returns the usage line and the command's options."""
    is_run = root is Config
    flags = {**{option: text for option, text in options.items() if " " not in option}, **FLAGS}
    file = "--config FILE" if is_run else "[--config FILE]"
    number, several = (": --train.num_steps 100", ": --data.sources '[{kind: stdlib}]'") if is_run else ("", "")
    own = {
        "--config FILE": "YAML file of the run, or the name of a shipped configuration such as quickstart."
        if is_run
        else "YAML file with any of the settings below.",
        "--KEY VALUE, --KEY=VALUE": f"Any setting; it overrides FILE{number}. Lists and whole sections are written as"
        f" YAML{several}. null unsets a setting.",
        **{option: text for option, text in options.items() if " " in option},
        **flags,
    }
    usage = f"usage: {prog} {file} [--KEY VALUE ...] {' '.join(f'[{flag}]' for flag in flags)}"
    entry = _entry if full else _row
    return [usage, "", *itertools.chain.from_iterable(entry(option, text, width) for option, text in own.items())]


def _short(root: type, width: int) -> list[str]:
    """Returns the settings that most people change, and the sections in one line each."""
    known = {setting.key: setting for setting in settings(root)}
    top = [setting for setting in known.values() if not setting.above]
    chosen = [known[key] for key in COMMON] if root is Config else [setting for setting in top if not setting.is_section]
    sections = [setting for setting in top if setting.is_section]
    lines = ["", "settings that most people change" if root is Config else "settings"]
    for setting in chosen:
        lines += _row(f"--{setting.key} {_short_kind(setting)}", _first_sentence(setting.text), width, most=2)
    if sections:
        lines += ["", "sections: --help NAME shows one, --help all shows every setting"]
        lines += _section_rows(sections, width)
    return lines


def _section_rows(sections: Sequence[Setting], width: int) -> list[str]:
    column = max(len(setting.topic) for setting in sections) + 6
    return [line for it in sections for line in _row(f"  {it.topic}", _first_sentence(it.section_text), width, 1, column)]


def _everything(root: type, width: int) -> list[str]:
    sections: dict[str, list[Setting]] = {"": []}
    titles = {"": "the run" if root is Config else "settings"}
    texts = {"": _docstrings(root.__module__)[root.__name__, ""]}
    for setting in settings(root):
        if setting.is_section:
            key = f"{setting.key}.0" if setting.kind.startswith("[") else setting.key
            sections[key], titles[key], texts[key] = [], key, setting.section_text
        if not setting.is_section or setting.kind.startswith("["):
            sections[setting.above].append(setting)
    lines: list[str] = []
    for key, several in sections.items():
        lines += ["", *textwrap.fill(f"{titles[key]}: {texts[key]}", width, subsequent_indent=" " * 6).splitlines()]
        lines += itertools.chain.from_iterable(_full_entry(setting, width) for setting in several)
    return lines


def _about(root: type, topic: str, width: int) -> list[str]:
    """Returns all about one section, with the names of the sections inside, or about one setting."""
    by_topic = {setting.topic: setting for setting in settings(root)}
    found = by_topic.get(_without_numbers(topic.removeprefix("--")))
    if found is None:
        raise ConfigError(f"--help: no section or setting is called {show(topic)}; {_guess(topic, by_topic)}")
    if not found.is_section:
        return _full_entry(found, width)
    inside = [setting for setting in settings(root) if _without_numbers(setting.above) == found.topic]
    lines = textwrap.wrap(f"{found.key}: {found.section_text}", width, subsequent_indent=" " * 6)
    if found.kind.startswith("["):
        lines += _full_entry(found, width)
    for setting in inside:
        if not setting.is_section:
            lines += _full_entry(setting, width)
    sections = [setting for setting in inside if setting.is_section]
    if sections:
        lines += ["", "sections: --help NAME shows one"]
        lines += _section_rows(sections, width)
    return lines


def _guess(topic: str, known: Mapping[str, Setting]) -> str:
    last = topic.rpartition(".")[2]
    close = [name for name in known if name.rpartition(".")[2] == last] or difflib.get_close_matches(topic, known, n=1)
    if not close:
        return f"sections are {', '.join(name for name, setting in known.items() if setting.is_section and '.' not in name)}"
    return f"did you mean {' or '.join(close[:3])}?"


def _full_entry(setting: Setting, width: int) -> list[str]:
    return _entry(f"--{setting.key} {setting.kind}  {setting.default}", setting.text, width)


def _entry(option: str, text: str, width: int) -> list[str]:
    """Returns an option with its whole meaning below it."""
    return [f"  {option}", *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _row(option: str, text: str, width: int, most: int | None = None, column: int = _COLUMN) -> list[str]:
    """Returns an option with its meaning beside it, in at most so many lines."""
    column = column if column + 24 <= width else 6  # on a narrow terminal the meaning goes below
    indent = " " * column
    if len(option) + 4 > column:
        below = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, max_lines=most and most - 1)
        return [f"  {option}", *below]
    first = f"  {option}".ljust(column)
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, max_lines=most, placeholder=" ...")


def _short_kind(setting: Setting) -> str:
    kind = setting.kind.removesuffix("|null")
    return "NAME" if "|" in kind and len(kind) > 12 else "[...]" if kind.startswith("[") else kind


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def _without_numbers(key: str) -> str:
    return re.sub(r"\.0(?=\.|$)", "", general(key))


@functools.cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Returns the docstrings of the sections, by (class, ""), and of their fields, which Python itself does not keep."""
    docs = {}
    for cls in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(cls, ast.ClassDef):
            docs[cls.name, ""] = " ".join((ast.get_docstring(cls) or "").split())
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
        return "(may be given several times)"
    if field.default is dataclasses.MISSING:
        return "(required)"
    return f"(default: {json.dumps(field.default).strip(chr(34))})"
