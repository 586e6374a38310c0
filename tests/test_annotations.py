"""A wrong shape or dtype is an error while tests run: tests/annotations.py is at work in the rooms it is meant for."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from llamajax.data.rows.packing import pack


def test_shapes_and_dtypes_of_public_functions_are_checked():
    starts, lengths = np.arange(0, 9, 3), np.full(3, 3)
    assert len(pack(starts, lengths, seq_len=4)) == 2
    with pytest.raises(TypeCheckError, match="documents"):
        pack(starts, lengths[:2], seq_len=4)
    with pytest.raises(TypeCheckError, match="lengths"):
        pack(starts, lengths.astype(np.float32), seq_len=4)
    with pytest.raises(TypeCheckError, match="starts"):
        pack(starts[None], lengths, seq_len=4)
