"""What all commands have in common."""

import io
import sys
from collections.abc import Callable

import pytest

from converters import arguments
from llamajax import report
from llamajax.config.command import parse_args
from llamajax.config.generate import GenerateConfig


@pytest.mark.parametrize(
    "begin",
    [
        lambda: parse_args(["--model=x", "--prompt=a"], prog="any", root=GenerateConfig),
        lambda: report.main(["nowhere"]),
        lambda: arguments.hf_arguments(["export", "a", "b"]),
        lambda: arguments.tokenizer_arguments(["grow", "a", "b", "--corpus=c", "--num_pieces=1"]),
        lambda: arguments.megatron_arguments(["info", "a"]),
    ],
    ids=["parse_args", "report", "hf", "tokenizer", "megatron"],
)
def test_no_command_ends_for_a_letter_that_its_output_lacks(begin: Callable[[], object], monkeypatch):
    """All others begin with `parse_args`."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict"))
    begin()
    for stream in (sys.stdout, sys.stderr):
        print("caf\u00e9 \u2581 \ud800", file=stream, flush=True)
        assert isinstance(stream, io.TextIOWrapper)
        assert stream.buffer.getvalue().endswith(b"caf\\xe9 \\u2581 \\ud800\n")  # pyright: ignore[reportAttributeAccessIssue]
