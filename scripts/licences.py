"""Checks the licences of the packages that llamajax needs against the lists under `tool.licences` of pyproject.toml.

    python scripts/licences.py

Covers the installed dependencies of llamajax and of all extras except `test` and `dev`, with their own dependencies. Exits
with 1 if a licence is unknown or not in the lists. Names packages that are not installed.
"""

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NOT_RUNTIME = ("test", "dev")
"""Extras for developers of llamajax."""

_TEXTS = {
    r"Apache( Software)? License|Apache[- ](License,? )?(Version )?2\.0": "Apache-2.0",
    r"(The )?MIT( License)?\b": "MIT",
    r"(3-Clause )?BSD( License|-3-Clause)?\b": "BSD-3-Clause",
    r"BSD-2-Clause": "BSD-2-Clause",
    r"ISC License|ISC\b": "ISC",
    r"Python Software Foundation License|PSF": "PSF-2.0",
    r"Mozilla Public License 2\.0|MPL-2\.0$": "MPL-2.0",
}
"""Patterns at the start of licence texts, with the licence's identifier."""


def licences(package: metadata.Distribution) -> str:
    """Returns the licence expression in a package's metadata; empty if the metadata names no known licence."""
    about = package.metadata
    if expressions := about.get_all("License-Expression"):
        return expressions[0]
    given = " ".join(" ".join(about.get_all("License") or []).split())
    if re.fullmatch(r"[\w.+-]+( (AND|OR) [\w.+-]+)+|LicenseRef-\S+", given):
        return given
    names = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or [] if text.startswith("License :: OSI")]
    known = [next((name for begin, name in _TEXTS.items() if re.match(begin, text)), "") for text in names or [given]]
    return " AND ".join(sorted(set(known))) if all(known) else given[:60]


def is_allowed(expression: str, allowed: Iterable[str]) -> bool:
    """Returns whether all parts of an expression are allowed, or at least one of its alternatives."""
    parts = [part.strip("() ").split(" OR ") for part in re.split(r" AND ", expression)]
    return all(any(one.strip("() ") in allowed for one in several) for several in parts)


def needed(extras: Iterable[str]) -> tuple[set[str], set[str]]:
    """Returns the packages that llamajax needs with these extras, and the packages among them that are not installed."""
    found: set[tuple[str, frozenset[str]]] = set()
    absent: set[str] = set()
    rest = [("llamajax", frozenset(extras))]
    while rest:
        name, asked = rest.pop()
        if (name, asked) in found or name in absent:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            absent.add(name)
            continue
        found.add((name, asked))
        for requirement in map(Requirement, requires):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ["", *asked]):
                rest.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in found} - {"llamajax"}, absent


def problems(names: Iterable[str], allowed: Iterable[str], named: dict[str, Any]) -> list[str]:
    """Returns a line for each package with a licence that is not allowed; `named` lists packages allowed by name."""
    lines = []
    for name in sorted(names):
        expression = licences(metadata.distribution(name))
        if name not in named and not is_allowed(expression, allowed):
            told = f"licence {expression!r} is not in tool.licences" if expression else "has no licence in its metadata"
            lines.append(f"{name} {metadata.version(name)}: {told} of pyproject.toml; read it, and allow or replace it")
    return lines


def main() -> int:
    """Checks all packages. Returns the exit code."""
    lists = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["licences"]
    extras = metadata.metadata("llamajax").get_all("Provides-Extra") or []
    core, absent_core = needed(())
    everything, absent = needed(extra for extra in extras if extra not in NOT_RUNTIME)
    found = problems(core, lists["allow"], {})
    found += problems(everything - core, [*lists["allow"], *lists["allow-in-extras"]], lists["packages"])
    for line in found:
        print(line, file=sys.stderr)
    print(f"licences: {len(core)} packages of llamajax, {len(everything - core)} more of extras")
    if absent := sorted(absent | absent_core):
        print(f"licences: not installed, so not checked: {', '.join(absent)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
