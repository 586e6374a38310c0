"""Token files are written as Megatron-LM's own code writes them, and come back as they were; or they are not there."""

import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamajax.data.tokens import megatron, megatron_writer
from llamajax.data.tokens.megatron import IndexedDataset, split_documents
from llamajax.data.tokens.megatron_writer import IndexedDatasetWriter, token_dtype, write_indexed
from tests.data.tokens.token_files import DOCUMENTS, DTYPES, MODES, check, write

# What Megatron-Core 0.16.1 made of DOCUMENTS, whose sequences have the modes MODES, by this script, hex:
#
#   from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
#   for dtype, multimodal in (("uint16", False), ("int64", False), ("int32", True)):
#       builder = IndexedDatasetBuilder("x.bin", getattr(numpy, dtype), multimodal)
#       for document, modes in zip(DOCUMENTS, MODES):
#           ids = torch.tensor([token for sequence in document for token in sequence], dtype=torch.int64)
#           builder.add_document(ids, [len(sequence) for sequence in document], modes)
#       builder.finalize("x.idx")
#       print(open("x.bin", "rb").read().hex(), open("x.idx", "rb").read().hex())
GOLDEN = {
    ("uint16", False): (
        "010002000300ff00000007004100",
        "4d4d4944494458000001000000000000000805000000000000000500000000000000030000000200000000000000010000000100000000000000"
        "0000000006000000000000000a000000000000000a000000000000000c0000000000000000000000000000000100000000000000010000000000"
        "000004000000000000000500000000000000",
    ),
    ("int64", False): (
        "010000000000000002000000000000000300000000000000ff00000000000000000000000000000007000000000000004100000000000000",
        "4d4d4944494458000001000000000000000505000000000000000500000000000000030000000200000000000000010000000100000000000000"
        "00000000180000000000000028000000000000002800000000000000300000000000000000000000000000000100000000000000010000000000"
        "000004000000000000000500000000000000",
    ),
    ("int32", True): (
        "010000000200000003000000ff000000000000000700000041000000",
        "4d4d4944494458000001000000000000000405000000000000000500000000000000030000000200000000000000010000000100000000000000"
        "000000000c0000000000000014000000000000001400000000000000180000000000000000000000000000000100000000000000010000000000"
        "0000040000000000000005000000000000000203050404",
    ),
}

# Megatron-Core's own builder and reader, in a process of its own, which takes long to start: cases in, what was read out.
REAL = """
import json, sys
import numpy, torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix, parse_and_normalize_split
)
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

cases, splits = json.load(sys.stdin)
read = []
for number, (dtype, documents, modes) in enumerate(cases):
    builder = IndexedDatasetBuilder(f"real{number}.bin", getattr(numpy, dtype), modes is not None)
    for index, document in enumerate(documents):
        of_document = [0] * len(document) if modes is None else modes[index]
        if index % 2:
            ids = torch.tensor([token for sequence in document for token in sequence], dtype=torch.int64)
            builder.add_document(ids, [len(sequence) for sequence in document], of_document)
        else:
            for sequence, mode in zip(document, of_document):
                builder.add_item(torch.tensor(sequence, dtype=torch.int64), mode)
            builder.end_document()
    builder.finalize(f"real{number}.idx")
    dataset = IndexedDataset(f"ours{number}", multimodal=modes is not None)
    items = [dataset[index] for index in range(len(dataset))]
    sequences = items if modes is None else [sequence for sequence, _ in items]
    read.append([
        [sequence.tolist() for sequence in sequences], dataset.document_indices.tolist(), sequences[0].dtype.name,
        None if modes is None else [int(mode) for _, mode in items],
    ])
ranges = []
for num_documents, split in splits:
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    ranges.append([part and [int(round(bound * float(num_documents))) for bound in part] for part in matrix])
dtypes = [DType.optimal_dtype(size).__name__ for size in (1, 65499, 65500, 65535, 65536, 128256)]
json.dump([read, ranges, dtypes], sys.stdout)
"""


@pytest.mark.parametrize(("dtype", "multimodal"), GOLDEN)
def test_files_are_those_of_megatron(tmp_path, dtype, multimodal):
    real = [bytes.fromhex(content) for content in GOLDEN[dtype, multimodal]]
    modes = MODES if multimodal else None
    for name, content in zip(("real.bin", "real.idx"), real, strict=True):
        (tmp_path / name).write_bytes(content)
    dataset = IndexedDataset(tmp_path / "real")
    check(dataset, DOCUMENTS)
    assert dataset.dtype == dataset.tokens.dtype == DTYPES[dtype]
    assert (None if dataset.modes is None else dataset.modes[:].tolist()) == ([2, 3, 5, 4, 4] if multimodal else None)
    write(tmp_path / "ours", DTYPES[dtype], DOCUMENTS, modes)
    assert [(tmp_path / name).read_bytes() for name in ("ours.bin", "ours.idx")] == real


def some_documents(rng: np.random.Generator, dtype: str) -> list[list[list[int]]]:
    limits = np.iinfo(dtype)
    return [
        [rng.integers(limits.min, limits.max, rng.integers(0, 20), np.int64).tolist() for _ in range(rng.integers(0, 4))]
        for _ in range(rng.integers(5, 30))
    ] + [[[limits.max], [limits.min]]]


@pytest.mark.slow
def test_megatrons_own_code_agrees(tmp_path):
    """Files byte for byte, what is read from them, splits and the choice of dtype; of any documents."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    rng = np.random.default_rng(0)
    cases = []
    for dtype, with_modes, _ in itertools.product(DTYPES, (False, True), range(4)):
        documents = some_documents(rng, dtype)
        modes = [rng.integers(-128, 128, len(document)).tolist() for document in documents] if with_modes else None
        write(tmp_path / f"ours{len(cases)}", DTYPES[dtype], documents, modes)
        cases.append((dtype, documents, modes))
    shares = ["0", "1", "30", "969", "0.5", ".1", "98", "7.25", "3."]
    drawn = [",".join(rng.choice(shares, rng.integers(1, 4))) for _ in range(2000)]
    splits = [(int(10 ** rng.uniform(0, 11)), split) for split in drawn if any(map(float, split.split(",")))]
    outcome = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REAL], input=json.dumps([cases, splits]), cwd=tmp_path, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
    read, ranges, dtypes = json.loads(outcome.stdout)
    for number, (dtype, documents, modes) in enumerate(cases):
        for suffix in ("bin", "idx"):
            assert (tmp_path / f"ours{number}.{suffix}").read_bytes() == (tmp_path / f"real{number}.{suffix}").read_bytes()
        check(IndexedDataset(tmp_path / f"real{number}"), documents)
        indices = np.cumsum([0, *map(len, documents)]).tolist()
        of_sequences = None if modes is None else list(itertools.chain(*modes))
        assert read[number] == [list(itertools.chain(*documents)), indices, dtype, of_sequences]
    for (num_documents, split), theirs in zip(splits, ranges, strict=True):
        for part, (first, end) in zip(theirs, split_documents(num_documents, split), strict=True):
            assert first == end if part is None else part == [first, end]
    assert dtypes == [token_dtype(size).name for size in (1, 65499, 65500, 65535, 65536, 128256)]


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from(list(DTYPES)))
    limits = np.iinfo(dtype)
    sequences = st.lists(st.integers(int(limits.min), int(limits.max)), max_size=5)
    documents = draw(st.lists(st.lists(sequences, max_size=4), max_size=8))
    modes = [draw(st.lists(st.integers(-128, 127), min_size=len(some), max_size=len(some))) for some in documents]
    return dtype, documents, draw(st.sampled_from([modes, None])), draw(st.integers(1, 4))


@given(cases())
@settings(deadline=None, max_examples=150)
def test_what_was_written_is_read(case):
    """Also where an index is looked at in many parts."""
    dtype, documents, modes, chunk = case
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "CHUNK", chunk)
        patch.setattr(megatron_writer, "CHUNK", chunk)
        prefix = pathlib.Path(directory) / "x.y"
        write(prefix, DTYPES[dtype], documents, modes)
        assert sorted(os.listdir(directory)) == ["x.y.bin", "x.y.idx"]
        for name in ("x.y", "x.y.bin", "x.y.idx"):
            dataset = IndexedDataset(prefix.with_name(name))
            check(dataset, documents)
        assert dataset.dtype == DTYPES[dtype]
        kept = list(itertools.chain(*modes)) if modes and dataset.num_sequences else None
        assert (None if dataset.modes is None else dataset.modes[:].tolist()) == kept


def test_documents_of_one_sequence_are_written_together(tmp_path):
    with write_indexed(tmp_path / "x", DTYPES["uint16"]) as writer:
        writer.add_documents(np.array([1, 2, 3, 4], np.uint16), np.array([1, 0, 3]))
        writer.add_documents(np.array([], np.uint16), np.array([], np.int64))
        writer.add_document(np.array([9], np.uint16))
    check(IndexedDataset(tmp_path / "x"), [[[1]], [[]], [[2, 3, 4]], [[9]]])


def test_a_large_index_is_written_and_checked_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(megatron, "CHUNK", 1000)
    monkeypatch.setattr(megatron_writer, "CHUNK", 1000)
    count = 300_000
    tracemalloc.start()
    try:
        with write_indexed(tmp_path / "x", DTYPES["uint8"]) as writer:
            for _ in range(count // 1000):
                writer.add_documents(np.ones(2000, np.uint8), np.full(1000, 2, np.int64))
        dataset = IndexedDataset(tmp_path / "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert dataset.num_documents == count
    assert peak < 500_000 < (tmp_path / "x.idx").stat().st_size // 10


def test_the_dtype_is_the_one_that_megatron_chooses():
    assert [token_dtype(size).name for size in (1024, 65499, 65500, 128256)] == ["uint16", "uint16", "int32", "int32"]


def test_a_pair_that_could_not_be_written_is_not_there(tmp_path):
    def wrong(add: Callable[[IndexedDatasetWriter], object], message: str) -> None:
        def begin() -> None:
            with write_indexed(tmp_path / "x", DTYPES["uint16"], with_modes=True) as writer:
                writer.add_document(np.array([1]))
                add(writer)

        with pytest.raises(ValueError, match=message):
            begin()
        assert os.listdir(tmp_path) == []

    wrong(lambda writer: writer.add_item(np.array([1])), "the last document was not ended: call end_document after its last")
    wrong(
        lambda writer: writer.add_document(np.array([3, 2**16])), "ids of tokens from 3 to 65536 exceed uint16, 0 to 65535"
    )
    wrong(lambda writer: writer.add_document(np.array([-1])), "ids of tokens from -1 to -1 exceed uint16")
    wrong(
        lambda writer: writer.add_document(np.array([1, 2]), [1]), "2 tokens are not 1 sequences of these lengths with 1 mod"
    )
    wrong(lambda writer: writer.add_document(np.array([1, 2]), [3, -1]), "2 tokens are not 2 sequences")
    wrong(
        lambda writer: writer.add_document(np.array([1]), [2**31]),
        "lengths of sequences from 2147483648 to .* exceed int32",
    )
    wrong(lambda writer: writer.add_document(np.array([1]), [1], []), "with 0 modes")
    wrong(lambda writer: writer.add_document(np.array([1]), [1], [128]), "modes from 128 to 128 exceed int8, -128 to 127")
    wrong(lambda writer: writer.add_documents(np.array([1, 2]), np.array([1])), "2 tokens are not 1 sequences")


def test_a_pair_is_replaced_index_last(tmp_path, monkeypatch):
    """At no moment is there an index beside the tokens of another."""
    pair, seen = tmp_path / "x", []
    write(pair, DTYPES["int32"], DOCUMENTS, None)
    replace = pathlib.Path.replace

    def watched(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        seen.append((target.name, [name.name for name in pair.parent.glob("x.???")]))
        return replace(path, target)

    monkeypatch.setattr(pathlib.Path, "replace", watched)
    write(pair, DTYPES["uint8"], [[[5]]], None)
    assert seen == [("x.bin", ["x.bin"]), ("x.idx", ["x.bin"])]
    check(IndexedDataset(pair), [[[5]]])
