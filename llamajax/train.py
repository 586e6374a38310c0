"""Train a Llama: `python -m llamajax.train --config configs/x.yaml`."""

from llamajax.config.command import parse_args
from llamajax.config.run import Config


def main() -> None:
    """Reads the command line, trains, and ends the process."""
    options = {"--dry_run": "Build, compile and report everything, then stop before the first step."}
    arguments = parse_args(prog="python -m llamajax.train", root=Config, options=options, check=Config.file_problems)
    # Only now: --help and mistakes in the configuration do not wait for the seconds that importing jax takes.
    from llamajax.training.run import main as train

    train(arguments.config, dry_run="--dry_run" in arguments.options)


if __name__ == "__main__":
    main()
