"""Weights to start from, of any kind: a run, one of its checkpoints, an imported model, a Hugging Face directory."""

import os
import re
from pathlib import Path
from typing import Any, get_args

from llamajax import disk
from llamajax.checkpoint.read import read_object
from llamajax.checkpoint.steps import find_step
from llamajax.config.file import settings_of
from llamajax.config.hf_config import CONFIG, SPECIAL_TOKENS, is_hf_model, token_ids
from llamajax.config.model import ModelConfig
from llamajax.errors import CheckpointError, ConfigError, show
from llamajax.weights.hf_files import LICENSE
from llamajax.weights.hf_model import open_directory
from llamajax.weights.pretrained import ExportDType, Pretrained


def open_pretrained(path: Path) -> Pretrained:
    """Finds out what `path` is and looks at everything but the weights; needs a current mesh.

    Args:
        path: a run's directory, whose newest good checkpoint is taken; RUN/checkpoints/STEP; a directory made by
            `python -m converters.hf import`; or a Hugging Face directory. Processes call this together.

    Raises:
        CheckpointError: there is no good checkpoint, or not of this version's model.
        ConfigError: it is none of these, or a Hugging Face model that cannot be read.
        DiskError: the disk fails, which may pass.
    """
    path = Path(os.path.expanduser(path)).absolute()
    try:
        disk.read_again(lambda: os.listdir(path))
    except OSError as error:
        if disk.may_pass(error):
            raise disk.cannot_read(error, path, "") from error
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = "there is no such directory" if is_missing else f"cannot be read: {error.strerror}"
        raise ConfigError(f"{path}: {reason}; give a run, RUN/checkpoints/STEP or a Hugging Face model") from error
    if (path / "checkpoints").is_dir() and is_hf_model(path / CONFIG):
        raise ConfigError(
            f"{path}: holds both a run's checkpoints/ and a Hugging Face model's {CONFIG}; give {path / 'checkpoints'}/STEP"
            " for the run, or move one of them to a directory of its own"
        )
    if (step_dir := find_step(path)) is not None:
        meta = read_object(step_dir, "meta.json")
        try:
            fields: dict[str, Any] = dict(meta["config"]["model"])
            # What belongs to how it was trained, and on what, not to the model.
            fields |= {"attention_kernel": "auto", "matmul_dtype": "compute_dtype", "float8_exempt": ()}
            config = settings_of(ModelConfig, fields)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{step_dir}: was not written by this version's model ({show(str(error))}); read it with its own"
            ) from error
        stored_dtype = meta.get("stored_dtype", config.param_dtype)
        if stored_dtype not in get_args(ExportDType) or not _is_hf(meta.get("hf"), step_dir / "meta.json", config):
            raise CheckpointError(f"{step_dir / 'meta.json'}: hf or stored_dtype are none of an import; choose another step")
        return Pretrained(step_dir, config, step_dir / "files", meta.get("hf"), stored_dtype, meta, None)
    if (path / CONFIG).is_file():
        return open_directory(path)
    raise ConfigError(
        f"{path}: has neither checkpoints/, as a run has, nor config.json, as a Hugging Face model has, and is no"
        " RUN/checkpoints/STEP; give one of these"
    )


def _is_hf(hf: object, path: Path, config: ModelConfig) -> bool:
    """Whether a step says of Hugging Face's files what can be in them.

    Raises:
        ConfigError: it has special tokens whose ids the model lacks.
    """
    match hf:
        case None:
            return True
        case {"source": str(), "special_tokens": dict(tokens), **others}:
            for key in SPECIAL_TOKENS:
                token_ids(tokens.get(key), key, path, config)
            license = others.get("license")
            return tokens.keys() == set(SPECIAL_TOKENS) and (
                license is None or re.fullmatch(LICENSE, str(license)) is not None
            )
    return False
