"""The smallest complete configuration, and how a command line is refused: shared by the tests of the front door."""

from pathlib import Path

import pytest

from llamajax.config import command as cli
from llamajax.config.run import Config

TRAIN_OPTIONS = {"--dry_run": "Compile, then stop."}

MINIMAL = """\
run_dir: runs/tiny
model:
  vocab_size: 512
  embed_dim: 64
  mlp_dim: 128
  num_layers: 2
  num_heads: 8
  num_kv_heads: 4
  head_dim: 8
data:
  sources:
    - kind: stdlib
  seq_len: 128
train:
  num_steps: 100
  global_batch_size: 16
optimizer:
  learning_rate: 3e-4
"""


def refuse(capsys: pytest.CaptureFixture[str], text: str | bytes | None, *arguments: str) -> list[str]:
    """The lines on stderr with which a command line ends on `text` in my.yaml."""
    if text is not None:
        Path("my.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        arguments = ("--config", "my.yaml", *arguments)
    with pytest.raises(SystemExit) as exit_info:
        cli.parse_args(
            arguments, prog="python -m llamajax.train", root=Config, options=TRAIN_OPTIONS, check=Config.file_problems
        )
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err.splitlines()


def changed(old: str, new: str) -> str:
    assert MINIMAL.count(old) == 1, old
    return MINIMAL.replace(old, new)
