"""List the commands: `python -m llamajax`."""

import importlib

import llamajax

COMMANDS = ("train", "plan", "verify", "preprocess", "generate", "serve", "evaluate", "report", "launch")


def main() -> None:
    """Prints what each command does, in a line and an example."""
    print(f"llamajax {llamajax.__version__} trains LLaMA-family models. Its commands, each with --help:")
    for name in COMMANDS:
        about = importlib.import_module(f"llamajax.{name}").__doc__ or ""
        text, _, example = about.partition("\n")[0].partition(": `")
        print(f"\n{text}\n    {example.removesuffix('`.')}")


if __name__ == "__main__":
    main()
