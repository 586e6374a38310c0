"""A plan, from configuration to files: read `run` from top to bottom.

Compiles the training step of a configuration for the cluster in `hardware`, on a machine that needs no GPU, and tells
what it takes of the memory, how long it runs, what it waits for and what it costs.

Exit codes: 0 when there is a plan, whether it fits or not (the first line and `fits` in the JSON say so); 2 for mistakes,
and when XLA's compiler for GPUs is missing: what formulas tell is then still printed, and written to `--json`.
"""

import json
from collections.abc import Mapping

from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.estimates.gpus import planned_gpu
from llamajax.planning.cost.timeline import perfetto
from llamajax.planning.plan import make_plan, plan_problems
from llamajax.planning.report import figures, picture, text
from llamajax.planning.search import read_sweep, run_sweep
from llamajax.planning.xla.compile import CompilerMissingError, check_compiler, prepare_environment
from llamajax.processes.exit import exit_code
from llamajax.watch.console import log, waiting
from llamajax.watch.option_files import check_outputs, write_output

FILES = ("--json", "--trace", "--hlo", "--picture")
"""Options that name a file to write."""
PAGES = ("--picture",)
"""Those whose file is an HTML page."""


def run(config: Config, options: Mapping[str, str]) -> None:
    """Plans `config`, prints the plan and writes the files that `options` names.

    Of a run in stages the longest rows are planned, all through: their step takes most of the memory.

    Args:
        config: the run.
        options: of the command line: files to write, by the option that names them; `--sweep`; and `--alternatives`, to
            compile it with other settings too.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is missing; what formulas tell is printed all the same.
        ConfigError: no GPU is named, the cluster cannot be divided so, or a file cannot be written.
    """
    prepare_environment()
    planned_gpu(config.hardware)
    if problems := plan_problems(config):
        raise ConfigError("\n".join(problems))
    lengths = sorted({stage.seq_len for stage in config.data.all_stages})
    config = config.in_longest_rows()
    sweep = read_sweep(options["--sweep"], config) if "--sweep" in options else None
    check_outputs(options, FILES, PAGES)
    try:
        check_compiler()
        with waiting("compiling") as doing:
            plan = make_plan(config, alternatives="--alternatives" in options, doing=doing)
            plans = run_sweep(sweep, plan, doing=doing) if sweep else ()
    except CompilerMissingError as missing:
        told = figures.estimated_figures(config, str(missing))
        text.print_estimate(config, told)
        write_output(options, "--json", lambda: json.dumps(told, indent=1))
        raise
    told = figures.figures(plan, sweep, plans)
    text.print_plan(plan, told)
    if len(lengths) > 1:
        others = f"--sweep data.seq_len={','.join(map(str, lengths))} compares all lengths"
        log(
            f"stages     planned all through in rows of {lengths[-1]:,} tokens, the longest, for the tokens of all; {others}"
        )
    write_output(options, "--json", lambda: json.dumps(told, indent=1))
    write_output(options, "--trace", lambda: json.dumps(perfetto(plan.chosen.timeline)))
    write_output(options, "--hlo", lambda: plan.chosen.step.hlo)
    write_output(options, "--picture", lambda: picture.page(plan, told))


def main(config: Config, options: Mapping[str, str]) -> int:
    """Plans, and returns the exit code."""
    return exit_code(
        lambda: run(config, options),
        memory_remedy="model.remat: full, more train.grad_accum_steps, or a larger mesh.fsdp or mesh.tensor",
        disk="the disk",
        disk_remedy="see to it and try again",
    )
