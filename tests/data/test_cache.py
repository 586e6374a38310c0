"""The cache: what is there is whole, and what is locked is waited for."""

import errno
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest

from llamajax import disk
from llamajax.data import cache, file_array

ARRAYS = {
    "tokens": np.arange(50_000, dtype=np.uint16),
    "empty": np.zeros((0,), np.int64),
    "hashes": np.arange(12, dtype=np.uint64) << 60,
}


def test_arrays_come_back_from_the_file(tmp_path):
    cache.write_arrays(tmp_path / "a", ARRAYS, {"last": True, "n": 3})
    file = cache.read_arrays(tmp_path / "a")
    assert file.info == {"last": True, "n": 3}
    assert list(file.arrays) == list(ARRAYS)
    for name, array in file.arrays.items():
        assert len(array) == len(ARRAYS[name])
        for part in (slice(None), slice(5, None), slice(None, -1), slice(7, 7), slice(3, 40_000), slice(9, 2)):
            values = array[part]
            np.testing.assert_array_equal(values, ARRAYS[name][part])
            assert values.dtype == ARRAYS[name].dtype
            assert not values.flags.writeable


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(cache.DamagedError, match=rf"{tmp_path}/a: .*No such file or directory.*; run again to rebuild it"):
        cache.read_arrays(tmp_path / "a")


def test_equal_arrays_make_equal_files(tmp_path):
    for name in ("a", "b"):
        cache.write_arrays(tmp_path / name, ARRAYS, {"x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_file_that_is_cut_or_replaced_is_damaged(tmp_path):
    path = tmp_path / "a"
    cache.write_arrays(path, ARRAYS, {})
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:9], whole[:3], b"", whole + b"\0", b"\xff" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(cache.DamagedError, match=f"{path}: is damaged; run again to rebuild it"):
            cache.read_arrays(path)


def flip(path, bit):
    """Inverts one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_no_flipped_bit_is_read(tmp_path):
    path = tmp_path / "a"
    cache.write_arrays(path, ARRAYS, {"last": True})
    num_bits = 8 * path.stat().st_size
    found = 0
    for bit in [*range(8 * 40), *np.random.default_rng(0).integers(0, num_bits, 300).tolist()]:
        flip(path, bit)
        try:
            cache.check_arrays(path)
        except cache.DamagedError:
            found += 1
        else:  # between two arrays
            for name, array in cache.read_arrays(path).arrays.items():
                np.testing.assert_array_equal(array[:], ARRAYS[name])
        flip(path, bit)
    assert found > 610
    cache.check_arrays(path)


def test_only_the_blocks_that_are_read_are_checked(tmp_path):
    path = tmp_path / "a"
    cache.write_arrays(path, {"tokens": ARRAYS["tokens"]}, {})
    last = 2 * len(ARRAYS["tokens"]) // cache.CHECKSUM_BYTES * cache.CHECKSUM_BYTES // 2  # where the last block begins
    flip(path, 8 * (path.stat().st_size - 1000))
    tokens = cache.read_arrays(path).arrays["tokens"]
    np.testing.assert_array_equal(tokens[:last], ARRAYS["tokens"][:last])
    for part in (slice(last, last + 1), slice(last - 1, last + 1), slice(None)):
        with pytest.raises(cache.DamagedError, match=f"{path}: is damaged"):
            tokens[part]


def test_a_file_for_others_is_whole_only_with_its_hash(tmp_path):
    path = tmp_path / "tokenizer.model"
    assert not cache.is_whole(path)
    cache.write_hashed(path, b"pieces")
    assert cache.is_whole(path)
    for file in sorted(tmp_path.iterdir()):
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), 11):
            flip(file, bit)
            assert not cache.is_whole(path)
            flip(file, bit)
        file.unlink()
        assert not cache.is_whole(path)
        file.write_bytes(whole)
    assert cache.is_whole(path)


def test_a_disk_that_is_full_is_not_kept_full(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # the kernel's refusal, in the middle of a file
    try:
        with pytest.raises(OSError, match="File too large"):
            cache.write_arrays(tmp_path / "a", ARRAYS, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == []


def test_damage_is_told_across_processes():
    error = pickle.loads(pickle.dumps(cache.DamagedError(Path("a/b"), "is damaged")))
    assert (type(error), error.path, error.reason) == (cache.DamagedError, Path("a/b"), "is damaged")
    assert str(error) == "a/b: is damaged; run again to rebuild it"


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_disk_that_fails_damages_nothing(tmp_path, monkeypatch, call):
    """Else whole files would be made again, and be torn from those who have opened them."""
    cache.write_arrays(tmp_path / "a", ARRAYS, {})
    calls, succeeds = [], getattr(os, call)

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) <= num_failures:
            raise OSError(errno.EIO, "Input/output error")
        return succeeds(*arguments)

    monkeypatch.setattr(file_array.os, call, fails)
    monkeypatch.setattr(disk, "_PAUSES_S", (0, 0, 0))
    num_failures = 3
    tokens = cache.read_arrays(tmp_path / "a").arrays["tokens"]
    file_array.close(tmp_path / "a")
    calls = []
    np.testing.assert_array_equal(tokens[3:9], ARRAYS["tokens"][3:9])
    calls, num_failures = [], 4
    for read in (lambda: cache.read_arrays(tmp_path / "a"), lambda: tokens[3:9]):
        file_array.close(tmp_path / "a")
        calls = []
        with pytest.raises(OSError, match=f"^\\[Errno 5\\] Input/output error: '{tmp_path}/a'$"):
            read()


def test_a_file_that_is_cut_or_taken_away_while_it_is_read_does_not_end_the_process(tmp_path):
    """A map of it would, by SIGBUS."""
    cache.write_arrays(tmp_path / "a", ARRAYS, {})
    tokens = cache.read_arrays(tmp_path / "a").arrays["tokens"]
    os.truncate(tmp_path / "a", 30_000)
    with pytest.raises(cache.DamagedError, match="is damaged"):
        tokens[-5:]
    (tmp_path / "a").unlink()
    file_array.close(tmp_path / "a")
    with pytest.raises(cache.DamagedError, match="No such file or directory"):
        tokens[:5]
