"""A manifest is believed as far as it speaks of files of its directory; deleting a step deletes nothing else."""

import errno
import json
import os
import shutil

import jax
import pytest

from llamajax import disk
from llamajax.checkpoint import manifest, retention
from llamajax.errors import CheckpointError, EnvironmentMismatchError

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of nothing."""


def a_step(tmp_path):
    step = tmp_path / "checkpoints" / "7"
    (step / "files").mkdir(parents=True)
    (step / "files" / "a").touch()
    (tmp_path / "outside").touch()
    return step


def sign(step, *paths):
    """Gives a step a whole manifest that names these as empty files."""
    (step / manifest.MANIFEST).write_bytes(manifest._text({path: {"size": 0, "sha256": EMPTY} for path in paths}))


@pytest.mark.parametrize(
    "path",
    ["../../outside", "files/../../../outside", "/dev/zero", "..", "./files/a", "files//a", "", "a\0b", "\ud800", "a\nb"],
)
def test_a_manifest_that_names_what_is_elsewhere_is_damaged(tmp_path, path):
    step = a_step(tmp_path)
    sign(step, "files/a", path)
    with pytest.raises(CheckpointError, match=r"^manifest\.json is damaged$"):
        manifest.read(step)


@pytest.mark.parametrize("record", [5, None, [], {}, {"size": 0}, {"size": "0", "sha256": EMPTY}, {"size": 0, "sha256": 1}])
def test_an_entry_of_another_form_is_damage(tmp_path, record):
    step = a_step(tmp_path)
    (step / manifest.MANIFEST).write_bytes(manifest._text({"files/a": record}))
    with pytest.raises(CheckpointError, match=r"^manifest\.json is damaged$"):
        manifest.read(step)


def test_what_may_have_no_end_is_not_read(tmp_path):
    step = a_step(tmp_path)
    os.mkfifo(step / "pipe")
    (step / "zeros").symlink_to("/dev/zero")
    (step / "folder").symlink_to("/")
    (step / "loop").symlink_to("loop")
    missing = ["files/a/b", "none", "loop", "x" * 999]
    sign(step, "files/a", "pipe", "zeros", "folder", *missing)
    told = manifest.problems(step, manifest.read(step))
    others = [f"{path} is not a regular file" for path in ("pipe", "zeros", "folder")]
    assert told == [*others, *(f"{path} is missing" for path in missing)]


def test_thousands_of_missing_files_are_a_short_message(tmp_path, monkeypatch):
    step = a_step(tmp_path)
    sign(step, "files/a", *(f"missing {i:04}" for i in range(2000)))
    sent = []
    monkeypatch.setattr(manifest, "everyones", lambda value: sent.append(value) or [value])
    found = manifest.damage(step)
    assert found
    assert len(json.dumps(sent)) < 1000
    names = ", ".join(f"missing {i:04} is missing" for i in range(10))
    assert manifest.damage_line(step.parent, 7, found) == f"{step} is damaged: {names} (and 1990 more)"


def as_first_of_two(monkeypatch, other: dict[str, str]) -> list[str]:
    """From here on, this process is the first of two, and the other finds what is given; the files that are hashed here."""
    hashed, record = [], manifest._record
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(manifest, "everyones", lambda value: [value, (None, other, len(other))])
    monkeypatch.setattr(manifest, "_record", lambda path: hashed.append(path.name) or record(path))
    return hashed


def test_damage_that_another_process_sees_is_confirmed_by_the_files_that_it_names(tmp_path, monkeypatch):
    step = a_step(tmp_path)
    names = [f"{i}" for i in range(6)]
    for name in names:
        (step / name).write_text(name)
    manifest.write(step, manifest.records_of(step, names))
    read, times = manifest.read, []
    monkeypatch.setattr(manifest, "read", lambda directory: times.append(directory) or read(directory))
    own, others = manifest.shares(dict.fromkeys(names, 1), 2)
    hashed = as_first_of_two(monkeypatch, {others[1]: f"{others[1]} does not match its SHA-256"})
    with pytest.raises(EnvironmentMismatchError, match=f"{others[1]} does not match its SHA-256 for process 1, but not for"):
        manifest.damage(step)
    assert sorted(hashed[:-1]) == sorted(own)
    assert hashed[-1] == others[1]
    assert len(times) == 1
    (step / others[1]).write_bytes(b"x")
    assert manifest.damage(step) == manifest.Damage([f"{others[1]} does not match its SHA-256"], 1)


def test_a_manifest_that_only_another_process_cannot_read_is_no_damage(tmp_path, monkeypatch):
    step = a_step(tmp_path)
    sign(step, "files/a")
    as_first_of_two(monkeypatch, {manifest.MANIFEST: "manifest.json is missing"})
    with pytest.raises(EnvironmentMismatchError, match=r"manifest\.json is missing for process 1, but not for process 0"):
        manifest.damage(step)
    (step / manifest.MANIFEST).unlink()
    assert manifest.damage(step) == manifest.Damage(["manifest.json is missing"], 1)


def test_links_are_deleted_and_not_what_is_behind_them(tmp_path):
    step = a_step(tmp_path)
    kept = tmp_path / "kept"
    shutil.copytree(step, kept)
    (step / "files" / "link").symlink_to(kept)
    for name in ("8", "9.saving", "10.deleting"):
        (step.parent / name).symlink_to(kept)
    told: list[str] = []
    retention.remove_unfinished(step.parent)
    retention.delete(step.parent, [7, 8], told.append)
    assert not step.exists()
    assert [path.name for path in kept.rglob("*")] == ["files", "a"]
    assert all("cannot be deleted" in line for line in told)


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADMSG])
def test_a_file_that_stays_unreadable_is_named(tmp_path, monkeypatch, number):
    """It may be whole; not so where the file system says that it is not what was written."""
    step = a_step(tmp_path)

    def fails(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(manifest, "_record", fails)
    monkeypatch.setattr(disk, "_PAUSES_S", (0, 0, 0))
    records: dict[str, manifest.FileRecord] = {"files/a": {"size": 0, "sha256": EMPTY}}
    if number == errno.EBADMSG:
        assert manifest.problems(step, records) == ["files/a is damaged according to its file system"]
        return
    with pytest.raises(OSError, match="Input/output error") as caught:
        manifest.problems(step, records)
    assert caught.value.filename == str(step / "files" / "a")
