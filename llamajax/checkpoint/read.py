"""Reading checkpoints: choosing a good step, comparing it with what is asked for, laying it over any mesh.

The layout of a step is described in `llamajax.checkpoint.write`, which writes them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from llamajax.checkpoint import manifest
from llamajax.errors import CheckpointError, EnvironmentMismatchError
from llamajax.parallel.mesh import concretise, named_arrays
from llamajax.parallel.processes import everyones
from llamajax.watch.console import say

State = TypeVar("State")


@dataclass(frozen=True)
class Restored(Generic[State]):
    """A verified checkpoint, read."""

    step: int
    """Optimizer step after which it was saved."""
    state: State
    """The arrays, in the structure, types and shardings that were asked for."""
    meta: dict[str, Any]
    """What was given to `save`."""
    files: Path
    """Directory with the files given to `save`; a running writer may delete it in time."""

    @property
    def hf(self) -> dict[str, Any] | None:
        """What the Hugging Face files that the run started from said, where ours have no place for it."""
        return self.meta.get("hf")


def restore(
    run_dir: Path | str, abstract_state: State, step: int | None = None, *, partial: bool = False
) -> Restored[State]:
    """Reads a checkpoint of a run, also of one that is being trained: takes no lock and changes nothing.

    Args:
        run_dir: the run's directory.
        abstract_state: the pytree to restore, of `jax.ShapeDtypeStruct`; see `concretise`.
        step: the step to read; None: the newest good one, damaged newer ones are named on stderr.
        partial: `abstract_state` may leave out arrays of the checkpoint, such as the optimizer's:
            `{"model": abstract_model}` reads the field `model` of the state that was saved.

    Raises:
        CheckpointError: there is no good checkpoint, or its arrays are not those of `abstract_state`.
    """
    directory = Path(run_dir).expanduser().absolute() / "checkpoints"
    if step is not None and step not in (steps := everyones(steps_in(directory))[0]):
        raise CheckpointError(f"{directory} has no step {step}; it has {', '.join(map(str, steps)) or 'none'}")
    step_dir = _good_step(directory, step)
    try:
        return read_step(step_dir, concretise(abstract_state), partial=partial)
    except Exception as error:
        if not step_dir.exists():
            raise CheckpointError(f"{step_dir} was deleted by its run while it was read; try again") from error
        raise


def find_step(path: Path) -> Path | None:
    """The verified step that `path` names: the newest good one of a run's directory, or RUN/checkpoints/STEP itself.

    Processes call this together. None if the path is neither.

    Raises:
        CheckpointError: the run has no good step, or the one named is damaged.
    """
    if path.parent.name == "checkpoints" and path.name.isdecimal() and path.is_dir():
        return _good_step(path.parent, int(path.name))
    return _good_step(path / "checkpoints") if (path / "checkpoints").is_dir() else None


def _good_step(directory: Path, step: int | None = None) -> Path:
    """Where the step is, verified; without one the newest good one, and damaged newer ones are named on stderr."""
    if step is not None:
        if found := damage(directory / str(step)):
            raise CheckpointError(f"{damage_line(directory, step, found)}; choose another step")
        return directory / str(step)
    newest, damaged = newest_good(directory)
    if newest is None:
        raise CheckpointError(none_good_line(directory, damaged))
    for bad, found in damaged.items():
        say(f"{damage_line(directory, bad, found)}; reading step {newest} instead")
    return directory / str(newest)


def latest_step(run_dir: Path) -> int | None:
    """The newest committed step of a run, unverified; None if there is none."""
    return max(steps_in(run_dir / "checkpoints"), default=None)


def read_step(directory: Path, abstract_state: State, *, partial: bool) -> Restored[State]:
    """Restores a verified step directory after comparing it with `abstract_state`, which names devices (`concretise`)."""
    wanted = named_arrays(abstract_state)
    saved = json.loads((directory / "arrays.json").read_text())
    differences = _differences(wanted, {name: _text(**about) for name, about in saved.items()}, partial=partial)
    if differences:
        more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        raise CheckpointError(
            f"{directory} is of another state: {differences[0]}{more}; use the configuration in its meta.json"
        )
    stored = {
        name: jax.eval_shape(jax.random.key_data, leaf).update(sharding=leaf.sharding) if is_key(leaf) else leaf
        for name, leaf in wanted.items()
    }
    request = ocp.args.PyTreeRestore(
        item=stored, restore_args=ocp.checkpoint_utils.construct_restore_args(stored), partial_restore=partial
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(directory / "state", args=request)
    leaves = [
        jax.random.wrap_key_data(arrays[name], dtype=leaf.dtype) if is_key(leaf) else arrays[name]
        for name, leaf in wanted.items()
    ]
    return Restored(
        step=int(directory.name),
        state=jax.tree.unflatten(jax.tree.structure(abstract_state), leaves),
        meta=json.loads((directory / "meta.json").read_text()),
        files=directory / "files",
    )


def _differences(wanted: dict[str, jax.ShapeDtypeStruct], saved: dict[str, str], *, partial: bool) -> list[str]:
    found = [f"{name} is missing in it" for name in wanted if name not in saved]
    if not partial:
        found += [f"{name} is in it, but not in the state to restore" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name in saved and saved[name] != (text := _text(str(leaf.dtype), leaf.shape)):
            found.append(f"{name} is {saved[name]} in it, but {text} in the state to restore")
    return found


def _text(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def is_key(array: Any) -> bool:
    """Whether an array holds typed PRNG keys, which are stored as their key data."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def steps_in(directory: Path) -> list[int]:
    """The committed steps, in order."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def newest_good(directory: Path) -> tuple[int | None, dict[int, list[str]]]:
    """The newest step without damage, and what is wrong with the newer ones; the same on every process."""
    damaged: dict[int, list[str]] = {}
    while True:
        # Listed anew each time: a running writer may have committed a step and deleted one meanwhile.
        steps = everyones(steps_in(directory))[0]
        step = max(set(steps) - damaged.keys(), default=None)
        found = [] if step is None else damage(directory / str(step))
        if not found:
            return step, {bad: damaged[bad] for bad in damaged if bad in steps}
        assert step is not None
        damaged[step] = found


def damage(directory: Path) -> list[str]:
    """What is wrong with the files of a step; every process checks a share and all return the same.

    Raises:
        EnvironmentMismatchError: another process sees damage where process 0 does not, so it sees another directory.
    """

    def check(rank: int) -> list[str]:
        try:
            records = sorted(manifest.read(directory).items())
            return manifest.problems(directory, dict(records[rank :: jax.process_count()]))
        except CheckpointError as error:
            return [str(error)]

    found = everyones(check(jax.process_index()))
    doubted = [rank for rank in range(1, len(found)) if found[rank]]
    if doubted:  # process 0 sets steps aside, and not on another's word
        seen = everyones([check(rank) for rank in doubted] if jax.process_index() == 0 else None)[0]
        for rank, problems in zip(doubted, seen, strict=True):
            if not problems:
                raise EnvironmentMismatchError(
                    f"{directory}: {found[rank][0]} for process {rank}, but not for process 0; nothing was changed; see to"
                    " the file system there, on which all processes must see the same"
                )
    return sorted({problem for share in found for problem in share})


def damage_line(directory: Path, step: int, found: list[str]) -> str:
    """One line that names a damaged step and its bad files."""
    more = f" (and {len(found) - 10} more)" if len(found) > 10 else ""
    return f"{directory / str(step)} is damaged: {', '.join(found[:10])}{more}"


def none_good_line(directory: Path, damaged: dict[int, list[str]]) -> str:
    """What to tell a user whose run has no step to restore: one line for every damaged one, and the remedy."""
    if not damaged:
        return f"{directory} has no checkpoint; is this the run_dir of a run that has saved one?"
    lines = [damage_line(directory, step, found) for step, found in damaged.items()]
    return "\n".join([*lines, f"{directory} has no good checkpoint; bring the files back, or choose another run_dir"])
