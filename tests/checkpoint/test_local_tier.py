"""The local tier: the newest whole step counts, wherever it is; what is damaged, lost or of another layout does not."""

import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from llamajax import disk
from llamajax.checkpoint import local_tier
from llamajax.checkpoint.write import Checkpointer
from llamajax.config.training import CheckpointConfig
from llamajax.errors import CheckpointError, ConfigError
from tests.checkpoint.states import META, TOKENIZER, abstract, bits, names_in, state_of, use_mesh


@pytest.fixture(autouse=True)
def _fsdp_mesh():
    use_mesh()


@pytest.fixture
def config(tmp_path) -> CheckpointConfig:
    return CheckpointConfig(save_every=100, local_every=10, local_dir=str(tmp_path / "local"))


def fill(run_dir: Path, config: CheckpointConfig, shared: list[int], local: list[int]) -> Path:
    """A run that saved these steps, in order, and was killed; where its local steps are."""
    checkpointer = Checkpointer(run_dir, config)
    for step in sorted({*shared, *local}):
        if step in shared:
            checkpointer.save(step, state_of(step), META | {"step": step}, {"tokenizer.model": TOKENIZER})
            checkpointer.wait()
        else:
            checkpointer.save_locally(step, state_of(step), META | {"step": step}, {"tokenizer.model": TOKENIZER})
    assert checkpointer._local is not None
    checkpointer._local.wait()
    checkpointer._release()
    return checkpointer._local._directory


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


def test_the_newest_step_of_both_tiers_is_restored(tmp_path, config):
    here = fill(tmp_path / "run", config, shared=[5], local=[10, 20, 30, 40])
    assert steps_in(here) == [20, 30, 40]
    identity = (tmp_path / "run/checkpoints/.identity").read_text()
    assert here == tmp_path / "local" / config.local_name(tmp_path / "run", identity) / "0"
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        restored = checkpointer.restore(abstract())
        assert restored is not None
        assert (restored.step, checkpointer.newest) == (40, 5)
        assert restored.place == f" from the local tier ({tmp_path}/run/checkpoints: 5)"
        assert restored.meta == META | {"step": 40}
        assert (restored.files / "tokenizer.model").read_bytes() == TOKENIZER
        assert bits(restored.state) == bits(state_of(40))
        for ours, theirs in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state_of(40)), strict=True):
            assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        checkpointer.save(50, restored.state, META)
    assert not here.exists()  # nothing there is newer
    assert list((tmp_path / "local").iterdir()) == []


def test_each_part_is_written_once_and_for_its_user_alone(tmp_path, config):
    use_mesh(data=4, fsdp=2)
    here = fill(tmp_path / "run", config, shared=[], local=[1])
    about = json.loads((here / "1/parts.json").read_text())["arrays"]
    assert {len(array["parts"]) for array in about.values()} == {1, 2}
    assert here.stat().st_mode & 0o777 == here.parent.parent.stat().st_mode & 0o777 == 0o700
    num_bytes = sum(path.stat().st_size for path in (here / "1").glob("*.bin"))
    assert num_bytes == sum(x.nbytes for x in jax.tree.leaves(state_of(1)))


def test_a_state_saved_while_its_buffers_are_donated_is_the_old_one(tmp_path, config):
    @partial(jax.jit, donate_argnums=0)
    def step(state):
        return jax.tree.map(lambda x: x + 1, state)

    state = step({"w": jnp.zeros((512, 512), out_sharding=P("fsdp")), "step": jnp.zeros((), jnp.int32)})
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    checkpointer = Checkpointer(tmp_path / "run", config)
    checkpointer.save_locally(1, state, {}, {})
    step(step(state))
    restored = checkpointer.restore(wanted)
    assert restored is not None
    assert restored.step == 1
    assert np.all(np.asarray(restored.state["w"]) == 1)
    checkpointer.close()


@pytest.mark.parametrize("loss", ["disk", "damage", "layout", "start"])
def test_a_step_that_is_not_whole_does_not_count(tmp_path, config, loss, monkeypatch):
    here = fill(tmp_path / "run", config, shared=[10], local=[20])
    why = {
        "disk": "",
        "damage": "0.bin does not match its SHA-256",
        "layout": "process 0 has other parts of model.down than its devices need",
        "start": "its parts are from different starts",
    }[loss]
    if loss == "disk":
        shutil.rmtree(here)
    elif loss == "damage":
        content = bytearray((here / "20/0.bin").read_bytes())
        content[7] ^= 1
        (here / "20/0.bin").write_bytes(content)
    elif loss == "layout":
        use_mesh(fsdp=4, tensor=2)
    else:  # of two processes, of which the other has saved the step in an earlier start

        def several(value):
            return [value, ["another", ""]] if isinstance(value, tuple) else [value]

        monkeypatch.setattr(local_tier, "everyones", several)
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        restored = checkpointer.restore(abstract())
        assert restored is not None
        assert (restored.step, bits(restored.state)) == (10, bits(state_of(10)))
        assert why in restored.place
        checkpointer.go_on_from(10)
        checkpointer.save_locally(15, restored.state, META, {})
    assert steps_in(here) == [15]


def test_who_asks_for_another_model_finds_all_local_steps_again(tmp_path, config):
    here = fill(tmp_path / "run", config, shared=[10], local=[20, 30])
    with (
        Checkpointer(tmp_path / "run", config) as checkpointer,
        pytest.raises(CheckpointError, match="holds a different state"),
    ):
        checkpointer.restore(abstract(width=24))
    assert steps_in(here) == [20, 30]
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        restored = checkpointer.restore(abstract())
        assert restored is not None
        assert restored.step == 30


def test_steps_that_a_run_has_not_come_to_go_when_it_goes_on(tmp_path, config):
    here = fill(tmp_path / "run", config, shared=[10], local=[20, 30])
    (here / "30/0.bin").unlink()
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        restored = checkpointer.restore(abstract())
        assert restored is not None
        assert steps_in(here) == [20, 30]
        checkpointer.go_on_from(restored.step)
        assert steps_in(here) == [20]


def test_a_disk_with_room_for_three_steps_keeps_the_newest_two(tmp_path, config, monkeypatch):
    """With three kept it would never take another one."""
    here = fill(tmp_path / "run", config, shared=[], local=[10, 20, 30])
    num_bytes = sum(array.nbytes for array in jax.tree.leaves(state_of(40)))

    def disk_usage(_):
        return SimpleNamespace(free=(3 - len(steps_in(here))) * num_bytes)

    monkeypatch.setattr(local_tier.shutil, "disk_usage", disk_usage)
    fill(tmp_path / "run", config, shared=[], local=[40])
    assert steps_in(here) == [20, 30, 40]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_host_whose_disk_is_dead_has_nothing_and_the_run_goes_on(tmp_path, config, number, monkeypatch):
    monkeypatch.setattr(disk, "_PAUSES_S", (0, 0, 0))
    here = fill(tmp_path / "run", config, shared=[10], local=[20])

    def dead(call):
        def fail(path, *args, **kwargs):
            if Path(path).is_relative_to(tmp_path / "local"):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *args, **kwargs)

        return fail

    for name in ("stat", "listdir", "open"):
        monkeypatch.setattr(os, name, dead(getattr(os, name)))
    # The other process has the step, so that this one is asked for it.

    def several(value):
        return [value, ["start", ""] if isinstance(value, tuple) else [20]]

    monkeypatch.setattr(local_tier, "everyones", several)
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        restored = checkpointer.restore(abstract())
        assert restored is not None
        assert restored.step == 10
        assert restored.place == " (local step 20 is not whole: process 0 has no part of it)"
    monkeypatch.undo()
    assert steps_in(here) == [20]


def test_a_damaged_checkpoint_gives_way_to_an_older_local_step(tmp_path, config, capfd):
    fill(tmp_path / "run", config, shared=[10, 30], local=[20])
    (tmp_path / "run/checkpoints/30/manifest.json").unlink()
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        restored = checkpointer.restore(abstract())
        assert restored is not None
        assert (restored.step, checkpointer.newest) == (20, 10)
    assert "moved to 30.damaged, continuing from step 20" in capfd.readouterr().err


def test_going_back_leaves_nothing_newer(tmp_path, config):
    here = fill(tmp_path / "run", config, shared=[10, 30], local=[20, 40])
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        restored = checkpointer.restore(abstract(), before=30)
        assert restored is not None
        assert restored.step == 20
        checkpointer.drop([30])
        checkpointer.go_on_from(20)
        assert checkpointer.newest == 10
        assert steps_in(here) == [20]
    assert names_in(tmp_path / "run") == [".identity", "10"]


def test_a_run_that_was_in_the_same_place_is_another(tmp_path, config):
    fill(tmp_path / "run", config, shared=[], local=[20])
    shutil.rmtree(tmp_path / "run")
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        assert checkpointer.restore(abstract()) is None


def test_a_disk_that_fails_is_told_and_tried_again(tmp_path, config, monkeypatch, capfd):
    failing = True
    write_file = local_tier.manifest.write_file

    def write(path, content):
        if failing and path.name == "1.bin":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return write_file(path, content)

    monkeypatch.setattr(local_tier.manifest, "write_file", write)
    with Checkpointer(tmp_path / "run", config) as checkpointer:
        assert checkpointer._local is not None
        for step in range(1, 6):
            failing = step < 3
            checkpointer.save_locally(step, state_of(step), META, {})
            checkpointer._local.wait()
        assert steps_in(checkpointer._local._directory) == [3, 4, 5]
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].endswith("step 1 cannot be saved: Disk quota exceeded; it will be tried again, and the run continues")
    assert lines[1].endswith("step 3 is saved; 1 before it could not be")


def test_the_settings_belong_together():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"local_dir": "/x"}, "local_dir: /x needs local_every"),
        ({"local_every": 5}, "local_every: 5 needs local_dir"),
        ({"local_dir": "/x", "local_every": 10, "save_every": 10}, "local_every: 10 must be below save_every=10"),
    ]
    for settings, line in wrong:
        with pytest.raises(ConfigError, match=line):
            CheckpointConfig(**settings)
