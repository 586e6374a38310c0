"""Rows from the cache: whatever happens to a file of it, rows stay what they were, or one line says why not."""

import functools
import json
import os
import resource
import shutil

import numpy as np
import pytest

from llamajax import disk
from llamajax.config.data import TokenizerConfig
from llamajax.data import cache, file_array
from llamajax.data.documents import file_groups
from llamajax.data.rows.dataset import prepare
from llamajax.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from llamajax.data.tokens import shards, stores
from llamajax.errors import DataError
from tests.data.rows.test_dataset import (
    config_for,
    epoch,
    jsonl_source,
    letters_tokenizer,
    num_rows,
    random_texts,
)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Documents in many shards, with a tokenizer of their own."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 3000)
    monkeypatch.setattr(file_groups, "UNSETTLED_S", -60.0)
    source = jsonl_source(tmp_path, "a.jsonl", random_texts(100))
    return config_for(
        tmp_path, source, held_out_fraction=0.2, eval_batches=1, tokenizer=TokenizerConfig(), vocab_size=300, seq_len=64
    )


def all_rows(dataset):
    return [*epoch(dataset, num_rows(dataset)), *dataset.held_out_rows]


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def middle_of_an_array(path):
    """A bit in the middle of the longest array of the file: between two there is nothing that is read."""
    content = path.read_bytes()
    arrays_at = 40 + int.from_bytes(content[:8], "little")
    layout = json.loads(content[40:arrays_at])["arrays"].values()
    size, at = max((np.dtype(dtype).itemsize * length, at) for dtype, length, at, _ in layout)
    return 8 * (arrays_at + at + size // 2)


def cached(tmp_path, pattern):
    return sorted(path for path in (tmp_path / "cache").rglob(pattern) if path.is_file())


@pytest.mark.parametrize(("pattern", "count"), [("*.shard", 9), ("*.packing", 9), ("tokenizer.model*", 6), ("hash", 3)])
def test_no_flipped_bit_is_trained_on(tmp_path, config, pattern, count):
    expected = all_rows(prepare(config, log=lambda line: None))
    files = cached(tmp_path, pattern)
    whole = [path.read_bytes() for path in files]
    rng, num_named = np.random.default_rng(0), 0
    for _ in range(count):
        path, log = files[rng.integers(len(files))], []
        flip(path, int(rng.integers(8 * path.stat().st_size)))
        np.testing.assert_equal(all_rows(prepare(config, log=log.append)), expected)
        if any(line.startswith("damaged    ") for line in log):
            num_named += 1
            assert [file.read_bytes() for file in files] == whole
        for file, content in zip(files, whole, strict=True):
            file.write_bytes(content)  # what lay between two arrays
    assert num_named >= count // 2


@pytest.mark.parametrize("pattern", ["*.shard", "*.packing"])
def test_a_bit_that_flips_while_the_file_is_open_is_not_trained_on(tmp_path, config, pattern):
    log = []
    dataset = prepare(config, log=log.append)
    expected, rng = all_rows(dataset), np.random.default_rng(1)
    for _ in range(6):
        path = rng.choice(cached(tmp_path, pattern))
        flip(path, middle_of_an_array(path))
        np.testing.assert_equal(all_rows(dataset), expected)
    assert len([line for line in log if line.startswith("damaged    ")]) == 6


def test_a_damaged_file_is_named_once_and_made_again(tmp_path, config):
    dataset = prepare(config, log=lambda line: None)
    expected, shard_files = all_rows(dataset), cached(tmp_path, "*.shard")
    noise = np.random.default_rng(0).bytes(shard_files[1].stat().st_size - 700)
    whole = shard_files[1].read_bytes()
    shard_files[1].write_bytes(whole[:700] + noise)
    log = []
    found = prepare(config, log=log.append)
    assert found.content == dataset.content
    np.testing.assert_equal(all_rows(found), expected)
    damaged = [line for line in log if line.startswith("damaged")]
    assert damaged == [f"damaged    {shard_files[1]}: is damaged; rebuilding it"]
    assert shard_files[1].read_bytes() == whole


def test_what_is_deleted_while_it_is_needed_is_made_again(tmp_path, config):
    log = []
    dataset = prepare(config, log=log.append)
    expected = all_rows(dataset)
    shutil.rmtree(cached(tmp_path, "*.shard")[0].parents[1])
    stores._shard.cache_clear()
    np.testing.assert_equal(all_rows(dataset), expected)
    assert [line for line in log if line.startswith("damaged")]


def test_what_cannot_be_made_again_ends_in_one_line(tmp_path, config):
    dataset = prepare(config, log=lambda line: None)
    for path in cached(tmp_path, "*.shard"):
        path.unlink()
    stores._shard.cache_clear()
    (tmp_path / "a.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(DataError, match=r"a.jsonl: data.sources\[0\].paths: changed while it was read"):
        all_rows(dataset)


def test_the_content_is_what_the_rows_are_read_from(tmp_path, config):
    dataset = prepare(config, log=lambda line: None)
    elsewhere = config.changed({"data.cache_dir": str(tmp_path / "elsewhere")})
    assert prepare(elsewhere, log=lambda line: None).content == dataset.content
    file, whole = cache.read_arrays(path := cached(tmp_path, "*.shard")[0]), path.read_bytes()
    arrays = {name: array[:].copy() for name, array in file.arrays.items()}
    arrays["tokens"][7] += 1  # as another version of a tokenizer's library would
    cache.write_arrays(path, arrays, file.info)
    log = []
    np.testing.assert_equal(all_rows(prepare(config, log=log.append)), all_rows(dataset))
    assert log[2] == f"damaged    {path}: is missing; rebuilding it"
    assert path.read_bytes() == whole
    cache.write_arrays(path, arrays, file.info)
    shutil.rmtree(tmp_path / "cache" / "index-1")  # as if such a version had made all
    other = prepare(config, log=lambda line: None)
    assert other.fingerprint == dataset.fingerprint
    assert other.content != dataset.content


def test_a_shard_that_becomes_another_when_it_is_made_again_is_refused(tmp_path, config, monkeypatch):
    dataset = prepare(config, log=lambda line: None)
    encode_batch = SentencePieceTokenizer.encode_batch
    monkeypatch.setattr(SentencePieceTokenizer, "encode_batch", lambda *args: [ids[::-1] for ids in encode_batch(*args)])
    path = cached(tmp_path, "*.shard")[0]
    path.unlink()
    stores._shard.cache_clear()
    message = rf"^{path}: has other tokens than at first, .*; remove {tmp_path}/cache/index-1/\w+ to accept them"
    with pytest.raises(DataError, match=message):
        all_rows(dataset)


def test_rows_follow_the_tokens_that_took_the_place_of_others(tmp_path, config, monkeypatch):
    """When the error above is heeded, or somebody removes shards and index but not the packings."""
    first = prepare(config, log=lambda line: None)
    encode_batch = SentencePieceTokenizer.encode_batch
    monkeypatch.setattr(SentencePieceTokenizer, "encode_batch", lambda *args: [ids[:-1] for ids in encode_batch(*args)])
    for folder in ("shards-2", "index-1"):
        shutil.rmtree(tmp_path / "cache" / folder)
    second = prepare(config, log=lambda line: None)
    elsewhere = prepare(config.changed({"data.cache_dir": str(tmp_path / "new")}), log=lambda line: None)
    np.testing.assert_equal(all_rows(second), all_rows(elsewhere))
    assert second.content == elsewhere.content != first.content


@pytest.mark.parametrize("pattern", ["index-1/*/shards", "packing-3/*/index", "train-*.packing"])
def test_several_damages_at_once_are_mended(tmp_path, config, pattern):
    expected = all_rows(prepare(config, log=lambda line: None))
    files = {path: path.read_bytes() for path in cached(tmp_path, "*.shard")}
    (damaged,) = (tmp_path / "cache").rglob(pattern)
    for lost in (list(files)[1], list(files)[-1]):
        flip(damaged, 8 * 100)
        lost.unlink()
        stores._shard.cache_clear()
        np.testing.assert_equal(all_rows(prepare(config, log=lambda line: None)), expected)
        assert {path: path.read_bytes() for path in files} == files


def test_a_shard_is_made_again_from_a_file_of_another_name(tmp_path, config):
    """The message about a bad record names the file; a shard does not hold that."""
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text() + "oops\n")
    config = config.changed({"data.sources.0.max_bad_records": 1})
    expected = all_rows(prepare(config, log=lambda line: None))
    path.rename(tmp_path / "b.jsonl")
    config = config.changed({"data.sources.0.paths": (str(tmp_path / "b.jsonl"),)})
    for shard in cached(tmp_path, "*.shard"):
        shard.unlink()
    stores._shard.cache_clear()
    np.testing.assert_equal(all_rows(prepare(config, log=lambda line: None)), expected)


def test_a_file_system_without_locks_is_said(tmp_path, config, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(38, "Function not implemented")

    expected = all_rows(prepare(config, log=lambda line: None))
    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    elsewhere = config.changed({"data.cache_dir": str(tmp_path / "elsewhere")})
    log = []
    np.testing.assert_equal(all_rows(prepare(elsewhere, log=log.append)), expected)
    assert f"note       {tmp_path}/elsewhere has no file locks: every process tokenizes separately" in log


@pytest.fixture
def many_shards(tmp_path, monkeypatch):
    """A configuration whose documents fill many shards."""
    letters_tokenizer(tmp_path)
    monkeypatch.setattr(shards, "SHARD_BYTES", 20)
    texts = [text + "some letters" for text in random_texts(120)]
    return config_for(tmp_path, jsonl_source(tmp_path, "a.jsonl", texts), held_out_fraction=0.2, eval_batches=1)


def test_more_shards_than_a_process_may_open(tmp_path, many_shards):
    open_now = max(map(int, os.listdir("/proc/self/fd")))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 20, limits[1]))
    try:
        for _ in range(2):  # made, and found in the cache
            dataset = prepare(many_shards, log=lambda line: None)
            epoch(dataset, num_rows(dataset))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list(tmp_path.rglob("*.shard"))) > 60


def test_few_files_are_open_at_once(many_shards, monkeypatch):
    monkeypatch.setattr(file_array, "MAX_OPEN", 3)
    before = len(os.listdir("/proc/self/fd"))
    dataset = prepare(many_shards, log=lambda line: None)
    expected = epoch(dataset, num_rows(dataset))
    monkeypatch.setattr(stores, "_shard", functools.lru_cache(3)(stores._shard.__wrapped__))
    for position, row in enumerate(expected):
        np.testing.assert_equal(dataset.train_row(position), row)
        assert len(os.listdir("/proc/self/fd")) <= before + 3
