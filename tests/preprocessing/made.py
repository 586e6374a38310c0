"""Runs of `python -m llamajax.preprocess` on a few files, and what they leave in the cache."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

from llamajax.data.tokenizers.tokenizer import train_sentencepiece
from tests import runs

NUM_FILES = 6


def write_config(directory: Path, num_documents: int = 300, *, with_tokenizer: bool = True) -> Path:
    """A run with a source for each of `NUM_FILES` files, so that there are as many pieces of work."""
    config = runs.write_config(directory)
    draw, sources = random.Random(0), []
    for number in range(NUM_FILES):
        path = directory / f"{number}.jsonl"
        texts = [" ".join(draw.choices(runs.WORDS, k=draw.randint(1, 60))) for _ in range(num_documents)]
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append({"kind": "jsonl", "paths": [str(path)]})
    record = json.loads(config.read_text())
    record["data"]["sources"] = sources
    if with_tokenizer:
        path = directory / "tokenizer.model"
        path.write_bytes(train_sentencepiece([" ".join(runs.WORDS)] * 50, vocab_size=320))
        record["data"]["tokenizer"] = {"path": str(path)}
    config.write_text(json.dumps(record))
    return config


def command(config: Path, cache: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "llamajax.preprocess", "--config", str(config), "--data.cache_dir", str(cache), *options]


def preprocess(config: Path, cache: Path, *options: str) -> str:
    """Runs the command; returns its output."""
    outcome = subprocess.run(
        command(config, cache, *options), cwd=runs.ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    return outcome.stdout


def contents(cache: Path) -> dict[str, bytes]:
    """All that is in a cache, but its locks."""
    return {
        str(path.relative_to(cache)): path.read_bytes()
        for path in cache.rglob("*")
        if path.is_file() and path.name != "lock" and not path.name.endswith(".tmp")
    }


def made(cache: Path) -> dict[str, bytes]:
    """Returns the files of a cache that a run reads: all except those about its source files."""
    return {name: content for name, content in contents(cache).items() if not re.match(r"content(-\d+)?/", name)}
