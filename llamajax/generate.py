"""Generate text with a model: `python -m llamajax.generate --model RUN --prompt "Once upon a time"`.

Texts go to standard output, everything else to standard error.
"""

from llamajax.config.command import parse_args
from llamajax.config.generate import GenerateConfig
from llamajax.errors import importing


def main() -> None:
    """Reads the command line, generates and ends the process."""
    arguments = parse_args(prog="python -m llamajax.generate", root=GenerateConfig, check=GenerateConfig.file_problems)
    # Imported here: --help and mistakes on the command line do not wait for jax, which takes seconds to import.
    with importing():
        from llamajax.generation.run import main as generate

    generate(arguments.config)


if __name__ == "__main__":
    main()
