"""Folders that a run writes to."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from llamajax import disk
from llamajax.diagnostics import storage
from tests.diagnostics.test_gpus import told


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_TRIED_BYTES", 1 << 20)
    monkeypatch.setattr(storage, "_LEAST_RATE", 1.0)


def test_a_sound_folder_is_left_as_it_was(tmp_path):
    missing = tmp_path / "runs" / "mine"
    room, rate = told(storage.check_folder("run_dir", missing))
    assert (room[:2], rate[:2]) == (("disk run_dir", "ok"), ("disk run_dir", "ok"))
    assert room[2].endswith(f" at {tmp_path}")
    assert list(tmp_path.iterdir()) == []


def test_a_rate_is_measured_once_per_device(tmp_path):
    tried = set[int]()
    assert len(told(storage.check_folder("run_dir", tmp_path, tried=tried))) == 2
    assert len(told(storage.check_folder("data.cache_dir", tmp_path, tried=tried))) == 1


def test_room(tmp_path, monkeypatch):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert told(storage.check_folder("x", tmp_path, 2 * free, 4 * free))[0][1] == "fail"
    assert told(storage.check_folder("x", tmp_path, 0, 2 * free))[0][1] == "warn"
    few = os.statvfs_result((4096, 4096, 1 << 30, 1 << 30, 1 << 30, 1 << 20, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: few)
    assert told(storage.check_folder("x", tmp_path))[0][2].endswith("but only 100 more files")


def test_a_slow_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_LEAST_RATE", 1e15)
    assert told(storage.check_folder("x", tmp_path))[1][1] == "warn"


def test_a_folder_that_cannot_be_written():
    """Not even root makes folders in /proc."""
    ((_, status, text),) = told(storage.check_folder("run_dir", Path("/proc/self/runs")))
    assert status == "fail"
    assert text.startswith("/proc/self: ")


def test_a_user_without_a_home(monkeypatch):
    """A container that runs as another user has neither HOME nor an entry in /etc/passwd."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 123456)
    ((_, status, text),) = told(storage.check_folder("cache", Path("~/.cache")))
    assert (status, text.startswith("~/.cache: ")) == ("fail", True)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    assert told(storage.check_folder("x", tmp_path))[2][2].endswith(" has no file locks")
    assert fcntl.flock is refuse


def test_a_clock_that_differs(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_skew_s", lambda _: -90.0)
    assert "90 s behind this host's" in told(storage.check_folder("x", tmp_path))[2][2]


MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
35 22 0:31 / /data rw,relatime shared:2 - nfs4 store:/data rw,vers=4.2,local_lock=none
36 22 0:32 / /data/old\040runs rw,relatime - nfs store:/old rw,vers=3,nolock,local_lock=all
37 22 0:33 / /lustre rw - lustre 10.0.0.1@o2ib:/fs rw,localflock
""".lstrip()


@pytest.mark.parametrize(
    ("place", "kind", "of_one_host"),
    [
        ("/home/me", "ext4", set()),
        ("/data", "nfs4", set()),
        ("/database", "ext4", set()),
        ("/data/old runs/x", "nfs", {"nolock", "local_lock=all"}),
        ("/lustre/x", "lustre", {"localflock"}),
    ],
)
def test_mounts(place, kind, of_one_host, tmp_path, monkeypatch):
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    found, options = storage.mount_of(Path(place), table)
    assert (found, options & storage._OF_ONE_HOST) == (kind, of_one_host)


def test_locks_of_one_host_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "mount_of", lambda *_: ("nfs", {"rw", "nolock"}))
    assert told(storage.check_folder("x", tmp_path))[2][2] == "nfs is mounted with nolock: locks hold on one host only"
