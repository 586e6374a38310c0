"""Files that come with llamajax: configurations, which are found by name, chat templates, calibrations, and the manual."""

import difflib
import os
from pathlib import Path

from llamajax.config.yaml_text import is_readable
from llamajax.errors import show_path

FOLDER = (Path(__file__).parents[1] / "configs").resolve()
"""The shipped configurations: `configs/` of the checkout, or of the installed package."""
MANUAL = (Path(__file__).parents[1] / "docs").resolve() / "index.md"
"""First page of the manual, in the checkout or in the installed package."""


def names() -> list[str]:
    """Returns the names of the shipped configurations, as `--config` takes them."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def is_name(text: str) -> bool:
    """Whether a text can be the name of a shipped configuration: no folder, no suffix."""
    return text != "" and text.isprintable() and os.sep not in text and not text.endswith((".yaml", ".yml"))


def find_config(text: str) -> str | None:
    """Returns the path of a configuration, given by path or by shipped name; None: no configuration has this name.

    A file of that very name in the working directory wins. A path that begins with `configs/` and does not exist there is
    that of the shipped file; any other path is returned unchanged, whether or not it exists.
    """
    if is_readable(text):
        return text
    if not is_name(text):
        return _shown(found) if (found := _shipped(text)) else text
    return _shown(FOLDER / f"{text}.yaml") if text in names() else None


def no_config(text: str) -> str:
    """Returns the message for a name that `find_config` does not find."""
    known = names()
    close = difflib.get_close_matches(text, [*known, *os.listdir()], n=1)
    guess = f"did you mean {show_path(close[0])}? Shipped" if close else "shipped"
    return f"no such file or shipped configuration; {guess} configurations: {', '.join(known)}"


def find_base(text: str, beside: str) -> str | None:
    """Returns the path of a `base`: in the folder `beside`, else among the shipped configurations; None: in neither."""
    own, shipped = os.path.normpath(os.path.join(beside, os.path.expanduser(text))), FOLDER / text
    if is_readable(own):
        return own
    if is_name(text):
        shipped = shipped.with_name(f"{text}.yaml")
    return _shown(shipped) if is_readable(str(shipped)) else None


def no_base(text: str, beside: str) -> str:
    """Returns the message for a `base` that `find_base` does not find."""
    folder = os.path.join(beside, os.path.dirname(os.path.expanduser(text))) or "."
    near = [os.path.join(os.path.dirname(text), name) for name in os.listdir(folder)] if os.path.isdir(folder) else []
    shipped = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml")]
    close = difflib.get_close_matches(text, [*near, *shipped], n=1)
    guess = f"; did you mean {show_path(close[0])}?" if close else "; correct the path"
    return f"no file {show_path(text)} in {show_path(beside or '.')} or among the shipped configurations{guess}"


def find_file(path: str) -> str:
    """Returns the path of the file that a setting names, with `~` expanded.

    Relative paths start at the working directory. One that begins with `configs/` and does not exist there is the file of
    that name that comes with llamajax, such as configs/chat_templates/llama3.jinja.
    """
    own = os.path.expanduser(path)
    return own if os.path.exists(own) else str(_shipped(own) or own)


def _shipped(path: str) -> Path | None:
    """Returns the shipped file for a relative path that begins with `configs/`; None: no such file comes with llamajax."""
    shipped = FOLDER.parent / path
    return shipped if Path(path).parts[:1] == (FOLDER.name,) and "\0" not in path and shipped.exists() else None


def _shown(path: Path) -> str:
    """Returns a path as people read it in messages: relative to the working directory where it is below that."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
