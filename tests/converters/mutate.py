"""Imports mutated model directories in a process of its own, whose memory is capped: `python -m tests.converters.mutate`.

Every mutant is converted as it stands, or refused in one line with nothing left behind; anything else ends the process.
"""

import contextlib
import io
import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from converters import convert
from converters.arguments import hf_arguments
from converters.hf_tokenizer import convert_sentencepiece
from llamajax.data.tokenizers.tokenizer import train_sentencepiece
from llamajax.errors import ConfigError
from tests.converters.models import VARIANTS, shard, tiny, write_model

ARCHITECTURES = ("llama3.2", "mistral", "qwen2", "qwen3")
ROOM_BYTES = 512 << 20
"""Address space that an import may take beyond what the process has after the first one."""
VALUES = (None, -1, 0, 1, 2**31, 10**30, 1e300, 0.5, True, "x", "", [], {}, [[]], {"a": 1}, [1, 2], "../x", ["x"] * 99)


def write_whole(directory: Path, architecture: str) -> None:
    """A model of the architecture with everything that one may have beside it."""
    write_model(directory, tiny(**VARIANTS[architecture], num_layers=1, vocab_size=272, embed_dim=8, mlp_dim=8))
    model = train_sentencepiece(["a b c d"], vocab_size=270)
    if architecture in ("llama3.2", "qwen2"):
        shard(directory)
        converted = convert_sentencepiece(model, bos_id=1)
        assert converted is not None
        (directory / "tokenizer.json").write_bytes(converted)
    else:
        (directory / "tokenizer.model").write_bytes(model)
    texts = {
        "tokenizer_config.json": '{"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}',
        "generation_config.json": '{"eos_token_id": [2, 3], "top_p": 0.9}',
        "chat_template.jinja": "{{ messages }}",
        "README.md": "---\nlicense: apache-2.0\n---\n",
    }
    for name, text in texts.items():
        (directory / name).write_text(text)


def mutate(path: Path, rng: np.random.Generator) -> None:
    """Changes a value, a byte or the length of a file."""
    data = bytearray(path.read_bytes())
    kind = rng.choice(["byte", "cut", "insert"])
    if path.suffix == ".json" and rng.random() < 0.6:
        kind, body = "value", json.loads(data)
        place: Any = body
        while isinstance(place, dict) and place:
            key = list(place)[rng.integers(len(place))]
            if not isinstance(place[key], dict) or not place[key] or rng.random() < 0.3:
                place[key] = VALUES[rng.integers(len(VALUES))]
                break
            place = place[key]
        data = bytearray(json.dumps(body).encode())
    if kind == "byte":
        data[rng.integers(min(len(data), 600))] = rng.integers(256)
    elif kind == "cut":
        del data[rng.integers(len(data)) :]
    elif kind == "insert":
        at = rng.integers(min(len(data), 600))
        data[at:at] = b"[" * 5000 if rng.random() < 0.5 else bytes(rng.integers(0, 256, 20).tolist())
    path.write_bytes(data)


def attempt(directory: Path) -> int:
    """Imports `directory / "hf"`; returns the exit code after checking what was said and left."""
    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        code = convert.main(hf_arguments([str(directory / "hf"), str(directory / "out"), "--no-verify"]))
    error = told.getvalue()
    assert "Traceback" not in error, error
    if code == 0:
        shutil.rmtree(directory / "out")
    else:
        assert code == ConfigError.exit_code, error
        assert error.count("\n") == 1, error
    assert {path.name for path in directory.iterdir()} == {"hf", "whole"}
    return code


def main(seed: int, count: int, directory: Path) -> None:
    """Prints how many of `count` mutants were refused."""
    rng = np.random.default_rng(seed)
    for architecture in ARCHITECTURES:
        write_whole(directory / "whole" / architecture, architecture)
    refused = 0
    for trial in range(-len(ARCHITECTURES), count):
        shutil.copytree(directory / "whole" / ARCHITECTURES[trial % len(ARCHITECTURES)], directory / "hf")
        if trial == 0:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
        if trial >= 0:
            files = sorted((directory / "hf").iterdir())
            mutate(files[rng.integers(len(files))], rng)
        code = attempt(directory)
        assert trial >= 0 or code == 0  # as they are, all can be read
        refused += code != 0
        shutil.rmtree(directory / "hf")
    print(refused)


if __name__ == "__main__":
    (Path(sys.argv[3]) / "whole").mkdir()
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
