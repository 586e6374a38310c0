"""A verification, from configuration to verdict: read `run` from top to bottom.

The run's mesh and forms are scaled down to a few emulated devices, and its first steps compared with those of the plainest
run there is: one device, one micro-batch, nothing recomputed, no form of sharing the work. Both draw the weights themselves,
are trained on the same rows, and compute in fp32 all through.

Exit codes: 0 when all numbers are equal, or the run has one device and so nothing to verify; 1 when some differ; 2 for
mistakes.
"""

import json
import math
import os
from collections.abc import Mapping

from llamajax.config.run import Config
from llamajax.errors import ConfigError, UnequalError, show
from llamajax.parallel import startup
from llamajax.processes.exit import exit_code
from llamajax.step.resolve import resolve
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
"""Those whose file is an HTML page."""


def run(config: Config, options: Mapping[str, str]) -> None:
    """Verifies `config`, prints what came out and writes the files that `options` names.

    Args:
        config: the run.
        options: of the command line: files to write, by the option that names them, and `--devices`.

    Raises:
        ConfigError: the mesh cannot be laid over so many devices, or a file cannot be written.
        UnequalError: numbers differ; what came out is printed and written all the same.
    """
    check_outputs(options, FILES, PAGES)
    num_devices = _read_devices(options["--devices"]) if "--devices" in options else None
    configured = configured_axes(config)
    if problems := config.undivided(configured):
        raise ConfigError("\n".join(problems))
    if math.prod(configured.values()) == 1:
        console.CONSOLE.print(
            "verdict    nothing to verify: the run has one device; mesh and mesh.num_cpu_devices say how many there are",
            soft_wrap=True,
        )
        return
    lengths = {stage.seq_len for stage in config.data.all_stages}
    config = config.in_longest_rows()
    scaled = scaled_axes(configured, num_devices) if num_devices else fitting_axes(config.model, configured)
    trained = resolve(config, configured).config
    verified = scale_down(config, configured, scaled).changed({"model.remat": trained.model.remat})
    # Fast code for five steps of a tiny model is not worth its compilation.
    os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()
    startup.connect(verified.mesh, verified.distributed)
    log(f"run        {config.run_dir}")
    log(f"mesh       {text.mesh(configured)}, verified as {text.mesh(scaled)}")
    if len(lengths) > 1:
        log(f"rows       of {max(lengths):,} tokens, the longest of the run's stages")
    log(f"forms      {', '.join(f'{name} {value}' for name, value in vars(trained.parallel).items())}")
    log("")
    text.print_changes(changes(config, verified))
    with console.waiting("starting") as doing:
        told = certify(config, verified, trained.parallel, doing)
    log("")
    text.print_verification(told)
    write_output(options, "--json", lambda: json.dumps(told, indent=1))
    write_output(options, "--page", lambda: page(told))
    if not told["equal"]:
        tried = text.trials(told)
        raise UnequalError(f"{text.first_difference(told)}; likely cause: {told['clues'][0]}{tried and f'; {tried}'}")


def _read_devices(value: str) -> int:
    if not value.isascii() or not value.isdecimal() or not 2 <= int(value[:9]) <= MOST_DEVICES:
        raise ConfigError(f"--devices: {show(value)} must be a number from 2 to {MOST_DEVICES}")
    return int(value)


def main(config: Config, options: Mapping[str, str]) -> int:
    """Verifies, and returns the exit code."""
    return exit_code(
        lambda: run(config, options),
        memory_remedy="fewer --devices",
        disk="the disk",
        disk_remedy="see to it and try again",
    )
