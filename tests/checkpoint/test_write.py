"""Writing checkpoints: what is kept, what is refused, and saves that fail."""

import errno
import fcntl
import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from llamajax.checkpoint import array_writer, commit, manifest, run_lock
from llamajax.checkpoint import write as checkpoint
from llamajax.checkpoint.read import restore
from llamajax.checkpoint.steps import latest_step
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.training import CheckpointConfig
from llamajax.errors import CheckpointError, SaveError
from tests import runs
from tests.checkpoint.states import CONFIG, META, abstract, bits, names_in, save, save_two_steps, state_of, use_mesh


@pytest.fixture(autouse=True)
def _fsdp_mesh():
    use_mesh()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    """A run with steps 10 and 20; copy it before changing it."""
    return save_two_steps(tmp_path_factory.mktemp("run"))


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
    with pytest.raises(CheckpointError, match=r"/checkpoints is a link to .*/unmounted, which is missing; mount it or"):
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
    monkeypatch.setattr(checkpoint, "time", runs.time_with(pauses.append))
    told: list[str] = []
    with Checkpointer(tmp_path, CONFIG, on_failure=told.append) as checkpointer:
        checkpointer.save(1, state_of(1), META, UNWRITABLE)
        checkpointer.finish(lambda: checkpointer.save(1, state_of(1), META, {} if len(pauses) == 2 else UNWRITABLE))
        assert checkpointer.newest == 1
        assert (len(told), pauses) == (2, [1, 2])
        checkpointer.save(2, state_of(2), META, UNWRITABLE)
        with pytest.raises(
            SaveError, match=r"check the disk and run the same command again; step 1 is the newest"
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
        f"{tmp_path}: this file system has no locks; make sure that nothing else writes this run\n"
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


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, SaveError), (errno.EDQUOT, SaveError), (errno.EIO, SaveError), (errno.EACCES, CheckpointError)],
)
def test_what_keeps_a_run_from_starting_may_pass_or_not(tmp_path, monkeypatch, number, error):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_lock.RunLock, "_write", fail)
    with pytest.raises(error, match=f"cannot be written: {os.strerror(number)}; check the disk"):
        Checkpointer(tmp_path, CONFIG)


def test_what_fails_after_the_rename_costs_no_step(tmp_path, monkeypatch):
    """The directory cannot be synchronised: the save counts as failed, and the next one finds the step that is there."""
    told, sync = [], commit.sync

    def fail_once(path):
        if path.name == "checkpoints" and (path / "1").exists() and not told:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(commit, "sync", fail_once)
    with Checkpointer(tmp_path, CONFIG, on_failure=told.append) as checkpointer:
        checkpointer.save(1, state_of(1), META)
        checkpointer.finish(save_again=lambda: checkpointer.save(1, state_of(1), META))
    (line,) = told
    assert "step 1 cannot be saved: Input/output error" in line
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name[0] != ".") == ["1"]
    assert restore(tmp_path, abstract()).step == 1


def test_steps_that_cannot_be_deleted_cost_no_new_one(tmp_path, monkeypatch, capfd):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint.retention, "delete", fail)
    with Checkpointer(tmp_path, CONFIG) as checkpointer:
        checkpointer.save(1, state_of(1), META)
        checkpointer.wait()
        assert checkpointer.newest == 1
    assert "older steps cannot be deleted: Input/output error" in capfd.readouterr().err


def test_who_has_lost_the_run_deletes_nothing_of_it(tmp_path):
    with Checkpointer(tmp_path, CONFIG) as checkpointer:
        checkpointer.save(1, state_of(1), META)
        checkpointer.wait()
        lease = tmp_path / ".owner"
        lease.write_text(json.dumps(json.loads(lease.read_text()) | {"token": "another's"}))
        with pytest.raises(CheckpointError, match="has taken over this run"):
            checkpointer.drop([1])
        assert (tmp_path / "checkpoints" / "1").exists()


@pytest.mark.parametrize("name", ["run [1]", "what?*", "[!x]", 'it\'s "a" run %d $HOME'])
def test_a_run_dir_may_have_any_name(tmp_path, name):
    """Also one that is a pattern for file names."""
    with Checkpointer(tmp_path / name, CONFIG) as checkpointer:
        checkpointer.save(1, state_of(1), META)
    restored = restore(tmp_path / name, abstract())
    assert bits(restored.state) == bits(state_of(1))


def test_a_run_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        Checkpointer(tmp_path / "file" / "run", CONFIG)


def test_each_process_hashes_what_it_has_written_and_looks_at_nothing_else(tmp_path, monkeypatch):
    own = ["state/ocdbt.process_0/d/a", "state/_METADATA", "state/manifest.ocdbt", "state/d/b"]
    others = {
        1: ["state/ocdbt.process_1/d/c", "state/ocdbt.process_1/manifest.ocdbt"],
        10: ["state/ocdbt.process_10/d/e"],
        11: [],
    }
    for path in [*own, *(path for paths in others.values() for path in paths)]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    looked, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(Path(path)) or scandir(path))
    for rank, paths in {0: own, **others}.items():
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        looked.clear()
        commit.hash_share(tmp_path)
        assert json.loads((tmp_path / f"hashes.{rank}.json").read_text()) == manifest.records_of(tmp_path, paths)
        assert looked
        places = [path.relative_to(tmp_path / "state").parts[:1] for path in looked]
        assert set(places) <= ({(), ("d",), ("ocdbt.process_0",)} if rank == 0 else {(f"ocdbt.process_{rank}",)})


def test_everything_is_on_the_disk_before_a_step_appears_and_large_files_before_that_is_due(tmp_path, monkeypatch):
    fsync, make_step, rename = os.fsync, commit.make_step, Path.rename
    synced: set[str] = set()
    at: dict[str, set[str]] = {}

    def remember(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def make(saving, *args):
        at["arrays"] = {str(path) for path in (saving / "state").rglob("*") if path.is_file()} - synced
        synced.difference_update([str(path) for path in (saving / "state").rglob("*")])
        make_step(saving, *args)

    def rename_when(path, target):
        if path.name.endswith(".saving"):
            of_arrays = {str(file) for file in (path / "state").rglob("*") if file.is_file()}
            at["again"] = of_arrays & synced
            at["others"] = {str(path), *map(str, path.rglob("*"))} - of_arrays - synced
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", remember)
    monkeypatch.setattr(commit, "make_step", make)
    monkeypatch.setattr(Path, "rename", rename_when)
    save(tmp_path, [1], files={"tokenizer.model": b"of a run"})
    assert at == {"arrays": set(), "again": set(), "others": set()}


def test_processes_divide_the_bytes_and_not_the_files():
    sizes = {f"small{i}": 1 for i in range(90)} | {"large0": 100, "large1": 90, "large2": 80}
    divided = manifest.shares(sizes, 4)
    assert sorted(path for share in divided for path in share) == sorted(sizes)
    assert [sum(sizes[path] for path in share) for share in divided] == [100, 90, 85, 85]


def test_an_error_of_the_disk_is_one_also_where_orbax_has_raised_another_for_it():
    """Else a disk that fails while a step is read would pass for a step that was written wrong."""
    told = ValueError("UNKNOWN: Error reading: Failed to read 65536 bytes: Input/output error [os_error_code='5']")
    try:
        try:
            raise told
        except ValueError as error:
            raise RuntimeError("Encountered error while reading array index: (slice(0, 64, 1),)") from error
    except RuntimeError as error:
        found = array_writer.os_error(error)
    assert found is not None
    assert found.errno == errno.EIO
    assert array_writer.os_error(ValueError("of another kind")) is None
