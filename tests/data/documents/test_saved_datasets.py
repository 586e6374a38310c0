"""What Hugging Face `datasets` saves is read as it would read it itself, and what cannot be is told."""

import json
import shutil
from typing import Any

import pytest

from llamajax.config.data import SourceConfig
from llamajax.data.documents.sources import Source
from llamajax.errors import DataError

datasets: Any = pytest.importorskip("datasets")

TEXTS = [f"document {n}\näöü " * (n % 7) for n in range(300)]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def source(*paths, **fields):
    return Source(SourceConfig(kind="arrow", paths=tuple(map(str, paths)), **fields), "data.sources[0]")


def texts(found):
    return [document.text for document in found.documents(found.files())]


def saved(path, **options):
    dataset = datasets.Dataset.from_dict({"id": list(range(300)), "text": TEXTS, "meta": [{"body": text} for text in TEXTS]})
    dataset.save_to_disk(path, **options)
    return path


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_saved_dataset_is_read_in_its_order(tmp_path, num_shards):
    folder = saved(tmp_path / "saved", num_shards=num_shards)
    found = source(folder)
    assert [path.name for path in found.files()] == [f"data-{n:05d}-of-{num_shards:05d}.arrow" for n in range(num_shards)]
    assert texts(found) == TEXTS == list(datasets.load_from_disk(folder)["text"])
    assert texts(source(folder / "*.arrow")) == TEXTS
    assert texts(source(folder, folder / "*.arrow", text_key="meta.body")) == TEXTS


def test_the_order_is_the_one_of_the_state(tmp_path):
    folder = saved(tmp_path / "saved", num_shards=3)
    state = json.loads((folder / "state.json").read_text())
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state))
    assert (
        texts(source(folder)) == TEXTS[200:] + TEXTS[100:200] + TEXTS[:100] == list(datasets.load_from_disk(folder)["text"])
    )
    other = saved(tmp_path / "another", num_shards=2)
    assert texts(source(folder, other)) == TEXTS + texts(source(folder))  # directories come by their names


def test_a_shuffled_dataset_is_saved_shuffled(tmp_path):
    shuffled = datasets.load_from_disk(saved(tmp_path / "saved")).shuffle(seed=1)
    shuffled.save_to_disk(tmp_path / "shuffled")
    assert texts(source(tmp_path / "shuffled")) == list(shuffled["text"]) != TEXTS


def test_rows_in_the_order_of_a_list_of_indices_are_refused(tmp_path):
    """As early versions saved what was shuffled."""
    folder = saved(tmp_path / "saved")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(DataError) as caught:
        source(folder).files()
    assert str(caught.value) == (
        f"{folder}: data.sources[0].paths: has its rows in another order than its files, by a list of indices; save it again"
        " after flatten_indices()"
    )
    (folder / "state.json").write_text(json.dumps(state | {"_indices_files": []}))
    assert texts(source(folder)) == TEXTS


def test_the_files_of_its_cache(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path / "c")
    )
    (cached,) = [file["filename"] for file in loaded.cache_files]
    assert texts(source(cached)) == TEXTS
    upper = loaded.map(lambda row: {"text": row["text"].upper()}, batch_size=7)
    (cached,) = [file["filename"] for file in upper.cache_files]
    assert texts(source(cached)) == [text.upper() for text in TEXTS]


def test_directories_that_are_no_dataset(tmp_path):
    folder = saved(tmp_path / "saved")
    both = tmp_path / "both"
    datasets.DatasetDict({name: datasets.load_from_disk(folder) for name in ("train", "test")}).save_to_disk(both)
    assert texts(source(both / "train")) == TEXTS
    shutil.copytree(folder, tmp_path / "damaged")
    (tmp_path / "damaged" / "state.json").write_text("{")
    shutil.copytree(folder, tmp_path / "nameless")
    (tmp_path / "nameless" / "state.json").write_text("{}")
    shutil.copytree(folder, tmp_path / "missing")
    (tmp_path / "missing" / "data-00000-of-00001.arrow").unlink()
    (tmp_path / "empty").mkdir()
    for name, message in {
        "both": f"is a DatasetDict; name a split of it: {both}/train, {both}/test",
        "damaged": "has a state.json that is damaged; save it again",
        "nameless": "has a state.json that names no _data_files; save it again",
        "empty": f"it has no state.json; name its files, for example {tmp_path}/empty/\\*.arrow",
        "missing": r"No such file or directory; correct or remove the path",
    }.items():
        with pytest.raises(DataError, match=rf"{name}.*: data.sources\[0\].paths: .*{message}"):
            source(tmp_path / name).files()
