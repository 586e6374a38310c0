"""Models on the Hugging Face Hub as configurations name them: addresses, commits, and what is refused in one line."""

import json
import pathlib
import shutil
import sys

import pytest
from huggingface_hub import constants

from llamajax.config.file import load_config
from llamajax.config.generate import GenerateConfig
from llamajax.config.hub import find_config, hub_model, is_pin_of, pin
from llamajax.config.inherited import INHERITED
from llamajax.errors import ConfigError, DiskError, EnvironmentMismatchError
from tests import hub, runs
from tests.converters.models import tiny, write_model
from tests.hub import FIRST, SECOND, Hub

MODEL = tiny(num_kv_heads=2, rope_theta=5e5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("model") / "hf"
    write_model(path, MODEL)
    return path


@pytest.fixture
def web(directory, tmp_path, monkeypatch):
    with hub.served() as found:
        hub.use(monkeypatch, found.url, tmp_path / "cache")
        found.add("org/tiny", FIRST, directory)
        yield found


def model_of(directory: pathlib.Path, init_from: str, model: object = None, *overrides: str):
    path = runs.write_config(directory)
    body = json.loads(path.read_text()) | {"init_from": init_from, "model": model}
    path.write_text(json.dumps(body))
    return load_config(path, overrides).model


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("hf://org/name", ("org/name", "main", None)),
        ("hf://o.r-g_/Name.1-B@v1.0/x", ("o.r-g_/Name.1-B", "v1.0/x", None)),
        (f"hf://org/name@{FIRST}", ("org/name", FIRST, FIRST)),
        (f"hf://org/name@main@{FIRST}", ("org/name", "main", FIRST)),
    ],
)
def test_addresses(address, parts):
    model = hub_model(address)
    assert (model.repository, model.revision, model.commit) == parts
    assert str(model) == address


@pytest.mark.parametrize(
    "address",
    ["hf://org", "hf://datasets/org/name", "hf://org/name/config.json", "hf://org/name@", "hf://org/a--b", "hf://org/..",
     "hf:///name", "hf://org/na me", "hf://org/name@a b"],
)  # fmt: skip
def test_addresses_in_another_form_are_refused(address):
    with pytest.raises(
        ConfigError, match=r"^hf://.* must be hf://ORG/NAME or hf://ORG/NAME@REVISION, such as hf://meta-llama/"
    ):
        hub_model(address)
    with pytest.raises(ConfigError, match=r"^model: hf://.* must be hf://ORG/NAME"):
        GenerateConfig(model=address, prompt=("a",))


def test_an_address_in_another_form_is_told_where_it_is(tmp_path):
    for model in (None, vars(MODEL) | {"rope_scaling": {}, "experts": {}}):
        with pytest.raises(ConfigError, match=r"^/.*/run.yaml:1: init_from: hf://org must be hf://ORG/NAME or .*-8B$"):
            model_of(tmp_path, "hf://org", model)


def test_only_the_file_that_describes_the_model_is_fetched_and_only_once(web, tmp_path):
    found = model_of(tmp_path, "hf://org/tiny", {"max_seq_len": 64})
    assert {key: getattr(found, key) for key in INHERITED} == {key: getattr(MODEL, key) for key in INHERITED} | {
        "max_seq_len": 64
    }
    assert web.fetched() == ["config.json"]
    before = len(web.requests)
    model_of(tmp_path, "hf://org/tiny")
    assert [method for method, _ in web.requests[before:]] == ["HEAD"]  # has the branch moved?
    model_of(tmp_path, f"hf://org/tiny@{FIRST}")
    assert len(web.requests) == before + 1


def test_a_branch_is_that_of_now_and_a_commit_stays(web, directory, tmp_path):
    assert pin("hf://org/tiny") == f"hf://org/tiny@{FIRST}"
    shutil.copytree(directory, tmp_path / "next")
    body = json.loads((directory / "config.json").read_text()) | {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7.0}}
    (tmp_path / "next/config.json").write_text(json.dumps(body))
    web.add("org/tiny", SECOND, tmp_path / "next")
    assert pin("hf://org/tiny@main") == f"hf://org/tiny@main@{SECOND}"
    assert pin(f"hf://org/tiny@{FIRST}") == f"hf://org/tiny@{FIRST}"
    assert is_pin_of(pin("hf://org/tiny"), "hf://org/tiny")
    assert not is_pin_of(pin("hf://org/tiny@main"), "hf://org/tiny")
    assert find_config(hub_model(f"hf://org/tiny@main@{FIRST}")).parent.name == FIRST


def test_a_run_that_was_begun_keeps_its_commit(web, directory, tmp_path):
    begun = tmp_path / "run/checkpoints/5"
    begun.mkdir(parents=True)
    model = vars(MODEL) | {"rope_scaling": {}, "experts": {}}
    stored = {"init_from": f"hf://org/tiny@{FIRST}", "model": model}
    (begun / "meta.json").write_text(json.dumps({"config": stored}))
    web.add("org/tiny", SECOND, directory)
    path = runs.write_config(tmp_path)
    body = json.loads(path.read_text())
    for own in ({}, model, {"preset": "llama-2-7b"}):
        path.write_text(json.dumps(body | {"init_from": "hf://org/tiny", "model": own}))
        assert load_config(path).init_from == stored["init_from"]
    for other in ("hf://org/tiny@main", f"hf://org/tiny@{SECOND}", "hf://org/other"):
        path.write_text(json.dumps(body | {"init_from": other, "model": model}))
        assert load_config(path).init_from == other  # which the run refuses, as any other setting that differs
    assert web.requests == []


def without(hub: Hub, name: str) -> None:
    hub.commits["org/tiny"][FIRST].pop(name)


REFUSED = {
    "missing": ("hf://org/none", "URL has no such model, or it is private; correct the name, or set HF_TOKEN to"),
    "gated": ("hf://org/gated", "is gated; accept its conditions at URL/org/gated, and set HF_TOKEN to a token of that"),
    "revision": ("hf://org/tiny@v9", "the model has no revision v9; name a branch, a tag or a commit of it, or none"),
    "commit": (f"hf://org/tiny@{SECOND}", f"the model has no revision {SECOND}; name a branch"),
    "no model": ("hf://org/data", "has no config.json; name a model in the form of transformers"),
    "down": ("hf://org/tiny", "cannot be fetched from URL: HTTP 503; run the same command again"),
    "strange": ("hf://org/tiny", "URL answers HTTP 418; check the address, and HF_ENDPOINT"),
    "offline": ("hf://org/tiny", "is not complete in CACHE, and HF_HUB_OFFLINE forbids fetching it; unset HF_HUB_OFFLINE"),
    "unreachable": ("hf://org/tiny", "cannot be reached ([Errno 111] Connection refused), and nothing is cached; connect"),
}


@pytest.mark.parametrize(("case", "token"), [*((case, None) for case in REFUSED), ("missing", "wrong"), ("gated", "wrong")])
def test_what_the_hub_does_not_give_is_one_line(case, token, web, directory, tmp_path, monkeypatch):
    address, rule = REFUSED[case]
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    web.add("org/gated", FIRST, directory)
    web.token["org/gated"] = "right"
    web.commits["org/data"], web.branches["org/data"] = {FIRST: {"a.csv": b"x"}}, {"main": FIRST}
    if case in ("down", "strange"):
        web.trouble = lambda method, path, number: 503 if case == "down" else 418
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", case == "offline")
    if case == "unreachable":
        hub.use(monkeypatch, f"http://{runs.free_address()}", tmp_path / "cache")
    rule = rule.replace("URL", web.url).replace("CACHE", f"{tmp_path}/cache")
    with pytest.raises(ConfigError) as error:
        model_of(tmp_path, address)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{tmp_path}/run.yaml:1: init_from: {address}: ")
    assert rule in line
    complete = vars(MODEL) | {"rope_scaling": {}, "experts": {}, "layer_types": []}
    assert model_of(tmp_path, address, complete) == MODEL  # needs nothing
    with pytest.raises(DiskError if case == "down" else ConfigError):
        find_config(hub_model(address))


@pytest.mark.parametrize("case", ["offline", "unreachable", "down", "gated"])
def test_what_is_cached_does_without_the_hub(case, web, tmp_path, monkeypatch):
    assert pin("hf://org/tiny") == f"hf://org/tiny@{FIRST}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", case == "offline")
    if case == "unreachable":
        hub.use(monkeypatch, f"http://{runs.free_address()}", tmp_path / "cache")
    if case == "gated":
        web.token["org/tiny"] = "right"
    if case == "down":
        web.trouble = lambda method, path, number: 503
    assert pin("hf://org/tiny") == f"hf://org/tiny@{FIRST}"
    assert model_of(tmp_path, "hf://org/tiny").rope_theta == 5e5


def test_a_token_opens_a_gated_model(web, directory, tmp_path, monkeypatch):
    web.add("org/gated", FIRST, directory)
    web.token["org/gated"] = "right"
    monkeypatch.setenv("HF_TOKEN", "right")
    assert model_of(tmp_path, "hf://org/gated").rope_theta == 5e5
    assert "right" not in str(load_config(tmp_path / "run.yaml"))


def test_a_machine_without_huggingface_hub_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentMismatchError, match=r"^huggingface_hub: .*; run pip install .*huggingface-hub"):
        model_of(tmp_path, "hf://org/tiny")
