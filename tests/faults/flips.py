"""Single bits that flip in what one device holds of a state, and whether comparing the replicas finds them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from llamajax.checkpoint.read import is_key
from llamajax.parallel.arrays import named_arrays
from llamajax.step.checksum import checksums, differing, holders, replicated

State = TypeVar("State")


@dataclass(frozen=True)
class Flip:
    """One bit of one device's part of an array."""

    array: str
    place: int
    """Index of the device in the mesh."""
    bit: int
    """Counted through the bytes of the part."""


def random_flips(state: Any, number: int, seed: int = 0) -> Iterator[Flip]:
    """Flips in arrays of which other devices hold the same part: any array, device and bit, each as likely as another."""
    arrays, rng = replicated(state), np.random.default_rng(seed)
    for _ in range(number):
        name = sorted(arrays)[rng.integers(len(arrays))]
        part = _data(arrays[name]).addressable_shards[0].data
        yield Flip(name, int(rng.integers(jax.sharding.get_mesh().size)), int(rng.integers(8 * part.nbytes)))


def flipped(state: State, flip: Flip) -> State:
    """The same state, all of whose other bits are where they were; for each process to call, one of which has the device."""
    leaves, structure = jax.tree.flatten(state)
    index = list(named_arrays(state)).index(flip.array)
    whole, device = _data(leaves[index]), jax.sharding.get_mesh().devices.flat[flip.place]
    parts = {shard.device: shard.data for shard in whole.addressable_shards}
    if device not in parts:
        return state
    part = np.array(parts[device])
    part.reshape(-1).view(np.uint8)[flip.bit // 8] ^= 1 << flip.bit % 8
    parts[device] = jax.device_put(part, device)
    array = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, list(parts.values()))
    leaves[index] = jax.random.wrap_key_data(array) if whole is not leaves[index] else array
    return jax.tree.unflatten(structure, leaves)


def found(state: Any) -> dict[str, list[int]]:
    """Returns, by array, the places of the devices that a comparison names."""
    arrays = replicated(state)
    held_by = {name: holders(array) for name, array in arrays.items()}
    return differing(np.asarray(checksums(list(arrays.values()))), held_by)


def expected(state: Any, flip: Flip) -> dict[str, list[int]]:
    """Returns the places that a comparison should name after `flip`: the device; of two that hold the same, both."""
    places = holders(named_arrays(state)[flip.array])
    (holding,) = (row for row in places if flip.place in row)
    return {flip.array: [flip.place] if len(holding) > 2 else sorted(map(int, holding))}


def missed(state: Any, number: int, seed: int = 0) -> list[str]:
    """Makes `number` random flips, one at a time; returns those that the next comparison does not name."""
    assert not found(state)
    told = []
    for flip in random_flips(state, number, seed):
        if (names := found(flipped(state, flip))) != expected(state, flip):
            told.append(f"{flip}: found {names}, not {expected(state, flip)}")
    return told


def _data(array: Any) -> Any:
    return jax.random.key_data(array) if is_key(array) else array
