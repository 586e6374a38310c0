"""Metadata of a checkpoint is checked before use: its author also wrote its manifest."""

import errno
import json
import os
from pathlib import Path

import jax
import pytest

from converters.hf_import import open_import
from llamajax import disk
from llamajax.checkpoint import manifest
from llamajax.errors import CheckpointError, ConfigError, DiskError, UserError
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from tests import tiny
from tests.converters.mutate import write_whole


@pytest.fixture
def step(tmp_path):
    """A step that was imported."""
    write_whole(tmp_path / "hf", "llama3.2")
    (tmp_path / "out").mkdir()
    with jax.set_mesh(tiny.single_device_mesh()):
        open_import(tmp_path / "hf", None).write(tmp_path / "out")
    return tmp_path / "out" / "checkpoints" / "0"


def rewrite(step, name, content):
    """Changes a file, and the manifest so that it vouches for that."""
    (step / name).write_text(content)
    (step / manifest.MANIFEST).write_bytes(manifest._text(manifest.records_of(step, manifest.list_files(step))))


def read(step):
    """Reads the weights of a step."""
    pretrained = open_pretrained(step)
    load_model(pretrained, pretrained.config)


def test_what_is_no_directory_or_may_not_be_read_is_told_and_a_failing_disk_is_the_disks(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for path, reason in (
        (Path("~nobody-of-that-name/m"), "there is no such directory"),
        (tmp_path / "file", "there is no such directory"),
        (tmp_path / ("a" * 300), "cannot be read: File name too long"),
    ):
        with pytest.raises(ConfigError, match=f"/{path.name}: {reason}; give a run, "):
            open_pretrained(path)

    def opened_where_listing_fails(number):
        def fail(path):
            raise OSError(number, os.strerror(number), path)

        monkeypatch.setattr(os, "listdir", fail)
        open_pretrained(tmp_path)

    monkeypatch.setattr(disk, "_PAUSES_S", (0, 0, 0))
    with pytest.raises(ConfigError, match=f"^{tmp_path}: cannot be read: Permission denied; give a run, "):
        opened_where_listing_fails(errno.EACCES)
    with pytest.raises(DiskError, match=f"^{tmp_path}: Stale file handle; check the disk and run the same command again"):
        opened_where_listing_fails(errno.ESTALE)


def test_a_run_with_a_config_json_is_two_models_only_where_that_is_one(step):
    run = step.parents[1]
    (run / "config.json").write_text('{"of": "another program"}')
    with jax.set_mesh(tiny.single_device_mesh()):
        assert open_pretrained(run).source == step
        (run / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(ConfigError, match=r"holds both a run's checkpoints/ and a Hugging Face model's config\.json"):
            open_pretrained(run)


def test_what_no_import_writes_is_refused(step):
    meta, arrays = (json.loads((step / name).read_text()) for name in ("meta.json", "arrays.json"))
    hf, first = meta["hf"], next(iter(arrays))
    metas = [
        [], "[" * 5000, meta | {"config": 5}, meta | {"config": {"model": None}}, meta | {"stored_dtype": "int8"},
        *(meta | {"hf": value} for value in (5, {}, hf | {"special_tokens": None}, hf | {"license": "a\nb: c"})),
        *(meta | {"hf": hf | {"special_tokens": hf["special_tokens"] | more}} for more in ({"eos_token_id": "x"}, {"a": 1})),
    ]  # fmt: skip
    with jax.set_mesh(tiny.single_device_mesh()):
        for name, bodies, whole in (
            ("meta.json", metas, meta),
            ("arrays.json", [[], arrays | {first: 5}, arrays | {first: {"dtype": "float32", "shape": None}}, {}], arrays),
        ):
            for body in bodies:
                rewrite(step, name, body if isinstance(body, str) else json.dumps(body))
                with pytest.raises(UserError) as caught:
                    read(step)
                assert "\n" not in str(caught.value)
            rewrite(step, name, json.dumps(whole))
        read(step)
        some = next(path for path in (step / "state").rglob(".zarray"))
        rewrite(step, some.relative_to(step), "{}")
        with pytest.raises(CheckpointError, match=r"state cannot be read: .*; it matches its manifest"):
            read(step)
