"""How good a model is: `python -m llamajax.evaluate --model RUN`, its loss on documents it was not trained on, or
`--tasks hellaswag,arc_easy`, its results in lm-evaluation-harness.
"""

from llamajax.config.command import parse_args
from llamajax.config.evaluate import EvaluateConfig
from llamajax.errors import importing


def main() -> None:
    """Reads the command line, evaluates, and ends the process."""
    arguments = parse_args(prog="python -m llamajax.evaluate", root=EvaluateConfig)
    # Only now: --help and mistakes on the command line do not wait for the seconds that importing jax takes.
    with importing():
        from llamajax.evaluation.run import main as evaluate

    evaluate(arguments.config)


if __name__ == "__main__":
    main()
