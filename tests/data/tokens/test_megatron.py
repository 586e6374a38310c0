"""Megatron-LM's token files are read, and nothing that is damaged is taken for data."""

import errno
import itertools
import os
import pathlib
import struct
from collections.abc import Callable

import numpy as np
import pytest

from llamajax.data.tokens import megatron
from llamajax.data.tokens.megatron import IndexedDataset, paths_of, split_documents
from llamajax.errors import DataError, DiskError
from tests.data.tokens.token_files import DOCUMENTS, DTYPES, write


@pytest.fixture
def pair(tmp_path):
    """A pair of files, of int32, that is as it should be: documents of one, no, three and one sequences."""
    write(tmp_path / "x", DTYPES["int32"], DOCUMENTS, None)
    return tmp_path / "x"


def refused(prefix: pathlib.Path) -> str:
    """Returns the message about a damaged pair."""
    with pytest.raises(DataError) as caught:
        IndexedDataset(prefix)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith((f"{prefix}.idx: ", f"{prefix}.bin: "))
    assert "; " in message
    return message


def test_arrays_are_read_only_and_hold_no_file_descriptor(pair):
    before = len(os.listdir("/proc/self/fd"))
    datasets = [IndexedDataset(pair) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    for array in (datasets[0].tokens, datasets[0].sequence_lengths, datasets[0].document_indices):
        with pytest.raises(ValueError, match="read-only"):
            array[:][0] = 1


def test_a_file_that_is_cut_while_it_is_read_does_not_end_the_process(pair):
    """A map of it would, by SIGBUS."""
    dataset = IndexedDataset(pair)
    os.truncate(dataset.bin_path, 4)
    assert len(dataset.tokens[:1]) == 1
    with pytest.raises(DataError, match=f"^{pair}.bin: changed while it was read; run again once it no longer changes$"):
        dataset.tokens[:]


HEAD = struct.Struct("<9sQBQQ")


def with_head(index: bytes, **fields: int | bytes) -> bytes:
    names = ("magic", "version", "code", "num_sequences", "num_indices")
    values = dict(zip(names, HEAD.unpack(index[: HEAD.size]), strict=True)) | fields
    return HEAD.pack(*values.values()) + index[HEAD.size :]


def with_number(index: bytes, array: str, place: int, value: int) -> bytes:
    """The index of `pair` with another number in one of its arrays."""
    at, kind = {"lengths": (34, "<i"), "pointers": (54, "<q"), "indices": (94, "<q")}[array]
    size = struct.calcsize(kind)
    at += place * size
    return index[:at] + struct.pack(kind, value) + index[at + size :]


DAMAGES: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda index: b"", "does not begin with MMIDIDX"),
    (lambda index: b"TNTIDX\0\0" + index, "does not begin with MMIDIDX, as .* name one of those"),
    (lambda index: index[:20], "ends within its head, after 20 bytes"),
    (lambda index: with_head(index, version=2), "has version 2, but only 1 is supported"),
    (lambda index: with_head(index, code=0), r"an unknown dtype \(code 0\)"),
    (lambda index: with_head(index, code=2), "holds int8, but ids of tokens must be uint8, int16, int32, int64, uint16"),
    (lambda index: with_head(index, code=6), "holds float64, "),
    (lambda index: with_head(index, code=7), "holds float32, "),
    (lambda index: with_head(index, code=9), r"an unknown dtype \(code 9\)"),
    (lambda index: with_head(index, code=5), "sequence 1 begins at byte 12 of the .bin, but must begin at 24"),
    (lambda index: with_head(index, num_sequences=4), "has 134 bytes, but 4 sequences and 5 document indices take 122, "),
    (lambda index: with_head(index, num_sequences=2**64 - 1), "has 134 bytes, but 18,446,744,073,709,551,615 sequences"),
    (lambda index: with_head(index, num_indices=4), "has 134 bytes, but 5 sequences and 4 document indices take 126, "),
    (lambda index: with_head(index, num_indices=0), "has no document indices, but must have one more"),
    (lambda index: index[:-1], "has 133 bytes, but 5 sequences and 5 document indices take 134, or 139 with modes"),
    (lambda index: index + b"\0", "has 135 bytes, but "),
    (lambda index: with_number(index, "lengths", 0, -1), "sequence 0 has -1 tokens, which must not be negative"),
    (lambda index: with_number(index, "lengths", 1, 3), "sequence 2 begins at byte 20 of the .bin, but must begin at 24"),
    (lambda index: with_number(index, "lengths", 4, 2), r"x\.bin: has 28 bytes, but the sequences in .*x\.idx reach to 32"),
    (lambda index: with_number(index, "lengths", 4, 0), r"x\.bin: has 28 bytes, but the sequences in .*x\.idx reach to 24"),
    (lambda index: with_number(index, "pointers", 0, 4), "sequence 0 begins at byte 4 of the .bin, but must begin at 0"),
    (lambda index: with_number(index, "pointers", 3, -4), "sequence 3 begins at byte -4 of the .bin, but must begin at 20"),
    (lambda index: with_number(index, "indices", 0, 1), "the first document begins at sequence 1, but must begin at 0"),
    (lambda index: with_number(index, "indices", 1, -1), "document 0 ends at sequence -1, before its beginning at 0"),
    (lambda index: with_number(index, "indices", 3, 6), "document 3 ends at sequence 5, before its beginning at 6"),
    (lambda index: with_number(index, "indices", 3, 0), "document 2 ends at sequence 0, before its beginning at 1"),
    (lambda index: with_number(index, "indices", 4, 4), "the last document ends at sequence 4, but must end at 5"),
    (lambda index: with_number(index, "indices", 4, 2**40), "the last document ends at sequence 1,099,511,627,776, "),
]  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 2**20])
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_index_is_refused(pair, monkeypatch, damage, message, chunk):
    monkeypatch.setattr(megatron, "CHUNK", chunk)
    index = pair.with_name("x.idx")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(DataError, match=message):
        IndexedDataset(pair)
    refused(pair)


def test_every_flipped_bit_of_the_index_is_found(pair):
    """But those that leave documents of other sequences than before, which nothing else tells."""
    index = pair.with_name("x.idx")
    whole = index.read_bytes()
    assert len(whole) == 134
    for at, bit in itertools.product(range(len(whole)), range(8)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        index.write_bytes(damaged)
        indices = np.frombuffer(damaged, "<i8", 5, 94)
        if not (at >= 94 and indices[0] == 0 and indices[-1] == 5 and (np.diff(indices) >= 0).all()):
            refused(pair)


def test_a_file_of_another_length_is_refused(pair):
    for path in paths_of(pair):
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            refused(pair)
        path.write_bytes(whole + b"\0")
        refused(pair)
        path.write_bytes(whole)
    IndexedDataset(pair)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_is_named(pair, suffix):
    path = pair.with_name(f"x.{suffix}")
    path.unlink()
    assert refused(pair) == (
        f"{path}: No such file or directory; name a .bin and an .idx in the same directory, or their common prefix"
    )
    path.mkdir()
    assert f"{path}: is not a regular file; " in refused(pair)


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, DiskError), (errno.EACCES, DataError)])
@pytest.mark.parametrize("where", ["open", "read"])
def test_a_failing_disk_is_told_from_damaged_files(pair, monkeypatch, where, number, kind):
    def fail(*_: object) -> None:
        raise OSError(number, "it has its own words")

    monkeypatch.setattr(*((pathlib.Path, "open") if where == "open" else (megatron, "_read")), fail)
    with pytest.raises(kind, match=rf"^{pair}\.idx: .*; (check the disk|copy both|name a)"):
        IndexedDataset(pair)


@pytest.mark.parametrize(
    ("num_documents", "split", "ranges"),
    [
        (1000, "969,30,1", ((0, 969), (969, 999), (999, 1000))),
        (10, "969,30,1", ((0, 10), (10, 10), (10, 10))),
        (100, "98,2", ((0, 98), (98, 100), (100, 100))),
        (7, "1", ((0, 7), (7, 7), (7, 7))),
        (7, "0, 0, 1", ((0, 0), (0, 0), (0, 7))),
        (5, "1,1,0", ((0, 2), (2, 5), (5, 5))),  # 2.5 is rounded to the even number
        (7, "1,1,0", ((0, 4), (4, 7), (7, 7))),
        (3, "1,1,1", ((0, 1), (1, 2), (2, 3))),
        (10, ".5,0.25,.25", ((0, 5), (5, 8), (8, 10))),
        (0, "969,30,1", ((0, 0), (0, 0), (0, 0))),
    ],
)
def test_splits_by_hand(num_documents, split, ranges):
    assert split_documents(num_documents, split) == ranges


@pytest.mark.parametrize(
    "split", ["", ",", "1,", "0", "0,0,0", "1,2,3,4", "-1,2", "1e3", "nan", "inf", "969/30/1", "1 2", ".", "٣", "9" * 400]
)
def test_splits_that_are_none_are_refused(split):
    with pytest.raises(ValueError, match=r"must be one to three numbers, such as 969,30,1, that are not all 0; correct it$"):
        split_documents(10, split)
