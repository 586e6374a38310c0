"""Batches: the same rows on every mesh, each fetched once, ahead of time, without leaving a thread behind."""

import subprocess
import sys
import threading
from typing import Any

import jax
import numpy as np
import pytest

from llamajax.config.batch_ramp import BatchRampConfig
from llamajax.config.parallel import MeshConfig
from llamajax.data.rows.loader import Loader, held_out_batches, make_batch
from llamajax.data.rows.position import PassedOver
from llamajax.errors import DataError
from llamajax.parallel.mesh import make_mesh
from llamajax.parallel.sharding import spec
from llamajax.step.batch import IGNORE
from tests.tiny import tiny_config

MESHES = [
    MeshConfig(),
    MeshConfig(data=8, fsdp=1),
    MeshConfig(data=2, fsdp=2, sequence=2),
    MeshConfig(fsdp=1, sequence=8),
    MeshConfig(fsdp=2, sequence=2, tensor=2),
    MeshConfig(fsdp=1, tensor=8),
]


class Rows:
    """Stands in for a dataset: rows that say at which position they are, and remembers who was asked for."""

    def __init__(self, seq_len: int = 16, num_held_out: int = 0, bad_position: int | None = None):
        self.seq_len = seq_len
        self.asked = []
        self.bad_position = bad_position
        self.held_out_rows = [self._row(position + 1000) for position in range(num_held_out)]
        self.held_out_row = self.held_out_rows.__getitem__

    def _row(self, position):
        row = {name: np.full(self.seq_len, position, np.int32) for name in ("targets", "segment_ids", "positions")}
        return row | {"tokens": position * 1000 + np.arange(self.seq_len, dtype=np.int32)}

    def train_row(self, position):
        if position == self.bad_position:
            raise ValueError(f"row {position}")
        self.asked.append(position)
        return self._row(position)


def stand_in(**fields: Any) -> Any:
    """`Rows`, where a `Dataset` is asked for."""
    return Rows(**fields)


def config_for(global_batch_size=32, grad_accum_steps=1, **train):
    train |= {"global_batch_size": global_batch_size, "grad_accum_steps": grad_accum_steps}
    return tiny_config(mesh=MeshConfig()).changed(
        {"model.vocab_size": 2_000_000} | {f"train.{name}": value for name, value in train.items()}
    )


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("grad_accum_steps", [1, 4])
def test_the_same_rows_in_the_same_places_on_every_mesh(mesh, grad_accum_steps):
    jax.set_mesh(make_mesh(mesh))
    with Loader(stand_in(), config_for(32, grad_accum_steps), start_step=3) as loader:
        for expected_step in (3, 4):
            step, batch = next(loader)
            assert step == expected_step
            assert set(batch) == {"tokens", "targets", "segment_ids", "positions"}
            for array in batch.values():
                assert array.shape == (grad_accum_steps, 32 // grad_accum_steps, 16)
                assert array.dtype == np.int32
                assert array.sharding.is_equivalent_to(
                    jax.NamedSharding(jax.sharding.get_mesh(), spec(None, "micro_batch", "seq")), 3
                )
            positions = 32 * step + np.arange(32).reshape(grad_accum_steps, -1, 1)
            np.testing.assert_array_equal(batch["tokens"], positions * 1000 + np.arange(16))
            np.testing.assert_array_equal(batch["targets"], np.broadcast_to(positions, batch["targets"].shape))


def test_each_row_is_fetched_once_though_several_devices_need_parts_of_it():
    jax.set_mesh(make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))
    rows = stand_in()
    with Loader(rows, config_for(8, 2), start_step=0) as loader:
        for _ in range(3):
            next(loader)
    assert rows.asked == list(range(len(rows.asked)))
    assert len(rows.asked) >= 24


@pytest.mark.parametrize("mesh", MESHES)
def test_processes_fetch_what_their_devices_need_and_agree(mesh, monkeypatch):
    """Two processes, each with half of the devices, played one after the other."""
    jax.set_mesh(make_mesh(mesh))
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), spec(None, "micro_batch", "seq"))
    shape = (2, 16, 16)
    index_of = sharding.devices_indices_map(shape)
    asked_by = []
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        rows = stand_in()
        monkeypatch.setattr(
            jax.NamedSharding,
            "addressable_devices_indices_map",
            lambda self, shape, of=devices: {d: index_of[d] for d in of},
        )
        given = {}

        def keep(shape, sharding, part, of=devices, given=given):
            given[len(given)] = {device: part(index_of[device]) for device in of}

        monkeypatch.setattr(jax, "make_array_from_callback", keep)
        make_batch(lambda a, i, rows=rows: rows.train_row(16 * a + i), shape, sharding, 2_000_000)
        for device in devices:
            expected = np.arange(32).reshape(2, 16, 1)[:, index_of[device][1]] * 1000 + np.arange(16)[index_of[device][2]]
            assert any(np.array_equal(arrays[device], expected) for arrays in given.values())
        assert len(rows.asked) == len(set(rows.asked))
        asked_by.append(set(rows.asked))
    assert asked_by[0] | asked_by[1] == set(range(32))
    batch_shards = sharding.mesh.shape["data"] * sharding.mesh.shape["fsdp"]
    assert len(asked_by[0]) == (16 if batch_shards > 1 else 32)


def test_resuming_is_starting_at_a_step():
    with Loader(stand_in(), config_for(), start_step=0) as whole, Loader(stand_in(), config_for(), start_step=2) as resumed:
        for _ in range(2):
            next(whole)
        for _ in range(3):
            (step, batch), (resumed_step, resumed_batch) = next(whole), next(resumed)
            assert step == resumed_step
            np.testing.assert_array_equal(batch["tokens"], resumed_batch["tokens"])


def test_batches_are_prepared_ahead_and_the_wait_is_measured():
    rows = stand_in()
    config = config_for().changed({"data.prefetch_steps": 3})
    with Loader(rows, config, start_step=0) as loader:
        next(loader)
        assert loader.wait_s >= 0
        loader._ahead[-1][1].result()
        assert len(rows.asked) == (1 + 3) * 32
        next(loader)
        assert 0 <= loader.wait_s < 60


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_mistakes_surface_and_no_thread_stays():
    with Loader(stand_in(bad_position=70), config_for(), start_step=0) as loader:
        assert len(loader_threads()) == 1
        assert [next(loader)[0] for _ in range(2)] == [0, 1]
        with pytest.raises(ValueError, match="row 70"):
            next(loader)
    assert loader_threads() == []
    loader.close()  # again is harmless


def test_the_thread_ends_when_the_block_is_left_by_an_error():
    with pytest.raises(RuntimeError, match="stop"), Loader(stand_in(), config_for(), start_step=0):
        raise RuntimeError("stop")
    assert loader_threads() == []


def test_held_out_batches_are_fixed_and_padded():
    rows = stand_in(num_held_out=21)
    config = config_for(32, 4)
    for _ in range(2):
        batches = list(held_out_batches(rows, config, 128))
        assert [batch["tokens"].shape for batch in batches] == [(1, 8, 16)] * 3
        first_column = np.concatenate([np.asarray(batch["targets"])[0, :, 0] for batch in batches])
        assert first_column.tolist() == [*range(1000, 1021), IGNORE, IGNORE, IGNORE]
        assert not np.asarray(batches[-1]["segment_ids"])[0, 5:].any()
    assert len(list(held_out_batches(rows, config, 16))) == 2
    assert list(held_out_batches(stand_in(), config, 128)) == []
    assert rows.asked == []


@pytest.mark.parametrize("grad_accum_steps", [1, 2, 4])
def test_the_same_rows_are_held_out_whatever_the_accumulation(grad_accum_steps):
    rows, config = stand_in(num_held_out=21), config_for(32, grad_accum_steps)
    column = [np.asarray(batch["targets"])[0, :, 0] for batch in held_out_batches(rows, config, 18)]
    assert [row for row in np.concatenate(column) if row != IGNORE] == [*range(1000, 1018)]


def test_rows_that_were_passed_over_are_not_loaded():
    passed_over = [PassedOver(after_step=4, first_row=128, num_rows=64, reason="step 6: bad", time=0.0)]
    with Loader(stand_in(), config_for(32, 2), 3, passed_over) as loader:
        firsts = [int(next(loader)[1]["targets"].min()) for _ in range(3)]
    assert firsts == [96, 192, 224]


def test_batches_grow_by_micro_batches_and_take_every_row_once():
    ramp = BatchRampConfig(start=8, increment=8, sequences=40)
    config = config_for(24, 3, global_batch_ramp=ramp)
    passed_over = [PassedOver(after_step=5, first_row=64, num_rows=32, reason="step 6: bad", time=0.0)]
    with Loader(stand_in(), config, 1) as loader, Loader(stand_in(), config, 4, passed_over) as back:
        read = [np.asarray(next(loader)[1]["targets"])[..., 0] for _ in range(6)]
        shifted = [np.asarray(next(back)[1]["targets"])[..., 0] for _ in range(3)]
    assert [rows.shape for rows in read] == [(1, 8), (1, 8), (2, 8), (3, 8), (3, 8), (3, 8)]
    assert np.concatenate([rows.ravel() for rows in read]).tolist() == list(range(8, 112))
    assert [rows.min() for rows in shifted] == [40, 96, 120]


PROCESS = """
import sys
import jax, numpy as np
from llamajax.parallel import mesh, startup
from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.data.rows.loader import Loader
from llamajax.data.rows.position import PassedOver
from tests.data.rows.test_loader import config_for, stand_in

startup.select_platform(MeshConfig(num_cpu_devices=4))
startup.join_run(DistributedConfig(
    enabled=True, coordinator_address=sys.argv[1], num_processes=2, process_id=int(sys.argv[2])
))
jax.set_mesh(mesh.make_mesh(MeshConfig(data=2, fsdp=2, sequence=2)))
rows = stand_in()
with Loader(rows, config_for(16, 2), start_step=1) as loader:
    step, batch = next(loader)
    for shard in batch["tokens"].addressable_shards:
        expected = (16 + np.arange(16).reshape(2, 8, 1)) * 1000 + np.arange(16)
        np.testing.assert_array_equal(shard.data, expected[shard.index])
print(sorted(row for row in rows.asked if row < 32))
"""


@pytest.mark.long
def test_two_real_processes():
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, "-c", PROCESS, address]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    asked = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert asked == [f"{[*range(16, 20), *range(24, 28)]}\n", f"{[*range(20, 24), *range(28, 32)]}\n"]


def test_ids_that_the_model_has_no_embedding_for_are_told():
    config = config_for().changed({"model.vocab_size": 32_000})
    with Loader(stand_in(), config, start_step=0) as loader:
        next(loader)  # whose ids go to 31,015
        with pytest.raises(DataError, match=r"cache_dir: token id 32000 is not among the 32000 rows of"):
            next(loader)
