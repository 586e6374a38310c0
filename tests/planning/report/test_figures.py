"""The JSON of a plan: every promised key, and figures that a hand can check."""

import dataclasses
import json
import re

import pytest

from llamajax.config.file import dump_config
from llamajax.estimates.formulas import flops_per_token
from llamajax.planning.plan import Alternative
from llamajax.planning.report import figures
from llamajax.planning.search import Sweep
from tests.estimates.test_calibration import MEASUREMENT
from tests.planning import plans

PROMISED = (
    "num_devices", "num_params", "argument_bytes", "temp_bytes", "peak_bytes", "host_bytes", "capacity_bytes", "fits",
    "step_time_s", "compute_s", "comm_s", "exposed_comm_s", "exposed_fraction", "wire_bytes",
    "tokens_per_sec_per_device", "mfu", "mfu_full_attention", "hfu", "sync_collectives_in_loops", "compile_s",
)  # fmt: skip


def test_every_promised_key_is_there_and_described():
    told = figures.figures(plans.plan())
    assert json.loads(json.dumps(told)) == told
    assert told["schema_version"] == 2
    assert set(PROMISED) <= told.keys()
    described = set(re.findall(r"\w+", figures.__doc__ or ""))
    keys = set(told)
    for rows in (told["collectives"], told["peak_tensors"]):
        keys |= set(rows[0])
    assert not keys - described


def test_measured_constants_are_told_beside_the_built_in_ones(tmp_path):
    assert figures.figures(plans.plan())["calibration"] is None
    file = tmp_path / "h100.yaml"
    file.write_text(dump_config(MEASUREMENT))
    told = figures.figures(plans.plan(config=plans.CONFIG.changed({"hardware.calibration": str(file)})))
    assert told["calibration"] == {
        "file": str(file),
        "device": "NVIDIA H100 80GB HBM3",
        "date": "2026-11-24",
        "commit": "1234567",
        "jax": "0.11.2",
        "constants": {
            "matmul_efficiency": {"built_in": 0.62, "measured": 0.7},
            "kernel_s": {"built_in": 2e-6, "measured": 1.5e-6},
            "compute_slowdown": {"built_in": 0.19, "measured": 0.0},
        },
    }


def test_speeds_follow_from_the_step():
    told = figures.figures(plans.plan())
    model, peak = plans.CONFIG.model, 989.5e12
    assert told["tokens_per_sec_per_device"] == pytest.approx(32 * 1024 / 16 / told["step_time_s"])
    assert told["mfu"] == pytest.approx(flops_per_token(model, 1024) * 32 * 1024 / 16 / told["step_time_s"] / peak)
    full = flops_per_token(model, 1024, full_attention=True) / flops_per_token(model, 1024)
    assert told["mfu_full_attention"] / told["mfu"] == pytest.approx(full)
    assert told["hfu"] == pytest.approx(told["flops"] / told["step_time_s"] / peak)
    assert told["wire_bytes_factor"] == pytest.approx(sum(told["wire_bytes_by_link"].values()) / told["least_wire_bytes"])
    assert told["checkpoint_bytes"] == 12 * told["num_params"]
    for use in told["collectives"]:
        assert use["hidden_s"] + use["exposed_s"] == pytest.approx(use["seconds"])


def test_both_schedules_are_told_and_that_of_training_leads():
    told = figures.figures(plans.plan())
    assert told["latency_profile"] == "auto"
    assert told["compile_s"] == 3.0
    assert told["step_time_s"] == told["with_profile"]["step_time_s"]
    assert told["without_profile"]["step_time_s"] == pytest.approx(told["step_time_s"] + 1e-3)
    assert set(PROMISED) - {"num_devices", "num_params", "compile_s"} <= told["without_profile"].keys()
    config = plans.CONFIG.changed({"xla.latency_profile": None})
    told = figures.figures(dataclasses.replace(plans.plan(config=config), informed=None))
    assert (told["latency_profile"], told["with_profile"], told["compile_s"]) == (None, None, 1.5)


def test_money():
    """At 1,000 tokens/s/GPU a billion tokens take a million GPU seconds: 277.8 GPU hours."""
    found = figures.money(plans.CONFIG, 1000.0)
    assert found["price_per_billion_tokens"] == pytest.approx(2 * 277.777, rel=1e-4)
    assert found["price"] == pytest.approx(found["price_per_billion_tokens"])
    assert found["days"] == pytest.approx(1e6 / 16 / 86400)
    config = plans.CONFIG.changed({"hardware.price_per_gpu_hour": None, "hardware.token_budget": None})
    found = figures.money(config, 1000.0)
    assert (found["price"], found["price_per_billion_tokens"]) == (None, None)
    assert found["token_budget"] == 1000 * 32 * 1024


def test_suggestions_have_their_price():
    told = figures.figures(plans.plan(peak_bytes=90 * plans.GIB))
    assert not told["fits"]
    (row,) = told["suggestions"]
    assert row["changes"] == {"train.grad_accum_steps": 4}
    assert row["fits"]
    assert row["step_time_ratio"] == row["gpu_time_ratio"] == pytest.approx(2.0)


def test_alternatives_are_told_with_the_best():
    faster = Alternative(changes={"parallel.stack": "scan"}, schedule=plans.schedule(seconds=-1e-6))
    slower = Alternative(changes={"xla.latency_profile": "auto"}, schedule=plans.schedule(seconds=1))
    told = figures.figures(dataclasses.replace(plans.plan(), alternatives=(slower, faster)))
    assert told["best_changes"] == faster.changes
    assert [row["changes"] for row in told["alternatives"]] == [slower.changes, faster.changes]
    assert told["alternatives"][0]["step_time_s"] == pytest.approx(told["step_time_s"] + 1)
    assert (told["num_compilations"], told["compile_s"]) == (4, 6.0)
    learnt = dataclasses.replace(slower, schedule=dataclasses.replace(slower.schedule, untimed=slower.schedule.step))
    told = figures.figures(dataclasses.replace(plans.plan(), alternatives=(learnt, faster)))
    assert (told["num_compilations"], told["compile_s"]) == (5, 7.5)
    assert figures.figures(plans.plan())["best_changes"] == {}


def test_what_is_expected_of_a_program_comes_from_its_configuration():
    """The module has no fused attention: where the configuration asks for it, its FLOPs are not those of the formula."""
    told = figures.figures(plans.plan())
    asked = figures.figures(plans.plan(config=plans.CONFIG.changed({"model.attend_across_documents": True})))
    assert told["attention_kernel"] == asked["attention_kernel"] == "plain"
    assert asked["flops"] == told["flops"]
    assert asked["flops_factor"] > 1.01 * told["flops_factor"]


def test_efficiency_is_relative_to_the_first_value():
    made = (plans.plan(), dataclasses.replace(plans.plan(), informed=None))
    told = figures.figures(made[0], Sweep(key="k", values=("a", "b"), configs=(plans.CONFIG,) * 2), made)
    first, second = told["sweep"]["rows"]
    assert first["efficiency"] == 1.0
    assert second["efficiency"] == pytest.approx(first["step_time_s"] / second["step_time_s"])
    assert second["efficiency"] < 1


def test_formulas_need_no_compiler():
    told = figures.estimated_figures(plans.CONFIG, "no compiler")
    assert not told["compiled"]
    assert told["missing"] == "no compiler"
    assert told["memory_estimate"]["fits"]
    assert "step_time_s" not in told
    json.dumps(told)
