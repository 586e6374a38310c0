"""Directories stand for the files of their kind, and what systems write beside files is no file of a source."""

import errno
import json
import os

import fsspec
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents import file_groups
from llamajax.data.documents.file_groups import group_files, known_groups
from llamajax.data.documents.sources import Source
from llamajax.errors import DataError, DiskError

UNFINISHED = ["x/_temporary/0/a.jsonl", "x/_delta_log/0.json", "_temporary/t.parquet", "_temporary/t.idx"]
NAMES = ["b.txt", "a.jsonl", "x/a.JSONL.GZ", "x/y/c.json", "x/d.ndjson.xz", "x/table.parquet", "x/t.idx", "README"]
BESIDE = [
    "._a.jsonl", "x/._c.json", ".DS_Store", "_SUCCESS", "x/.table.parquet.crc", "x/y/c.json.crc", "x/_started_17",
    "_committed_17", "_metadata", "x/_common_metadata",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name in [*NAMES, *BESIDE, *UNFINISHED, ".hidden/a.jsonl", "x/.a.jsonl"]:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"text": "{name}"}}')
    return tmp_path / "data"


def source(kind, *paths):
    return Source(SourceConfig(kind=kind, paths=tuple(map(str, paths))), "data.sources[0]")


def texts(of):
    return [document.text for document in of.documents(of.look().files)]


def found(kind, *paths):
    return source(kind, *paths).look()


def test_text_files_are_sorted_and_each_is_a_document(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in zip(["c.txt", "a.txt", "sub/b.txt", "d.txt", "e.md"], "12345", strict=True):
        (tmp_path / name).write_text(text)
    of = source("text", tmp_path / "**", tmp_path / "c.txt")
    assert [path.name for path in of.files()] == ["a.txt", "c.txt", "d.txt", "e.md", "b.txt"]
    assert texts(of) == ["2", "1", "4", "5", "3"]


def test_a_name_with_brackets_is_a_file_if_there_is_one(tmp_path):
    (tmp_path / "[a].txt").write_text("brackets")
    assert texts(source("text", tmp_path / "[a].txt")) == ["brackets"]


def test_a_file_of_several_names_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "c.txt").hardlink_to(tmp_path / "a.txt")
    (tmp_path / "sub" / "d.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "e.txt").write_text("one")  # the same text is another file
    of = source("text", "**/*.txt", tmp_path / "*.txt", "./a.txt", "sub/../a.txt")
    assert texts(of) == ["one", "one"]
    assert [path.name for path in of.files()] == ["a.txt", "e.txt"]


def test_paths_that_are_no_files(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    for name, message in {
        "nowhere": "No such file or directory; correct or remove the path",
        "folder": r"folder: data.sources\[0\].paths: is a directory without files; correct the path",
        "dangling": "No such file",
        "fifo": "is not a regular file",
        "*.txt": r"data.sources\[0\].paths: '.*\*.txt' matches no file; correct it",
    }.items():
        with pytest.raises(DataError, match=message):
            source("text", tmp_path / name).files()


def test_a_pattern_on_a_disk_that_fails_does_not_match_less(tmp_path, monkeypatch):
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text(name)
    of = source("text", tmp_path / "*" / "*.txt")
    assert texts(of) == ["b", "c"]
    listdir = os.listdir

    def fail(asked):
        if os.path.normpath(asked) == str(tmp_path / "c"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), asked)
        return listdir(asked)

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(DiskError, match=r"/\*/\*.txt: data.sources\[0\].paths: cannot be read: Input/output error; check"):
        of.files()


RECORDS = ["a.jsonl", "x/a.JSONL.GZ", "x/d.ndjson.xz", "x/y/c.json"]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("jsonl", RECORDS),
        ("chat", [*RECORDS, "x/table.parquet"]),
        ("parquet", ["x/table.parquet"]),
        ("megatron", ["x/t.idx"]),
        ("text", NAMES),
    ],
)
def test_a_directory_stands_for_the_files_of_its_kind_below_it(folder, kind, names):
    of_kind = found(kind, folder)
    assert of_kind.files == sorted(folder / name for name in names)
    assert of_kind.num_left_out == len(BESIDE)
    assert of_kind.others == sorted(folder / name for name in {*NAMES} - {*names})
    (folder / "z").symlink_to("x")
    assert found(kind, f"{folder}/").files == of_kind.files, "its files have names already"
    (folder.parent / "other").mkdir()
    (folder.parent / "other" / "link").symlink_to(folder)
    assert found(kind, folder.parent / "other").files == sorted(folder.parent / "other" / "link" / name for name in names)


@pytest.mark.parametrize("pattern", ["**/*", "**/.*", "**/*c*", "x/._c.json", "_SUCCESS"])
def test_what_systems_write_beside_files_is_left_out_whatever_names_it(folder, pattern):
    both = found("text", folder / pattern, folder / "a.jsonl")
    assert both.num_left_out >= 1
    assert folder / "a.jsonl" in both.files
    assert not {folder / name for name in BESIDE} & set(both.files)


def test_nothing_but_such_files_is_no_source(folder):
    with pytest.raises(DataError, match=r"^data.sources\[0\].paths: all files are ones that systems write beside data"):
        found("jsonl", folder / "x" / "._c.json", folder / "_SUCCESS")
    (folder / "empty").mkdir()
    message = r"^.*/empty: data.sources\[0\].paths: is a directory without files of kind=jsonl \(\*.jsonl, \*.nd.*\)"
    with pytest.raises(DataError, match=message):
        found("jsonl", folder / "empty")


def test_they_are_counted_at_every_start(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    of = source("text", folder)
    log = []
    group_files(of, tmp_path / "cache", log.append)
    assert known_groups(of, tmp_path / "cache", log.append) is not None
    names = "._*, .DS_Store, _SUCCESS, *.crc, _started_*, _committed_*, _metadata, _common_metadata"
    assert log == [f"left out   data.sources[0]: 10 files that systems write beside data ({names})"] * 2


def test_files_of_other_names_in_a_directory_are_told(folder, tmp_path):
    """But for those that are named besides, and for tokens beside their index."""
    (folder / "x/t.bin").write_text("")
    log = []
    of = source("jsonl", folder / "x/y", folder / "x")
    group_files(of, tmp_path / "cache", log.append)
    others = "3 files of other names in a directory"
    assert [line for line in log if "of other" in line] == [
        f"left out   data.sources[0]: {others}, such as {folder}/x/t.bin; name those to read"
    ]
    named = found("jsonl", folder / "x", folder / "x/t.idx", folder / "x/table.parquet")
    assert named.others == [folder / "x/t.bin"]
    assert found("megatron", folder / "x").others == [
        folder / f"x/{name}" for name in ("a.JSONL.GZ", "d.ndjson.xz", "table.parquet", "y/c.json")
    ]


def test_directories_that_a_pattern_matches_are_told(folder, tmp_path):
    """Their contents are not meant: `*` matches in one directory."""
    of = source("jsonl", folder / "[ax]*", folder / "**/c.json")
    assert of.look().files == [folder / "a.jsonl", folder / "x/y/c.json"]
    log = []
    group_files(of, tmp_path / "cache", log.append)
    beside = f"1 directories that match a pattern, such as {folder}/x; name them to use them"
    assert log == [f"left out   data.sources[0]: {beside}"]
    with pytest.raises(
        DataError, match=r"^data.sources\[0\].paths: '.*/x\*' matches only directories, such as .*/x; write '"
    ):
        found("jsonl", f"{folder}/x*")
    assert found("jsonl", f"{folder}/x*/**/*.json").files == [folder / "x/y/c.json"]


def test_a_directory_on_a_disk_that_fails_does_not_have_fewer_files(folder, monkeypatch):
    scandir = os.scandir

    def fail(asked):
        if os.path.normpath(asked) == str(folder / "x"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(asked))
        return scandir(asked)

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(DiskError, match=r"/data: data.sources\[0\].paths: cannot be read: Input/output error; check"):
        found("jsonl", folder)


def test_a_directory_of_a_store_stands_for_the_files_of_its_kind_below_it(tmp_path):
    """And what systems write beside files is left out, as of local ones."""
    names = [
        "1.jsonl",
        "x/y/2.json",
        "x/_temporary/2.json",
        "x/3.JSONL",
        "x/._3.jsonl",
        "_SUCCESS",
        "x/.1.jsonl.crc",
        ".hidden/4.jsonl",
        "x/5.txt",
    ]
    store = fsspec.filesystem("memory")
    for name in names:
        store.pipe(f"{tmp_path}/{name}", json.dumps({"text": name}).encode())

    def remote(kind, *paths):
        addresses = tuple(f"memory://{tmp_path}/{path}" for path in paths)
        return Source(SourceConfig(kind=kind, paths=addresses), "data.sources[0]", tmp_path / "cache")

    found = remote("jsonl", "")
    assert texts(found) == ["1.jsonl", "x/3.JSONL", "x/y/2.json"]
    assert found.look().num_left_out == 3
    assert list(map(str, found.look().others)) == ["x/5.txt"]
    assert texts(remote("jsonl", "x/*.jsonl", "1.jsonl")) == ["1.jsonl"]
    with pytest.raises(DataError, match=r"data.sources\[0\].paths: 'memory://.*/.hidden' matches no file"):
        remote("parquet", ".hidden").look()
    store.rm(str(tmp_path), recursive=True)
