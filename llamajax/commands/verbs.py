"""The verbs of `llamajax VERB ...`: the modules that `python -m` runs too."""

import ast
import difflib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamajax.errors import ConfigError, show

MODULES = {
    "train": "llamajax.train",
    "launch": "llamajax.launch",
    "preprocess": "llamajax.preprocess",
    "plan": "llamajax.plan",
    "verify": "llamajax.verify",
    "generate": "llamajax.generate",
    "evaluate": "llamajax.evaluate",
    "serve": "llamajax.serve",
    "report": "llamajax.report",
    "doctor": "llamajax.doctor",
    "convert hf": "converters.hf",
    "convert tokenizer": "converters.tokenizer",
    "convert megatron": "converters.megatron",
    "completion": "llamajax.completion",
}
"""Module of each verb, in the order of the list. A verb has one word, or the two of a group. A verb without its module does
not exist."""


@dataclass(frozen=True)
class Verb:
    """A verb with its module."""

    name: str
    """Words on the command line, such as `convert hf`."""
    module: str
    path: Path
    """File of the module."""

    @property
    def about(self) -> str:
        """Description of the command: the first line of its docstring, which is read without importing it."""
        return self._first_line.partition(": `")[0]

    @property
    def example(self) -> str:
        """A command line, from the same line."""
        return self._first_line.partition(": `")[2].partition("`")[0]

    @property
    def _first_line(self) -> str:
        return (ast.get_docstring(ast.parse(self.path.read_text())) or "").partition("\n")[0]


def verbs() -> dict[str, Verb]:
    """Returns the verbs that exist, by name."""
    found = {name: (module, importlib.util.find_spec(module)) for name, module in MODULES.items()}
    return {name: Verb(name, module, Path(spec.origin)) for name, (module, spec) in found.items() if spec and spec.origin}


def find(words: Sequence[str]) -> tuple[Verb, list[str]]:
    """Returns the verb at the beginning of a command line, and the words after it.

    Raises:
        ConfigError: the line begins with no verb.
    """
    known = verbs()
    for count in (1, 2):
        if (verb := known.get(" ".join(words[:count]))) is not None:
            return verb, list(words[count:])
    group = in_group(words[0])
    word = words[1] if group and len(words) > 1 else words[0]
    names = [name.rpartition(" ")[2] for name in group] or sorted({name.partition(" ")[0] for name in known})
    close = difflib.get_close_matches(word.lower().removesuffix(".py"), names, n=1)
    remedy = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
    if word.startswith("-"):
        raise ConfigError(
            f"{show(word)}: comes before the verb; write llamajax VERB {show(word)}, or llamajax for the verbs"
        )
    raise ConfigError(f"{show(word)}: is not a verb{f' of {words[0]}' if group else ''}; {remedy}")


def in_group(word: str) -> dict[str, Verb]:
    """Returns the verbs of two words that begin with `word`."""
    return {name: verb for name, verb in verbs().items() if name.startswith(f"{word} ")}


def listing(several: dict[str, Verb]) -> str:
    """Returns one line for each verb."""
    width = max(map(len, several))
    return "\n".join(f"  {name:<{width}}  {verb.about}" for name, verb in several.items())
