"""Models are fetched from the Hub once, with only the files that are needed, whatever happens to the network meanwhile."""

import json
import os
import pathlib
import subprocess
import sys
import time
import types

import huggingface_hub.file_download
import huggingface_hub.utils._http
import jax
import pytest
from huggingface_hub import constants

from llamajax import disk
from llamajax.config.hub import find_config, hub_model, pin
from llamajax.errors import ConfigError, DiskError
from llamajax.processes import peers
from llamajax.training.beginning import with_commit
from llamajax.weights import download
from llamajax.weights.download import fetched
from llamajax.weights.open_model import open_pretrained
from llamajax.weights.origin import models_tokenizer
from tests import hub, runs
from tests.config.test_run import config
from tests.converters.models import read_weights, shard, tiny, write_model
from tests.hub import FIRST, SECOND
from tests.tiny import single_device_mesh

MODEL = tiny(num_kv_heads=2)
OTHERS = {
    "README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"MIT", "tokenizer_config.json": b"{}", "chat_template.jinja": b"T",
    "pytorch_model.bin": b"pickle", "original/consolidated.00.pth": b"pickle", "consolidated.safetensors": b"again",
    "onnx/model.onnx": b"x", "modeling_tiny.py": b"raise SystemExit", "tf_model.h5": b"x", ".gitattributes": b"",
}  # fmt: skip
"""Beside config.json and weights, as repositories have it."""
SMALL = ["LICENSE", "README.md", "chat_template.jinja", "config.json", "tokenizer_config.json"]
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, pathlib.Path]:
    path = tmp_path_factory.mktemp("models")
    for name in ("single", "sharded"):
        write_model(path / name, MODEL)
    shard(path / "sharded")
    return {name: path / name for name in ("single", "sharded")}


@pytest.fixture
def web(directories, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSES_S", (0, 0, 0))
    for module in (huggingface_hub.file_download, huggingface_hub.utils._http):
        monkeypatch.setattr(module, "time", runs.time_with(lambda _: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    with hub.served() as found:
        hub.use(monkeypatch, found.url, tmp_path / "cache")
        for name, directory in directories.items():
            found.add(f"org/{name}", FIRST, directory, OTHERS)
        yield found


def test_a_model_is_read_as_from_a_directory(web, directories, capsys):
    with jax.set_mesh(single_device_mesh()):
        found = open_pretrained("hf://org/sharded")
    assert found.tensors is not None
    assert found.tensors.keys() == read_weights(directories["sharded"]).keys()
    assert {name: (found.source / name).read_bytes() for name in SHARDS} == {
        name: (directories["sharded"] / name).read_bytes() for name in SHARDS
    }
    assert found.about.startswith(f"hf://org/sharded@{FIRST}: Hugging Face Llama of ")
    assert found.hf is not None
    assert (found.hf["source"], found.hf["license"]) == ("org/sharded", "mit")
    assert web.fetched() == sorted([*SMALL, INDEX, *SHARDS])
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in told] == ["fetching", "fetched"] * 2
    assert f"hf://org/sharded@{FIRST}: 3 files, " in told[2]
    before = len(web.requests)
    assert open_pretrained(f"hf://org/sharded@{FIRST}").source == found.source
    assert len(web.requests) == before
    assert capsys.readouterr().err == ""


def test_a_second_copy_of_the_weights_is_not_fetched(web, directories):
    web.commits["org/single"][FIRST][INDEX] = (directories["sharded"] / INDEX).read_bytes()
    directory = fetched("hf://org/single")
    assert sorted(path.name for path in directory.iterdir()) == sorted([*SMALL, "model.safetensors"])


def test_a_tokenizer_needs_no_weights(web):
    assert models_tokenizer("hf://org/single") is None
    assert web.fetched() == SMALL


def test_a_connection_that_is_cut_goes_on_where_it_was(web, directories):
    """Nor does a failure that passes end the fetch."""
    cut = "/org/single/resolve/" + FIRST + "/model.safetensors"

    def trouble(method, path, number):
        if path == cut and method == "GET":
            return {1: "drop", 2: "drop"}.get(number)
        return 503 if path.startswith("/api/models/org/") and number == 1 else None

    web.trouble = trouble
    content = (directories["single"] / "model.safetensors").read_bytes()
    assert (fetched("hf://org/single") / "model.safetensors").read_bytes() == content
    (first, second) = web.ranges
    assert 0 < int(first.removeprefix("bytes=").rstrip("-")) <= len(content) // 2
    assert int(second.removeprefix("bytes=").rstrip("-")) > len(content) // 2


def test_a_hub_that_fails_for_long_ends_with_one_line_and_keeps_what_came(web):
    web.trouble = lambda method, path, number: 500 if path.endswith(SHARDS[2]) else None
    rule = f"^hf://org/sharded@{FIRST}: cannot be fetched from {web.url}: HTTP 500; run the same command again$"
    with pytest.raises(DiskError, match=rule):
        fetched("hf://org/sharded")
    web.trouble = lambda method, path, number: None
    web.requests.clear()
    fetched("hf://org/sharded")
    assert not {*web.fetched()} & {*SMALL, INDEX}
    assert SHARDS[2] in web.fetched()


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({"pytorch_model.bin": b"x"}, "has neither model.safetensors nor .*; pickles can run code and are not read"),
        ({"model.gguf": b"x"}, "has neither model.safetensors nor .*; name a model of transformers"),
        ({INDEX: b'{"weight_map": {"a": "b.safetensors"}}'}, f"{INDEX} names b.safetensors, which the model lacks"),
        ({INDEX: b'{"weight_map": {"a": "../b.safetensors"}}'}, "must name a .safetensors file of this directory"),
    ],
)
def test_models_without_readable_weights_are_refused(files, rule, web):
    described = web.commits["org/single"][FIRST]["config.json"]
    web.commits["org/other"], web.branches["org/other"] = {FIRST: {"config.json": described} | files}, {"main": FIRST}
    with pytest.raises(ConfigError, match=rule) as error:
        fetched("hf://org/other")
    assert "\n" not in str(error.value)
    assert not [name for name in web.fetched() if name.endswith((".bin", ".gguf"))]


def test_the_disk_must_have_room(web, monkeypatch):
    fetched("hf://org/single", weights=False)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5))
    with pytest.raises(DiskError, match=r"are to be fetched, but only 5 B are free on the disk of .*/cache; make room, or"):
        fetched("hf://org/single")
    assert "model.safetensors" not in web.fetched()


def test_what_is_complete_needs_no_network_and_what_is_not_says_so(web, monkeypatch):
    fetched("hf://org/single")
    find_config(hub_model("hf://org/sharded"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert (fetched("hf://org/single") / "model.safetensors").exists()
    with pytest.raises(ConfigError, match=r"is not complete in .*/cache, and HF_HUB_OFFLINE forbids fetching it"):
        fetched("hf://org/sharded")


def test_a_cache_of_other_programs_is_used_and_completed(web, tmp_path, monkeypatch):
    """Without leave to write, what it has must do; it needs no lock."""
    huggingface_hub.hf_hub_download("org/single", "model.safetensors", revision="main")
    huggingface_hub.hf_hub_download("org/single", "config.json", revision="main")
    monkeypatch.setattr(disk, "make_folder", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert sorted(path.name for path in fetched("hf://org/single").iterdir()) == ["config.json", "model.safetensors"]
    monkeypatch.undo()
    hub.use(monkeypatch, web.url, tmp_path / "cache")
    assert {path.name for path in fetched("hf://org/single").iterdir()} == {*SMALL, "model.safetensors"}
    assert web.fetched().count("model.safetensors") == 1


def test_a_new_run_takes_the_commit_of_now_and_keeps_it(web, directories, tmp_path, monkeypatch):
    run = config(init_from="hf://org/single")
    begun = with_commit(run, tmp_path / "run")
    assert begun.init_from == f"hf://org/single@{FIRST}"
    web.add("org/single", SECOND, directories["single"])
    assert with_commit(begun, tmp_path / "run") == begun
    assert with_commit(run, tmp_path / "run").init_from == f"hf://org/single@{SECOND}"
    monkeypatch.setattr(peers, "everyones", lambda value, about="": [f"hf://org/single@{FIRST}", None])
    monkeypatch.setattr(peers, "rank", lambda: 1)
    before = len(web.requests)
    assert download.pinned("hf://org/single") == f"hf://org/single@{FIRST}"  # as process 0 has it
    assert len(web.requests) == before
    (tmp_path / "run/checkpoints/5").mkdir(parents=True)
    monkeypatch.undo()
    assert pin(str(begun.init_from)) == begun.init_from


PROGRAM = """
import sys
from llamajax.weights.download import fetched
print(fetched("hf://org/sharded"))
"""


@pytest.mark.slow
def test_of_several_processes_one_fetches_and_the_others_wait(web, tmp_path):
    """Also where the first one is killed."""
    env = os.environ | {"HF_ENDPOINT": web.url, "HF_HUB_CACHE": str(tmp_path / "cache")}
    env |= {"PYTHONPATH": str(runs.ROOT), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def start(number: int) -> subprocess.Popen[str]:
        with (tmp_path / f"{number}.err").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            )

    def told(number: int) -> str:
        return (tmp_path / f"{number}.err").read_text()

    def trouble(method, path, number):
        if path.endswith(SHARDS[0]) and method == "GET" and number == 1:
            time.sleep(60)

    web.trouble = trouble
    first = start(0)
    runs.wait_until(lambda: SHARDS[0] in web.fetched(), [first])
    others = [start(1), start(2)]
    runs.wait_until(lambda: all("waiting    another process fetches" in told(number) for number in (1, 2)), others)
    first.kill()
    outputs = [process.communicate(timeout=120)[0] for process in (*others, first)]
    assert [process.returncode for process in others] == [0, 0], told(1) + told(2)
    assert outputs[0] == outputs[1]
    directory = pathlib.Path(outputs[0].strip())
    assert {path.name for path in directory.iterdir()} == {*SMALL, INDEX, *SHARDS}
    assert web.fetched().count(SHARDS[0]) == 2
    assert sorted("fetching" in told(number) for number in (1, 2)) == [False, True]
    record = next((tmp_path / "cache/.locks/models--org--sharded").glob("llamajax-*/*-all.json"))
    assert sorted(json.loads(record.read_text())) == sorted([*SMALL, INDEX, *SHARDS])
