"""Runs one conversion from start to finish; `python -m converters.hf` calls it."""

import argparse
import os
import time
from pathlib import Path

import jax

from converters.hf_export import Export, ExportDType, read_checkpoint
from converters.hf_import import open_import
from llamajax.config.parallel import MeshConfig
from llamajax.disk import made_whole
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import num_params
from llamajax.parallel.mesh import make_mesh
from llamajax.processes.exit import exit_code
from llamajax.weights.open_model import local_directory

VERIFY_BELOW = 2_000_000_000
"""Number of parameters. Larger models are compared only on request: the comparison holds both models in memory, in fp32."""


def convert(
    command: str, source: str, out: Path, *, dtype: ExportDType | None, verify: bool | None, license: str | None
) -> None:
    """Runs one conversion; `out` appears complete once everything is written and verified, or not at all.

    Args:
        command: `import` or `export`.
        source: directory to read; for an import also hf://ORG/NAME[@REVISION].
        out: directory to create.
        dtype: dtype of the weights in `out`, not float16 for an import; None: as in `source`.
        verify: compare logits, and for an export also token ids; None: compare logits below two billion parameters.
        license: licence of the exported model, for its card; None: the licence of the model it was imported from.

    Raises:
        UserError: one of `llamajax.errors`.
        OSError: reading or writing failed.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: exists already; choose another directory, or remove it")
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        started = time.monotonic()
        if command == "import":
            assert dtype != "float16"
            plan = open_import(local_directory(source), dtype)
        else:
            plan = read_checkpoint(source, dtype, license)
        print(plan.about, flush=True)
        with made_whole(out) as unfinished:
            nbytes = plan.write(unfinished)
            seconds = time.monotonic() - started
            speed = f"{nbytes / 1e6:,.0f} MB in {seconds:.1f} s, {nbytes / 1e6 / seconds:,.0f} MB/s"
            print(f"wrote      {speed}, checked and synced to disk", flush=True)
            if verify is not False and isinstance(plan, Export) and plan.has_tokenizer:
                print(f"verify     {plan.verify_ids(unfinished)}", flush=True)
            if verify or (verify is None and num_params(plan.config) < VERIFY_BELOW):
                print(f"verify     {plan.verify(unfinished)}", flush=True)
    print(f"done       {out}")


def main(arguments: argparse.Namespace) -> int:
    """Runs the conversion and returns the exit code."""
    source, out = arguments.source, Path(os.path.expanduser(arguments.out))
    options = {"dtype": arguments.dtype, "verify": arguments.verify, "license": arguments.license}
    return exit_code(
        lambda: convert(arguments.command, source, out, **options),
        memory_remedy="--no-verify",
        disk=str(out),
        disk_remedy="check the disk and try again",
    )
