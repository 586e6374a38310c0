"""Remote files are fetched once and whole, whatever networks, servers and kills do; and what cannot be is told in a line."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from llamajax.config.data import SourceConfig, is_remote
from llamajax.config.file import load_config
from llamajax.data.documents import file_groups, remote
from llamajax.data.documents.file_groups import find_groups, group_files
from llamajax.data.documents.remote import RemoteFile, listed, shown
from llamajax.data.documents.sources import Source
from llamajax.data.rows.dataset import prepare
from llamajax.errors import DataError, DiskError, EnvironmentMismatchError
from tests import runs
from tests.data.documents.web import served

TEXTS = [f"document {n}\näöü" for n in range(100)]
LINES = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


@pytest.fixture
def web():
    with served() as web:
        yield web


@pytest.fixture
def pauses(monkeypatch):
    """Those that were made before further attempts."""
    made = []
    monkeypatch.setattr(remote, "time", runs.time_with(made.append))
    return made


@pytest.fixture
def memory():
    """A store in memory, which is one in this process."""
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()


def source(tmp_path, *paths, kind: Any = "jsonl", **fields):
    config = SourceConfig(kind=kind, paths=tuple(map(str, paths)), **fields)
    return Source(config, "data.sources[0]", tmp_path / "cache")


def texts(of):
    return [document.text for document in of.documents(of.look().files)]


def copies(tmp_path):
    return sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != "lock")


def test_what_is_an_address():
    assert all(map(is_remote, ["s3://b/x", "https://h/x", "hf://datasets/a/b/**/*.parquet", "file:///x", "abfs://c@a/x"]))
    assert not any(map(is_remote, ["/x", "x.jsonl", "a/b:/c", "~/x", "a//b", "://x", "C:/x"]))


def test_every_kind_of_file_is_read_from_afar(tmp_path, web):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), sink, row_group_size=7)
    stream = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(stream, pyarrow.schema({"text": pyarrow.string()})) as writer:
        writer.write_table(pyarrow.table({"text": TEXTS}))
    web.files = {
        "/a.jsonl": LINES, "/a.jsonl.gz": gzip.compress(LINES), "/a.jsonl.zst": zstandard.compress(LINES),
        "/b.jsonl": gzip.compress(LINES), "/c.jsonl": b"\xef\xbb\xbf" + LINES,
        "/d.jsonl": b"[" + b",".join(LINES.splitlines()) + b"]",
        "/a.parquet": sink.getvalue().to_pybytes(), "/a.arrow": stream.getvalue().to_pybytes(),
    }  # fmt: skip
    for path in web.files:
        kind = path.split(".")[1]
        assert texts(source(tmp_path, web.url + path, kind=kind)) == TEXTS, path
    web.files["/a.txt"] = TEXTS[0].encode()
    assert texts(source(tmp_path, f"{web.url}/a.txt", kind="text")) == TEXTS[:1]


def test_stretches_of_a_remote_file(tmp_path, web, monkeypatch):
    monkeypatch.setattr(file_groups, "SPAN_BYTES", 1000)
    web.files["/a.jsonl"] = LINES
    found = source(tmp_path, f"{web.url}/a.jsonl")
    grouped = group_files(found, tmp_path / "cache", print)
    assert len(grouped) == -(-len(LINES) // 1000) > 3
    assert [document.text for group in grouped for document in group.documents()] == TEXTS
    assert web.fetched("/a.jsonl") == 1


def test_planning_asks_for_sizes_only_and_a_second_start_fetches_nothing(tmp_path, web):
    web.files = {"/a.jsonl": LINES, "/b.jsonl": LINES[:50]}
    web.headers = {"ETag": '"1"'}
    found = source(tmp_path, f"{web.url}/b.jsonl", f"{web.url}/a.jsonl")
    (group,) = find_groups(found)
    assert group.num_bytes == len(LINES) + 50
    assert sorted(web.requests) == [("HEAD", "/a.jsonl"), ("HEAD", "/b.jsonl")]
    first = group_files(found, tmp_path / "cache", print)
    assert web.fetched("/a.jsonl") == web.fetched("/b.jsonl") == 1
    for copy in copies(tmp_path):
        if copy.name.startswith("copy"):
            copy.unlink()
    web.requests.clear()
    assert group_files(found, tmp_path / "cache", print) == first
    assert sorted(web.requests) == [("HEAD", "/a.jsonl"), ("HEAD", "/b.jsonl")]


def test_a_run_whose_tokens_are_made_fetches_nothing(tmp_path, web):
    path = runs.write_config(tmp_path)
    web.files["/text.jsonl"] = (tmp_path / "text.jsonl").read_bytes()
    config = load_config(path)
    remote_config = config.changed({"data.sources": (SourceConfig(kind="jsonl", paths=(f"{web.url}/text.jsonl",)),)})
    first = prepare(remote_config, log=lambda line: None)
    shutil.rmtree(tmp_path / "cache" / "remote")
    web.requests.clear()
    again, local = (prepare(run, log=lambda line: None) for run in (remote_config, config))
    assert first.fingerprint == again.fingerprint == local.fingerprint
    assert set(web.requests) == {("HEAD", "/text.jsonl")}


def test_a_content_is_known_wherever_it_lies(tmp_path, web):
    web.files["/a.jsonl"] = LINES
    (tmp_path / "a.jsonl").write_bytes(LINES)
    here, there = (
        group_files(source(tmp_path, path), tmp_path / "cache", print)
        for path in (tmp_path / "a.jsonl", f"{web.url}/a.jsonl")
    )
    assert here[0].content == there[0].content


def test_another_version_is_another_file(tmp_path, web):
    web.files["/a.jsonl"], web.headers["ETag"] = b'{"text": "one"}\n', '"1"'
    found = source(tmp_path, f"{web.url}/a.jsonl")
    assert texts(found) == ["one"]
    web.files["/a.jsonl"], web.headers["ETag"] = b'{"text": "two"}\n', '"2"'
    assert texts(found) == ["two"]
    assert len([path for path in copies(tmp_path) if path.name == "copy.jsonl"]) == 2


def test_globs_of_a_store(tmp_path, memory):
    for name in ("b/2.jsonl", "b/1.jsonl", "c/d/3.jsonl", "c/x.txt"):
        memory.pipe(f"/bucket/{name}", json.dumps({"text": name}).encode())
    assert texts(source(tmp_path, "memory://bucket/**/*.jsonl", "memory://bucket/b/*")) == [
        "b/1.jsonl",
        "b/2.jsonl",
        "c/d/3.jsonl",
    ]
    assert texts(source(tmp_path, "memory://bucket/b/?.jsonl")) == ["b/1.jsonl", "b/2.jsonl"]
    with pytest.raises(DataError, match=r"data.sources\[0\].paths: 'memory://bucket/\*.gz' matches no file; correct it"):
        source(tmp_path, "memory://bucket/*.gz").look()
    with pytest.raises(DataError, match=r"^memory://bucket/none: data.sources\[0\].paths: does not exist; correct"):
        source(tmp_path, "memory://bucket/none").look()


def test_local_files_by_address_beside_others(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_text('{"text": "here"}\n')
    assert texts(source(tmp_path, f"file://{tmp_path}/a.js*", tmp_path / "b.jsonl")) == ["here", *TEXTS]


def test_a_mistake_in_a_remote_file_names_the_copy_where_it_can_be_looked_at(tmp_path, web):
    web.files["/web/a.jsonl"] = LINES[: LINES.index(b"\n") + 1] + b"\noops\n"
    with pytest.raises(DataError, match=r"is not JSON") as caught:
        texts(source(tmp_path, f"{web.url}/web/a.jsonl"))
    place = str(caught.value).partition(": ")[0]
    assert place.startswith(f"{tmp_path}/cache/remote/http/127.0.0.1_")
    assert "/web/a.jsonl-" in place
    assert place.endswith("/copy.jsonl:3")


@pytest.mark.parametrize(
    "url", ["memory://b/../../../x/a.jsonl", "memory://b/" + "d/" * 999 + "ü" * 300 + "/n\0\n.j\0l", "memory://"]
)
def test_a_copy_lies_in_the_cache_whatever_the_address_is(tmp_path, url):
    path = RemoteFile(url, 1, "", tmp_path / "cache").path
    assert path.resolve().is_relative_to(tmp_path / "cache" / "remote")
    path.parent.mkdir(parents=True)
    path.write_text("a")


@pytest.mark.parametrize("trouble", [503, 429, 500, "drop"])
def test_what_may_pass_is_tried_again(tmp_path, web, pauses, trouble):
    web.files["/a.jsonl"] = LINES
    web.trouble = lambda method, path, number: trouble if method == "GET" and number <= 2 else None
    assert texts(source(tmp_path, f"{web.url}/a.jsonl")) == TEXTS
    assert pauses == list(remote.PAUSES_S[:2])
    assert web.fetched("/a.jsonl") == 3
    assert [path.name for path in copies(tmp_path)] == ["copy.jsonl"]


def test_a_listing_that_fails_is_tried_again(tmp_path, web, pauses):
    web.files["/a.jsonl"] = LINES
    web.trouble = lambda method, path, number: 503 if number <= 2 else None
    assert [file.size for file in listed(f"{web.url}/a.jsonl", "x", tmp_path, bool)] == [len(LINES)]
    assert pauses == list(remote.PAUSES_S[:2])


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [(503, "HTTP 503 Service Unavailable"), ("drop", r"Response payload is not completed.*")],
)
def test_what_does_not_pass_may_be_started_again(tmp_path, web, pauses, trouble, reason):
    web.files["/a.jsonl"] = LINES
    web.trouble = lambda method, path, number: trouble if method == "GET" else None
    message = rf"^{web.url}/a.jsonl: data.sources\[0\].paths: cannot be fetched: {reason}, 4 times; check the network and"
    with pytest.raises(DiskError, match=message) as caught:
        texts(source(tmp_path, f"{web.url}/a.jsonl?X-Amz-Signature=secret"))
    assert caught.value.exit_code == 74
    assert "secret" not in str(caught.value)
    assert pauses == list(remote.PAUSES_S)
    assert not copies(tmp_path)


def error_of(package, name, base: type = Exception, **fields):
    """An error as a package that need not be installed has it."""
    return type("Derived", (type(name, (base,), {"__module__": f"{package}.exceptions"}),), fields)(
        "reason https://h/x?k=secret"
    )


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (error_of("botocore", "ConnectionError"), DiskError, "cannot be fetched: reason https://h/x, 4 times; check the"),
        (error_of("httpx2", "TransportError"), DiskError, "cannot be fetched: reason https://h/x, 4 times"),
        (error_of("gcsfs", "HttpError", code=502), DiskError, "cannot be fetched: HTTP 502 Bad Gateway, 4 times"),
        (TimeoutError(), DiskError, "cannot be fetched: TimeoutError, 4 times"),
        (error_of("botocore", "NoCredentialsError"), DataError, "cannot be fetched: reason https://h/x; correct or remove"),
        (
            error_of("botocore", "ClientError", OSError, response={"ResponseMetadata": {"HTTPStatusCode": 403}}),
            DataError, "may not be read: HTTP 403 Forbidden; check your credentials",
        ),
        (OSError(5, "Input/output error"), DiskError, "cannot be fetched: [Errno 5] Input/output error, 4 times"),
        (OSError("Forbidden: a"), DataError, "cannot be fetched: Forbidden: a; correct or remove the path"),
        (PermissionError("no"), DataError, "may not be read: no; check your credentials for this store"),
    ],
)  # fmt: skip
def test_errors_of_stores_are_told_apart(tmp_path, memory, monkeypatch, pauses, error, kind, told):
    memory.pipe("/bucket/a.jsonl", LINES)

    def fail(self, name, path, **options):
        raise error

    monkeypatch.setattr(type(memory), "get_file", fail)
    with pytest.raises(kind) as caught:
        texts(source(tmp_path, "memory://bucket/a.jsonl"))
    assert str(caught.value).startswith(f"memory://bucket/a.jsonl: data.sources[0].paths: {told}")
    assert len(pauses) == (3 if kind is DiskError else 0)


def test_a_server_that_is_not_there(tmp_path, pauses):
    with pytest.raises(DiskError, match=r"^http://127.0.0.1:\d+/a.jsonl: .*cannot be fetched: .*onnect.*, 4 times"):
        source(tmp_path, f"http://{runs.free_address()}/a.jsonl?key=secret").look()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "does not exist; correct or remove the path"),
        (403, "may not be read: HTTP 403 Forbidden; check your credentials for this store, or correct the path"),
        (401, "may not be read: HTTP 401 Unauthorized; check your credentials"),
        (400, "cannot be fetched: HTTP 400 Bad Request; correct or remove the path"),
    ],
)
@pytest.mark.parametrize("when", ["listed", "fetched"])
def test_what_is_refused_is_told_at_once(tmp_path, web, pauses, status, message, when):
    web.files["/a.jsonl"] = LINES
    web.trouble = lambda method, path, number: status if method == "GET" or when == "listed" else None
    with pytest.raises(DataError) as caught:
        texts(source(tmp_path, f"{web.url}/a.jsonl?token=secret"))
    assert str(caught.value).startswith(f"{web.url}/a.jsonl: data.sources[0].paths: {message}")
    assert "secret" not in str(caught.value)
    assert not pauses
    assert not copies(tmp_path)


@pytest.mark.parametrize("another", [LINES * 2, LINES.replace(b"document", b"Document")])
def test_a_file_that_changes_between_listing_and_fetching_is_refused(tmp_path, web, pauses, another):
    web.files["/a.jsonl"], web.headers["ETag"] = LINES, '"1"'
    found = source(tmp_path, f"{web.url}/a.jsonl")
    files = found.look().files
    web.files["/a.jsonl"], web.headers["ETag"] = another, '"2"'
    with pytest.raises(DataError, match=r"/a.jsonl: .*changed while it was read; run again once it no longer changes"):
        list(found.documents(files))
    assert not copies(tmp_path)
    assert not pauses
    assert len(texts(found)) == another.count(b"\n")


def test_a_size_that_is_not_told(tmp_path, web):
    web.files["/a.jsonl"] = LINES
    web.headers["Content-Encoding"] = "br"  # of which the length says nothing
    with pytest.raises(DataError, match=r"/a.jsonl: .*its server does not report its size; download it and name the copy"):
        source(tmp_path, f"{web.url}/a.jsonl").look()


def test_a_compressed_file_is_kept_as_it_lies_there(tmp_path, web):
    """Some servers say of .gz files that they are compressed for the way, and clients unpack those."""
    web.files["/a.jsonl.gz"] = gzip.compress(LINES)
    found = source(tmp_path, f"{web.url}/a.jsonl.gz")
    files = found.look().files
    web.trouble = lambda method, path, number: web.headers.update({"Content-Encoding": "" if method == "HEAD" else "gzip"})
    assert found.local(files[0]).read_bytes() == web.files["/a.jsonl.gz"]


def test_a_full_disk_is_the_disks(tmp_path, memory, monkeypatch):
    memory.pipe("/bucket/a.jsonl", LINES)

    def full(self, name, path, **options):
        raise OSError(28, os.strerror(28), path)

    found = source(tmp_path, "memory://bucket/a.jsonl")
    (file,) = found.look().files
    monkeypatch.setattr(type(memory), "get_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        found.local(file)


def test_stores_without_package_or_name(tmp_path, monkeypatch):
    def no_package(name):
        raise ImportError("Install s3fs to access S3")

    with pytest.raises(
        DataError, match=r"^nosuch://b/x: data.sources\[0\].paths: cannot be fetched: Protocol not known: nosuch"
    ):
        source(tmp_path, "nosuch://b/x").look()
    monkeypatch.setattr("fsspec.core.get_filesystem_class", no_package)
    message = r"^s3://b/x: data.sources\[0\].paths: Install s3fs to access S3; run pip install 'llamajax\[remote\]'$"
    with pytest.raises(EnvironmentMismatchError, match=message):
        source(tmp_path, "s3://b/x").look()


def test_what_may_be_a_key_is_not_shown(tmp_path):
    assert shown("https://h/x?sig=secret") == "https://h/x"
    assert shown("s3://b/?.jsonl") == "s3://b/?.jsonl"
    assert str(source(tmp_path, "https://h/x?sig=secret", "a?.jsonl")) == "jsonl: https://h/x, a?.jsonl"


def test_much_is_announced(tmp_path, memory, monkeypatch):
    monkeypatch.setattr(file_groups, "ANNOUNCED_BYTES", 1000)
    memory.pipe("/bucket/a.jsonl", LINES)
    log = []
    group_files(source(tmp_path, "memory://bucket/a.jsonl"), tmp_path / "cache", log.append)
    assert "fetching   1 files, 0.0 GB" in log


FETCH = """
import sys
from pathlib import Path
from llamajax.config.data import SourceConfig
from llamajax.data.documents.sources import Source
source = Source(SourceConfig(kind="jsonl", paths=(sys.argv[1],)), "data.sources[0]", Path(sys.argv[2]))
print(sum(1 for _ in source.documents(source.look().files)))
"""


def start(url, cache_dir):
    return subprocess.Popen([sys.executable, "-c", FETCH, url, cache_dir], cwd=runs.ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_fetch_a_file_once(tmp_path, web):
    web.files["/a.jsonl"] = LINES * 300
    web.trouble = lambda method, path, number: "slow"
    processes = [start(f"{web.url}/a.jsonl", tmp_path / "cache") for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == [f"{len(TEXTS) * 300}\n"] * 3
    assert web.fetched("/a.jsonl") == 1


def test_a_kill_leaves_nothing_half(tmp_path, web):
    web.files["/a.jsonl"] = LINES * 2000
    web.trouble = lambda method, path, number: "slow" if number == 1 else None
    with start(f"{web.url}/a.jsonl", tmp_path / "cache") as killed:
        while not any(path.stat().st_size for path in copies(tmp_path)):
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    (leftover,) = copies(tmp_path)
    assert leftover.suffix == ".tmp"
    assert start(f"{web.url}/a.jsonl", tmp_path / "cache").communicate()[0] == f"{len(TEXTS) * 2000}\n"
    assert [path.name for path in copies(tmp_path)] == ["copy.jsonl"]
