"""Train a Llama: `python -m llamajax.train --config configs/x.yaml`."""

from llamajax.config.command import parse_run_args


def main() -> None:
    """Reads the command line, trains, and ends the process."""
    arguments = parse_run_args(
        prog="python -m llamajax.train",
        flags={"--dry_run": "Build, compile and report everything, then stop before the first step."},
    )
    # Only now: --help and mistakes in the configuration do not wait for the seconds that importing jax takes.
    from llamajax.training.run import main as train

    train(arguments.config, dry_run="--dry_run" in arguments.flags)


if __name__ == "__main__":
    main()
