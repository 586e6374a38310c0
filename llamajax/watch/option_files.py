"""Checks and writes the files that options of a command line name."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from llamajax.errors import ConfigError


def check_outputs(options: Mapping[str, str], files: Collection[str], pages: Collection[str] = ()) -> None:
    """Raises `ConfigError` for files that cannot be written, before minutes are spent on their contents.

    Args:
        options: options of the command line, with their values.
        files: the options that name a file to write.
        pages: the options in `files` with an HTML page as their file.
    """
    named = {option: Path(os.path.expanduser(path)) for option, path in options.items() if option in files}
    problems = [
        f"{option}: {path}: another option names this file too; name a different file for each"
        for option, path in named.items()
        if sum(path.absolute() == other.absolute() for other in named.values()) > 1
    ]
    for option, path in named.items():
        is_new = not path.exists()
        try:
            with path.open("ab"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not path.parent.exists():
                problems.append(f"{option}: {path}: there is no directory {path.parent}; create it, or name another file")
            else:
                problems.append(f"{option}: {path} cannot be written: {error.strerror}; name another file")
    problems += [
        f"{option}: {path}: the output is an HTML page; name a file that ends with .html"
        for option, path in named.items()
        if option in pages and path.suffix != ".html"
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def write_output(options: Mapping[str, str], option: str, content: Callable[[], str]) -> None:
    """Writes `content` to the file that `option` names, if it was given.

    Raises:
        ConfigError: the file cannot be written.
    """
    if option not in options:
        return
    path = Path(os.path.expanduser(options[option]))
    try:
        path.write_text(content(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written: {error.strerror}; name another file") from error
