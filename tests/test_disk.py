"""Whole or not at all, and locks that die with their process."""

import errno
import fcntl
import glob
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamajax import disk
from tests import runs


def test_a_file_that_could_not_be_written_is_not_there(tmp_path):
    with pytest.raises(TypeError):
        disk.write_atomically(tmp_path / "a", b"half", "not bytes")  # pyright: ignore[reportArgumentType] (the mistake)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks(tmp_path, monkeypatch, refusal):
    assert disk.has_locks(tmp_path / "entry")

    def refuse(descriptor, operation):
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert not disk.has_locks(tmp_path / "entry")
    with disk.locked(tmp_path / "entry") as first:
        (tmp_path / "entry" / "a.1234.tmp").write_text("of another process that writes now")
        with disk.locked(tmp_path / "entry", wait=False) as second:
            assert (first, second) == (True, True)
            disk.write_atomically(tmp_path / "entry" / "a", b"whole")
    assert sorted(os.listdir(tmp_path / "entry")) == ["a", "a.1234.tmp", "lock"]


def test_what_else_goes_wrong_with_a_lock_is_an_error(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="Input/output error"), disk.locked(tmp_path / "entry"):
        pass


def test_a_lock_keeps_others_out(tmp_path):
    with disk.locked(tmp_path / "entry") as first:
        with disk.locked(tmp_path / "entry", wait=False) as second:
            assert (first, second) == (True, False)
        with disk.locked(tmp_path / "other", wait=False) as other:
            assert other
    with disk.locked(tmp_path / "entry", wait=False) as third:
        assert third


HOLD_LOCK = """
import pathlib, sys
from llamajax import disk
entry = pathlib.Path(sys.argv[1])
with disk.locked(entry):
    (entry / "half written.tmp").write_text("half")
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_lock_dies_with_its_process(tmp_path):
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with disk.locked(tmp_path, wait=False) as mine:
            assert not mine
        process.kill()
        with disk.locked(tmp_path) as mine:
            assert mine
    assert os.listdir(tmp_path) == ["lock"]


def test_what_another_host_is_writing_is_left_to_it(tmp_path, monkeypatch):
    """The lock may hold among the processes of one host only."""
    with disk.locked(tmp_path):
        pass
    own, others, old = (tmp_path / f"a.{host}.12345678.tmp" for host in (disk._HOST, "00000000", "00000001"))
    for path in (own, others, old):
        path.write_text("half")
    os.utime(old, (1, 1))
    with disk.locked(tmp_path):
        assert sorted(os.listdir(tmp_path)) == [others.name, "lock"]


@pytest.mark.parametrize("num_failures", [0, 3, 4])
def test_a_read_that_fails_is_tried_again(monkeypatch, num_failures):
    pauses: list[float] = []
    monkeypatch.setattr(disk, "time", runs.time_with(pauses.append))

    def read() -> str:
        if len(attempts) < num_failures:
            attempts.append("failed")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return "read"

    attempts: list[str] = []
    if num_failures < 4:
        assert disk.read_again(read) == "read"
    else:
        with pytest.raises(OSError, match="Input/output error"):
            disk.read_again(read)
    assert pauses == [0.5, 2, 5][:num_failures]


def test_what_is_not_there_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "time", runs.time_with(lambda _: pytest.fail("waits")))
    with pytest.raises(FileNotFoundError):
        disk.read_again((tmp_path / "a").read_bytes)
    assert disk.names_in(tmp_path / "a" / "b") == []


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_another_host_made_meanwhile_stays(tmp_path, monkeypatch, has_links):
    """Where files can have several names; elsewhere the newer of the two, which are the same, takes its place."""
    if not has_links:
        monkeypatch.setattr(Path, "hardlink_to", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    disk.write_atomically(tmp_path / "a", b"theirs", keep=True)
    disk.write_atomically(tmp_path / "a", b"ours", keep=True)
    assert (tmp_path / "a").read_bytes() == (b"theirs" if has_links else b"ours")
    disk.write_atomically(tmp_path / "a", b"damaged no more")
    assert (tmp_path / "a").read_bytes() == b"damaged no more"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_folders_are_closed_to_others(tmp_path):
    umask = os.umask(0)
    try:
        disk.make_folder(tmp_path / "runs" / "a")
        with disk.locked(tmp_path / "cache" / "entry"):
            disk.write_atomically(tmp_path / "cache" / "entry" / "b", b"")
        disk.keep_from_others()
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "d").touch()
        modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    finally:
        os.umask(umask)
    assert modes | {"cache/entry/b": 0, "cache/entry/lock": 0} == {
        "runs": 0o750, "runs/a": 0o750, "cache": 0o700, "cache/entry": 0o700, "cache/entry/b": 0, "cache/entry/lock": 0,
        "c": 0o750, "c/d": 0o640,
    }  # fmt: skip


def test_a_folder_that_cannot_be_listed_is_not_left_out(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    found = [(folder.name, names) for folder, _, names in disk.files_below(tmp_path / "a")]
    assert found == [("a", ["file"]), ("b", [])]
    assert list(disk.files_below(tmp_path / "missing")) == []
    scandir = os.scandir

    def fails(path):
        if str(path).endswith("/b"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/a/b'"):
        list(disk.files_below(tmp_path / "a"))


def fails_at(monkeypatch, path: Path, number: int) -> None:
    """Lets what asks for the file or directory `path`, or what is in it, fail with an error of this number."""

    def failing(asks):
        def ask(asked, *args, **kwargs):
            if Path(os.path.abspath(asked)).is_relative_to(path):
                raise OSError(number, os.strerror(number), str(asked))
            return asks(asked, *args, **kwargs)

        return ask

    for name in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


PATTERNS = [
    "a/*/*.txt", "a/**/*.txt", "a/**", "a/[bc]/?.txt", "a/*/1.txt", "a/**/1.txt", "a/*/../c/*", "*/c/1.txt", "**",
    "**/c/**/*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_all_or_fails(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    for name in ("b", "c"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "1.txt").touch()
    assert "a/c/1.txt" in map(os.path.normpath, disk.matching(pattern))
    fails_at(monkeypatch, tmp_path / "a" / "c", errno.ESTALE)
    with pytest.raises(OSError, match=f"{os.strerror(errno.ESTALE)}: .*/c"):
        list(disk.matching(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        *PATTERNS,
        "*",
        ".*",
        "*/.*",
        "**/.*/*",
        ".h/**",
        "a/[[]x]",
        "a/**/**",
        "nowhere/*",
        "*/nowhere",
        "a/b/*.t",
        "./a/*",
        "a//*",
    ],
)
def test_a_pattern_matches_as_glob_says(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    for path in ("1.txt", ".h/1.txt", "a/[x]", "a/.h/2.txt", "a/b/1.txt", "a/b/.3.txt", "a/b/c/4.txt", "a/c/1.txt"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
    Path("a/link").symlink_to("b", target_is_directory=True)
    Path("a/loop").symlink_to(".", target_is_directory=True)
    Path("a/b/dangling.t").symlink_to("nowhere")

    def shown(paths) -> set[str]:
        return {f"{Path(path)}" for path in paths if not os.path.isdir(path)}

    assert shown(disk.matching(pattern)) == shown(glob.glob(pattern, recursive=True))
    everywhere = f"{tmp_path}/{pattern}"
    assert shown(disk.matching(everywhere)) == shown(glob.glob(everywhere, recursive=True))


def test_what_may_not_be_listed_matches_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    fails_at(monkeypatch, tmp_path / "a", errno.EACCES)
    assert [*disk.matching("a/*"), *disk.matching("nowhere/*"), *disk.matching("nowhere"), *disk.matching("a\0b/*")] == []
    assert disk.status("a") is None
