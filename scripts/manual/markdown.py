"""Markdown of the generated pages: text for cells of tables, docstrings, whole pages."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = "<!-- not run: an example; tutorials and how-to pages run what it shows -->"
NOTE = "<!-- Written by scripts/reference.py from the code. Edit the code, then run the script. -->"


def prose(text: str) -> str:
    """Returns text for a cell of a table, with markup escaped outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    escaped = [part if part.startswith("`") else re.sub(r"([<|*\[\]])", r"\\\1", part) for part in parts]
    assert not any("|" in part for part in parts if part.startswith("`")), text
    return "".join(escaped)


def docstring(node: Any) -> str:
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


def page(lines: list[str]) -> str:
    text = "\n".join(lines)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
