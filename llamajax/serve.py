"""Serve a model over HTTP, in the form of OpenAI's API: `python -m llamajax.serve --model RUN`."""

from llamajax.config.command import parse_args
from llamajax.config.serve import ServeConfig
from llamajax.errors import importing


def main() -> None:
    """Reads the command line, serves until a signal and ends the process."""
    arguments = parse_args(prog="python -m llamajax.serve", root=ServeConfig, check=ServeConfig.problems_here)
    # Imported here: --help and mistakes on the command line do not wait for jax, which takes seconds to import.
    with importing():
        from llamajax.serving.run import main as serve

    serve(arguments.config)


if __name__ == "__main__":
    main()
