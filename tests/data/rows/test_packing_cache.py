"""Packings in chunks are those in one go, whoever makes them, and a damaged chunk is made again alone."""

import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from llamajax.data import cache
from llamajax.data.rows import packing, packing_cache
from llamajax.data.rows.packing import pack
from llamajax.data.rows.packing_cache import Packings
from llamajax.data.tokens.stores import HELD_OUT, SIDES, TRAIN, Documents


class MadeUp(NamedTuple):
    """A store of documents of random lengths, without their tokens."""

    seed: int
    num_parts: int

    def documents(self, part, seq_len):
        rng = np.random.default_rng((self.seed, part))
        count = rng.integers(0, 40)
        lengths = rng.integers(2, 30, count)
        nothing = rng.random(count) < 0.1
        return Documents(
            starts=np.cumsum(lengths) - lengths,
            lengths=np.where(nothing, 0, lengths),
            sides=rng.integers(0, 3, count).astype(np.uint8),  # 2: on neither side
            is_cut=rng.random(count) < 0.5,
            is_left_out=nothing,
            is_moved=rng.random(count) < 0.2,
        )

    @property
    def tokens_of_part(self):
        ends = [self.documents(part, 0) for part in range(self.num_parts)]
        return np.array([(of.starts + 30).max(initial=0) for of in ends], np.int64)

    def piece(self, part, start, length):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(packing, "WINDOW", 16)
    monkeypatch.setattr(packing_cache, "CHUNK_WINDOWS", 2)
    monkeypatch.setattr(packing_cache, "COUNTED_PARTS", 3)


def in_one_go(store, side, seq_len):
    starts, lengths, before = [], [], 0
    for part, tokens in enumerate(store.tokens_of_part):
        of = store.documents(part, seq_len)
        chosen = (of.sides == side) & ~of.is_left_out
        starts.append(of.starts[chosen] + before)
        lengths.append(of.lengths[chosen])
        before += tokens
    return pack(np.concatenate(starts), np.concatenate(lengths), seq_len)


def all_pieces(made, side):
    return [tuple(array.tolist() for array in made.pieces(side, row)) for row in range(made.num_rows(side))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_parts", [1, 7, 30])
def test_chunks_are_parts_of_the_whole(tmp_path, seed, num_parts):
    store = MadeUp(seed, num_parts)
    made = Packings(store, 64, "key", tmp_path)
    made.make()
    found = made.read()
    for side in range(len(SIDES)):
        whole = in_one_go(store, side, 64)
        expected = [
            (whole.starts[a:b].tolist(), whole.lengths[a:b].tolist())
            for a, b in zip(whole.rows[:-1], whole.rows[1:], strict=True)
        ]
        assert all_pieces(found, side) == expected
        assert found.num_targets(side) == whole.lengths.sum()
        of_parts = [store.documents(part, 64) for part in range(num_parts)]
        assert found.totals(side) == tuple(
            sum(int(chosen(of)[of.sides == side].sum()) for of in of_parts)
            for chosen in (
                lambda of: ~of.is_left_out,
                lambda of: of.is_cut,
                lambda of: of.is_left_out,
                lambda of: of.is_moved,
            )
        )
    num_train = found.totals(SIDES.index(TRAIN)).documents
    assert len(list(made.entry.glob("train-*.packing"))) == -(-num_train // 32)


def files(entry):
    return {path.name: path.read_bytes() for path in entry.iterdir() if path.name != "lock"}


def as_elsewhere(function, tasks):
    """Results in order, of tasks done in another one; all that is sent is copied as if to another process."""
    results = {n: pickle.dumps(function(pickle.loads(pickle.dumps(tasks[n])))) for n in reversed(range(len(tasks)))}
    return [pickle.loads(results[n]) for n in range(len(tasks))]


def test_other_processes_make_the_same(tmp_path):
    store = MadeUp(0, 30)
    alone, together = (Packings(store, 64, key, tmp_path) for key in ("alone", "together"))
    alone.make()
    together.make(as_elsewhere)
    assert files(alone.entry) == files(together.entry)
    assert len(files(alone.entry)) > 10


def test_a_damaged_file_is_made_again_and_no_other(tmp_path):
    made = Packings(MadeUp(1, 30), 64, "key", tmp_path)
    made.make()
    whole = files(made.entry)
    for name in ("train-000002.packing", f"{HELD_OUT}-000000.packing", "index"):
        times = {path.name: path.stat().st_mtime_ns for path in made.entry.iterdir()}
        path = made.entry / name
        for damaged in (whole[name][:60] + bytes([whole[name][60] ^ 1]) + whole[name][61:], whole[name][:-8], b""):
            path.write_bytes(damaged)
            log = []
            made.remake(path, log.append)
            assert [line.split(":")[0] for line in log] == [f"damaged    {path}"]
            assert files(made.entry) == whole
        if name != "index":
            assert {path.name: path.stat().st_mtime_ns for path in made.entry.iterdir()}.items() >= {
                other: time for other, time in times.items() if other not in (name, "lock")
            }.items()
    log = []
    made.remake(made.entry / "index", log.append)
    assert log == [], "another process was first"


def test_nothing_is_made_twice(tmp_path, monkeypatch):
    made = Packings(MadeUp(1, 3), 64, "key", tmp_path)
    assert not made.is_there()
    made.make()
    assert made.is_there()
    monkeypatch.setattr(cache, "write_arrays", None)
    made.make()


def test_a_damaged_error_comes_from_another_process_whole():
    error = pickle.loads(pickle.dumps(cache.DamagedError(Path("a/b"), "is damaged")))
    assert (error.path, error.reason) == (Path("a/b"), "is damaged")
    assert str(error) == "a/b: is damaged; run again to rebuild it"
