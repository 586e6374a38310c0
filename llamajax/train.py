"""Train a Llama: `python -m llamajax.train --config configs/x.yaml`."""

from llamajax.config.command import parse_run
from llamajax.errors import importing


def main() -> None:
    """Reads the command line, trains and ends the process."""
    arguments = parse_run()
    # Imported here: --help and mistakes in the configuration do not wait for jax, which takes seconds to import.
    with importing():
        from llamajax.training.run import main as train

    train(arguments.config, rewards=arguments.options.get("--rewards"), dry_run="--dry_run" in arguments.options)


if __name__ == "__main__":
    main()
