"""The page of every setting, from the docstrings that make `--help`."""

import re
from collections.abc import Sequence

from llamajax.config import help as help_texts
from llamajax.config.evaluate import EvaluateConfig
from llamajax.config.generate import GenerateConfig
from llamajax.config.launch import LaunchConfig
from llamajax.config.run import Config
from llamajax.config.serve import ServeConfig
from scripts.manual.markdown import NOTE, page, prose


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
            lines += [prose(section.section_text), *_table(inside, prefix)]
    return page(lines)


def _table(several: Sequence[help_texts.Setting], prefix: str) -> list[str]:
    """Returns the table of a section's own settings."""
    rows = [
        f"| {_name(it, prefix)} | {_kind(it.kind)} | {_default(it.default)} | {prose(it.text)} |"
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
