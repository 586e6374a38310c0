"""Checkpoints: bit-exact on any mesh, refused when they are another state's, and never believed when damaged."""

import dataclasses
import errno
import fcntl
import json
import os
import random
import shutil
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import P

from llamajax.checkpoint import manifest
from llamajax.checkpoint import write as checkpoint
from llamajax.checkpoint.read import latest_step, read_meta, restore
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import CheckpointConfig
from llamajax.errors import CheckpointError, SaveError
from llamajax.parallel import mesh
from llamajax.parallel.mesh import concretise

CONFIG = CheckpointConfig(keep_last=2)
TOKENIZER = random.Random(0).randbytes(5000)
META = {"data": {"position": 640}, "config": "run_dir: runs/tiny\n", "mesh": {"fsdp": 8}}


class Tiny(nnx.Module):
    def __init__(self, key: jax.Array, width: int, dtype: jnp.dtype):
        up, down = jax.random.split(key)
        self.up = nnx.Param(jax.random.normal(up, (width, 32), dtype, out_sharding=P("fsdp", "tensor")))
        self.down = nnx.Param(jax.random.normal(down, (32, width), dtype, out_sharding=P("tensor", "fsdp")))
        self.norm = nnx.Param(jnp.full((width,), 1 / 3, jnp.bfloat16))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TinyState:
    model: Tiny
    opt_state: Any
    step: jax.Array
    key: jax.Array


def init(seed: int, width: int = 16, dtype: jnp.dtype = jnp.float32) -> TinyState:
    key, rest = jax.random.split(jax.random.key(seed))
    model = Tiny(key, width, dtype)
    weights: Any = model  # optax's types know dicts and tuples only
    opt_state = optax.adam(1e-3).init(weights)
    opt_state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype) / 3 if x.dtype == jnp.float32 else x, opt_state)
    return TinyState(model, opt_state, jnp.int32(seed), rest)


def state_of(seed: int) -> TinyState:
    return jax.jit(init)(seed)


def abstract(**options) -> TinyState:
    return jax.eval_shape(partial(init, **options), 0)


def use_mesh(**sizes: int) -> None:
    jax.set_mesh(mesh.make_mesh(MeshConfig(**sizes)))


def bits(tree) -> list[bytes]:
    """The exact content of every leaf, typed keys included."""
    leaves = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(tree)]
    return [np.asarray(x).tobytes() for x in leaves]


def save(
    run_dir: Path, steps: list[int], config: CheckpointConfig = CONFIG, files: Mapping[str, bytes] = MappingProxyType({})
) -> None:
    with Checkpointer(run_dir, config) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step), META | {"step": step}, files)


def names_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.fixture(autouse=True)
def _fsdp_mesh():
    use_mesh()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    """A run with steps 10 and 20; copy it before changing it."""
    run_dir = tmp_path_factory.mktemp("run")
    use_mesh()
    save(run_dir, [10, 20], files={"tokenizer.model": TOKENIZER})
    return run_dir


def test_everything_comes_back_bit_for_bit(tmp_path, two_steps):
    expected = state_of(20)
    with Checkpointer(shutil.copytree(two_steps, tmp_path / "run"), CONFIG) as checkpointer:
        restored = checkpointer.restore(abstract())
    assert restored is not None
    assert restored.step == 20
    assert restored.meta == META | {"step": 20}
    assert (restored.files / "tokenizer.model").read_bytes() == TOKENIZER
    assert jax.tree.structure(restored.state) == jax.tree.structure(expected)
    assert bits(restored.state) == bits(expected)
    for ours, theirs in zip(jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
    drawn, wanted = (jax.random.normal(state.key, (4,)) for state in (restored.state, expected))
    np.testing.assert_array_equal(drawn, wanted)


@pytest.mark.parametrize(
    "sizes", [{"tensor": 2, "fsdp": 2, "sequence": 2}, {"data": 8, "fsdp": 1}, {"fsdp": 4, "tensor": 2}, {"sequence": 8}]
)
def test_any_mesh_reads_what_another_wrote(tmp_path, two_steps, sizes):
    written = bits(state_of(20))
    use_mesh(**({"fsdp": -1} | sizes))
    restored = restore(two_steps, abstract())
    assert bits(restored.state) == written
    up = restored.state.model.up[...]
    assert up.sharding.is_equivalent_to(jax.NamedSharding(jax.sharding.get_mesh(), P("fsdp", "tensor")), 2)
    with Checkpointer(tmp_path, CONFIG) as checkpointer:
        checkpointer.save(21, restored.state, META)
    use_mesh()
    assert bits(restore(tmp_path, abstract()).state) == written


def test_a_state_saved_while_its_buffers_are_donated_is_the_old_one(tmp_path):
    @partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    state = {"w": jnp.zeros((512, 512), out_sharding=P("fsdp")), "step": jnp.zeros((), jnp.int32)}
    with Checkpointer(tmp_path, CONFIG) as checkpointer:
        for _ in range(3):
            state = step(state)
            checkpointer.save(int(state["step"]), state, {})
            state = step(step(state))
    restored = restore(tmp_path, jax.eval_shape(lambda: state))
    assert restored.step == 7
    assert np.all(np.asarray(restored.state["w"]) == 7)


def test_a_part_of_the_state_can_be_read_alone(two_steps):
    part = {"model": abstract().model}
    assert bits(restore(two_steps, part, partial=True).state) == bits(state_of(20).model)
    with pytest.raises(CheckpointError, match="is in it, but not in the state to restore"):
        restore(two_steps, part)


def test_an_older_step_is_read_on_request(two_steps):
    assert bits(restore(two_steps, abstract(), step=10).state) == bits(state_of(10))
    assert read_meta(two_steps, step=10)["step"] == 10
    assert read_meta(two_steps)["step"] == latest_step(two_steps) == 20
    for read in (lambda: restore(two_steps, abstract(), step=15), lambda: read_meta(two_steps, step=15)):
        with pytest.raises(CheckpointError, match="has no step 15; it has 10, 20"):
            read()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": jnp.bfloat16},
            r"model\.down is float32\[32,16\] in it, but bfloat16\[32,16\] in the state to restore .and 5 more differences",
        ),
        ({"width": 24}, r"model\.down is float32\[32,16\] in it, but float32\[32,24\] in the state to restore"),
    ],
)
def test_another_dtype_or_shape_is_refused(two_steps, options, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        restore(two_steps, abstract(**options))
    assert "\n" not in str(caught.value)


def test_missing_and_extra_arrays_are_refused(tmp_path, two_steps):
    wanted = abstract()
    with pytest.raises(CheckpointError, match=r"opt_state\.0\.count is in it, but not in the state to restore"):
        restore(two_steps, dataclasses.replace(wanted, opt_state=optax.EmptyState()))
    with pytest.raises(CheckpointError, match=r"opt_state\.more is missing in it"):
        restore(two_steps, dataclasses.replace(wanted, opt_state={"0": wanted.opt_state[0], "more": wanted.step}))
    other_key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    with pytest.raises(CheckpointError, match=r"key is key<fry>\[\] in it, but key<rbg>\[\]"):
        restore(two_steps, dataclasses.replace(wanted, key=other_key))


def test_concretise_names_devices_for_every_leaf():
    use_mesh(fsdp=4, tensor=2)
    leaves = jax.tree.leaves(concretise(abstract()))
    assert all(isinstance(leaf.sharding.mesh, jax.sharding.Mesh) for leaf in leaves)
    elsewhere = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[3]))
    assert concretise(elsewhere).sharding == elsewhere.sharding


def flip(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]


def truncate(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def overwrite(content: bytes, rng: random.Random) -> bytes:
    """A stretch of up to 512 bytes, as of a lost disk sector, turned to zeros, or to ones where it was zeros."""
    at = rng.randrange(len(content))
    end = min(at + 512, len(content))
    stretch = b"\xff" if not any(content[at:end]) else b"\0"
    return content[:at] + stretch * (end - at) + content[end:]


def append(content: bytes, rng: random.Random) -> bytes:
    return content + b"\n"


@pytest.mark.parametrize("fault", [flip, truncate, overwrite, append, "delete", "swap"])
def test_every_damage_is_found_and_the_older_step_read(tmp_path, two_steps, capfd, fault):
    older, rng = bits(state_of(10)), random.Random(str(getattr(fault, "__name__", fault)))
    newest = two_steps / "checkpoints" / "20"
    files = [path for path in sorted(newest.rglob("*")) if path.is_file()]
    assert {"manifest.json", "arrays.json", "meta.json", "tokenizer.model", "_METADATA"} <= {path.name for path in files}
    for victim in files:
        name = victim.relative_to(newest).as_posix()
        run_dir = shutil.copytree(two_steps, tmp_path / "run")
        target = run_dir / "checkpoints" / "20" / name
        content = target.read_bytes()
        if fault == "delete":
            target.unlink()
        elif fault == "swap":
            other = rng.choice([path for path in files if path.read_bytes() != content])
            target.write_bytes(other.read_bytes())
            (run_dir / "checkpoints" / "20" / other.relative_to(newest)).write_bytes(content)
        else:
            target.write_bytes(fault(content, rng))
        restored = restore(run_dir, abstract())
        assert (restored.step, bits(restored.state)) == (10, older), name
        line = capfd.readouterr().err
        assert line.count("\n") == 1, line
        # When the manifest is gone, nothing can be said about the others.
        assert f"{target.parent}" in line or name in line or "manifest.json" in line
        assert name in line or (fault == "swap" and "manifest.json" in line), line
        shutil.rmtree(run_dir)


def test_a_damaged_step_is_set_aside_and_can_be_saved_again(tmp_path, two_steps, capfd):
    run_dir = shutil.copytree(two_steps, tmp_path / "run")
    (run_dir / "checkpoints" / "20" / "files" / "tokenizer.model").write_bytes(b"")
    with Checkpointer(run_dir, CONFIG) as checkpointer:
        restored = checkpointer.restore(abstract())
        assert restored is not None
        assert restored.step == 10
        line = capfd.readouterr().err
        assert "files/tokenizer.model has 0 bytes instead of 5000; moved to 20.damaged, going on from step 10" in line
        checkpointer.save(20, state_of(20), META)
    assert names_in(run_dir) == ["10", "20", "20.damaged"]
    assert restore(run_dir, abstract()).step == 20


def test_a_run_without_a_good_step_is_refused_with_every_bad_file(tmp_path, two_steps):
    run_dir = shutil.copytree(two_steps, tmp_path / "run")
    (run_dir / "checkpoints" / "20" / "manifest.json").unlink()
    (run_dir / "checkpoints" / "10" / "meta.json").write_text("{}")
    (run_dir / "checkpoints" / "10" / "arrays.json").unlink()
    wrong = r"10 is damaged: arrays\.json is missing, meta\.json has 2 bytes instead of \d+\n.*bring the files back"
    with Checkpointer(run_dir, CONFIG) as checkpointer, pytest.raises(CheckpointError, match=wrong) as caught:
        checkpointer.restore(abstract())
    assert "20 is damaged: manifest.json is missing" in str(caught.value)
    assert caught.value.exit_code == 65
    assert names_in(run_dir) == ["10", "20"]
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing; choose another step"):
        restore(run_dir, abstract(), step=20)
    with pytest.raises(CheckpointError, match="has no good checkpoint"):
        read_meta(run_dir)


def test_a_run_that_saved_nothing(tmp_path):
    with Checkpointer(tmp_path / "run", CONFIG) as checkpointer:
        assert checkpointer.restore(abstract()) is None
    assert latest_step(tmp_path / "run") is None
    with pytest.raises(CheckpointError, match="has no checkpoint; is this the run_dir"):
        restore(tmp_path / "run", abstract())


def test_retention(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    save(Path(tmp_path.name), list(range(2, 16, 2)), CheckpointConfig(save_every=2, keep_last=3, keep_every=4))
    assert names_in(tmp_path) == ["10", "12", "14", "4", "8"]
    save(tmp_path, [16], CheckpointConfig(keep_last=1))
    assert names_in(tmp_path) == ["16"]
    assert restore(Path(tmp_path.name), abstract()).step == 16


def test_steps_only_go_up(tmp_path, two_steps):
    run_dir = shutil.copytree(two_steps, tmp_path / "run")
    for step in (15, 20):
        with (
            Checkpointer(run_dir, CONFIG) as checkpointer,
            pytest.raises(CheckpointError, match=f"step {step} cannot be saved after step 20"),
        ):
            checkpointer.save(step, state_of(15), META)
    assert names_in(run_dir) == ["10", "20"]


def test_a_small_state_is_few_files_and_the_manifest_lists_them_all(two_steps):
    newest = two_steps / "checkpoints" / "20"
    records = manifest.read(newest)
    on_disk = {path.relative_to(newest).as_posix() for path in newest.rglob("*") if path.is_file()}
    assert set(records) == on_disk - {"manifest.json"}
    assert len(on_disk) < 40  # 13 arrays in up to 8 pieces
    assert json.loads((newest / "meta.json").read_text()) == META | {"step": 20}


def test_left_overs_of_killed_processes_are_removed(tmp_path, two_steps):
    run_dir = shutil.copytree(two_steps, tmp_path / "run")
    checkpoints = run_dir / "checkpoints"
    shutil.copytree(checkpoints / "20", checkpoints / "30.saving")
    (checkpoints / "10").rename(checkpoints / "10.deleting")
    assert latest_step(run_dir) == 20
    Checkpointer(run_dir, CONFIG).close()
    assert names_in(run_dir) == ["20"]


def test_a_disk_without_room_is_noticed_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(SaveError, match=r"step 1 cannot be saved: it takes [0-9.]+ KiB, but only 0\.98 KiB are free"):
        save(tmp_path, [1])
    assert names_in(tmp_path) == []


def test_room_is_asked_of_the_disk_that_is_written(tmp_path, monkeypatch):
    """Where `checkpoints` is a link to another one."""
    (tmp_path / "large").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "large")
    free = {tmp_path / "large": 10**9, tmp_path / "run": 0}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 0, free[Path(os.path.realpath(path))])
    )
    save(tmp_path / "run", [1])
    assert (tmp_path / "large/1/manifest.json").exists()
    free = {tmp_path / "large": 0, tmp_path / "run": 10**9}
    with pytest.raises(SaveError, match=r"step 2 cannot be saved: it takes [0-9.]+ KiB, but only 0 B are free"):
        save(tmp_path / "run", [2])


def test_a_link_to_a_disk_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=r"/checkpoints is a link to .*/unmounted, which is not there; mount it or"):
        Checkpointer(tmp_path, CONFIG)


UNWRITABLE = {"no_such_directory/tokenizer.model": b""}


def test_a_file_that_cannot_be_written_fails_the_save_by_name(tmp_path):
    checkpointer = Checkpointer(tmp_path, CONFIG)
    checkpointer.save(1, state_of(1), META, UNWRITABLE)
    with pytest.raises(SaveError, match=r"step 1 cannot be saved: No such file or directory: .*tokenizer\.model"):
        checkpointer.close()
    assert names_in(tmp_path) == []
    Checkpointer(tmp_path, CONFIG).close()


def test_a_failed_save_is_told_at_once_and_tried_again_more_and_more_rarely(tmp_path):
    told: list[str] = []
    with Checkpointer(tmp_path, CheckpointConfig(async_save=False), on_failure=told.append) as checkpointer:
        checkpointer.save(1, state_of(1), META)
        assert [step for step in range(2, 10) if checkpointer.retry_due(step)] == []
        tried = []
        for step in range(10, 50):
            if step == 10 or checkpointer.retry_due(step):
                checkpointer.save(step, state_of(step), META, UNWRITABLE)
                tried.append(step)
        assert tried == [10, 11, 13, 17, 25, 41]
        assert [line.split(" cannot be saved")[0].split()[-1] for line in told] == [str(step) for step in tried]
        assert told[0].endswith("it will be tried again; step 1 is the newest checkpoint")
        assert checkpointer.retry_due(73)
        checkpointer.save(73, state_of(73), META)
        assert not any(checkpointer.retry_due(step) for step in range(74, 200))
        assert checkpointer.newest == 73
    assert names_in(tmp_path) == ["1", "73"]
    assert bits(restore(tmp_path, abstract()).state) == bits(state_of(73))


def test_the_last_save_is_tried_for_some_seconds(tmp_path, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(checkpoint.time, "sleep", pauses.append)
    told: list[str] = []
    with Checkpointer(tmp_path, CONFIG, on_failure=told.append) as checkpointer:
        checkpointer.save(1, state_of(1), META, UNWRITABLE)
        checkpointer.finish(lambda: checkpointer.save(1, state_of(1), META, {} if len(pauses) == 2 else UNWRITABLE))
        assert checkpointer.newest == 1
        assert (len(told), pauses) == (2, [1, 2])
        checkpointer.save(2, state_of(2), META, UNWRITABLE)
        with pytest.raises(
            SaveError, match=r"see to the disk and run the same command again; step 1 is the newest"
        ) as caught:
            checkpointer.finish(lambda: checkpointer.save(2, state_of(2), META, UNWRITABLE))
        assert caught.value.exit_code == 74
    assert names_in(tmp_path) == ["1"]


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch, capfd):
    def flock(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    save(tmp_path, [1])
    assert capfd.readouterr().err == (
        f"{tmp_path}: this file system has no locks; see to it that nothing else writes this run\n"
    )
    assert latest_step(tmp_path) == 1


def test_an_error_in_the_run_is_not_hidden_by_one_in_the_save(tmp_path, capfd):
    def run():
        with Checkpointer(tmp_path, CONFIG) as checkpointer:
            checkpointer.save(1, state_of(1), META, UNWRITABLE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert "step 1 cannot be saved" in capfd.readouterr().err
    Checkpointer(tmp_path, CONFIG).close()


def test_nothing_leaks(tmp_path):
    state = state_of(0)

    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with Checkpointer(tmp_path, CONFIG) as checkpointer:
        checkpointer.save(1, state, META)
        checkpointer.wait()
        before = resources()
        for step in range(2, 22):
            checkpointer.save(step, state, META)
        checkpointer.wait()
        assert resources() == before
    assert resources() <= before


def test_a_run_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        Checkpointer(tmp_path / "file" / "run", CONFIG)
