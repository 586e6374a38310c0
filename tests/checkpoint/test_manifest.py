"""A manifest is believed as far as it speaks of files of its directory; deleting a step deletes nothing else."""

import os
import shutil

import pytest

from llamajax.checkpoint import manifest, retention
from llamajax.errors import CheckpointError

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
