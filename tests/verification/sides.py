"""Sides made of a few small arrays, laid over a mesh of fsdp 2 x tensor 4 by hand."""

import itertools
from collections.abc import Callable, Mapping

import numpy as np

from llamajax.verification.reference_run import Part, Seen, Side, Step

AXES = {"data": 1, "fsdp": 2, "sequence": 1, "tensor": 4}
KINDS = ("gradient", "first moment", "second moment", "weight")
SPLITS = {"embedding": (None, None), "layers.mlp.w_down": (None, "tensor", "fsdp"), "head": ("tensor", None)}
"""The axis that splits each dim of the parameters."""
_SHAPES = {"embedding": (6, 4), "layers.mlp.w_down": (3, 8, 4), "head": (8, 4)}


def array(name: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, len(name))).standard_normal(_SHAPES[name]).astype(np.float32)


def laid_out(whole: np.ndarray, split: tuple[str | None, ...], axes: Mapping[str, int] = AXES) -> Seen:
    """An array whose dims lie over these axes, on all devices of the mesh."""
    parts = {}
    for place in itertools.product(*map(range, axes.values())):
        at = dict(zip(axes, place, strict=True))
        index = tuple(
            slice(None) if axis is None else slice(at[axis] * size // axes[axis], (at[axis] + 1) * size // axes[axis])
            for size, axis in zip(whole.shape, split, strict=True)
        )
        parts[place] = Part(index, whole[index])
    return Seen(whole, parts)


def side(change: Callable[[int, str, str, np.ndarray], np.ndarray] | None = None, **scalars: float) -> Side:
    """Two steps of three parameters.

    Args:
        change: from step, kind, name and array to the array that is there instead.
        scalars: those of step 1 that are other ones, `tokens`, `loss` and `norm`.
    """

    def arrays(step: int) -> dict[str, dict[str, Seen]]:
        kinds = KINDS if step else KINDS[1:]
        made: dict[str, dict[str, Seen]] = {}
        for kind, (name, split) in itertools.product(kinds, SPLITS.items()):
            value = array(name, seed=10 * step + KINDS.index(kind))
            made.setdefault(kind, {})[name] = laid_out(change(step, kind, name, value) if change else value, split)
        return made

    right = {"tokens": 100.0, "loss": 5.0, "gradient norm": 2.0}
    wrong = {"gradient norm" if name == "norm" else name: value for name, value in scalars.items()}
    return Side(AXES, 2, (Step({}, arrays(0)), Step(right | wrong, arrays(1)), Step(right, arrays(2))))


def only(step: int, kind: str, names: tuple[str, ...], change: Callable[[np.ndarray], np.ndarray]):
    """A `change` of `side`: some arrays of one kind, from a step on."""
    return lambda at, of, name, value: change(value) if at >= step and of == kind and name in names else value
