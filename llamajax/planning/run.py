"""A plan, from configuration to files: read `run` from top to bottom.

Compiles the training step of a configuration for the cluster in `hardware`, on a machine that needs no GPU, and reports its
memory, time, communication and cost.

Exit codes: 0 for any plan, whether the run fits or not (the first line and `fits` in the JSON say so); 2 for mistakes, and
when XLA's compiler for GPUs is missing: the estimate of formulas is then still printed, and written to `--json`.
"""

import json
from collections.abc import Mapping
from typing import Any

from llamajax.config.run import Config
from llamajax.errors import ConfigError
from llamajax.estimates.gpus import planned_gpu
from llamajax.planning.cost.timeline import perfetto
from llamajax.planning.plan import Plan, make_plan, plan_problems
from llamajax.planning.report import figures, picture, text
from llamajax.planning.search import Sweep, read_sweep, run_sweep
from llamajax.planning.xla.compile import CompilerMissingError, check_compiler, prepare_environment
from llamajax.processes.exit import exit_code
from llamajax.watch.console import log, waiting
from llamajax.watch.option_files import check_outputs, write_output

FILES = ("--json", "--trace", "--hlo", "--picture")
"""Options that name a file to write."""
PAGES = ("--picture",)
"""Options that name an HTML page to write."""


def run(config: Config, options: Mapping[str, str]) -> None:
    """Plans `config`, prints the plan and writes the files that `options` names.

    Of a run in stages, the stage with the longest rows is planned for all steps: its step takes the most memory. Of a run
    with a ramp of its batch, the full batch is planned for all steps.

    Args:
        config: the run.
        options: command-line options: files to write, by the option that names them; `--sweep`; and `--alternatives`, to
            compile with other settings too.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is missing; the estimate of formulas is printed all the same.
        ConfigError: no GPU is named, the cluster cannot be divided this way, or a file cannot be written.
    """
    asked, (config, sweep) = config, check(config, options.get("--sweep"))
    check_outputs(options, FILES, PAGES)
    try:
        plan, told = compile_plan(asked, config, sweep, alternatives="--alternatives" in options)
    except CompilerMissingError as missing:
        told = figures.estimated_figures(config, str(missing))
        text.print_estimate(config, told)
        write_output(options, "--json", lambda: json.dumps(told, indent=1))
        raise
    text.print_plan(plan, told)
    lengths = sorted({stage.seq_len for stage in asked.data.all_stages})
    if len(lengths) > 1:
        others = f"--sweep data.seq_len={','.join(map(str, lengths))} compares all lengths"
        log(f"stages     planned with rows of {lengths[-1]:,} tokens, the longest, for the tokens of all stages; {others}")
    text.print_ramp(asked, told)
    write_output(options, "--json", lambda: json.dumps(told, indent=1))
    write_output(options, "--trace", lambda: json.dumps(perfetto(plan.chosen.timeline)))
    write_output(options, "--hlo", lambda: plan.chosen.step.hlo)
    write_output(options, "--picture", lambda: picture.page(plan, told))


def check(config: Config, sweep: str | None) -> tuple[Config, Sweep | None]:
    """Returns the run in its largest steps, and the sweep, once both can be planned; keeps jax away from GPUs.

    Raises:
        ConfigError: no GPU is named, the cluster cannot be divided this way, or the sweep is wrong.
    """
    prepare_environment()
    planned_gpu(config.hardware)
    if problems := plan_problems(config):
        raise ConfigError("\n".join(problems))
    config = config.in_largest_steps()
    return config, None if sweep is None else read_sweep(sweep, config)


def compile_plan(asked: Config, config: Config, sweep: Sweep | None, *, alternatives: bool) -> tuple[Plan, dict[str, Any]]:
    """Plans what `check` returns for the run `asked`, and returns the plan with its figures.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is missing.
    """
    check_compiler()
    with waiting("compiling") as doing:
        plan = make_plan(config, alternatives=alternatives, doing=doing)
        plans = run_sweep(sweep, plan, doing=doing) if sweep else ()
    told = figures.figures(plan, sweep, plans)
    return plan, told | {"ramp": figures.ramp(asked, plan.chosen.step.run, told)}


def main(config: Config, options: Mapping[str, str]) -> int:
    """Plans and returns the exit code."""
    return exit_code(
        lambda: run(config, options),
        memory_remedy="model.remat: full, more train.grad_accum_steps, or a larger mesh.fsdp or mesh.tensor",
        disk="the disk",
        disk_remedy="free space on it, or repair it, and try again",
    )
