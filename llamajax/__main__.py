"""Run a command or list all of them: `llamajax VERB ...`, or `python -m llamajax VERB ...`."""

import importlib
import sys

import llamajax
from llamajax.commands.verbs import find, in_group, listing, verbs
from llamajax.errors import ConfigError, importing, show_any_text


def main() -> int:
    """Runs the verb on the command line; without one, lists what each does. Returns the exit code."""
    show_any_text()
    words, help_options = sys.argv[1:], ("--help", "-h")
    if words and words[0] in ("--version", "-V"):
        print(f"llamajax {llamajax.__version__}")
        return 0
    if not words or words[0] in help_options:
        print(f"llamajax {llamajax.__version__} trains LLaMA-family models.\n\nusage: llamajax VERB [OPTION ...]\n")
        print(f"{listing(verbs())}\n\nllamajax VERB --help shows a verb's options. python -m llamajax.VERB is the same.")
        return 0
    if (group := in_group(words[0])) and (len(words) == 1 or words[1] in help_options):
        print(f"usage: llamajax {words[0]} VERB [OPTION ...]\n\n{listing(group)}")
        return 0
    try:
        verb, rest = find(words)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    sys.argv = [f"llamajax {verb.name}", *rest]
    with importing():
        module = importlib.import_module(verb.module)
    return module.main() or 0


if __name__ == "__main__":
    sys.exit(main())
