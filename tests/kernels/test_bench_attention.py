"""scripts/bench_attention.py at toy size: what it compares, counts and tells."""

import numpy as np
import pytest

from scripts import bench_attention
from scripts.bench_attention import Case, run, seen_pairs, segment_ids, table


def test_kernels_agree_and_none_is_timed_without_a_gpu(capsys):
    rows = run([Case(8, 32, 6)], toy=True)
    assert [row["kernel"] for row in rows] == ["cudnn", "tokamax", "pallas", "plain"]
    for row in rows:
        if row["kernel"] in ("cudnn", "tokamax"):
            assert "it needs NVIDIA GPUs" in row["cannot"]
        else:
            assert row["error"] <= bench_attention.TOLERANCE
            assert "forward_s" not in row
    printed = capsys.readouterr().out
    assert printed.count("pallas") == 1
    assert printed.count("not measured") == 4


def test_a_kernel_that_is_wrong_ends_it(monkeypatch):
    attend = bench_attention.attend

    def wrong(*arguments, kernel, **how):
        out, lse = attend(*arguments, kernel=kernel, **how)
        return (out + 1 if kernel == "pallas" else out), lse

    monkeypatch.setattr(bench_attention, "attend", wrong)
    with pytest.raises(SystemExit, match=r"pallas is .* off the plain form"):
        run([Case(8, 32, 0)], toy=True)


def test_pairs_are_counted_one_by_one():
    ids = segment_ids(Case(8, 40, 7), 3)
    assert ids is not None
    alike = ids[:, :, None] == ids[:, None, :]
    assert seen_pairs(ids, 3, 40) == np.sum(alike & np.tri(40, dtype=bool))
    assert seen_pairs(None, 3, 40) == 3 * np.tri(40).sum()


def test_times_are_told_as_rates():
    way = {"forward_s": 1e-3, "forward_tflops": 500.0, "forward_and_backward_s": 4e-3, "forward_and_backward_tflops": 437.0}
    row = Case(128, 8192, 0)._asdict() | {"kernel": "cudnn", "error": 1e-3} | way
    assert "1.000 ms   500 TF/s" in table([row])
    assert "4.000 ms   437 TF/s" in table([row])
