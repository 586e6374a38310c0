"""The kernels in Triton's own language, by Triton's interpreter, against attention by its definition and the plain form. For
`test_triton`: in a process of its own, which has TRITON_INTERPRET=1 before the first import of `triton`."""

import os

import pytest

from tests.kernels.split_rows import check
from tests.kernels.test_pallas import _one_device, check_case  # noqa: F401  # a fixture

assert os.environ.get("TRITON_INTERPRET") == "1"

SMALL = {"shape": (2, 36, 36, 1, 2), "head_dim": 8, "offset": 0, "window": None, "num_documents": 3, "seed": 0}
"""Two rows of several documents, whose last tile is not full."""
WIDE = SMALL | {"shape": (1, 70, 70, 1, 2), "head_dim": 256, "enough_programs": 512}
"""Every head of the group has programs of its own."""
SEVERAL_TILES = SMALL | {"shape": (1, 150, 130, 2, 3), "head_dim": 80, "window": 40, "offset": 17, "enough_programs": 9}
OPEN = SMALL | {"shape": (1, 128, 128, 1, 4), "num_documents": 0, "head_dim": 64}
"""Nothing is ragged."""
UNSEEN = SMALL | {"shape": (1, 20, 20, 1, 1), "num_documents": 30, "offset": -9}
"""Queries before all keys, and of documents that have none."""


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (SMALL | {"window": 20, "enough_programs": 512}, "float32"),
        (UNSEEN, "float32"),
        (SMALL, "bfloat16"),
        *(
            pytest.param(case, dtype, marks=pytest.mark.slow if dtype == quicker else pytest.mark.long)
            for case, quicker in ((WIDE, "float32"), (SEVERAL_TILES, "float32"), (OPEN, "float16"))
            for dtype in ("float32", "bfloat16", "float16")
        ),
    ],
)
def test_equal_to_the_definition(case, dtype):
    """Of bfloat16 the interpreter cuts the bits that GPUs round off."""
    check_case(case, dtype, {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}[dtype], "triton")


@pytest.mark.parametrize(
    ("form", "axes", "case"),
    [
        pytest.param("ulysses", {"sequence": 4}, {"window": 9, "K": 1, "G": 4}, marks=pytest.mark.slow),
        pytest.param("ring", {"sequence": 2}, {}, marks=pytest.mark.slow),
        *(
            pytest.param(*how, marks=pytest.mark.long)
            for how in (
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
