"""llamajax.train on a device that flips bits: `python -m tests.faults.faulty_device FLIPS --config ...`.

FLIPS is JSON: `{"once": true, "after": {"7": ["model.layers.mlp.w_down", 5, 30]}}` flips bit 30 of what device 5 of the mesh
holds of that array, when step 7 is done; without `once`, whenever it is.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from llamajax.planning.scheduling import Compilation
from tests.faults.flips import Flip, flipped


class FaultyStep:
    """The compiled step, whose result is spoilt after some of the steps."""

    def __init__(self, step: Any, after: dict[int, Flip], *, once: bool) -> None:
        self._step, self._after, self._once = step, dict(after), once

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        state, values = self._step(state, batch)
        number = int(state.step)
        flip = self._after.pop(number, None) if self._once else self._after.get(number)
        return state if flip is None else flipped(state, flip), values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


def faulty(compile_here: Callable[..., Compilation], after: dict[int, Flip], *, once: bool) -> Callable[..., Compilation]:
    """In place of `compile_here`: compiles a step that is spoilt."""

    def compile_faulty(*args: Any) -> Compilation:
        compilation = compile_here(*args)
        return dataclasses.replace(compilation, step=FaultyStep(compilation.step, after, once=once))

    return compile_faulty


def main() -> None:
    """Takes its own argument off the command line, and trains."""
    from llamajax.train import main as train
    from llamajax.training import stages

    told = json.loads(sys.argv.pop(1))
    after = {int(step): Flip(*flip) for step, flip in told["after"].items()}
    stages.compile_here = faulty(stages.compile_here, after, once=told["once"])
    train()


if __name__ == "__main__":
    main()
