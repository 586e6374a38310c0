"""Other programs that turn JSONL into tokens, which `scripts/bench_preprocess.py` compares with llamajax.

Each takes a tokenizer and lines of JSONL, works in one thread of the calling process, and returns its cost.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """Bytes of text, and the seconds that they took."""

    num_bytes: int
    wall: float
    processor: float


@contextlib.contextmanager
def measuring(num_bytes: int) -> Iterator[list[Measured]]:
    """Yields a list that receives the time of the block."""
    taken: list[Measured] = []
    started = time.perf_counter(), time.process_time()
    yield taken
    taken.append(Measured(num_bytes, time.perf_counter() - started[0], time.process_time() - started[1]))


def text_bytes(lines: list[bytes]) -> int:
    """Returns the bytes of the texts in these lines."""
    return sum(len(json.loads(line)["text"].encode()) for line in lines)


def encode_alone(tokenizer: Path, lines: list[bytes]) -> Measured:
    """Runs the library alone, on batches of 8 MB like llamajax's."""
    encode = _batches_by_library(tokenizer)
    texts = [json.loads(line)["text"] for line in lines]
    batches, size = [[]], 0
    for text in texts:
        batches[-1].append(text)
        size += len(text)
        if size > 8 << 20:
            batches.append([])
            size = 0
    encode(texts[:10])
    with measuring(text_bytes(lines)) as taken:
        for batch in batches:
            encode(batch)
    return taken[0]


def encode_by_gigatoken(tokenizer: Path, lines: list[bytes]) -> Measured:
    """Runs gigatoken alone, one text at a time."""
    encode = _gigatoken(tokenizer).encode
    texts = [json.loads(line)["text"] for line in lines]
    encode(texts[0])
    with measuring(text_bytes(lines)) as taken:
        for text in texts:
            encode(text)
    return taken[0]


def encode_as_megatron_fast(tokenizer: Path, lines: list[bytes], out: Path) -> Measured:
    """Processes a file like `preprocess_data_fast.py`: encodes all of it with gigatoken, in one thread, and writes it at
    once."""
    import gigatoken
    import numpy as np

    library = _gigatoken(tokenizer)
    library.encode("warm")
    source = out.with_suffix(".jsonl")
    source.write_bytes(b"".join(lines))
    with measuring(text_bytes(lines)) as taken:
        ids = library.encode_files(gigatoken.JsonlFileSource([source], "text"), parallel=False)
        offsets = np.asarray(ids.layout.offsets.data)
        tokens = np.insert(np.asarray(ids.layout.content.data), offsets[1:], 0)
        tokens.astype("<i4").tofile(out.with_suffix(".bin"))
        (np.diff(offsets) + 1).astype("<i4").tofile(out.with_suffix(".idx"))
    return taken[0]


def _gigatoken(path: Path) -> Any:
    import gigatoken

    load = gigatoken.Tokenizer.from_json if path.suffix == ".json" else gigatoken.Tokenizer.from_sentencepiece
    return load(path.read_bytes())


def encode_as_megatron(tokenizer: Path, lines: list[bytes], out: Path) -> Measured:
    """Works like a worker of `preprocess_data.py` and its writer: one document at a time."""
    import numpy as np

    from llamajax.data.tokens.megatron_writer import write_indexed

    encode = _one_by_library(tokenizer)
    encode("warm")
    with measuring(text_bytes(lines)) as taken, write_indexed(out, np.dtype("<i4")) as writer:
        for line in lines:
            writer.add_document(np.array([*encode(json.loads(line)["text"]), 0]))
    return taken[0]


def _batches_by_library(path: Path) -> Any:
    if path.suffix == ".json":
        import tokenizers

        library = tokenizers.Tokenizer.from_file(str(path))
        return lambda texts: library.encode_batch_fast(texts, add_special_tokens=False)
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return lambda texts: processor.encode(texts, return_type="numpy", num_threads=1)


def _one_by_library(path: Path) -> Any:
    if path.suffix == ".json":
        import tokenizers

        library = tokenizers.Tokenizer.from_file(str(path))
        return lambda text: library.encode(text, add_special_tokens=False).ids
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=str(path)).encode
