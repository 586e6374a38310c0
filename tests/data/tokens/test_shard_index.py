"""The index of shards has what their heads say, and is no smaller than they are."""

import pytest

from llamajax.data import cache
from llamajax.data.tokens import shards
from llamajax.data.tokens.shard_index import ShardIndex, index_path, write_index
from llamajax.data.tokens.shards import read_shard, shard_paths, shards_entry, tokenize
from tests.data.tokens.test_shards import groups_of, small_shards, tokenizer, write_documents

__all__ = ["small_shards", "tokenizer"]  # fixtures


@pytest.fixture
def entries(tmp_path, tokenizer, small_shards):
    for n in range(3):
        write_documents(tmp_path / f"{n}.jsonl", 60, seed=n)
    groups = groups_of(tmp_path)
    tokenize(groups, tokenizer, tmp_path / "cache", print)
    return [shards_entry(group, tokenizer, tmp_path / "cache") for group in groups]


def test_it_has_what_the_heads_say(tmp_path, entries):
    path = index_path(entries, tmp_path / "cache")
    write_index(entries, path)
    index = ShardIndex(path)
    paths = [path for entry in entries for path in shard_paths(entry)]
    made = [read_shard(path) for path in paths]
    assert len(index) == len(made) > len(entries) == 3
    assert index.entries == [entry.name for entry in entries]
    assert index.sha256_of_shard == [shard.sha256 for shard in made]
    assert index.tokens_of_shard.tolist() == [len(shard.tokens) for shard in made]
    assert index.documents == sum(len(shard.hashes) for shard in made)
    assert index.empty == sum(shard.num_empty for shard in made) > 0
    assert index.text_bytes == sum(shard.text_bytes for shard in made)
    assert (index.bad, index.first_bad, index.space_signs) == (0, "", 0)
    places = [index.place(number) for number in range(len(index))]
    assert [entries[0].parent / name / f"{number:06d}.shard" for name, number in places] == paths


@pytest.mark.parametrize("which", [0, 2, -1])
def test_it_is_made_of_complete_entries_only(tmp_path, entries, which):
    path = index_path(entries, tmp_path / "cache")
    lost = shard_paths(entries[1])[which]
    lost.unlink()
    with pytest.raises(cache.DamagedError) as caught:
        write_index(entries, path)
    assert caught.value.path == lost
    assert not path.exists()


def test_a_shard_without_documents_is_in_it(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n')
    (group,) = groups_of(tmp_path)
    tokenize([group], tokenizer, tmp_path / "cache", print)
    entry = shards_entry(group, tokenizer, tmp_path / "cache")
    write_index([entry], path := index_path([entry], tmp_path / "cache"))
    assert (ShardIndex(path).tokens_of_shard > 0).tolist() == [True, False]
