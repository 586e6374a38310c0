"""Files are hashed once, by several threads, and named when they cannot be read."""

import gzip
import itertools
import json
import os
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import fsspec
import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents import file_groups
from llamajax.data.documents.file_groups import find_groups, group_files, known_group
from llamajax.data.documents.sources import Source
from llamajax.errors import DataError, DiskError
from tests import runs


def grouped(*paths, cache_dir, log=print):
    source = Source(SourceConfig(kind="text", paths=tuple(map(str, paths))), "data.sources[0]")
    return group_files(source, cache_dir, log)


def content(*paths, cache_dir):
    (group,) = grouped(*paths, cache_dir=cache_dir)
    return group.content


def age(path, seconds):
    """Sets the modification time back; the change time follows the clock and cannot be set."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def hashed(monkeypatch):
    """The groups of files that are read to be hashed."""
    hashed, hash_group = [], file_groups._hash
    monkeypatch.setattr(
        file_groups,
        "_hash",
        lambda group, stop: hashed.append(list(group.files)) or hash_group(group, stop),
    )
    return hashed


def test_unchanged_files_are_hashed_once(tmp_path, monkeypatch, hashed):
    files = [tmp_path / "a", tmp_path / "b"]
    for path in files:
        path.write_text(path.name)
    cache_dir = tmp_path / "cache"

    first = content(*files, cache_dir=cache_dir)
    assert content(*files, cache_dir=cache_dir) == first
    assert len(hashed) == 2, "files that were changed just now may still change unseen"

    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    assert [content(*files, cache_dir=cache_dir) for _ in range(3)] == [first] * 3
    assert len(hashed) == 3

    files[1].write_text("B")  # same size
    second = content(*files, cache_dir=cache_dir)
    assert second != first
    age(files[1], 1000)
    assert content(*files, cache_dir=cache_dir) == second
    (tmp_path / "0").write_text("B")
    assert content(tmp_path / "0", files[0], cache_dir=cache_dir) != second  # another order


def test_a_file_of_the_future_is_hashed_once(tmp_path, monkeypatch, hashed):
    """Its time does not tell when it was changed, but a wait does."""
    waits = []
    monkeypatch.setattr(file_groups, "time", runs.time_with(waits.append))
    (tmp_path / "a").write_text("a")
    age(tmp_path / "a", -1000)
    first = content(tmp_path / "a", cache_dir=tmp_path / "cache")
    assert [content(tmp_path / "a", cache_dir=tmp_path / "cache") for _ in range(3)] == [first] * 3
    assert len(hashed) == 1
    assert waits == [file_groups.UNSETTLED_S]


def test_a_damaged_hash_is_named_and_made_again(tmp_path, monkeypatch, hashed):
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    (tmp_path / "a").write_text("a")
    first = content(tmp_path / "a", cache_dir=tmp_path / "cache")
    (path,) = (tmp_path / "cache").rglob("hash")
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        hashed.clear()
        log = []
        (group,) = grouped(tmp_path / "a", cache_dir=tmp_path / "cache", log=log.append)
        assert (group.content, len(hashed)) == (first, 1)
        assert log == [f"damaged    {path}; hashing the files again"]
        assert path.read_bytes() == whole


def test_a_new_file_leaves_the_hashes_of_other_groups(tmp_path, monkeypatch, hashed):
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 10)
    for name in "abc":
        (tmp_path / name).write_text(name * 8)
    before = grouped(tmp_path / "?", cache_dir=tmp_path / "cache")
    (tmp_path / "d").write_text("d" * 8)
    after = grouped(tmp_path / "?", cache_dir=tmp_path / "cache")
    assert after[:3] == before
    assert len(hashed) == 4
    assert len({group.content for group in after}) == 4


def test_compressed_files_are_work_of_their_own_and_small_ones_together(tmp_path, monkeypatch):
    """A compressed file cannot be cut: several processes take a file each."""
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 1000)
    monkeypatch.setattr(file_groups, "SPAN_BYTES", 1000)
    sizes = {"a.jsonl.gz": 1500, "b.jsonl.zst": 5000, "c.jsonl": 1500, "d.jsonl.gz": 400, "e.jsonl.zst": 500, "f.jsonl": 300}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    source = Source(SourceConfig(kind="jsonl", paths=(str(tmp_path / "*"),)), "data.sources[0]")
    found = [
        ("".join(path.name[0] for path in group.files if isinstance(path, Path)), group.num_bytes)
        for group in find_groups(source)
    ]
    assert found == [("a", 1500), ("b", 5000), ("c", 1000), ("c", 500), ("de", 900), ("f", 300)]


def test_the_hash_is_of_the_content_not_of_the_place(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a").write_text("same")
    assert content(tmp_path / "x/a", cache_dir=tmp_path / "c") == content(tmp_path / "y/a", cache_dir=tmp_path / "c")


def test_what_is_hashed_stays_the_same(tmp_path):
    """A golden value: another would make every cache and every checkpoint's fingerprint of the data void."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    golden = "1e5937c63a8cc6ae0a109a10b7019646ea16d38f099636b8c2991e01c1a9b8f1"
    assert content(tmp_path / "a.txt", tmp_path / "b.txt", cache_dir=tmp_path / "cache") == golden


def test_keys_of_files_that_were_always_read_stay_the_same(tmp_path, monkeypatch):
    """Golden values; another reading of a file is another key: of a byte-order mark, an array, a name that is wrong."""
    lines = b"".join(b'{"text": "t%d"}\n' % n for n in range(20))
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "c.txt").write_bytes(b"[text]")
    zipped = bytes.fromhex("1f8b0800000000000203ab562a49ad2851b252504a54aae50200bdd22a200e000000")
    (tmp_path / "b.jsonl.gz").write_bytes(zipped)

    def keys(kind, name, content=None):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        source = Source(SourceConfig(kind=kind, paths=(str(tmp_path / name),)), "data.sources[0]")
        return [group.content for group in group_files(source, tmp_path / "cache", print)]

    assert keys("jsonl", "a.jsonl") == ["fc060d1a32056082c05bfba86dd4e5f0df22abf858a1ab76182b5ac2a83fac71"]
    assert keys("chat", "a.jsonl") == ["db44e4f55f0cf32254a1ef2e46c1082122882997909ac1a14842719db8e2ff9d"]
    assert keys("text", "c.txt") == ["c0fcd3f9bb955d9ad0b6c865d47de54e2d28c69577d862ef096cb6621ef20757"]
    assert keys("jsonl", "b.jsonl.gz") == ["a80e70c8ee6b45ca2912cb2017f03dd4f10e32d2af935270d6f15eb22f410c21"]
    contents = [lines, b"\xef\xbb\xbf" + lines, zipped]
    different = {keys(kind, "d.txt", content)[0] for kind in ("text", "jsonl", "chat") for content in contents}
    assert len(different) == 9
    for name in ("SPAN_BYTES", "GROUP_BYTES"):
        monkeypatch.setattr(file_groups, name, 200)
    assert keys("jsonl", "a.jsonl") == [
        "a219bbcb9ef2664bdf1cf40cebced40c4d2e4f34d2742d3a8263148162f8ce0d",
        "97b3eaa48db354ab857b97ee7351e6cd5deb4665727f9b407d200bbd0e3ca81b",
    ]
    assert (
        keys("jsonl", "a.jsonl", b"\xef\xbb\xbf" + lines)[0]
        != "a219bbcb9ef2664bdf1cf40cebced40c4d2e4f34d2742d3a8263148162f8ce0d"
    )


@pytest.mark.parametrize("form", ["array", "gzip", "mark"])
@pytest.mark.parametrize("kind", ["jsonl", "chat"])
def test_a_large_file_that_its_name_does_not_describe_is_read_once(tmp_path, monkeypatch, form, kind):
    """All that cannot be cut begins in the first stretch."""
    for name in ("SPAN_BYTES", "GROUP_BYTES"):
        monkeypatch.setattr(file_groups, name, 100)
    texts = [os.urandom(30).hex() for _ in range(40)]
    field = (lambda text: {"text": text}) if kind == "jsonl" else (lambda text: {"instruction": "", "output": text})
    lines = b"".join(json.dumps(field(text)).encode() + b"\n" for text in texts)
    content = {"array": json.dumps(list(map(field, texts)), indent=1).encode(), "gzip": gzip.compress(lines)}
    (tmp_path / "a.json").write_bytes(content.get(form, b"\xef\xbb\xbf" + lines))
    config = SourceConfig(
        kind=kind, paths=(str(tmp_path / "a.json"),), chat_format="alpaca" if kind == "chat" else "messages"
    )
    found = group_files(Source(config, "data.sources[0]"), tmp_path / "cache", print)
    assert len(found) > 3
    of_groups = [[document.text.strip() for document in group.documents()] for group in found]
    assert [text for of_group in of_groups for text in of_group] == texts
    assert (len(of_groups[0]) == len(texts)) == (form != "mark")


def test_groups_are_hashed_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 1)
    together, hash_group = threading.Barrier(2, timeout=20), file_groups._hash
    monkeypatch.setattr(file_groups, "_hash", lambda *args: (together.wait(), hash_group(*args))[1])
    for name in "abcd":
        (tmp_path / name).write_text(name)
    found = grouped(tmp_path / "?", cache_dir=tmp_path / "cache")
    monkeypatch.undo()
    one_by_one = [content(tmp_path / name, cache_dir=tmp_path / "cache") for name in "abcd"]
    assert [group.content for group in found] == one_by_one


def test_remote_files_are_fetched_at_the_same_time(tmp_path, monkeypatch):
    """Also those of which every stretch is a group."""
    monkeypatch.setattr(file_groups, "SPAN_BYTES", 10)
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 10)
    store = fsspec.filesystem("memory")
    for name in "ab":
        store.pipe(f"{tmp_path}/{name}", b'{"text": "a"}\n' * 20)
    together, get_file = threading.Barrier(2, timeout=20), type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda *args, **options: (together.wait(), get_file(*args, **options))[1])
    source = Source(SourceConfig(kind="jsonl", paths=(f"memory://{tmp_path}/?",)), "data.sources[0]", tmp_path / "cache")
    assert len(group_files(source, tmp_path / "cache", print)) == 2 * 28


def test_hashing_stops_in_the_middle_of_a_file_when_it_is_no_longer_wanted(tmp_path):
    (tmp_path / "a").write_text("a")
    stop = threading.Event()
    stop.set()
    source = Source(SourceConfig(kind="text", paths=(str(tmp_path / "a"),)), "data.sources[0]")
    (group,) = find_groups(source)
    with pytest.raises(CancelledError):
        file_groups._hash(group, stop)


def test_fetching_stops_in_the_middle_of_a_file_when_it_is_no_longer_wanted(tmp_path):
    stop = threading.Event()
    stop.set()
    address = f"memory://{tmp_path}/a"
    fsspec.filesystem("memory").pipe(address, b"a")
    source = Source(SourceConfig(kind="text", paths=(address,)), "data.sources[0]", tmp_path / "cache")
    (group,) = find_groups(source)
    with pytest.raises(CancelledError):
        file_groups._hash(group, stop)
    assert not list((tmp_path / "cache").rglob("copy*"))
    assert [document.text for document in source.documents(group.files)] == ["a"]


def test_an_unreadable_file_is_named_and_what_was_hashed_before_it_is_kept(tmp_path, monkeypatch, hashed):
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 0)
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").symlink_to("/proc/self/mem")  # its start is not mapped: reading it is an I/O error
    message = rf"^{tmp_path}/b: data.sources\[0\].paths: cannot be read: Input/output error; check the disk"
    for _ in range(2):
        with pytest.raises(DiskError, match=message):
            grouped(tmp_path / "a", tmp_path / "b", cache_dir=tmp_path / "cache")
    assert hashed.count([tmp_path / "a"]) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hash")]


def test_a_file_whose_state_cannot_be_asked_is_named(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("a")
    (group,) = grouped(tmp_path / "a", cache_dir=tmp_path / "cache")

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(file_groups, "file_identity", denied)
    message = r"/a: data.sources\[0\].paths: cannot be read: Permission denied"
    with pytest.raises(DataError, match=message):
        group.check_unchanged()
    with pytest.raises(DataError, match=message):
        grouped(tmp_path / "a", cache_dir=tmp_path / "cache")


def test_a_hash_is_kept_although_a_clock_is_ahead(tmp_path):
    """A file server's, by a second or so."""
    path = tmp_path / "a"
    path.write_text("a")
    age(path, -0.5)
    source = Source(SourceConfig(kind="text", paths=(str(path),)), "data.sources[0]")
    (group,) = find_groups(source)
    hashed = file_groups.hashed(group, tmp_path / "cache")
    assert known_group(group, tmp_path / "cache") == hashed


def test_many_small_files_are_put_together_quickly(tmp_path, monkeypatch):
    monkeypatch.setattr(file_groups, "GROUP_BYTES", 10)
    for number in range(25):
        (tmp_path / f"{number:02d}").write_text("x" * (number % 5))
    source = Source(SourceConfig(kind="text", paths=(str(tmp_path / "*"),)), "data.sources[0]")
    found = find_groups(source)
    assert [path for group in found for path in group.files] == sorted(tmp_path.iterdir())
    assert all(group.num_bytes <= 10 for group in found)
    assert all(a.num_bytes + (b.identities[0].size) > 10 for a, b in itertools.pairwise(found)), "groups are full"
