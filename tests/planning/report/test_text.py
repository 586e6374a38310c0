"""The text of a plan."""

import dataclasses
import io

import jaxlib.version
import pytest
from rich.console import Console

from llamajax.config.file import dump_config
from llamajax.estimates.calibration import Constants
from llamajax.planning.plan import Alternative
from llamajax.planning.report import figures
from llamajax.planning.report.text import print_estimate, print_plan
from llamajax.planning.search import Sweep
from llamajax.watch import console
from tests.estimates.test_calibration import MEASUREMENT
from tests.planning import plans


@pytest.fixture
def printed(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(console, "CONSOLE", Console(file=file, width=120, highlight=False))
    return file


def test_the_verdict_comes_first_and_then_everything(printed):
    plan = plans.plan()
    print_plan(plan, figures.figures(plan))
    text = printed.getvalue()
    first, second = text.splitlines()[:2]
    assert first.startswith("verdict    fits: 64.0 GiB of 79.1 GiB per GPU; ")
    assert "tokens/s/GPU, MFU" in first
    assert "waits for communication" in first
    assert "predicted, not measured" in second
    for word in (
        "16 x H100 in 4 nodes, 200 GB/s between nodes; mesh data 2 x fsdp 4 x tensor 2",
        "the optimizer's moments",
        "model.[bold]",
        f"options    jaxlib {jaxlib.version.__version__}, H100: xla_gpu_enable_latency_hiding_scheduler=true\n",
        "all-gather",
        "reduce-scatter",
        "hides behind",
        "inter-node",
        "the cost model's latencies",
        "training's",
        "training takes 92.0% of the card for XLA's arrays, which need 75.9%",
        "1B tokens take",
        "0 instructions with a guessed cost",
    ):
        assert word in text
    assert "instead" not in text


def test_synchronous_collectives_are_counted_with_their_price(printed):
    plan = plans.plan()
    told = figures.figures(plan)
    collectives = [use | {"is_sync": True, "in_loop": True, "exposed_s": 0.5} for use in told["collectives"][:2]]
    print_plan(plan, told | {"collectives": collectives, "sync_collectives_in_loops": 2})
    assert "2 collectives in loops hide behind nothing" in printed.getvalue()
    assert "every iteration, 1 s per step" in printed.getvalue()


def test_what_does_not_fit_is_said_with_what_does(printed):
    plan = plans.plan(peak_bytes=90 * plans.GIB)
    print_plan(plan, figures.figures(plan))
    text = printed.getvalue()
    assert text.startswith("verdict    does not fit: 94.0 GiB of 79.1 GiB")
    assert "missing" in text
    assert "train.grad_accum_steps: 4" in text
    assert "x 2.000" in text
    assert "MEM_FRACTION" not in text


def test_a_full_card_needs_a_larger_share_for_jax(printed):
    plan = plans.plan(peak_bytes=74 * plans.GIB)
    print_plan(plan, figures.figures(plan))
    text = printed.getvalue()
    assert text.startswith("verdict    does not fit: ")
    assert "set        XLA_PYTHON_CLIENT_MEM_FRACTION=0.936 here and for training to make it fit" in text


def test_a_share_that_leaves_too_little_is_told(printed):
    plan = plans.plan()
    told = figures.figures(plan)
    memory = dataclasses.replace(plan.chosen.memory, training_fraction=0.97)
    chosen = dataclasses.replace(plan.chosen, memory=memory)
    print_plan(dataclasses.replace(plan, informed=chosen), told)
    assert "set        XLA_PYTHON_CLIENT_MEM_FRACTION=0.949 or less" in printed.getvalue()


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("auto", ("XLA's built-in estimates ", "the cost model's latencies ")),
        ("runs/[a]/measured.pbtxt", ("XLA's built-in estimates ", "the latencies in runs/[a]/measured.pbtxt ")),
    ],
)
def test_schedules_are_named_by_what_they_are_by(printed, source, names):
    plan = plans.plan(config=plans.CONFIG.changed({"xla.latency_profile": source}))
    better = {"parallel.stack": "scan", "xla.latency_profile": None}
    other = Alternative(changes=better, schedule=plans.schedule(seconds=-1e-6))
    plan = dataclasses.replace(plan, alternatives=(other,))
    print_plan(plan, figures.figures(plan))
    lines = printed.getvalue().splitlines()
    for name in (*names, "XLA's built-in estimates, layers by scan "):
        assert any(line.startswith(name) for line in lines)
    assert [line for line in lines if line.endswith("training's  ")] == [line for line in lines if line.startswith(names[1])]
    assert "set        parallel.stack: scan, xla.latency_profile: null: the best of these" in lines


def test_measured_constants_are_one_line(printed, tmp_path):
    plan = plans.plan()
    print_plan(plan, figures.figures(plan))
    assert "\nconstants " not in printed.getvalue()
    for constants, told in (
        (
            MEASUREMENT.constants,
            "matmul_efficiency 0.7 (built in: 0.62), kernel_s 1.5e-06 (built in: 2e-06), compute_slowdown",
        ),
        (Constants(matmul_efficiency=0.62), "none differs from the built-in ones"),
    ):
        file = tmp_path / "h100.yaml"
        file.write_text(dump_config(dataclasses.replace(MEASUREMENT, constants=constants)))
        plan = plans.plan(config=plans.CONFIG.changed({"hardware.calibration": str(file)}))
        print_plan(plan, figures.figures(plan))
        where = f"constants  {file}, measured on NVIDIA H100 80GB HBM3 on 2026-11-24, jax 0.11.2, commit 1234567: "
        assert [line for line in printed.getvalue().splitlines() if line.startswith(where + told)]


def test_without_a_change_that_fits_the_way_out_is_told(printed):
    plan = plans.plan(peak_bytes=90 * plans.GIB)
    print_plan(plan, figures.figures(plan) | {"suggestions": []})
    assert "no change that was tried fits" in printed.getvalue()


def test_a_sweep_is_a_table(printed):
    made = (plans.plan(), plans.plan())
    told = figures.figures(made[0], Sweep(key="hardware.nodes", values=("4", "8"), configs=(plans.CONFIG,) * 2), made)
    print_plan(made[0], told)
    text = printed.getvalue()
    assert "efficiency" in text
    assert "weak scaling" in text


def test_an_estimate_says_that_nothing_was_compiled(printed):
    print_estimate(plans.CONFIG, figures.estimated_figures(plans.CONFIG, "no compiler"))
    first, *rest = printed.getvalue().splitlines()
    assert first.startswith("verdict    probably fits: about")
    assert first.endswith("by formulas; nothing was compiled")
    assert len(rest) == 10
    assert any(line.startswith("attention  pallas: cudnn cannot be used") for line in rest)


def test_attention_that_no_kernel_computes_is_a_warning(printed):
    config = plans.CONFIG.changed({"model.compute_dtype": "float32"})
    print_estimate(config, figures.estimated_figures(config, "no compiler"))
    assert "\nwarning    attention uses no fused kernel: " in printed.getvalue()


def test_ticks_of_a_pipeline_are_told_with_their_seconds_where_these_are_known(printed):
    plan = plans.plan()
    told = figures.figures(plan) | {"idle_flops": 100.0, "flops": 700.0}
    assert told["pipeline"] is None
    ticks = {"fill": 7, "both": 128, "drain": 8}
    known = {"layers": 10, "slots": 16, "bubble": 0.0586, "ticks": ticks, "bytes_per_tick": 8 << 20, "tick_s": None}
    print_plan(plan, told | {"pipeline": known})
    text = printed.getvalue()
    assert "7 fill the pipeline, 128 run both passes, 8 drain it; each sends 8.00 MiB on and as much back" in text
    assert "10 layers, values of 16 micro-batches; waits for 5.9% of the time in which it works, and computes 12.5%" in text
    print_plan(plan, told | {"pipeline": known | {"tick_s": {"fill": 0.06, "both": 0.2, "drain": 0.13}}})
    assert (
        "7 fill the pipeline (60 ms each), 128 run both passes (200 ms each), 8 drain it (130 ms each); "
        in printed.getvalue()
    )
