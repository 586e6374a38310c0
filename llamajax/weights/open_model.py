"""Opens initial weights of any kind: a run, one of its checkpoints, an imported model, a Hugging Face directory."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from llamajax import disk
from llamajax.checkpoint.read import read_object
from llamajax.checkpoint.steps import find_step
from llamajax.config.architectures import architecture_of
from llamajax.config.experts import OF_A_RUN
from llamajax.config.file import settings_of
from llamajax.config.hf_config import CONFIG, SPECIAL_TOKENS, is_hf_model, read_ends, read_hf_config, token_ids
from llamajax.config.hub import is_on_hub
from llamajax.config.json_file import read_json
from llamajax.config.model import DType, ModelConfig
from llamajax.config.peft import base_of, is_peft
from llamajax.data.tokenizers.tokenizer import find_tokenizer
from llamajax.errors import CheckpointError, ConfigError, show
from llamajax.estimates.formulas import num_params
from llamajax.weights import hf_files, names
from llamajax.weights.float8 import quantization_of, with_scales
from llamajax.weights.peft import adapters_of_run, open_peft
from llamajax.weights.pretrained import ExportDType, Pretrained
from llamajax.weights.safetensors import DTYPES

_BUFFER = re.compile(r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers with frequencies that old Llamas store beside the weights; they follow from config.json."""


def open_pretrained(
    named: str | os.PathLike[str], *, base: Pretrained | None = None, for_adapters: tuple[Path, ...] = ()
) -> Pretrained:
    """Determines the kind of a model and checks everything but the weights; needs a current mesh. Processes call this
    together.

    Args:
        named: a run directory, which selects its newest good checkpoint; RUN/checkpoints/STEP; a directory made by
            `python -m converters.hf import`; a Hugging Face directory; a PEFT directory; or hf://ORG/NAME[@REVISION], which
            is fetched. Adapters bring their base, which `adapter_config.json` or the run's `init_from` names.
        base: model that adapters add to, in place of the one that they name.
        for_adapters: adapters that the model is the base of, the outermost first.

    Raises:
        CheckpointError: there is no good checkpoint, or it holds a model of another llamajax version.
        ConfigError: the path is none of these, or a Hugging Face model that cannot be read.
        DiskError: the disk or the Hub fails, perhaps temporarily.
    """
    path = local_directory(named)
    if path in for_adapters:
        rule = "names adapters as their own base; name the model that they were trained beside"
        raise ConfigError(f"{for_adapters[0]}: {rule}")
    for_adapters += (path,)
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
            # These settings belong to the training run, its data and its hardware, not to the model.
            fields |= {"attention_kernel": "auto", "matmul_dtype": "compute_dtype", "float8_exempt": ()}
            fields["experts"] = {name: value for name, value in fields.get("experts", {}).items() if name not in OF_A_RUN}
            config = settings_of(ModelConfig, fields)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{step_dir}: holds a model of another llamajax version ({show(str(error))}); read it with that version"
            ) from error
        stored_dtype = meta.get("stored_dtype", config.param_dtype)
        if stored_dtype not in get_args(ExportDType) or not _is_hf(meta.get("hf"), step_dir / "meta.json", config):
            raise CheckpointError(f"{step_dir / 'meta.json'}: hf or stored_dtype is invalid; choose another step")
        adapters = adapters_of_run(step_dir, meta)
        if adapters is not None:
            base = base or _base_of_run(step_dir, meta, for_adapters)
            base.check(config, meta["config"].get("init_changes", ()))
        return Pretrained(
            step_dir, config, step_dir / "files", meta.get("hf"), stored_dtype, meta, None, adapters=adapters,
            base=None if adapters is None else base,
        )  # fmt: skip
    if is_peft(path):
        return open_peft(path, base or open_pretrained(base_of(path), for_adapters=for_adapters))
    if (path / CONFIG).is_file():
        return open_directory(path)
    raise ConfigError(
        f"{path}: has neither checkpoints/, as a run has, nor config.json, as a Hugging Face model has, and is not"
        " RUN/checkpoints/STEP; give one of these"
    )


def local_directory(named: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a model, which is fetched first if it is on the Hub. Processes call this together.

    Raises:
        ConfigError, DiskError: see `llamajax.weights.download.fetched`.
    """
    if is_on_hub(name := os.fspath(named)):
        from llamajax.weights.download import fetched  # takes a second to import

        return fetched(name)
    return Path(os.path.expanduser(name)).absolute()


def _base_of_run(step_dir: Path, meta: Mapping[str, Any], for_adapters: tuple[Path, ...]) -> Pretrained:
    """Returns the model that the adapters of a checkpoint belong to: the first one without adapters that `init_from` leads
    to.

    Raises:
        CheckpointError: the run has no `init_from`.
        ConfigError: there is no model any more.
    """
    named = meta["config"].get("init_from")
    if not isinstance(named, str):
        raise CheckpointError(f"{step_dir}: holds adapters, but its run names no init_from; choose another step")
    found = open_pretrained(named, for_adapters=for_adapters)
    return found if found.base is None else found.base


def open_directory(path: Path, dtype: DType | None = None) -> Pretrained:
    """Checks everything in a Hugging Face directory but the values of the weights; needs a current mesh.

    Args:
        path: the directory.
        dtype: type to keep the weights in; None: bfloat16 if all are bfloat16, else float32, which holds them exactly.

    Raises:
        ConfigError: the model cannot be read completely and unambiguously; the message says why in one line.
    """
    body, generation = read_json(path / CONFIG), hf_files.read_generation(path)
    name, license = hf_files.source_name(path), hf_files.read_license(path / "README.md")
    hf_files.read_travelling(path)  # as training does
    quantization = quantization_of(body, path / CONFIG)
    tensors = {name: stored for name, stored in hf_files.open_model(path).items() if not _BUFFER.fullmatch(name)}
    tensors = with_scales(tensors, quantization)
    stored_dtypes = {stored.dtype for stored in tensors.values()}
    as_stored: Literal["float32", "bfloat16"] = "bfloat16" if stored_dtypes == {DTYPES["BF16"]} else "float32"
    config, special_tokens = read_hf_config(body, path / CONFIG, dtype or as_stored)
    read_ends(generation, path, special_tokens, config)  # as generation does later
    hf = {"source": name, "model_type": body["model_type"], "special_tokens": special_tokens, "license": license}
    num_stored = sum(stored.nbytes // stored.dtype.itemsize for stored in tensors.values())
    if num_params(config) > 2 * num_stored + 1_000_000:  # too many missing tensors to list
        raise ConfigError(
            f"{path / CONFIG}: describes {num_params(config):,} parameters, but the files hold {num_stored:,};"
            " download the whole model"
        )
    tensors = names.tensors_for(config, tensors, path, architecture_of(config, body["model_type"]))
    try:
        find_tokenizer(path)  # as training does
    except Exception as error:  # a damaged file makes the tokenizer libraries raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{path}: the tokenizer cannot be read: {reason}; download it again") from error
    stored_dtype = "float16" if dtype is None and stored_dtypes == {DTYPES["F16"]} else config.param_dtype
    return Pretrained(path, config, path, hf, stored_dtype, {}, tensors)


def _is_hf(hf: object, path: Path, config: ModelConfig) -> bool:
    """Returns whether the `hf` metadata of a step is valid.

    Raises:
        ConfigError: a special token has an id that the model lacks.
    """
    match hf:
        case None:
            return True
        case {"source": str(), "special_tokens": dict(tokens), **others}:
            for key in SPECIAL_TOKENS:
                token_ids(tokens.get(key), key, path, config)
            license = others.get("license")
            return tokens.keys() == set(SPECIAL_TOKENS) and (
                license is None or re.fullmatch(hf_files.LICENSE, str(license)) is not None
            )
    return False
