"""The page of the library, from its signatures and docstrings."""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llamajax
from scripts.manual.markdown import NOTE, ROOT, docstring, page, prose

RESULTS = {
    "results.py": ("TrainResult", "Plan", "Verification", "Model"),
    "checkpoint/read.py": ("Saved", "Restored"),
    "training/own_loop.py": ("OwnLoop",),
}
"""Classes that the library's functions return, by file."""
CONFIG_METHODS = ("changed",)
"""Methods of a configuration for users."""


def python() -> str:
    """Returns the page of the library."""
    package = ROOT / "llamajax"
    lines = ["# Python", "", NOTE, "", docstring(ast.parse((package / "library.py").read_text()))]
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
    return page(lines)


def _definition(path: Path, name: str) -> Any:
    """Returns the function or class `name` of a file."""
    (node,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    return node


def _class(node: ast.ClassDef, title: str, methods: Sequence[str] | None = None) -> list[str]:
    """Returns a class with its fields, properties and public methods, or those methods only."""
    bases = ", ".join(ast.unparse(base) for base in node.bases if not isinstance(base, ast.Subscript))
    lines = ["", f"### `{title}`", "", *([f"A subclass of `{bases}`.", ""] if bases else []), docstring(node)]
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
        lines += [f"| `{name}` | {prose(text)} |" for name, text in values]
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
    return ["", f"{heading} `{title}`", "", "```text", signature, "```", "", docstring(node)]


def _unquoted(annotation: ast.expr | None) -> ast.expr | None:
    """Returns an annotation without the quotes of a string annotation."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return ast.parse(annotation.value, mode="eval").body
    return annotation
