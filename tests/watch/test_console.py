"""The console's output: aligned lines when piped, a bar on a terminal, tables that add up."""

import contextlib
import dataclasses
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tiny import tiny_config

from llamajax.config.parallel import MeshConfig
from llamajax.config.training import TrainConfig
from llamajax.config.watch import MetricsConfig
from llamajax.parallel import mesh
from llamajax.step.state import abstract_state
from llamajax.watch import console, goodput, run_log


def record(step, *, loss=2.34567, step_time_s=0.5, skipped=0):
    return {
        "step": step, "time": 1e9, "train/loss": loss, "train/grad_norm": 0.8125, "train/learning_rate": 3e-4,
        "train/skipped_steps": skipped, "perf/step_time_s": step_time_s, "perf/data_wait_s": 0.01,
        "perf/tokens_per_sec": 1000 / step_time_s, "perf/tokens_per_sec_per_device": 125 / step_time_s,
        "perf/mfu": 0.2 / step_time_s, "perf/mfu_full_attention": 0.22 / step_time_s,
    }  # fmt: skip


def progress_config(**settings):
    return tiny_config(train=TrainConfig(num_steps=2000, global_batch_size=32), metrics=MetricsConfig(**settings))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch, request):
    """A terminal of `request.param` columns in place of standard output."""
    terminal = Terminal()
    screen = Console(file=terminal, width=request.param, force_terminal=True, color_system=None, highlight=False)
    monkeypatch.setattr(console, "CONSOLE", screen)
    return terminal


def test_a_full_disk_behind_standard_output_ends_nothing(monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(console, "CONSOLE", console.Screen(file=full))
        monkeypatch.setattr(console.sys, "stderr", full)
        console.log("a line")
        console.say("a line")
        console.print_stream("a prompt", ["a", " piece"])
        with contextlib.suppress(OSError):
            full.close()


def test_a_reader_that_has_gone_ends_nothing(monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    with contextlib.suppress(BrokenPipeError), open(writes, "w", buffering=1) as closed:  # to close it fails, too
        screen = console.Screen(file=closed)
        monkeypatch.setattr(console, "CONSOLE", screen)
        console.log("a line")
        assert screen.quiet
        screen.quiet, screen.ends_with_reader = False, True
        with pytest.raises(SystemExit):
            console.log("another, of a command that has nothing to do but print")


def test_plain_lines(capsys):
    with console.Progress(progress_config(log_every=10), start_step=990) as progress:
        for step in range(991, 1011):
            progress.update(record(step, step_time_s=0.25 if step == 1001 else 0.5, skipped=int(step > 1005)))
        progress.tell_eval({"step": 1010, "eval/loss": 2.5, "eval/bits_per_byte": 1.125})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "step  991/2000  loss  2.3457  grad norm   0.812  lr 3.00e-04      2,000 tok/s  MFU 40.0% (44.0% full attention)"
        "    0.500 s/step  data wait  2.0%  ETA 0:08:"
    )
    assert [line.split("/")[0] for line in lines] == ["step  991", "step 1000", "step 1010", "step 1010"]
    # Ten steps, one of them twice as fast: 10,000 tokens in 4.75 s.
    assert "2,105 tok/s  MFU 42.1% (46.3% full attention)    0.475 s/step  data wait  2.1%" in lines[2]
    assert lines[2].endswith("1 skipped")
    assert lines[3] == "step 1010/2000  held-out loss 2.5000  1.1250 bits per byte"
    aligned = [line.index("ETA") for line in lines[:3]]
    assert len(set(aligned)) == 1


def test_a_line_about_short_steps_shows_the_speed_of_more_of_them(capsys):
    """The last one was fetched 9 ms late, and this one therefore after one: alone it would have an MFU of 2000%."""
    with console.Progress(progress_config(log_every=1), start_step=0) as progress:
        for step_time_s in (0.5, 0.1, 0.2, 0.2, 0.19, 0.01):
            progress.update(record(1, step_time_s=step_time_s))
    last = capsys.readouterr().out.splitlines()[-1]
    assert "5,000 tok/s  MFU 100.0% (110.0% full attention)    0.200 s/step" in last


def test_plain_lines_survive_forced_colours(capsys, monkeypatch):
    monkeypatch.setattr(console, "CONSOLE", Console(force_terminal=True, highlight=False))
    assert not console.is_interactive()


@pytest.mark.parametrize("terminal", [80, 120], indirect=True)
def test_bar(terminal):
    with console.Progress(progress_config(), start_step=0) as progress:
        for step in range(1, 501):
            progress.update(record(step, loss=3.0 - step / 1000))
        progress.doing("evaluating")
        evaluating = render(progress)
        progress.tell_eval({"step": 500, "eval/loss": 2.5, "eval/bits_per_byte": 1.125})
        progress.update(record(501, skipped=3))
    bar, figures = render(progress)
    assert bar.startswith("step 501/2,000  ━")
    assert re.search(r"━[╸ ]+25%  ETA \d+:\d\d:\d\d  3 skipped", bar)
    assert evaluating[0].rstrip().endswith("25%  evaluating")
    assert figures.startswith("loss 2.3457  2,000 tok/s  MFU 40.0% (44.0% full attention)  data wait 2.0%")
    assert ("lr 3.00e-04" in figures) == (console.CONSOLE.width == 120)
    assert max(len(bar), len(figures)) <= console.CONSOLE.width
    assert "step  500/2000  held-out loss 2.5000  1.1250 bits per byte" in terminal.getvalue()


def render(progress):
    with console.CONSOLE.capture() as capture:
        console.CONSOLE.print(progress._render())
    return capture.get().splitlines()


def sharded_tree():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))
    return {
        "embed": jax.device_put(np.zeros((64, 32), np.float32), jax.P("tensor", "fsdp")),
        "layers": {"up": jax.device_put(jnp.zeros((3, 32, 64), jnp.bfloat16), jax.P(None, "fsdp", ("sequence", "tensor")))},
        "norm": jax.device_put(np.zeros(32, np.float32), jax.P()),
        "step": jnp.int32(0),
    }


@pytest.mark.parametrize("abstract", [False, True])
def test_parameter_table_adds_up(abstract):
    tree = sharded_tree()
    if abstract:
        tree = jax.eval_shape(lambda tree: tree, tree)
    written = io.StringIO()
    screen = Console(file=written, width=200, highlight=False)
    screen.print(console.parameter_table(tree))
    rows = [re.split(r"  +", line.strip()) for line in written.getvalue().splitlines()]
    assert rows == [
        ["parameter", "shape", "dtype", "split over", "per device", "all"],
        ["embed", "64 x 32", "float32", "tensor, fsdp", "2.00 KiB", "8.00 KiB"],
        ["layers.up", "3 x 32 x 64", "bfloat16", "-, fsdp, sequence+tensor", "1.50 KiB", "12.0 KiB"],
        ["norm", "32", "float32", "-", "128 B", "128 B"],
        ["step", "scalar", "int32", "-", "4 B", "4 B"],
        ["total", "8,225", "3.63 KiB", "20.1 KiB"],
    ]


def test_an_array_without_sharding_counts_as_replicated():
    written = io.StringIO()
    screen = Console(file=written, width=200)
    screen.print(console.parameter_table([jax.ShapeDtypeStruct((256, 4), jnp.float32)]))
    assert re.search(r"total +1,024 +4.00 KiB +4.00 KiB", written.getvalue())


def test_memory_summary():
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=8)))
    x = jax.device_put(np.zeros((64, 1024), np.float32), jax.P("fsdp"))
    compiled = jax.jit(lambda x: (x * 2, x + 1), donate_argnums=0).lower(x).compile()
    line = console.memory_summary(compiled)
    assert re.fullmatch(
        r"memory per device 64\.\d KiB: arguments 32\.0 KiB, outputs 64\.0 KiB \(32\.0 KiB in place of arguments\),"
        r" temporary \d+ B, in use at the peak [\d.]+ KiB",
        line,
    )


def test_memory_of_a_gpu_program():
    stats = SimpleNamespace(
        argument_size_in_bytes=3 * 2**30,
        output_size_in_bytes=2**30,
        alias_size_in_bytes=2**30,
        temp_size_in_bytes=5 * 2**30,
        peak_memory_in_bytes=7 * 2**30,
        host_temp_size_in_bytes=2**30,
    )
    program: Any = SimpleNamespace(memory_analysis=lambda: stats)
    assert console.memory_summary(program) == (
        "memory per device 8.00 GiB: arguments 3.00 GiB, outputs 1.00 GiB (1.00 GiB in place of arguments),"
        " temporary 5.00 GiB, in use at the peak 7.00 GiB, offloaded to the host 1.00 GiB"
    )
    untold: Any = SimpleNamespace(memory_analysis=lambda: None)
    assert "does not report" in console.memory_summary(untold)


SPLIT = goodput.Goodput(
    wall_s=200.0,
    seconds=dict.fromkeys(goodput.PARTS, 0.0) | {"productive": 186.2, "data wait": 5.4, "compile": 8.38, "other": 0.02},
)
SUMMARY = run_log.RunSummary(
    step=1500, num_steps=1500, num_params=7, tokens=1_500_000, train_loss=2.5, eval_loss=2.625, eval_bits_per_byte=1.25,
    tokens_per_sec=12_345.6, tokens_per_sec_per_device=1543.2, mfu=0.4, mfu_full_attention=0.44, steps_time_s=100.0,
    wall_time_s=3725.0, goodput=SPLIT, restarts=2, stop_reason="finished",
)  # fmt: skip


def test_summary_names_everything_a_person_goes_on_with(capsys):
    console.print_summary(Path("runs/a b"), SUMMARY, Path("runs/a b/checkpoints/1500"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("finished")
    assert lines[1:] == [
        "steps          1,500 of 1,500, 1,500,000 tokens",
        "train loss     2.5000 (mean of the last 20 steps)",
        "held-out loss  2.6250, 1.2500 bits per byte",
        "speed          12,346 tokens/s, 1,543 per device (median)",
        "MFU            40.0% (median), or 44.0% counting full attention",
        "wall time      1:02:05, of which 0:01:40 in steps, 2 restarts",
        "goodput        93.1%: compile 4.2%, data wait 2.7%",
        "run            runs/a b",
        "checkpoint     runs/a b/checkpoints/1500",
        "metrics        runs/a b/metrics.jsonl",
        "report         python -m llamajax.report 'runs/a b'",
    ]


def test_the_summary_tells_how_often_sources_were_gone_through(capsys):
    console.print_summary(Path("run"), dataclasses.replace(SUMMARY, epochs=(0.126, 2.0)), Path("run/checkpoints/2"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[2] == "epochs         0.13 of data.sources[0], 2.00 of data.sources[1]"


@pytest.mark.parametrize(
    ("loss", "bits", "told"),
    [(None, None, "not evaluated"), (2.625, None, "2.6250"), (2.5, 1.25, "2.5000, 1.2500 bits per byte")],
)
def test_summary_of_what_was_evaluated(capsys, loss, bits, told):
    summary = dataclasses.replace(SUMMARY, eval_loss=loss, eval_bits_per_byte=bits)
    console.print_summary(Path("run"), summary, Path("run/checkpoints/2"))
    assert f"held-out loss  {told}" in [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_header_and_long_lines_are_not_folded_when_piped(capsys):
    jax.set_mesh(mesh.make_mesh(MeshConfig(fsdp=2, sequence=2, tensor=2)))
    config = tiny_config("x" * 300, mesh=MeshConfig(fsdp=2, sequence=2, tensor=2, num_cpu_devices=8))
    console.print_header(config, sharded_tree())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "run        " + "x" * 300
    assert lines[2] == "devices    8 x cpu in 1 process; mesh fsdp 2 x sequence 2 x tensor 2"
    assert lines[3].startswith("batch      global batch 32 sequences x 16 tokens = 512 tokens = 16 per device x 2")
    assert lines[4] == "model      8.22k parameters (8,225)"
    assert len(lines) == 4 + 1 + 6


def test_a_model_cannot_speak_to_the_terminal(capsys):
    console.print_stream("[bold]Once", iter([" upon\n", "\x1b[31ma", " time\r"]))
    assert capsys.readouterr().out == "[bold]Once upon\n\N{REPLACEMENT CHARACTER}[31ma time\N{REPLACEMENT CHARACTER}\n"


def test_what_narrow_master_weights_cost_is_said(capsys):
    config = tiny_config()
    model = abstract_state(config).model
    console.print_header(config, model)
    assert "param_dtype" not in capsys.readouterr().out
    console.print_header(config.changed({"model.param_dtype": "bfloat16"}), model)
    warning = next(line for line in capsys.readouterr().out.splitlines() if "model.param_dtype: bfloat16" in line)
    assert "lose every update below 1/512 of the weight: most updates at" in warning
    assert "float32 needs 56.3 KiB more in all" in warning
