"""Predict memory, time and cost of a run before paying for it: `python -m llamajax.plan --config configs/x.yaml`."""

import os
import sys

from llamajax.config.command import parse_args
from llamajax.config.run import Config
from llamajax.errors import importing

OPTIONS = {
    "--json FILE": "Write all figures as JSON; llamajax/planning/report/figures.py describes them.",
    "--trace FILE": "Write the timeline of a step, for ui.perfetto.dev.",
    "--hlo FILE": "Write the compiled and scheduled program.",
    "--picture FILE.html": "Write a page with drawings of a layer's timeline and of the memory.",
    "--sweep KEY=VALUE,VALUE": "Also plan other values of one setting, such as hardware.nodes=4,8,16; mesh.fsdp and"
    " train.global_batch_size grow with the number of devices.",
    "--alternatives": "Also compile with other settings, and report which are fastest.",
}


def main() -> int:
    """Reads the command line and plans; returns the exit code."""
    # Without `Config.file_problems`: the data need not exist on the machine that plans.
    arguments = parse_args(prog="python -m llamajax.plan", root=Config, options=OPTIONS)
    # XLA warns of programs that are too large; the plan reports them, with a remedy.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Imported here: --help and mistakes in the configuration do not wait for jax, which takes seconds to import.
    with importing():
        from llamajax.planning.run import main as plan

    return plan(arguments.config, arguments.options)


if __name__ == "__main__":
    sys.exit(main())
