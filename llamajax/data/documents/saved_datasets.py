"""Directories that Hugging Face `datasets` saves: which Arrow files they have, in which order."""

import json
from pathlib import Path
from typing import Any


class NotReadableError(ValueError):
    """A directory that cannot be read as one dataset; it says why, and what to do."""


def shards_of(folder: Path) -> list[Path]:
    """The files of a dataset of `Dataset.save_to_disk`, in the order of its rows.

    Raises:
        NotReadableError: it is none, or several, or its rows are others than those of the files.
        OSError: a file cannot be read.
    """
    try:
        splits = _json(folder / "dataset_dict.json")["splits"]
    except FileNotFoundError:
        pass
    else:
        raise NotReadableError(f"is a DatasetDict; name a split of it: {', '.join(str(folder / split) for split in splits)}")
    try:
        state = _json(folder / "state.json")
    except FileNotFoundError:
        raise NotReadableError(
            f"is no directory of Dataset.save_to_disk, it has no state.json; name its files, for example {folder}/*.arrow"
        ) from None
    if any(state[key] for key in state if key.startswith("_indices")):
        raise NotReadableError(
            "has its rows in another order than its files, by a list of indices; save it again after flatten_indices()"
        )
    try:
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise NotReadableError("has a state.json that names no _data_files; save it again") from None


def _json(path: Path) -> dict[str, Any]:
    """Raises `NotReadableError` if it is no JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise NotReadableError(f"has a {path.name} that is damaged; save it again")
    return content
