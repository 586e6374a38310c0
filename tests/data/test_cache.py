"""The cache: what is there is whole, what is locked is waited for, what has not changed is not read again."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from llamajax.data import cache
from llamajax.errors import DataError

ARRAYS = {
    "tokens": np.arange(1000, dtype=np.uint16),
    "empty": np.zeros((0,), np.int64),
    "table": np.arange(12, dtype=np.uint64).reshape(3, 4) << 60,
}


def test_arrays_come_back_mapped_from_the_file(tmp_path):
    cache.write_arrays(tmp_path / "a", ARRAYS, {"last": True, "n": 3})
    arrays, info = cache.read_arrays(tmp_path / "a")
    assert info == {"last": True, "n": 3}
    assert list(arrays) == list(ARRAYS)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])
        assert array.dtype == ARRAYS[name].dtype
        assert array.ctypes.data % cache.ALIGNMENT == 0
        assert not array.flags.writeable
    assert isinstance(arrays["tokens"].base.base, np.memmap)


def test_equal_arrays_make_equal_files(tmp_path):
    for name in ("a", "b"):
        cache.write_arrays(tmp_path / name, ARRAYS, {"x": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "a"
    cache.write_arrays(path, ARRAYS, {})
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:9], whole[:3], b"", whole + b"\0", b"\xff" * len(whole)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{path}: is damaged; delete {tmp_path}"):
            cache.read_arrays(path)


def test_a_file_that_could_not_be_written_is_not_there(tmp_path):
    with pytest.raises(TypeError):
        cache.write_atomically(tmp_path / "a", b"half", "not bytes")  # pyright: ignore[reportArgumentType]
    assert os.listdir(tmp_path) == ["a.tmp"]
    with cache.locked(tmp_path):
        assert os.listdir(tmp_path) == ["lock"]


def test_a_lock_keeps_others_out(tmp_path):
    with cache.locked(tmp_path / "entry") as first:
        with cache.locked(tmp_path / "entry", wait=False) as second:
            assert (first, second) == (True, False)
        with cache.locked(tmp_path / "other", wait=False) as other:
            assert other
    with cache.locked(tmp_path / "entry", wait=False) as third:
        assert third


HOLD_LOCK = """
import pathlib, sys
from llamajax.data import cache
entry = pathlib.Path(sys.argv[1])
with cache.locked(entry):
    (entry / "half written.tmp").write_text("half")
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_lock_dies_with_its_process(tmp_path):
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with cache.locked(tmp_path, wait=False) as mine:
            assert not mine
        process.kill()
        with cache.locked(tmp_path) as mine:
            assert mine
    assert os.listdir(tmp_path) == ["lock"]


def age(path, seconds):
    """Sets the modification time back; the change time follows the clock and cannot be set."""
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_unchanged_files_are_hashed_once(tmp_path, monkeypatch):
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        path.write_text(path.name)
    hashed = []
    digest_file = cache.hashlib.file_digest
    monkeypatch.setattr(cache.hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or digest_file(file, kind))
    cache_dir = tmp_path / "cache"

    first = cache.content_hash(files, cache_dir)
    assert cache.content_hash(files, cache_dir) == first
    assert len(hashed) == 4, "files that were changed just now may still change unseen"

    monkeypatch.setattr(cache, "UNSETTLED_S", -60.0)
    assert [cache.content_hash(files, cache_dir) for _ in range(3)] == [first] * 3
    assert len(hashed) == 6

    files[1].write_text("B")  # same size
    second = cache.content_hash(files, cache_dir)
    assert second != first
    age(files[1], 1000)
    assert cache.content_hash(files, cache_dir) == second
    assert cache.content_hash(files[::-1], cache_dir) != second


def test_the_hash_is_of_the_content_not_of_the_place(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").write_text("same")
    assert cache.content_hash([tmp_path / "x/a"], tmp_path / "c") == cache.content_hash([tmp_path / "y/a"], tmp_path / "c")
