"""Planned work of attention, against documents drawn by chance and tiles counted one by one."""

import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.config.parallel import MeshConfig
from llamajax.estimates.formulas import keys_seen, mean_keys
from llamajax.kernels import choice
from llamajax.kernels.pallas import sizes
from llamajax.kernels.tiles import Sizes, TileSize, tiles
from llamajax.planning.cost.attention import Grid, busy_share, computed_scores, planned_kernel, scores_of_calls
from llamajax.step.resolve import resolve_planned
from tests.planning.plans import CONFIG

LENGTH = 4096
CLOSED = CONFIG.changed({"data.seq_len": LENGTH, "model.head_dim": 128, "mesh": MeshConfig()})


def documents(mean: float, rows: int) -> np.ndarray:
    """Ids of rows [rows, LENGTH] of documents that end after any token with the same chance."""
    return 1 + np.cumsum(np.random.default_rng(0).random((rows, LENGTH)) < 1 / mean, axis=1).astype(np.int32)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("mean", [200.0, 3000.0])
def test_keys_that_are_seen_are_those_of_documents_that_end_by_chance(mean, window):
    model = CLOSED.changed({"model.sliding_window": window}).model
    ids = documents(mean, 400)
    begins = np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    index = np.arange(LENGTH)
    before = index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    before = before if window is None else np.minimum(before, window)
    for place in (100, 2000, 4000):
        assert keys_seen(model, place, mean) == pytest.approx(before[:, place].mean(), rel=0.12)
    assert mean_keys(model, LENGTH, mean) == pytest.approx(before.mean(), rel=0.05)
    assert mean_keys(model, LENGTH, mean) == pytest.approx(
        np.mean([keys_seen(model, place, mean) for place in range(LENGTH)]), rel=1e-3
    )


def test_open_documents_are_whole_rows():
    opened = CLOSED.changed({"model.attend_across_documents": True}).model
    assert keys_seen(opened, 1000, 200.0) == keys_seen(CLOSED.model, 1000, None) == 1000
    assert mean_keys(opened, LENGTH, 200.0) == LENGTH / 2


@pytest.mark.parametrize("mean", [None, 200.0, 1000.0])
def test_scores_are_those_of_the_tiles_that_are_computed(mean):
    config = CLOSED.changed({"data.mean_document_length": mean})
    rows = 1 if mean is None else 40
    ids = np.ones((1, LENGTH), np.int32) if mean is None else documents(mean, rows)
    own = sizes(LENGTH, LENGTH, 128)
    on_device = jnp.asarray(ids)
    found = tiles(own, LENGTH, LENGTH, offset=0, window=None, q_ids=on_device, k_ids=on_device)
    counted = [
        float(np.sum(table[:, :, 3] - table[:, :, 0])) * size.queries * size.keys / rows / LENGTH
        for table, size in zip(found, (own.for_queries, own.for_keys), strict=True)
    ]
    assert computed_scores(resolve_planned(config)) == pytest.approx(tuple(counted), rel=0.04 if mean else 1e-9)


def test_scores_of_layers_that_take_turns_are_their_mean():
    kinds = {"model.layer_types": ("sliding_attention", "full_attention"), "model.num_layers": 5}
    sliding = CLOSED.changed({"model.sliding_window": 300, "data.mean_document_length": 1000.0})
    scores = [
        computed_scores(resolve_planned(config))
        for config in (sliding.changed(kinds), sliding, sliding.changed({"model.sliding_window": None}))
    ]
    for mixed, narrow, whole in zip(*scores, strict=True):
        assert narrow < whole
        assert mixed == pytest.approx((3 * narrow + 2 * whole) / 5)


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "pallas"),
        ({"model.attend_across_documents": True}, "cudnn"),
        ({"model.compute_dtype": "float32"}, "plain"),
        ({"model.attention_kernel": "plain"}, "plain"),
    ],
)
def test_only_kernels_that_skip_tiles_have_scores(changes, kernel):
    config = CLOSED.changed(changes)
    assert planned_kernel(resolve_planned(config))[0] == kernel
    assert (computed_scores(resolve_planned(config)) is not None) == (kernel == "pallas")


@pytest.mark.parametrize("mean", [None, 1000.0])
def test_tokamax_skips_documents_forward_only(monkeypatch, mean):
    """Forward in tiles of 128 queries and keys; backward whole causal tiles, of which the last is full."""
    monkeypatch.setattr(choice, "_missing", lambda: None)
    changes = {"data.mean_document_length": mean, "model.compute_dtype": "bfloat16"}
    found = computed_scores(resolve_planned(CLOSED.changed(changes | {"model.attention_kernel": "tokamax"})))
    tile = TileSize(128, 128)
    ids = np.ones((1, LENGTH), np.int32) if mean is None else documents(mean, 40)
    on_device = jnp.asarray(ids)
    seen = tiles(Sizes(tile, tile), LENGTH, LENGTH, offset=0, window=None, q_ids=on_device, k_ids=on_device).of_queries
    forward = float(np.sum(seen[:, :, 3] - seen[:, :, 0])) * tile.queries * tile.keys / len(ids) / LENGTH
    assert found == pytest.approx((forward, (LENGTH + 128) / 2), rel=0.04 if mean else 1e-9)


def test_devices_that_split_rows_share_them_out():
    """A ring evenly, in 2 n + 1 calls of half as many queries; of gathered keys the last device sees the most."""
    whole = computed_scores(resolve_planned(CLOSED))
    split = {
        form: CLOSED.changed({"mesh": MeshConfig(sequence=4), "parallel.sequence": form})
        for form in ("ring", "gather", "ulysses")
    }
    assert whole is not None
    assert computed_scores(resolve_planned(split["ulysses"])) == whole
    in_ring = scores_of_calls(resolve_planned(split["ring"]))
    assert in_ring is not None
    # Queries of half a device's part, in 9 calls, and of all of it once.
    assert 9 / 2 * in_ring.by_queries == pytest.approx(whole.by_queries, rel=0.01)
    gathered = scores_of_calls(resolve_planned(split["gather"]))
    assert gathered is not None
    assert gathered.by_queries == pytest.approx((1 - 1 / 8) * LENGTH, rel=0.03)


@pytest.mark.parametrize(
    ("grid", "length"),
    [
        (Grid(32, 32, 1), 4096),  # 1B and 8B, forward: 0.859
        (Grid(8, 64, 1), 4096),  # and for keys: 0.808
        (Grid(8, 64, 1), 8192),  # 70B on tensor 8, forward: 0.759
        (Grid(4, 128, 1), 8192),  # and for keys, of which one program of four heads each is two otherwise: 0.489
    ],
)
def test_longest_programs_first_keep_132_cores_busy(grid, length):
    """Computed by list scheduling; in comments, the share with one head after the other, each with its shortest program
    first (forward) or its longest (for keys), of a whole group of heads."""
    assert busy_share(grid, length / 2, length, 132) > 0.98


def test_a_grid_of_few_programs_is_as_long_as_its_longest():
    assert busy_share(Grid(1, 66, 1), 100.0, 100.0, 132) == 0.5
    assert busy_share(Grid(1, 64, 2), 50.0, 1000.0, 128) == pytest.approx(0.5)
    assert busy_share(Grid(132, 10, 1), 50.0, 100.0, 132) == pytest.approx(1.0)
    assert busy_share(Grid(132, 1, 1), 50.0, 100.0, 132) == 1.0
