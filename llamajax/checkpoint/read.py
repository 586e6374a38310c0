"""Reads checkpoints: compares a step with the requested state and distributes it over any mesh.

The layout of a step is described in `llamajax.checkpoint.write`.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

import llamajax
from llamajax.checkpoint.array_writer import os_error, reason
from llamajax.checkpoint.steps import good_step, steps_in
from llamajax.disk import read_again
from llamajax.errors import CheckpointError, show
from llamajax.parallel.arrays import concretise, named_arrays
from llamajax.parallel.host_memory import KIND, cast
from llamajax.processes.peers import everyones, of_first

State = TypeVar("State")

_OTHER = "it matches its manifest, so it was written this way; choose another step"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A verified checkpoint."""

    step: int
    """Optimizer step after which the checkpoint was saved."""
    meta: dict[str, Any]
    """The metadata given to `save`."""
    files: Path
    """Directory with the files given to `save`; the writer of a running run may delete it later."""
    place: str = ""
    """Where the step was read from, if not from the run's checkpoints alone; text to append to its number."""

    @property
    def hf(self) -> dict[str, Any] | None:
        """Metadata of the Hugging Face files that the run started from, where our configuration has no place for it."""
        return self.meta.get("hf")


@dataclass(frozen=True, kw_only=True)
class Restored(Saved, Generic[State]):
    """A verified checkpoint that has been read."""

    state: State
    """The arrays, with the requested structure, types and shardings."""


@dataclass(frozen=True, kw_only=True)
class Found(Saved, Generic[State]):
    """A verified checkpoint that has the requested arrays, which are not read yet."""

    read_state: Callable[[], State]
    """Reads the arrays; all processes call it together."""

    def read(self) -> Restored[State]:
        """Reads the arrays; all processes call this together.

        Raises:
            CheckpointError: the arrays cannot be read.
            OSError: the disk fails.
        """
        saved = {field.name: getattr(self, field.name) for field in dataclasses.fields(Saved)}
        return Restored(state=self.read_state(), **saved)


def restore(
    run_dir: Path | str, abstract_state: State, step: int | None = None, *, partial: bool = False
) -> Restored[State]:
    """Reads a checkpoint of a run, even while the run trains. Takes no lock and changes nothing.

    Args:
        run_dir: directory of the run.
        abstract_state: the pytree to restore, with leaves of `jax.ShapeDtypeStruct`; see `concretise`.
        step: the step to read; None: the newest good one. Damaged newer steps are reported on stderr.
        partial: `abstract_state` may omit arrays of the checkpoint, such as the optimizer's:
            `{"model": abstract_model}` reads the field `model` of the saved state.

    Raises:
        CheckpointError: there is no good checkpoint, or its arrays are not the arrays of `abstract_state`.
    """
    directory = Path(run_dir).expanduser().absolute() / "checkpoints"
    if step is not None and step not in (steps := of_first(steps_in(directory))):
        raise CheckpointError(f"{directory} has no step {step}; it has {', '.join(map(str, steps)) or 'none'}")
    step_dir = good_step(directory, step)
    with unless_deleted(step_dir):
        return read_step(step_dir, concretise(abstract_state), partial=partial)


@contextlib.contextmanager
def unless_deleted(step_dir: Path) -> Iterator[None]:
    """Turns any error inside the context into a `CheckpointError` if the run has deleted the step meanwhile."""
    try:
        yield
    except Exception as error:
        if not step_dir.exists():
            raise CheckpointError(f"{step_dir} was deleted by its run while it was read; try again") from error
        raise


def read_step(directory: Path, abstract_state: State, *, partial: bool) -> Restored[State]:
    """Restores a verified step directory after comparing it with `abstract_state`, which names devices (`concretise`)."""
    return find_arrays(directory, abstract_state, partial=partial).read()


def find_arrays(directory: Path, abstract_state: State, *, partial: bool) -> Found[State]:
    """Compares a verified step directory with `abstract_state`, which names devices (`concretise`).

    Raises:
        CheckpointError: its arrays are different.
        OSError: the disk fails.
    """
    wanted = named_arrays(abstract_state)
    saved = {name: _text(*about) for name, about in saved_arrays(directory).items()}
    differences = [f"{name} is missing from it" for name in wanted if name not in saved]
    if not partial:
        differences += [f"{name} is in it, but not in the state to restore" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name in saved and saved[name] != (text := _text(str(leaf.dtype), leaf.shape)):
            differences.append(f"{name} is {saved[name]} in it, but {text} in the state to restore")
    if differences:
        more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        remedy = "use the configuration in its meta.json"
        if (writer := read_object(directory, "meta.json").get("llamajax")) not in (None, llamajax.__version__):
            writer = show(str(writer))
            remedy = f"llamajax {writer} wrote it: export it with that version and start from the export with init_from"
        raise CheckpointError(f"{directory} holds a different state: {differences[0]}{more}; {remedy}")
    return Found(
        step=int(directory.name),
        meta=read_object(directory, "meta.json"),
        files=directory / "files",
        read_state=lambda: _read_arrays(directory, abstract_state, partial=partial),
    )


def _read_arrays(directory: Path, abstract_state: State, *, partial: bool) -> State:
    wanted = named_arrays(abstract_state)
    stored = {
        name: jax.eval_shape(jax.random.key_data, leaf).update(sharding=leaf.sharding) if is_key(leaf) else leaf
        for name, leaf in wanted.items()
    }
    request = ocp.args.PyTreeRestore(
        item=stored, restore_args=ocp.checkpoint_utils.construct_restore_args(stored), partial_restore=partial
    )

    def read() -> Any:
        try:
            # Without Orbax's Checkpointer, in which processes that have finished reading wait half a minute for the others.
            with contextlib.closing(ocp.PyTreeCheckpointHandler()) as reader:
                arrays = reader.restore(epath.Path(directory / "state"), args=request)
            if missing := [name for name in stored if not isinstance(arrays[name], jax.Array)]:
                raise ValueError(f"{missing[0]} has no values")
            return arrays
        except Exception as error:
            if (failed := os_error(error)) is None:
                if isinstance(error, MemoryError | jax.errors.JaxRuntimeError):
                    raise
                raise CheckpointError(f"{directory / 'state'} cannot be read: {show(reason(error))}; {_OTHER}") from error
            raise OSError(failed.errno, failed.strerror, str(directory / "state")) from error

    arrays = read_again(read)
    everyones("read")
    leaves = [
        jax.random.wrap_key_data(arrays[name], dtype=leaf.dtype) if is_key(leaf) else arrays[name]
        for name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def read_object(step_dir: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of a verified step, which another program may have written.

    Raises:
        CheckpointError: the file does not exist or does not hold an object.
        OSError: the disk fails.
    """
    try:
        body = json.loads(read_again((step_dir / name).read_bytes))
    except FileNotFoundError as error:
        raise CheckpointError(f"{step_dir / name} is missing; {_OTHER}") from error
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise CheckpointError(f"{step_dir / name} is not a JSON object; {_OTHER}")
    return body


def saved_arrays(step_dir: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of every array in a verified step.

    Raises:
        CheckpointError: the step does not record them.
        OSError: the disk fails.
    """
    arrays = {}
    for name, about in read_object(step_dir, "arrays.json").items():
        match about:
            case {"dtype": str(dtype), "shape": list(shape)} if all(type(size) is int for size in shape):
                arrays[name] = dtype, tuple(shape)
            case _:
                raise CheckpointError(f"{step_dir / 'arrays.json'}: {show(name)} has no dtype and shape; {_OTHER}")
    return arrays


def read_weights(directory: Path, abstract_model: Any, dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """Returns the leaves of the field `model` of a state, restored as by `read_step` and cast to `dtype`.

    Raises:
        CheckpointError: the run has deleted the checkpoint meanwhile, or it holds another version of the model.
    """
    with unless_deleted(directory):
        leaves = jax.tree.leaves(read_step(directory, {"model": abstract_model}, partial=True).state)
    for i, array in enumerate(leaves):  # one by one, so that only one array exists in both types at a time
        leaves[i] = _cast(array, jnp.dtype(dtype))
    return leaves


def _cast(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Returns the array in another dtype, in the memory where it is."""
    if array.sharding.memory_kind != KIND:
        return array.astype(dtype)
    return array if array.dtype == dtype else jax.jit(cast, static_argnums=1, donate_argnums=0)(array, dtype)


def _text(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"


def is_key(array: Any) -> bool:
    """Returns whether an array holds typed PRNG keys, which are stored as their key data."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
