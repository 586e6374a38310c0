"""Checks that the files and folders that settings name exist on this machine."""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from llamajax import disk
from llamajax.config.hf_config import CONFIG, is_hf_model
from llamajax.config.shipped import find_file
from llamajax.errors import show_path


def path_problems(
    folders: Mapping[str, str], patterns: Mapping[str, str], files: Mapping[str, str], of_datasets: tuple[str, ...]
) -> list[str]:
    """Returns one `key: rule; remedy` line for every path that cannot be used.

    Args:
        folders: folders that the run writes to, by key.
        patterns: names and globs of files, by key; each must match a file.
        files: files, by key; each must exist.
        of_datasets: beginnings of the keys in `patterns` for which a directory will do.
    """
    problems = []
    for key, path in {**folders, **patterns, **files}.items():
        expanded, shown = find_file(path), show_path(path)
        if expanded.startswith("~"):
            problems.append(f"{key}: {shown} is in no known home directory; write the path out")
        elif key in folders:
            if os.path.exists(expanded) and not os.path.isdir(expanded):
                problems.append(f"{key}: {shown} is not a directory; choose another")
            elif key == "run_dir" and is_hf_model(Path(expanded, CONFIG)):
                has_steps = os.path.isdir(os.path.join(expanded, "checkpoints"))
                remedy = f"move {CONFIG} to a directory of its own" if has_steps else "choose another directory"
                problems.append(f"{key}: {shown} holds a Hugging Face model ({CONFIG}); {remedy}")
        elif _is_missing(expanded, is_pattern=key in patterns, may_be_folder=key.startswith(of_datasets)):
            remedy = f"relative paths start at {show_path(os.getcwd())}"
            if key in patterns and next(iter(disk.matching(expanded)), None) is not None:
                remedy = f"only directories do; write {shown}/** for the files in them"
            elif os.path.isdir(expanded):
                remedy = "it is a directory; name a file in it"
            problems.append(f"{key}: no file matches {shown}; {remedy}")
    return problems


def _is_missing(path: str, *, is_pattern: bool, may_be_folder: bool) -> bool:
    """Whether no file, nor a directory where that will do, is at a path; False where the disk fails.

    A failure of the disk may pass, and is reported when the file is read.
    """
    try:
        found: Iterable[str] = disk.matching(path) if is_pattern else [path]
        modes = (file.st_mode for each in found if (file := disk.status(each)) is not None)
        return not any(stat.S_ISREG(mode) or (may_be_folder and stat.S_ISDIR(mode)) for mode in modes)
    except OSError:
        return False
