"""Start the processes of this host together: `python -m llamajax.launch -n 4 -- --config configs/x.yaml`."""

import sys

from llamajax.config.command import parse_args
from llamajax.config.launch import LaunchConfig
from llamajax.errors import importing

OPTIONS = {
    "-n N": "Short for --num_processes N.",
    "-- OPTION ...": "Options of the program: -- --config configs/x.yaml --train.num_steps 100",
    "--check": "Print what would be started and where the processes would meet, then stop.",
}


def main() -> None:
    """Reads the command line, launches, and exits with the code of the first process that failed."""
    own, dashes, program = _split(sys.argv[1:])
    if not dashes and not {"--help", "-h", "--print_config"}.intersection(own):
        print("--: required; write it before the options of the program: -n 4 -- --config FILE", file=sys.stderr)
        sys.exit(2)
    arguments = parse_args(own, prog="python -m llamajax.launch", root=LaunchConfig, options=OPTIONS)
    with importing():
        from llamajax.launching.run import main as launch

    sys.exit(launch(arguments.config, program, check="--check" in arguments.options))


def _split(arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    """Returns the launcher's own options, with `-n` written out; whether `--` ends them; and the options after it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own = ["--num_processes" if option == "-n" else option for option in arguments[:end]]
    return own, end < len(arguments), arguments[end + 1 :]


if __name__ == "__main__":
    main()
