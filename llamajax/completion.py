"""Print the completion script of a shell: `python -m llamajax.completion bash`."""

import argparse
import sys
from collections.abc import Sequence

from llamajax.commands import complete
from llamajax.errors import show_any_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a shell's script; after `--`, the candidates for the last of the words, which the script asks for."""
    show_any_text()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--"]:
        print("\n".join(complete.candidates(given[1:])))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m llamajax.completion",
        description="Print a script with which a shell completes verbs, options, settings and their values.",
        epilog='bash and zsh: eval "$(llamajax completion bash)" in ~/.bashrc, or zsh in ~/.zshrc; fish: llamajax completion'
        " fish | source in ~/.config/fish/config.fish.",
    )
    parser.add_argument("shell", choices=tuple(complete.SCRIPTS), help="shell that runs the script")
    print(complete.SCRIPTS[parser.parse_args(given).shell].read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
