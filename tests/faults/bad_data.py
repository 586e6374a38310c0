"""Data files that are damaged or made to do harm, of every kind, each read to its end."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import zstandard

from llamajax.config.data import SourceConfig
from llamajax.data.documents.formats import Jsonl
from llamajax.data.documents.sources import Source

SHAPES: tuple[object, ...] = (
    None, True, -1, 1e300, "x", "", [], {}, [[]], {"a": 1}, ["x"] * 99, "\ud800", "\0", [{"role": "user"}], [{"from": 1}],
    [{"role": "user", "content": {"text": "x"}}], [{"role": {}, "content": "x"}], [None],
    [{"role": "assistant", "content": ""}],
    {"role": "user", "content": "x"}, [{"role": "user", "content": "x", "tool_calls": [1]}],
)  # fmt: skip
"""Values in the place of a text or a conversation."""
RAW = (
    b"\xff\xfe\x00", b"\0" * 99, b"[" * 10_000, b'{"text": ' * 10_000, b'{"text": "' + b"a" * (1 << 20), b"\n" * 999,
    b"{}\n", b'{"text": 1' + b"0" * 9999 + b"}\n", b'{"text": "\\ud800"}\n', b"\r", b"\x85", b"NaN\n", b'"text"\n',
    b"PAR1", b"\x1f\x8b",
)  # fmt: skip
KINDS = ("text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "chat", "chat.gz", "sharegpt", "alpaca")
_LONGEST_LINE = 1 << 22
"""In place of `Jsonl.max_line_bytes`: bombs that are hundreds of times longer are made quickly."""


def _records(kind: str, rng: np.random.Generator) -> list[object]:
    """Records as they should be, but for some."""
    turns = [("user", "Hi"), ("assistant", "Hello")]
    forms = {
        "chat": {"messages": [{"role": role, "content": said} for role, said in turns]},
        "sharegpt": {"conversations": [{"from": role, "value": said} for role, said in turns]},
        "alpaca": {"instruction": "Hi", "output": "Hello"},
    }
    good = forms.get(kind.partition(".")[0], {"text": "Once upon a time.\n"})
    records: list[object] = [good] * 20
    for _ in range(rng.integers(4)):
        bad = SHAPES[rng.integers(len(SHAPES))]
        records[rng.integers(20)] = bad if rng.random() < 0.3 else good | {str(rng.choice(list(good))): bad}
    return records


def _content(kind: str, rng: np.random.Generator) -> bytes:
    """A file, perhaps damaged."""
    if kind in ("parquet", "arrow"):
        columns = ({"text": ["a", None, "b" * 9]}, {"text": [1, 2]}, {"x": ["a"]}, {"text": ["long " * 9999] * 300})
        sink, table = pyarrow.BufferOutputStream(), pyarrow.table(columns[rng.integers(4)])
        if kind == "parquet":
            pyarrow.parquet.write_table(table, sink, compression=str(rng.choice(["zstd", "none"])))
        else:
            new = (pyarrow.ipc.new_stream, pyarrow.ipc.new_file)[rng.integers(2)]
            options = pyarrow.ipc.IpcWriteOptions(compression=("zstd", None)[rng.integers(2)])
            with new(sink, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=99)
        data = sink.getvalue().to_pybytes()
    else:
        data = b"".join(json.dumps(record).encode() + b"\n" for record in _records(kind, rng))
        if rng.random() < 0.3:
            at = rng.integers(len(data))
            data = data[:at] + RAW[rng.integers(len(RAW))] + data[at:]
    if kind.endswith((".gz", ".zst")) and rng.random() < 0.1:
        data = b'{"text": "' + b"a" * (16 * _LONGEST_LINE) + b'"}\n'
    if kind.endswith(".gz"):
        data = gzip.compress(data, 1)
    if kind.endswith(".zst"):
        data = zstandard.compress(data)
    damaged = bytearray(data)
    match rng.integers(4):
        case 0:
            del damaged[rng.integers(len(damaged)) :]
        case 1:
            for _ in range(rng.integers(1, 9)):
                damaged[rng.integers(len(damaged))] = rng.integers(256)
        case 2 if kind == "parquet":  # what describes it is at its end
            damaged[-rng.integers(1, min(600, len(damaged)))] = rng.integers(256)
    return bytes(damaged)


def read(source: Source) -> int:
    """Documents of the source that are not left out.

    Raises:
        DataError: a file of it is not what it should be.
    """
    return sum(not document.error for document in source.documents(source.files()))


def prepare(directory: Path):
    """Reads one file after the other in `directory`."""
    Jsonl.max_line_bytes = _LONGEST_LINE

    def attempt(rng: np.random.Generator) -> None:
        kind = str(rng.choice(KINDS))
        name, _, suffix = kind.partition(".")
        is_chat = name in ("chat", "sharegpt", "alpaca")
        path = directory / f"file.{'jsonl' if is_chat or name == 'jsonl' else name}{suffix and '.'}{suffix}"
        path.write_bytes(_content(kind, rng))
        config = SourceConfig(
            kind="chat" if is_chat else name,  # pyright: ignore[reportArgumentType] (one of its kinds)
            paths=(str(path),),
            chat_format=name if name in ("sharegpt", "alpaca") else "messages",
            max_bad_records=0 if name == "text" else int(rng.choice([0, 9])),
        )
        try:
            read(Source(config, "data.sources.0"))
        finally:
            path.unlink()

    whole = directory / "whole.parquet"  # with the first, Arrow takes address space for later ones
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), whole)
    read(Source(SourceConfig(kind="parquet", paths=(str(whole),)), "data.sources.0"))
    return attempt
