"""Reading checkpoints: bit-exact on any mesh, refused when they are another state's, never believed when damaged."""

import dataclasses
import random
import shutil
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P

from llamajax.checkpoint.read import restore
from llamajax.checkpoint.steps import latest_step
from llamajax.checkpoint.write import Checkpointer
from llamajax.errors import CheckpointError
from tests.checkpoint.states import (
    CONFIG,
    META,
    TOKENIZER,
    abstract,
    bits,
    names_in,
    save_two_steps,
    state_of,
    use_mesh,
)


@pytest.fixture(autouse=True)
def _fsdp_mesh():
    use_mesh()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    """A run with steps 10 and 20; copy it before changing it."""
    return save_two_steps(tmp_path_factory.mktemp("run"))


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
    chex.assert_trees_all_equal_shapes_and_dtypes(restored.state, expected)
    for ours, theirs in zip(jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True):
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


def test_a_part_of_the_state_can_be_read_alone(two_steps):
    part = {"model": abstract().model}
    assert bits(restore(two_steps, part, partial=True).state) == bits(state_of(20).model)
    with pytest.raises(CheckpointError, match="is in it, but not in the state to restore"):
        restore(two_steps, part)


def test_an_older_step_is_read_on_request(two_steps):
    assert bits(restore(two_steps, abstract(), step=10).state) == bits(state_of(10))
    assert restore(two_steps, abstract(), step=10).meta["step"] == 10
    assert restore(two_steps, abstract()).meta["step"] == latest_step(two_steps) == 20
    with pytest.raises(CheckpointError, match="has no step 15; it has 10, 20"):
        restore(two_steps, abstract(), step=15)


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
    with pytest.raises(CheckpointError, match=r"opt_state\.more is missing from it"):
        restore(two_steps, dataclasses.replace(wanted, opt_state={"0": wanted.opt_state[0], "more": wanted.step}))
    other_key = jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))
    with pytest.raises(CheckpointError, match=r"key is key<fry>\[\] in it, but key<rbg>\[\]"):
        restore(two_steps, dataclasses.replace(wanted, key=other_key))


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
        assert "files/tokenizer.model has 0 bytes instead of 5000; moved to 20.damaged, continuing from step 10" in line
        checkpointer.save(20, state_of(20), META)
    assert names_in(run_dir) == ["10", "20", "20.damaged"]
    assert restore(run_dir, abstract()).step == 20


def test_a_run_without_a_good_step_is_refused_with_every_bad_file(tmp_path, two_steps):
    run_dir = shutil.copytree(two_steps, tmp_path / "run")
    (run_dir / "checkpoints" / "20" / "manifest.json").unlink()
    (run_dir / "checkpoints" / "10" / "meta.json").write_text("{}")
    (run_dir / "checkpoints" / "10" / "arrays.json").unlink()
    wrong = r"10 is damaged: arrays\.json is missing, meta\.json has 2 bytes instead of \d+\n.*restore the files"
    with Checkpointer(run_dir, CONFIG) as checkpointer, pytest.raises(CheckpointError, match=wrong) as caught:
        checkpointer.restore(abstract())
    assert "20 is damaged: manifest.json is missing" in str(caught.value)
    assert caught.value.exit_code == 65
    assert names_in(run_dir) == ["10", "20"]
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing; choose another step"):
        restore(run_dir, abstract(), step=20)
    with pytest.raises(CheckpointError, match="has no good checkpoint"):
        restore(run_dir, abstract())


def test_arrays_of_another_version_are_refused_by_its_name(tmp_path):
    with Checkpointer(tmp_path / "run", CONFIG) as checkpointer:
        checkpointer.save(10, state_of(10), META | {"llamajax": "0.0.1"})
    with pytest.raises(CheckpointError, match=r".*; llamajax 0\.0\.1 wrote it: export it with that"):
        restore(tmp_path / "run", abstract(width=48))
