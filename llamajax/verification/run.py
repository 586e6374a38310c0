"""A verification, from configuration to verdict: read `run` from top to bottom.

Scales the run's mesh and forms down to a few emulated devices, and compares its first steps with those of the plainest
possible run: one device, no accumulation, no recomputation, no form of sharing the work, nothing in host memory. Both runs
draw the weights themselves, train on the same rows, and compute in fp32 throughout.

Exit codes: 0 when all numbers are equal, or there is nothing to verify, because the run has one device and keeps all data on
it; 1 when some differ; 2 for mistakes.
"""

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamajax.config.offload import OffloadConfig
from llamajax.config.parallel import ParallelConfig
from llamajax.config.run import Config
from llamajax.errors import ConfigError, UnequalError, show
from llamajax.parallel import startup
from llamajax.processes.exit import exit_code
from llamajax.step.resolve import resolve, with_placed_state
from llamajax.verification import text
from llamajax.verification.compare import certify
from llamajax.verification.page import page
from llamajax.verification.scaling import MOST_DEVICES, changes, configured_axes, fitting_axes, scale_down, scaled_axes
from llamajax.watch import console
from llamajax.watch.console import log
from llamajax.watch.option_files import check_outputs, write_output

FILES = ("--json", "--page")
"""Options that name a file to write."""
PAGES = ("--page",)
"""Options that name an HTML page to write."""
NOTHING = (
    "nothing to verify: the run has one device; mesh and mesh.num_cpu_devices say how many there are, and offload what waits"
    " in host memory"
)
"""Verdict on a run with one device that keeps all data on it."""


def run(config: Config, options: Mapping[str, str]) -> None:
    """Verifies `config`, prints the result and writes the files that `options` names.

    Args:
        config: the run.
        options: command-line options: files to write, by the option that names them, and `--devices`.

    Raises:
        ConfigError: the mesh cannot be laid over so many devices, or a file cannot be written.
        UnequalError: numbers differ; the result is printed and written all the same.
    """
    check_outputs(options, FILES, PAGES)
    scaled = scale(config, _read_devices(options["--devices"]) if "--devices" in options else None)
    if scaled is None:
        console.CONSOLE.print(f"verdict    {NOTHING}", soft_wrap=True)
        return
    # Fast code for five steps of a tiny model is not worth its compilation.
    os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()
    told = compare(scaled)
    log("")
    text.print_verification(told)
    write_output(options, "--json", lambda: json.dumps(told, indent=1))
    write_output(options, "--page", lambda: page(told))
    if not told["equal"]:
        tried = text.trials(told)
        raise UnequalError(f"{text.first_difference(told)}; likely cause: {told['clues'][0]}{tried and f'; {tried}'}")


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """A run, scaled down to a few devices."""

    config: Config
    """The run, in its longest rows."""
    verified: Config
    """The run that is compared with one device."""
    configured_axes: Mapping[str, int]
    """Sizes of the run's mesh axes."""
    scaled_axes: Mapping[str, int]
    """Sizes of the verified mesh axes."""
    forms: ParallelConfig
    """Forms that the run is trained in, none of them `auto`."""
    lengths: frozenset[int]
    """Lengths of rows in the run's stages, in tokens."""


def scale(config: Config, num_devices: int | None) -> Scaled | None:
    """Scales a run down to `num_devices`, or to as few as its mesh allows; None if the run has one device, and nothing waits
    in its host's memory.

    Raises:
        ConfigError: the mesh cannot be laid over so many devices.
    """
    configured = configured_axes(config)
    if problems := config.undivided(configured):
        raise ConfigError("\n".join(problems))
    config = with_placed_state(config, configured)
    if math.prod(configured.values()) == 1 and not _waits(config.offload):
        return None
    lengths = frozenset(stage.seq_len for stage in config.data.all_stages)
    config = config.in_largest_steps()
    axes = scaled_axes(configured, num_devices) if num_devices else fitting_axes(config.model, configured)
    trained = resolve(config, configured).config
    in_parts = config.changed({"parallel.expert_parts": trained.parallel.expert_parts})
    verified = scale_down(in_parts, configured, axes).changed(
        {"model.remat": trained.model.remat, "offload": _verified(trained.offload)}
    )
    return Scaled(
        config=config, verified=verified, configured_axes=configured, scaled_axes=axes, forms=trained.parallel,
        lengths=lengths,
    )  # fmt: skip


def _waits(offload: OffloadConfig) -> bool:
    return offload.activations != "none" or offload.state_share > 0


def _verified(offload: OffloadConfig) -> OffloadConfig:
    tiers = dataclasses.replace(offload.tiers, nvme_dir=None, nvme_bytes=None)
    if offload.tiers.nvme_dir is not None and offload.names:
        tiers = dataclasses.replace(tiers, nvme_dir=tempfile.gettempdir())  # this machine may lack the disk
    return dataclasses.replace(offload, gradient_dtype="float32", tiers=tiers)


def compare(scaled: Scaled) -> dict[str, Any]:
    """Starts jax on emulated devices, unless it runs on enough of them, and returns the figures of the comparison.

    Raises:
        EnvironmentMismatchError: jax already runs on too few devices, or on other ones.
    """
    config, verified = scaled.config, scaled.verified
    startup.connect(verified.mesh, verified.distributed, or_more=True)
    log(f"run        {config.run_dir}")
    log(f"mesh       {text.mesh(scaled.configured_axes)}, verified as {text.mesh(scaled.scaled_axes)}")
    if len(scaled.lengths) > 1:
        log(f"rows       of {max(scaled.lengths):,} tokens, the longest of the run's stages")
    log(f"forms      {', '.join(f'{name} {value}' for name, value in vars(scaled.forms).items())}")
    log("")
    text.print_changes(changes(config, verified))
    with console.waiting("starting") as doing:
        return certify(config, verified, scaled.forms, doing)


def _read_devices(value: str) -> int:
    if not value.isascii() or not value.isdecimal() or not 2 <= int(value[:9]) <= MOST_DEVICES:
        raise ConfigError(f"--devices: {show(value)} must be a number from 2 to {MOST_DEVICES}")
    return int(value)


def main(config: Config, options: Mapping[str, str]) -> int:
    """Verifies and returns the exit code."""
    return exit_code(
        lambda: run(config, options),
        memory_remedy="fewer --devices",
        disk="the disk",
        disk_remedy="free space on it, or repair it, and try again",
    )
