"""The kernels in Triton's own language, by Triton's interpreter, against attention by its definition and the plain form. For
`test_triton` and `scripts/faults.py`: in a process of its own, since what is imported elsewhere compiles."""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamajax.kernels.tiles import Documents
from tests.kernels.split_rows import check
from tests.kernels.test_pallas import _one_device, by_definition, by_kernel, check_case  # noqa: F401  # a fixture

os.environ["TRITON_INTERPRET"] = "1"  # read at the first import of `triton`, which the tests cause

PACKED = {
    "shape": (2, 150, 130, 2, 2), "head_dim": 8, "offset": 0, "window": 40, "num_documents": 3, "seed": 0,
    "enough_programs": 512,
}  # fmt: skip
"""Rows have several tiles, the last of them not full; every head of a group has programs of its own."""
AHEAD = PACKED | {"shape": (1, 50, 40, 1, 2), "offset": 17, "window": None, "num_documents": 0, "enough_programs": 1}
"""Queries stand behind all keys too, whose tile is not full."""
UNSEEN = AHEAD | {"shape": (1, 20, 20, 1, 1), "offset": -9, "num_documents": 30}
"""Queries before all keys, and of documents that have none."""
WIDE = PACKED | {"shape": (1, 70, 70, 1, 2), "head_dim": 256, "window": None}
SHARED = PACKED | {"shape": (1, 150, 130, 2, 3), "head_dim": 80, "offset": 17, "enough_programs": 9}
"""A group of three, and a width that is no power of two."""
FULL = PACKED | {"shape": (1, 128, 128, 1, 4), "head_dim": 64, "window": None, "num_documents": 0, "enough_programs": 1}
"""Nothing is ragged."""


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (PACKED, "float32"),
        (AHEAD, "float32"),
        (AHEAD, "bfloat16"),
        (UNSEEN, "float32"),
        *(
            pytest.param(case, dtype, marks=pytest.mark.slow if dtype == quicker else pytest.mark.long)
            for case, quicker in ((WIDE, "float32"), (SHARED, None), (FULL, "float16"))
            for dtype in ("float32", "bfloat16", "float16")
        ),
    ],
)
def test_equal_to_the_definition(case, dtype):
    """The interpreter cuts the bits of bfloat16 that GPUs round off."""
    check_case(case, dtype, {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}[dtype], "triton")


def test_rows_and_programs_have_tiles_of_their_own():
    """The second row's longest tile of keys is not its first."""
    rng, ids = np.random.default_rng(0), jnp.asarray([[1] * 150, [1] * 64 + [2] * 86])
    q, k, v = (jnp.asarray(rng.standard_normal(n), "float32") for n in ((2, 150, 1, 1, 8), (2, 150, 1, 8), (2, 150, 1, 8)))

    def results(attend: Any) -> Any:
        @jax.jit
        def there_and_back(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, Documents(ids, ids), 0, None)[0], q, k, v)
            return out, *pull_back(jnp.ones_like(out))

        return there_and_back(q, k, v)

    for own, true in zip(results(partial(by_kernel, language="triton")), results(by_definition), strict=True):
        np.testing.assert_allclose(own, true, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("form", "axes", "case"),
    [
        pytest.param("ulysses", {"sequence": 4}, {"window": 9, "K": 1, "G": 4}, marks=pytest.mark.slow),
        *(
            pytest.param(*how, marks=pytest.mark.long)
            for how in (
                ("ring", {"sequence": 2}, {}),
                ("gather", {"fsdp": 2, "tensor": 2}, {"window": 5}),
                ("gather", {"sequence": 4}, {"window": 7}),
                ("ulysses", {"fsdp": 2, "sequence": 2}, {"packed": False}),
                ("ring", {"sequence": 4}, {"window": 7, "packed": False}),
                ("ring", {"fsdp": 2, "sequence": 3}, {"T": 18, "window": 2}),
                ("ring", {"sequence": 2, "tensor": 2}, {"T": 64, "window": 20}),
            )
        ),
    ],
)
def test_split_rows_are_one_devices(form, axes, case):
    check(form, axes, kernel="triton", **case)
