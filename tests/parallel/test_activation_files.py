"""Arrays wait in files: they come back whole, each is written once, and no failure hangs or leaves a file."""

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.errors import DiskError
from llamajax.parallel import block_file
from llamajax.parallel.activation_files import ActivationFiles
from llamajax.parallel.block_file import BLOCK
from llamajax.parallel.mesh import make_mesh

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8", "int4", "bool", "complex64")
SHAPES = ((8, 16), (8, 1025, 3), (8, 4096), (8, 1), (8, 0, 3))


@pytest.fixture
def files(tmp_path):
    opened = ActivationFiles(str(tmp_path), jax.local_devices())
    yield opened
    opened.close()
    assert not any(thread.is_alive() for thread in opened.threads)
    assert not list(tmp_path.iterdir())


def sharded(array: Any, *dims: Any, kind: str | None = "pinned_host") -> Any:
    mesh = jax.sharding.get_mesh()
    return jax.device_put(array, jax.NamedSharding(mesh, jax.P(*dims), memory_kind=kind))


def random_bytes(shape, dtype, seed=0):
    """Any bits, also those of NaN."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    count = int(np.prod(shape))
    if dtype in (jnp.bool, jnp.int4):
        return rng.integers(0, 2 if dtype == jnp.bool else 8, shape).astype(dtype)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)


def same(found, expected):
    assert found.sharding == expected.sharding
    for own, like in zip(found.addressable_shards, expected.addressable_shards, strict=True):
        own, like = np.asarray(own.data), np.asarray(like.data)
        assert (own.shape, own.dtype) == (like.shape, like.dtype)
        assert own.tobytes() == like.tobytes()


def test_arrays_come_back_to_the_last_bit(files):
    """Every dtype, in parts, replicated, in both memories; sizes beside blocks and beside chunks."""
    jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    size, arrays = 0, []
    for number, dtype in enumerate(DTYPES):
        for shape in SHAPES:
            dims = ((("data", "fsdp"),), ("fsdp",), ())[number % 3]
            kind = "pinned_host" if number % 2 else None
            arrays.append(sharded(random_bytes(shape, dtype, number), *dims, kind=kind))
            size += sum(shard.data.nbytes for shard in arrays[-1].addressable_shards)
    like = [sharded(np.asarray(array), *array.sharding.spec, kind=array.sharding.memory_kind) for array in arrays]
    values = files.store(arrays)
    arrays.clear()
    files.settle(values)
    assert files.bytes_written == size
    files.load(values)
    for found, expected in zip(files.take(values), like, strict=True):
        same(found, expected)
    assert (files.bytes_read, files.forwarded) == (size, 0)


def test_an_array_of_several_chunks_comes_back(files, monkeypatch):
    monkeypatch.setattr(block_file, "CHUNK", 2 * BLOCK)
    array = sharded(random_bytes((8, 5 * BLOCK + 77), "uint8"), ("data", "fsdp"))
    like, values = np.asarray(array).copy(), files.store([array])
    del array
    files.settle(values)
    files.load(values)
    np.testing.assert_array_equal(files.take(values)[0], like)
    assert files.bytes_read == like.nbytes


def test_arrays_are_copied_only_where_the_disk_needs_it(tmp_path, monkeypatch):
    """A disk takes an array in aligned memory and refuses another one, which is then copied."""
    device, write = jax.local_devices()[0], os.pwrite
    files, lies = (
        ActivationFiles(str(tmp_path), [device]),
        jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"),
    )
    memory = block_file.aligned(3 * BLOCK)
    memory[:] = np.arange(3 * BLOCK) % 251

    def fussy(file, data, offset):
        if np.frombuffer(data, np.uint8).ctypes.data % BLOCK:
            raise OSError(errno.EINVAL, "refused")
        return write(file, data, offset)

    monkeypatch.setattr(block_file.os, "pwrite", fussy)
    for start in (0, 64):
        values = files.store([jax.device_put(memory[start : start + 2 * BLOCK], lies)])
        files.settle(values)
        files.load(values)
        np.testing.assert_array_equal(files.take(values)[0], memory[start : start + 2 * BLOCK])
        assert files._lanes[device].file.is_staging == (start == 64)
    assert files.bytes_read == 2 * 2 * BLOCK
    files.close()


def test_an_array_is_written_once(files):
    """The same object, and another one with the same buffers; an equal array elsewhere is another one."""
    array = sharded(np.ones((8, 64), np.float32), "fsdp")
    alias = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [x.data for x in array.addressable_shards])
    jax.block_until_ready([array, alias])
    first, second = files.store([array, alias]), files.store([array, sharded(np.ones((8, 64), np.float32), "fsdp")])
    assert first[0] is first[1] is second[0] is not second[1]
    files.settle([*first, *second])
    assert files.bytes_written == 2 * array.nbytes
    like = np.asarray(array).copy()
    del array, alias
    gc.collect()
    for values in (first, second):
        files.load(values)
        for found in files.take(values):
            np.testing.assert_array_equal(found, like)
    assert files.bytes_read == 2 * like.nbytes


def test_no_call_waits_for_a_computation(files):
    """Python's lock is held meanwhile in some of jax's calls, and other threads may need it for the computation to end."""
    start = jax.device_put(np.ones((8, 512, 512), np.float32), jax.P("fsdp"))
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.einsum("bij,bjk->bik", y, x) / 512, x)).lower(start)
    compiled = long.compile()
    pending = compiled(start)
    array = pending + 1
    values = files.store([array])
    assert not pending.is_ready()
    files.load(values)
    assert files.take(values)[0] is array
    assert not pending.is_ready()
    pending.block_until_ready()


def slow(seconds, monkeypatch):
    """Every write takes this long; returns the event that a write has begun."""
    begun, write = threading.Event(), os.pwrite

    def throttled(*given):
        begun.set()
        time.sleep(seconds)
        return write(*given)

    monkeypatch.setattr(block_file.os, "pwrite", throttled)
    return begun


def test_values_in_flight_come_from_memory(files, monkeypatch):
    """One is being written, others wait for it: nothing is read, and the others are never written."""
    begun = slow(0.2, monkeypatch)
    arrays = [sharded(np.full((8, 16), n, np.float32), None) for n in range(4)]
    pointers = [[x.data.unsafe_buffer_pointer() for x in array.addressable_shards] for array in arrays]
    values = files.store(arrays)
    arrays.clear()
    assert begun.wait(10)
    files.load(values)
    found = files.take(values)
    assert [[x.data.unsafe_buffer_pointer() for x in array.addressable_shards] for array in found] == pointers
    files.close()
    assert (files.bytes_read, files.forwarded) == (0, 4)
    assert files.bytes_written <= found[0].nbytes * 8


def test_a_written_value_that_somebody_still_holds_is_not_read(files):
    array = sharded(np.ones((8, 16), np.float32), "fsdp")
    values = files.store([array])
    files.settle(values)
    files.load(values)
    assert files.take(values)[0] is array
    assert (files.bytes_written, files.bytes_read, files.forwarded) == (array.nbytes, 0, 1)


def test_written_values_leave_memory(files):
    array = sharded(np.ones((8, 1 << 16), np.float32), "fsdp")
    files.settle(files.store([array]))
    held = [x for x in jax.live_arrays() if x.shape == array.shape]
    assert held == [array]
    del array, held
    gc.collect()
    assert not [x for x in jax.live_arrays() if x.shape == (8, 1 << 16)]


def test_an_array_in_the_memory_of_an_earlier_one_is_another(files):
    """Its value is its own, although Python and jax give both the same place."""
    places, stored = set(), []
    for number in range(30):
        array = sharded(np.full((8, 1 << 12), number, np.float32), "fsdp")
        places.add(array.block_until_ready().addressable_shards[0].data.unsafe_buffer_pointer())
        (value,) = files.store([array])
        files.settle([value])
        stored.append(value)
        del array
    assert len(places) < 30
    files.load(stored)
    assert [int(np.asarray(array)[0, 0]) for array in files.take(stored)] == list(range(30))


def test_space_is_used_again(files):
    """The files of steps that store the same are no larger than after the first one."""
    ends = []
    for step in range(4):
        groups = [files.store([sharded(random_bytes((8, size), "uint8", step), "fsdp")]) for size in (5000, 100, 9000)]
        for values in reversed(groups):
            files.settle(values)
            files.load(values)
            files.take(values)
        ends.append([lane.file.space.end for lane in files._lanes.values()])
    assert ends[0] == ends[-1] == [(2 + 1 + 3) * BLOCK] * 8


def failing(code, monkeypatch, name="pwrite"):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(block_file.os, name, fail)


@pytest.mark.parametrize(("code", "remedy"), [(errno.EIO, "check the disk"), (errno.ENOSPC, "free space there")])
def test_a_failing_write_ends_the_next_call_with_one_line(files, monkeypatch, code, remedy):
    failing(code, monkeypatch)
    values = files.store([sharded(np.ones((8, 16), np.float32), "fsdp")])
    for call in (files.settle, files.store, files.load, files.take):
        with pytest.raises(DiskError, match=rf"^offload.tiers.nvme_dir: \S+: writing .*{remedy}") as caught:
            call(values if call != files.store else [])
        assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 74


def test_a_failing_read_ends_the_wait(files, monkeypatch):
    array = sharded(np.ones((8, 16), np.float32), "fsdp")
    values = files.store([array])
    files.settle(values)
    del array
    failing(errno.EIO, monkeypatch, "preadv")
    files.load(values)
    with pytest.raises(DiskError, match="reading saved values failed: Input/output error; check the disk"):
        files.take(values)


def test_a_closed_descriptor_is_an_error(files):
    """Of a file that is cut short, too."""
    array = sharded(np.ones((8, BLOCK), np.float32), "fsdp")
    values = files.store([array])
    files.settle(values)
    del array
    for lane in files._lanes.values():
        os.ftruncate(lane.file.file, 0)
    files.load(values)
    with pytest.raises(DiskError, match="the file is too short"):
        files.take(values)


def test_files_take_no_more_than_they_may(tmp_path):
    files = ActivationFiles(str(tmp_path), jax.local_devices(), capacity=8 * 2 * BLOCK)
    array = sharded(np.ones((8, 2 * BLOCK), np.uint8), "fsdp")
    kept = files.store([array])
    with pytest.raises(DiskError, match=r"take 96.0 KiB in .*, more than 64.0 KiB, .*offload.tiers.nvme_bytes; "):
        files.store([sharded(np.ones((8, 1), np.uint8), "fsdp")])
    files.settle(kept)
    files.close()


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"no file can be opened there: .*; name a folder on a local disk"):
        ActivationFiles(str(tmp_path / "file" / "folder"), jax.local_devices())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nvme-")]


@pytest.mark.parametrize("refused", ["O_DIRECT", "O_TMPFILE"])
def test_a_file_system_without_direct_io_or_unnamed_files_will_do(tmp_path, monkeypatch, refused):
    opened, notes = os.open, []

    def choosy(path, flags, *mode):
        if flags & getattr(os, refused) == getattr(os, refused):
            raise OSError(errno.EINVAL if refused == "O_DIRECT" else errno.EOPNOTSUPP, "refused")
        return opened(path, flags, *mode)

    monkeypatch.setattr(block_file.os, "open", choosy)
    files = ActivationFiles(str(tmp_path / "new"), jax.local_devices(), note=notes.append)
    assert not list((tmp_path / "new").iterdir())
    array = sharded(random_bytes((8, 100), "uint8"), "fsdp")
    like, values = np.asarray(array).copy(), files.store([array])
    del array
    files.settle(values)
    files.load(values)
    np.testing.assert_array_equal(files.take(values)[0], like)
    files.close()
    assert len(notes) == (refused == "O_DIRECT")
    assert all("has no direct I/O" in note for note in notes)


def test_threads_end_with_the_last_reference(tmp_path):
    files = ActivationFiles(str(tmp_path), jax.local_devices())
    threads = files.threads
    del files
    gc.collect()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


WRITES_FOREVER = """
    import jax, numpy as np
    from llamajax.parallel.activation_files import ActivationFiles
    files = ActivationFiles({folder!r}, jax.local_devices())
    print("ready", flush=True)
    while True:
        values = files.store([jax.device_put(np.ones(1 << 20, np.uint8)) for _ in range(8)])
        files.settle(values)
        files.load(values)
        files.take(values)
"""


@pytest.mark.parametrize(
    "moments", [(0.0, 0.1), pytest.param([0.013 * number for number in range(20)], marks=pytest.mark.long)], ids=len
)
def test_a_killed_process_leaves_nothing(tmp_path, moments):
    """One process for each moment, in seconds after it began to write."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    script = textwrap.dedent(WRITES_FOREVER.format(folder=str(tmp_path)))
    for pair in zip(moments[::2], moments[1::2], strict=True):
        processes = [
            subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True)
            for _ in pair
        ]
        for process, seconds in zip(processes, pair, strict=True):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            process.stdout.close()
            assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_writes_are_about_as_fast_as_those_of_dd(tmp_path):
    """Prints both bandwidths, medians of five, in turns on one disk; run it alone, with `-s` and a folder of that disk as
    `--basetemp`."""
    files, size, count, rates = ActivationFiles(str(tmp_path), jax.local_devices()[:1]), 128 << 20, 8, []
    lies = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    arrays = [jax.device_put(np.full(size, number, np.uint8), lies) for number in range(count)]
    for _ in range(5):
        begun = time.monotonic()
        command = ["dd", "if=/dev/zero", f"of={tmp_path}/dd", "bs=8M", f"count={count * size >> 23}", "oflag=direct"]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=True)
        between = time.monotonic()
        values = files.store(arrays)
        files.settle(values)
        ended = time.monotonic()
        rates.append((count * size / (between - begun), count * size / (ended - between)))
        files.load(values)
        files.take(values)
        os.remove(tmp_path / "dd")
    files.close()
    of_dd, own = np.median(rates, axis=0)
    print(f"dd {of_dd / 1e9:.2f} GB/s, saved values {own / 1e9:.2f} GB/s: {own / of_dd:.0%}")
    assert own > 0.7 * of_dd
