"""Exports the adapters of a run to a PEFT directory."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from converters.copying import PIECE_BYTES, copy_array, rounded
from converters.hf_export import check_arrays
from converters.model_card import adapters_card
from converters.small_files import SmallFiles, read_small_files
from converters.verify import compare_adapters
from converters.verify_ids import compare_ids
from llamajax.checkpoint.read import unless_deleted
from llamajax.config.adapters import AdaptersConfig
from llamajax.config.model import ModelConfig
from llamajax.config.peft import ADAPTER_CONFIG, peft_config_of
from llamajax.errors import ConfigError
from llamajax.weights import names
from llamajax.weights.hf_files import hub_name
from llamajax.weights.peft import ADAPTERS
from llamajax.weights.pretrained import ExportDType, Pretrained
from llamajax.weights.safetensors import Writer


@dataclass(frozen=True)
class PeftExport:
    """Good checkpoint of adapters that can be exported."""

    found: Pretrained
    dtype: ExportDType
    """Dtype of the adapters to write."""
    license: str | None
    """Licence identifier for the model card; None: the base's, or its licence file."""
    files: SmallFiles
    """Tokenizer and other small files."""
    base: tuple[str, str | None]
    """Name or directory of the base for other programs, and its commit if it is on the Hub."""

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.found.config

    @property
    def adapters(self) -> AdaptersConfig:
        """The adapters."""
        assert self.found.adapters is not None
        return self.found.adapters

    @property
    def about(self) -> str:
        """Describes the adapters in one line."""
        return (
            f"read       {self.found.about}; written for peft as {self.dtype}, with"
            f" {self.files.listed}; its base is named {self.base[0]}"
        )

    def write(self, out: Path) -> int:
        """Fills the directory `out`. Returns the bytes of adapters written.

        Raises:
            CheckpointError: a running run deleted the step during the export.
            ConfigError: a weight is too large for `dtype`.
        """
        name, revision = self.base
        self.files.write(out)
        body = peft_config_of(self.adapters, name, revision)
        (out / ADAPTER_CONFIG).write_text(json.dumps(body, indent=2) + "\n")
        (out / "README.md").write_text(adapters_card(self.found, name, self.dtype, self.license), encoding="utf-8")
        dtype = np.dtype(jax.numpy.dtype(self.dtype))
        shapes = names.hf_shapes(self.config, self.adapters)
        with unless_deleted(self.found.source), Writer(out, shapes, dtype, single=ADAPTERS) as writer:

            def put(name: str, values: np.ndarray, first_row: int) -> None:
                writer.write(name, rounded(values, dtype, name), first_row)

            for array in names.adapter_shapes(self.config, self.adapters):
                copy_array(self.found.source, array, put, PIECE_BYTES, self.config)
        return writer.nbytes

    def verify_ids(self, out: Path) -> str:
        """Compares the token ids of texts in training and in the directory; see `compare_ids`."""
        return compare_ids(out, self.found.tokenizer())

    def verify(self, out: Path) -> str:
        """Compares the logits of the checkpoint with those of peft; see `compare_adapters`."""
        assert self.found.base is not None
        base = Path(self.base[0]) if self.found.base.tensors is None else self.found.base.source
        if not base.is_dir():
            return f"skipped: {base} is no directory on this machine"
        return compare_adapters(base, self.found, self.dtype, peft_dir=out)


def read_adapters(found: Pretrained, dtype: ExportDType | None, license: str | None, base: str | None) -> PeftExport:
    """Checks a checkpoint of adapters.

    Args:
        found: the checkpoint.
        dtype: dtype of the adapters to write; None: as they are.
        license: licence for the model card.
        base: name or directory of the base; None: its own.

    Raises:
        CheckpointError: it does not hold the adapters that its configuration describes.
        ConfigError: it is a PEFT directory already, or its base is in a form that only llamajax reads.
    """
    assert found.adapters is not None
    if found.tensors is not None:
        raise ConfigError(f"{found.source}: is already a PEFT directory; --merge writes the whole model")
    assert found.architecture  # raises if transformers has none
    check_arrays(found, names.adapter_shapes(found.config, found.adapters))
    return PeftExport(found, dtype or found.stored_dtype, license, read_small_files(found), _named_base(found, base))


def _named_base(found: Pretrained, told: str | None) -> tuple[str, str | None]:
    """Returns `PeftExport.base`."""
    assert found.base is not None
    if told is not None:
        directory = Path(os.path.expanduser(told))
        return str(directory.absolute()) if directory.is_dir() else told, None
    if found.base.tensors is None:
        raise ConfigError(
            f"{found.source}: its base, {found.base.source}, is a checkpoint, which peft cannot read; export that first and"
            " name the result with --base, or write the whole model with --merge"
        )
    return hub_name(found.base.source) or (str(found.base.source), None)
