"""Adds adapters to the matrices of their base, some rows of a tensor at a time."""

import functools

import numpy as np

from converters.blocks import open_array
from llamajax.weights import names
from llamajax.weights.pretrained import Pretrained


class Merging:
    """Returns the rows of a model's tensors with the products of its adapters in them."""

    def __init__(self, found: Pretrained):
        """Reads no adapter yet."""
        assert found.adapters is not None
        self._found, self._adapters = found, found.adapters
        self._places = names.places(found.config, found.adapters)
        # A tensor comes in pieces, in two threads.
        self._factors = functools.lru_cache(maxsize=4)(self._read_factors)

    def __call__(self, name: str, values: np.ndarray, first_row: int) -> np.ndarray:
        """Returns rows of a tensor, in float32 if its module has an adapter; otherwise unchanged.

        Args:
            name: name of the tensor.
            values: its rows, without the adapter.
            first_row: number of the first of them.
        """
        module = f"{names.OF_PEFT}{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in self._places:
            return values
        a, b, magnitude = self._factors(module)
        rows = slice(first_row, first_row + len(values))
        merged = values.astype(np.float32) + (self._adapters.scale * b[rows]) @ a
        if magnitude is not None:
            lengths = np.sqrt(np.sum(np.square(merged, dtype=np.float64), axis=1))
            merged *= (magnitude[rows] / lengths).astype(np.float32)[:, None]
        return merged

    def _read_factors(self, module: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns A [r, in], B [out, r] and, for DoRA, the lengths [out] of a module's adapter, in float32."""
        magnitude = f"{module}.lora_magnitude_vector"
        own = self._read(magnitude) if magnitude in self._places else None
        return self._read(f"{module}.lora_A.weight"), self._read(f"{module}.lora_B.weight"), own

    def _read(self, name: str) -> np.ndarray:
        if self._found.tensors is not None:
            return self._found.tensors[name].read().astype(np.float32)
        place = self._places[name]
        part = open_array(self._found.source, place.array).read(place.numbers)
        return names.to_hf(place.tensor, part).astype(np.float32)
