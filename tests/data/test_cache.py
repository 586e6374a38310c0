"""The cache: what is there is whole, and what is locked is waited for."""

import os
import subprocess
import sys
from pathlib import Path

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
    assert len(mapped(tmp_path / "a")) == 1
    del arrays, array
    assert mapped(tmp_path / "a") == []


def mapped(path):
    """The maps of a file that this process has."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


def test_a_mapped_file_takes_no_file_descriptor(tmp_path):
    cache.write_arrays(tmp_path / "a", ARRAYS, {})
    before = len(os.listdir("/proc/self/fd"))
    arrays = [cache.read_arrays(tmp_path / "a") for _ in range(10)]
    assert len(mapped(tmp_path / "a")) == len(arrays)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(DataError, match=rf"data.cache_dir: .*{tmp_path}/a.*No such file or directory; run again"):
        cache.read_arrays(tmp_path / "a")


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
