"""Evaluate a model: `python -m llamajax.evaluate --model RUN`.

Without further options on its held-out documents; with `--tasks hellaswag,arc_easy` in lm-evaluation-harness.
"""

from llamajax.config.command import parse_args
from llamajax.config.evaluate import EvaluateConfig
from llamajax.errors import importing


def main() -> None:
    """Reads the command line, evaluates and ends the process."""
    arguments = parse_args(prog="python -m llamajax.evaluate", root=EvaluateConfig)
    # Imported here: --help and mistakes on the command line do not wait for jax, which takes seconds to import.
    with importing():
        from llamajax.evaluation.run import main as evaluate

    evaluate(arguments.config)


if __name__ == "__main__":
    main()
