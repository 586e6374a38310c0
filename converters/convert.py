"""Runs one conversion from start to finish; `python -m converters.hf` calls it."""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax

from converters.hf_export import Export, read_model
from converters.hf_import import Import, open_import
from converters.peft_export import PeftExport, read_adapters
from converters.upcycle import Upcycling, read_upcycling
from llamajax.config.experts import ExpertsConfig
from llamajax.config.hub import is_on_hub
from llamajax.config.parallel import MeshConfig
from llamajax.disk import made_whole
from llamajax.errors import ConfigError
from llamajax.estimates.formulas import num_params
from llamajax.parallel.mesh import make_mesh
from llamajax.processes.exit import exit_code
from llamajax.weights.open_model import local_directory, open_pretrained
from llamajax.weights.pretrained import ExportDType

VERIFY_BELOW = 2_000_000_000
"""Number of parameters. Larger models are compared only on request: the comparison holds both models in memory, in fp32."""


def convert(open_plan: Callable[[], Import | Export | PeftExport | Upcycling], out: Path, *, verify: bool | None) -> None:
    """Runs one conversion; `out` appears complete once everything is written and verified, or not at all.

    Args:
        open_plan: opens and checks the source.
        out: directory to create.
        verify: compare logits, and unless it is an import also token ids; None: compare logits below two billion parameters.

    Raises:
        UserError: one of `llamajax.errors`.
        OSError: reading or writing failed.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: exists already; choose another directory, or remove it")
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        started = time.monotonic()
        plan = open_plan()
        print(plan.about, flush=True)
        with made_whole(out) as unfinished:
            nbytes = plan.write(unfinished)
            seconds = time.monotonic() - started
            speed = f"{nbytes / 1e6:,.0f} MB in {seconds:.1f} s, {nbytes / 1e6 / seconds:,.0f} MB/s"
            print(f"wrote      {speed}, checked and synced to disk", flush=True)
            if verify is not False and not isinstance(plan, Import) and plan.files.has_tokenizer:
                print(f"verify     {plan.verify_ids(unfinished)}", flush=True)
            if verify or (verify is None and num_params(plan.config) < VERIFY_BELOW):
                print(f"verify     {plan.verify(unfinished)}", flush=True)
    print(f"done       {out}")


def open_export(
    source: str, dtype: ExportDType | None, license: str | None, *, merge: bool, base: str | None
) -> Export | PeftExport:
    """Finds what a directory holds: a model, or adapters to export alone or merged.

    Args:
        source: the directory.
        dtype: dtype of the weights to write; None: as in `source`.
        license: licence of the exported model, for its card; None: the licence of the model it was imported from.
        merge: export adapters merged into their base.
        base: name or directory of the base of exported adapters; None: their own.
    """
    if is_on_hub(source):
        raise ConfigError(f"{source}: is in the form of Hugging Face already; give a run or RUN/checkpoints/STEP")
    found = open_pretrained(source)
    if merge and found.adapters is None:
        raise ConfigError(f"--merge: {found.source} holds a whole model, and no adapters; leave it out")
    if base is not None and (merge or found.adapters is None):
        raise ConfigError("--base: only adapters that are exported alone name their base; leave it out")
    if merge or found.adapters is None:
        return read_model(found, dtype, license)
    return read_adapters(found, dtype, license, base)


def open_upcycling(arguments: argparse.Namespace) -> Upcycling:
    """Opens the dense model that `arguments` name; see `read_upcycling`."""
    try:
        experts = ExpertsConfig(
            num_experts=arguments.experts, top_k=arguments.top_k, mlp_dim=arguments.mlp_dim, normalize=arguments.normalize
        )
    except ConfigError as error:
        raise ConfigError(f"--{str(error).splitlines()[0].replace('num_experts', 'experts')}") from error
    found = open_pretrained(arguments.source)
    return read_upcycling(found, experts, arguments.dtype, arguments.seed, arguments.license)


def main(arguments: argparse.Namespace) -> int:
    """Runs the conversion and returns the exit code."""
    source, out = arguments.source, Path(os.path.expanduser(arguments.out))

    def open_plan() -> Import | Export | PeftExport | Upcycling:
        if arguments.command == "import":
            return open_import(local_directory(source), arguments.dtype)
        if arguments.command == "upcycle":
            return open_upcycling(arguments)
        return open_export(source, arguments.dtype, arguments.license, merge=arguments.merge, base=arguments.base)

    return exit_code(
        lambda: convert(open_plan, out, verify=arguments.verify),
        memory_remedy="--no-verify",
        disk=str(out),
        disk_remedy="check the disk and try again",
    )
