"""Compares replicas: devices that should hold the same bits, and the response when they differ.

Rolling back and recomputing the same steps distinguishes a single bit flip in memory from a device that computes wrong
results. A majority of the devices could not repair the state: the wrong bits of one device have entered all gradients.
"""

import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from llamajax.config.recovery import RecoveryConfig
from llamajax.errors import CorruptionError
from llamajax.parallel.arrays import named_arrays
from llamajax.processes.peers import everyones
from llamajax.step.checksum import checksums, differing, held_bytes, holders, replicated
from llamajax.training.bad_steps import GoBack
from llamajax.units import format_bytes
from llamajax.watch import console

MAX_TOLD = 4
"""Maximum number of devices named in one line."""


@dataclass(frozen=True)
class Suspects:
    """Devices, by position in the mesh, that hold different bits from others."""

    known: frozenset[int]
    """Devices that differ from most of the devices with the same part of an array."""
    unknown: frozenset[int]
    """Devices in ties (two of two, or half of several): one of them is wrong, but it is unknown which."""

    def __bool__(self) -> bool:
        return bool(self.known or self.unknown)

    @property
    def all(self) -> frozenset[int]:
        return self.known | self.unknown

    def among(self, places: frozenset[int]) -> "Suspects":
        """Returns the suspects that are also in `places`."""
        return Suspects(self.known & places, self.unknown & places)


class Replicas:
    """Compares the copies of the state on different devices. An instance lasts as long as its process, across all
    rollbacks."""

    def __init__(self, config: RecoveryConfig, state: Any) -> None:
        """Compiles the comparison and reports what it covers. All processes call this together.

        Args:
            config: the `recovery` section of the run.
            state: the `abstract_state` of the run, or its state.
        """
        self._every = config.checksum_every
        arrays = {} if self._every is None else replicated(state)
        self._held_by = {name: holders(array) for name, array in arrays.items()}
        self._compiled = checksums.lower(list(arrays.values())).compile() if arrays else None
        self._devices = list(jax.sharding.get_mesh().devices.flat)
        self._hosts = everyones(socket.gethostname())
        self._good_step = math.inf
        self._suspected: frozenset[int] = frozenset()
        """Positions of devices that differed; cleared once all replicas are equal at step `_again_at` or later."""
        self._again_at = 0
        self._facts: dict[str, Any] = {}
        self._times_transient: Counter[int] = Counter()
        if self._compiled is not None:
            of, whole = (format_bytes(held_bytes(tree)) for tree in (arrays, state))
            console.log(f"checksums  {of} of {whole} per device, every {self._every} steps and before each checkpoint")
        elif self._every is not None:
            console.log("checksums  every array is stored on one device only: there are no replicas to compare")

    def due(self, step: int) -> bool:
        """Returns whether to compare after `step` even without a checkpoint there."""
        if self._compiled is None or self._every is None:
            return False
        return step % self._every == 0 or (bool(self._suspected) and step == self._again_at)

    def check(self, step: int, state: Any, event: Callable[..., object]) -> None:
        """Returns normally when all replicas are equal. All processes call this together, with the same outcome.

        Args:
            step: number of finished steps.
            state: the state after these steps.
            event: writes a finding (name and facts) to the run's log.

        Raises:
            GoBack: devices differ; the steps since the newest checkpoint must be recomputed.
            CorruptionError: the same devices have differed before, and still do.
        """
        if self._compiled is None:
            return
        found = self._found(state)
        if not found:
            self._good_step = step
            if self._suspected and step >= self._again_at:
                self._acquit(step, event)
            return
        suspects, where = suspected(found, self._held_by), _first_of(found)
        first_step = int(min(self._good_step, step)) + 1
        self._facts = {"devices": self._ids(suspects.all), "arrays": list(found), "steps": [first_step, step]}
        if again := suspects.among(self._suspected):
            event("corruption", kind="lasting", **self._facts)
            raise CorruptionError(
                f"step {step}: {self._told(again)} in {where}, again after a rollback, so the fault is lasting;"
                f" {self._remedy(again)} and start the run again: it resumes from its newest checkpoint"
            )
        event("corruption", kind="suspected", **self._facts)
        self._suspected, self._again_at = self._suspected | suspects.all, max(step, self._again_at)
        what = f"step {step}: {self._told(suspects)} in {where}"
        raise GoBack(what, first_step=first_step, last_step=step, pass_over=False)

    def _found(self, state: Any) -> dict[str, list[int]]:
        """See `differing`. If processes see different results, all of them use the result of the first one that found
        anything."""
        assert self._compiled is not None
        arrays = named_arrays(state)
        table = np.asarray(self._compiled([arrays[name] for name in self._held_by]))
        found = differing(table, self._held_by)
        first = next((rank for rank, finds in enumerate(everyones(bool(found))) if finds), None)
        return {} if first is None else everyones(found if jax.process_index() == first else None)[first]

    def _acquit(self, step: int, event: Callable[..., object]) -> None:
        """Reports that the difference on the suspected devices has not recurred."""
        event("corruption", kind="transient", **self._facts | {"devices": self._ids(self._suspected)})
        self._times_transient.update(self._suspected)
        times = max(self._times_transient[place] for place in self._suspected)
        often = f", {times} times so far; have the hardware checked" if times > 1 else ""
        who, self._suspected = self._names(self._suspected), frozenset()
        console.say(f"step {step}: recomputed, all replicas are equal: {who} had a transient fault{often}")

    def _remedy(self, suspects: Suspects) -> str:
        hosts = sorted({self._hosts[self._devices[place].process_index] for place in suspects.all})
        if len(hosts) > 1:
            return f"exclude {' or '.join(hosts)}"
        return f"exclude {hosts[0]}" if len(set(self._hosts)) > 1 else "exclude the device or use another machine,"

    def _ids(self, places: Iterable[int]) -> list[int]:
        return [self._devices[place].id for place in sorted(places)]

    def _told(self, suspects: Suspects) -> str:
        if suspects.known:
            holds = "differs from its replicas" if len(suspects.all) == 1 else "differ from their replicas"
            return f"{self._names(suspects.all)} {holds}"
        return f"{self._names(suspects.all)} hold different bits, and no majority says which is right,"

    def _names(self, places: Iterable[int]) -> str:
        devices = [self._devices[place] for place in sorted(places)]
        told = [f"device {d.id} (process {d.process_index} on {self._hosts[d.process_index]})" for d in devices[:MAX_TOLD]]
        return " and ".join([*told, f"{len(devices) - MAX_TOLD} more"] if len(devices) > MAX_TOLD else told)


def suspected(found: Mapping[str, Iterable[int]], held_by: Mapping[str, np.ndarray]) -> Suspects:
    """Finds the devices to blame. A device that is wrong by majority in one array explains ties in another array.

    Args:
        found: the result of `differing`.
        held_by: the argument of `differing`.
    """
    known: set[int] = set()
    halves: list[set[int]] = []
    for name, places in found.items():
        for row in held_by[name]:
            holding = set(map(int, row))
            wrong = holding & set(places)
            if wrong == holding:
                halves.append(wrong)
            else:
                known |= wrong
    return Suspects(frozenset(known), frozenset().union(*(half for half in halves if not half & known)))


def _first_of(arrays: Mapping[str, object]) -> str:
    first, *others = arrays
    return first if not others else f"{first} and {len(others)} more"
