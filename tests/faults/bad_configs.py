"""Configurations that are damaged in every way that YAML has, each loaded, or refused in lines that say where."""

import re
from pathlib import Path

import numpy as np

from llamajax.config.file import dump_config, load_config
from llamajax.errors import ConfigError

SHIPPED = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.yaml"))
FRAGMENTS = [
    "*a", "&a ", "!!python/object:os.system ", "!x ", "- ", "? ", ": ", ":", "#", "{", "}", "[", "]", ",", "'", '"', "|\n",
    ">-\n", "\t", "\n", "\r", "  ", "---\n", "...\n", "%YAML 1.1\n", "<<", "null", "~", "true", "no", "-1", "017", "1e3",
    "1:30", "0x1f", ".nan", "9" * 5000, "\0", "\x85", "\u2028", "\ufeff", "é", "\ud800", '"\\UFFFFFFFF"', '"\\x"', "data",
    "sources", "kind: text", "=", "@", "`",
]  # fmt: skip
"""Text with a meaning in YAML, and text that no file should hold."""
VALUES = [
    "null", "~", "", "true", "-1", "0", "1e400", "-.inf", ".nan", "9" * 5000, "1" + "0" * 300, "2026-13-45", "2026-11-24",
    "0001-01-01T99:99:99Z", "0x" + "f" * 5000, "[]", "{}", "[" * 200, "{a: " * 200, "[[1]]", "{a: 1}", "'", '"\\UFFFFFFFF"',
    "*a", "&a 1", "&a [*a, *a]", "!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!binary aGk=",
    "!!timestamp 9", "!!set {a}", "!!int 1:99", "<<: {a: 1}", "|\n", "é" * 3000, "../../etc/passwd", "%s%n", "0b2",
]  # fmt: skip
"""Texts in the place of a value."""


def mutated(text: str, rng: np.random.Generator) -> bytes:
    """The text of a file after one to three changes: of bytes, lines, values, or by what YAML gives a meaning."""
    for _ in range(rng.integers(1, 4)):
        lines = text.splitlines(keepends=True) or [""]
        at = rng.integers(len(lines))
        match rng.integers(6):
            case 0:  # a value of another type
                lines[at] = re.sub(r"(?<=: ).*", lambda _: str(rng.choice(VALUES)), lines[at], count=1)
            case 1:  # lines that are there twice
                lines[at:at] = lines[at : at + rng.integers(1, 9)] * (300 if rng.random() < 0.05 else 1)
            case 2:  # lines that are missing
                del lines[at : at + rng.integers(1, 9)]
            case 3:  # another depth
                lines[at] = " " * rng.integers(9) + lines[at].lstrip(" ")
            case _:
                start, moved = rng.integers(len(text) + 1, size=2)
                end = start + rng.choice((0, 0, 1, 1, 5, 50))
                copied = text[moved : moved + rng.integers(60)]
                lines = [text[:start], FRAGMENTS[rng.integers(len(FRAGMENTS))] if rng.random() < 0.5 else copied, text[end:]]
        text = "".join(lines)
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(rng.integers(1, 4) if data and rng.random() < 0.2 else 0):
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    return bytes(data)


def read(path: Path) -> None:
    """Loads a configuration, and what it is written as, which is equal.

    Raises:
        ConfigError: as `load_config`; every line says where.
    """
    try:
        config = load_config(path)
    except ConfigError as error:
        _check_lines(str(error), path)
        raise
    again = path.with_name("again.yaml")
    again.write_text(dump_config(config))
    assert load_config(again) == config


def _check_lines(told: str, path: Path) -> None:
    """Checks that every line names the file, or the preset of a model that is its base."""
    files = rf"{re.escape(str(path))}|\S*configs/models/\w+\.yaml"
    assert all(re.match(rf"({files})(:\d+)?: \S", line) for line in told.split("\n")), told


def prepare(directory: Path):
    """Reads one configuration after the other from `directory`."""
    texts = [path.read_text() for path in SHIPPED]
    path = directory / "my.yaml"

    def attempt(rng: np.random.Generator) -> None:
        path.write_bytes(mutated(texts[rng.integers(len(texts))], rng))
        read(path)

    path.write_text(texts[0])
    read(path)
    return attempt
