"""The benchmark on one GPU: the whole of it at toy size on the CPU, what it refuses, counts and tells."""

import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from llamajax.errors import ConfigError
from llamajax.estimates.formulas import flops_per_token
from llamajax.planning.xla.compile import compile_for
from llamajax.step.resolve import resolve_planned
from scripts import bench_gpu
from scripts.bench import card
from scripts.bench.case import IGNORE, LOSS_STEPS, MODELS, PASSES, REMATS, ROOT, TORCH_ROWS, TOY, Case, Choice
from scripts.bench.checks import refusals
from scripts.bench.child import Task, first_that_fits
from scripts.bench.figures import Ceiling, ceiling, figures, peak_flops, table
from scripts.bench.jax_rows import fused_calls
from scripts.bench.weights import write_weights
from tests.faults import scene

ROWS = tuple(REMATS)
MEASURED = tuple(row for row in ROWS if row not in TORCH_ROWS or importlib.util.find_spec("torch"))
"""On this machine."""
LLAMA = Case(model="1b", seq_len=4096, packed=False)
BEST = Ceiling(gemm_s=0.3, attention_s=0.1, gemm_flops=800e12)
GIB = 2**30


def run(row: str, **changes: Any) -> dict[str, Any]:
    """A round as a row of an H100 would tell it."""
    return {
        "row": row, "round": 1, "step_s": [0.5, 0.51, 0.52, 0.5], "peak_bytes": 60 * GIB, "compile_s": 20.0, "note": "cudnn",
        "losses": [7 - 0.1 * step for step in range(LOSS_STEPS)], "gradients": {"norm": 0.1, "self_attn.q_proj": 0.2},
        "tokens": "1ccdb68d", "attention": {"forward": ["fmhaSoftmax"], "backward": ["fmhaSoftmaxBackward"]},
        "choice": {"micro_batch": 4, "remat": "none"}, "sm_mhz": 1755.0, "watts": 690.0,
    } | changes  # fmt: skip


def refused(*, best: Ceiling | None = BEST, case: Case = LLAMA, **changed: dict[str, Any]) -> dict[str, list[str]]:
    """Why rows are refused, of which some rounds are not as the others."""
    rows = {row: [run(row) | changed.get(row, {})] for row in ROWS}
    return {row: reasons for row, reasons in refusals(case, 80 * GIB, best, rows).items() if reasons}


def test_rows_that_agree_are_not_refused():
    assert not refused()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_s": [0.5, 0.39, 0.5, 0.5]}, "faster than the ceiling: 390.0 ms for a step, and its products and attention"),
        ({"losses": [7.03 - 0.1 * step for step in range(LOSS_STEPS)]}, "losses are 0.0300 from"),
        ({"losses": [float("nan")] * LOSS_STEPS}, "20 finite losses are needed, and round 1 has [nan"),
        ({"losses": [7.0] * LOSS_STEPS}, "nothing is learnt: loss 7.0000 at first, 7.0000 at step 20"),
        ({"gradients": {"norm": 0.1, "self_attn.q_proj": 0.21}}, "gradients of the first step are 4.8% from"),
        ({"gradients": {"norm": 0.1}}, "gradients of the first step are inf% from"),
        ({"attention": {"forward": [], "backward": ["fmhaSoftmaxBackward"]}}, "no fused attention forward: "),
        ({"attention": {"forward": ["fmhaSoftmax"], "backward": []}}, "no fused attention backward: "),
        ({"peak_bytes": 81 * GIB}, "peak memory 81.0 GiB of 80.0 GiB: more than there is"),
        ({"reserved_bytes": 82 * GIB}, "peak memory 82.0 GiB of 80.0 GiB: more than there is"),
        ({"error": "ended with exit code 1: RuntimeError"}, "round 1: ended with exit code 1: RuntimeError"),
    ],
)
def test_a_row_that_is_not_what_it_says_is_refused_alone(changes, reason):
    found = refused(torch_ideal=changes)
    assert set(found) == {"torch_ideal"}
    assert any(text.startswith(reason) for text in found["torch_ideal"]), found


def test_of_two_rows_that_differ_neither_is_known_to_be_right():
    rows = {"hf": [run("hf")], "llamajax": [run("llamajax", losses=[6 - 0.1 * step for step in range(LOSS_STEPS)])]}
    assert all(refusals(LLAMA, 80 * GIB, BEST, rows).values())


def test_without_the_same_tokens_or_a_ceiling_nothing_is_known():
    assert set(refused(hf={"tokens": "0"})) == set(refused(best=None)) == set(ROWS)


def test_newcomers_attention_need_not_be_fused_and_a_toys_neither():
    none = {"attention": {"forward": [], "backward": []}}
    assert not refused(jax_naive=none)
    assert not refused(case=Case(model=TOY, seq_len=128, packed=True), llamajax=none)


def test_the_ceiling_is_the_faster_of_both_in_every_product():
    gemms = LLAMA.gemms()
    flops = sum(6 * width * out * layers for width, out, layers in gemms.values()) * LLAMA.tokens

    def part(rate: dict[str, float], attention_s: float) -> dict[str, Any]:
        shapes = {name: 2 * width * out / rate.get(name, 100e12) for name, (width, out, _) in gemms.items()}
        seconds = {f"{name}, {which}": per_token for name, per_token in shapes.items() for which in PASSES}
        return {"gemms": seconds, "attention": {"b": attention_s, "c": 1.0}, "unavailable": {"a": "no"}}

    halves = {"qkv": 800e12, "head": 800e12}, {"output": 800e12, "gate and up": 800e12, "down": 800e12}
    best = ceiling(LLAMA, [part(halves[0], 0.03), part(halves[1], 0.02), {"error": "no"}])
    assert best is not None
    assert best.gemm_s == pytest.approx(flops / 800e12)
    assert best.attention_s == pytest.approx(16 * 8 * 0.02)  # layers, rows
    assert best.gemm_flops == pytest.approx(800e12)
    assert ceiling(LLAMA, [{"error": "no"}]) is None


def test_figures_are_medians_of_all_rounds():
    runs = [run("hf"), run("hf", step_s=[0.54, 0.55, 0.56, 0.55], peak_bytes=50 * GIB, round=2)]
    found = figures(LLAMA, BEST, 1e15, runs)
    assert found["step_s"] == pytest.approx(0.53)
    assert found["tokens_per_s"] == pytest.approx(32768 / 0.53)
    assert found["rounds_apart"] == pytest.approx(0.55 / 0.505 - 1)
    assert found["mfu"] == pytest.approx(32768 * flops_per_token(LLAMA.network, 4096) / 0.53 / 1e15)
    assert found["mfu_full"] == pytest.approx(32768 * flops_per_token(LLAMA.network, 4096, full_attention=True) / 0.53e15)
    assert found["of_ceiling"] == pytest.approx(0.4 / 0.53)
    assert found["peak_bytes"] == 50 * GIB


def test_the_table_says_what_was_not_measured(capsys):
    rows = {row: figures(LLAMA, BEST, 1e15, [run(row)]) | {"refused": []} for row in ("hf", "llamajax")}
    rows["hf"] |= {"refused": ["x"]}
    rows["torch_ideal"] = {"refused": ["y"]}
    bench_gpu.print_table(table(LLAMA, rows))
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["hf"][-1] == lines["torch_ideal"][-1] == "REFUSED"
    assert set(lines["torch_ideal"][1:-1]) == {"-"}
    assert lines["llamajax"][1:8] == ["64,887", "-", "0.5050", "2.5%", "0.0%", "53.3%", "58.6%"]


def test_what_documents_see_is_counted():
    case = Case(model=TOY, seq_len=128, packed=True)
    batch = case.batch(3)
    alike = batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None, :]
    pairs = np.sum(alike & np.tri(128, dtype=bool)) - case.tokens / 2  # the formula leaves half of the diagonal out
    model = case.network
    attention = 12 * model.num_layers * model.num_heads * model.head_dim * pairs
    weights = sum(6 * width * out * layers for width, out, layers in case.gemms().values()) * case.tokens
    assert case.flops() == pytest.approx(weights + attention, rel=1e-4)
    assert case.flops() < dataclasses.replace(case, packed=False).flops() < case.flops(full_attention=True)


def test_batches_are_packed_rows_whose_documents_end_without_a_target():
    case = Case(model=TOY, seq_len=128, packed=True)
    first, second = case.batch(0), case.batch(1)
    assert np.any(first["tokens"] != second["tokens"])
    assert np.all(first["segment_ids"] == second["segment_ids"])
    ends = np.diff(first["segment_ids"], axis=1) > 0
    assert ends.any()
    assert np.all(first["targets"][:, :-1][ends] == IGNORE)
    assert np.all(first["targets"][:, :-1][~ends] == first["tokens"][:, 1:][~ends])


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.parametrize(
    ("packed", "kernel", "forward", "backward"),
    [
        (False, "auto", ["fmhaSoftmax"], ["fmhaSoftmaxBackward"]),
        pytest.param(
            True,
            "auto",
            ["attention_forward"],
            ["attention_backward_keys", "attention_backward_queries"],
            marks=pytest.mark.long,
        ),
        pytest.param(False, "plain", [], [], marks=pytest.mark.long),
    ],
)
def test_fused_attention_is_found_in_what_xla_compiles_for_gpus(packed, kernel, forward, backward):
    config = Case(model="1b", seq_len=2048, packed=packed).config(Choice(micro_batch=1, remat="full"))
    smaller = {"model.num_layers": 2, "model.vocab_size": 1024, "model.attention_kernel": kernel, "hardware.gpu": "h100"}
    assert fused_calls(compile_for(resolve_planned(config.changed(smaller))).hlo) == {
        "forward": forward,
        "backward": backward,
    }


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("model", [model for model in MODELS if model != TOY])
def test_what_can_be_chosen_is_a_run(row, model):
    case = Case(model=model, seq_len=8192, packed=True)
    for choice in case.candidates(row, 140 * GIB):
        config = case.config(choice)
        assert not config.placement_problems(1)
        assert config.train.grad_accum_steps * choice.micro_batch == case.rows
    assert len(case.candidates(row, 1.0)) == 1  # the last resort


def test_little_computed_again_and_few_sums_come_first():
    first, second, third, *_, last = map(str, LLAMA.candidates("llamajax", 140 * GIB))
    assert (first, second, third) == ("8 at a time, none", "8 at a time, save_attention_qkv_mlp", "4 at a time, none")
    assert last == "1 at a time, full"
    assert str(LLAMA.candidates("torch_ideal", 80 * GIB)[0]) == "8 at a time, none"


def test_the_first_choice_that_fits_is_taken():
    def attempt(choice: Choice) -> dict[str, Any]:
        if choice.micro_batch > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if choice.remat == "full":
            raise ValueError("a mistake")
        return {"losses": []}

    choices = [Choice(micro_batch=n, remat="none") for n in (4, 2, 1)]
    assert first_that_fits(choices, attempt) == {"losses": [], "choice": {"micro_batch": 2, "remat": "none"}}
    with pytest.raises(ValueError, match="a mistake"):
        first_that_fits([choices[0], Choice(micro_batch=1, remat="full"), choices[1]], attempt)
    with pytest.raises(MemoryError, match=r"^out of memory with each of: 4 at a time, none; 3 at a time, full$"):
        first_that_fits([choices[0], Choice(micro_batch=3, remat="full")], attempt)


def test_clocks_are_those_of_the_timed_steps(tmp_path):
    watch = card.Watch(tmp_path / "samples", toy=True)
    begin = card._seconds("2026/11/23 16:00:00.000")
    lines = ("00.000, 345, 70.10", "01.000, 1980, 690.00", "02.000, 1755, [N/A]", "03.000, 1755, 695.00", "04.000, 345, 7")
    (tmp_path / "samples").write_text("".join(f"2026/11/23 16:00:{line}\n" for line in lines) + "2026/11/23 16:0")
    assert watch.between(begin + 0.5, begin + 3.5) == {"sm_mhz": 1755, "watts": 692.5}
    assert watch.between(begin + 10, begin + 20) == {"sm_mhz": None, "watts": None}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--models", "70b"], "'70b' is unknown; choose from 1b, 3b, 8b16, 8b"),
        (["--toy", "--seq", "2048"], "--toy sets its own model and rows"),
        (["--rows", "llamajax,maxtext"], "'maxtext' is unknown; choose from"),
        (
            ["--choices", "llamajax=4:none,hf=2:save_attention"],
            "'hf=2:save_attention' must have the form llamajax=4:none; choose from hf: ",
        ),
        (["--minutes", "nan"], "--minutes: 'nan' is not a number of minutes"),
        (["--minutes", "soon"], "--minutes: 'soon' is not a number of minutes"),
    ],
)
def test_a_wrong_command_line_is_told(arguments, reason, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_gpu.parse(arguments)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_without_a_gpu_it_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(card.shutil, "which", lambda command: None)
    assert bench_gpu.main([]) == 2
    assert capsys.readouterr().err == (
        "no GPU to measure on (nvidia-smi was not found); run it on a machine with an NVIDIA GPU, or give --toy to try it"
        " on a CPU\n"
    )


def test_a_gpu_is_what_nvidia_smi_says(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $2 in *timestamp*) echo 2026/11/23 16:00:00.000, 1980, 690.00 ;;"
        " *) echo NVIDIA H100 80GB HBM3, 81559, 580.159.04, 700.00, [N/A] ;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = card.hardware(toy=False)
    assert found == {
        "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 81559 * 2**20, "driver": "580.159.04", "power_limit_w": 700.0,
        "max_sm_mhz": None,
    }  # fmt: skip
    assert peak_flops(found["name"], None) == (989.5e12, "H100 data sheet, dense bfloat16")
    with card.Watch(tmp_path / "samples", toy=False) as watch:
        watch._process.wait()
    begin = card._seconds("2026/11/23 16:00:00.000")
    assert watch.between(begin - 1, begin + 1) == {"sm_mhz": 1980, "watts": 690}
    program.write_text("#!/bin/sh\necho No devices were found; exit 6\n")
    with pytest.raises(ConfigError, match=r"^no GPU to measure on \(No devices were found\); "):
        card.hardware(toy=False)


@pytest.fixture
def asked(monkeypatch) -> list[Task]:
    """The tasks of the processes that measure, which here answer at once."""
    tasks: list[Task] = []

    def answer(self: bench_gpu.Benchmark, module: str, task: Task, number: int) -> dict[str, Any]:
        tasks.append(task)
        if task.row != "ceiling":
            choice = {"choice": dataclasses.asdict(task.choice or Choice(micro_batch=2, remat="full"))}
            return run(task.row) | choice | {"round": number} | ({"step_s": [0.01] * 4} if task.row == "hf" else {})
        gemms = {f"{name}, {which}": 1e-10 for name in task.case.gemms() for which in PASSES}
        return {
            "row": "ceiling",
            "gemms": gemms,
            "attention": {"flash": 0.0003, "cudnn": 0.0001},
            "unavailable": {"x": "no"},
        }

    monkeypatch.setattr(bench_gpu.Benchmark, "_run", answer)
    monkeypatch.setattr(bench_gpu, "write_weights", lambda case, directory: None)
    monkeypatch.setattr(card, "hardware", lambda *, toy: {"name": "NVIDIA H200", "memory_bytes": 140 * GIB})
    return tasks


def test_rounds_go_there_and_back_with_the_choice_of_the_first(asked, tmp_path, capsys):
    options = ["--models", "3b", "--seq", "2048,8192", "--rows", ",".join(ROWS), "--json", str(tmp_path / "found.json")]
    assert bench_gpu.main(options) == 1
    each = len(asked) // 2
    assert [task.row for task in asked[:each]] == ["ceiling", "ceiling", *ROWS, *ROWS[::-1]]
    assert [task.case.seq_len for task in asked] == [2048] * each + [8192] * each
    assert [task.choice for task in asked[2:each]] == [None] * 4 + [Choice(micro_batch=2, remat="full")] * 4
    assert {(task.row, task.attention) for task in asked if task.attention} == {("torch_ideal", "cudnn")}
    found = json.loads((tmp_path / "found.json").read_text())
    for case in found["cases"]:
        assert [row for row, told in case["rows"].items() if told["refused"]] == ["hf"]  # faster than the ceiling
        assert len(case["measured"]["rows"]["llamajax"]) == 2
        assert case["rows"]["llamajax"]["tokens_per_s"] == pytest.approx(32768 / 0.505)
    assert "refused    hf: faster than the ceiling: 10.0 ms" in capsys.readouterr().out


def test_one_row_alone_is_compared_with_none_and_says_so(asked, capsys):
    assert bench_gpu.main(["--rows", "llamajax", "--choices", "llamajax=4:full"]) == 0
    assert [task.choice for task in asked[1:]] == [Choice(micro_batch=4, remat="full")] * 2
    assert [task.row for task in asked] == ["ceiling", "llamajax", "llamajax"]  # torch's ceiling needs torch
    assert "not compared: losses and gradients" in capsys.readouterr().out


def test_what_there_was_no_time_for_is_refused(capsys):
    assert bench_gpu.main(["--toy", "--minutes", "0", "--rows", "hf,llamajax"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("no time was left; raise --minutes, or name fewer cases or rows") for line in lines) == 4
    assert lines[-1] == "refused: toy, 128 tokens, packed: ceiling, hf, llamajax"


@pytest.mark.slow
def test_the_whole_way_at_toy_size(tmp_path):
    command = [sys.executable, "scripts/bench_gpu.py", "--toy", "--json", str(tmp_path / "toy.json")]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert outcome.stdout.endswith("no row refused\n")
    found = json.loads((tmp_path / "toy.json").read_text())
    assert {"toy", "date", "command", "commit", "hardware", "versions"} < set(found)
    (case,) = found["cases"]
    assert case["case"] == {"model": TOY, "seq_len": 128, "packed": True}
    assert tuple(case["rows"]) == ("ceiling", *MEASURED)
    assert not any(row["refused"] for row in case["rows"].values())
    assert not any("step_s" in row for row in case["rows"].values())  # a CPU's times are not told
    for row in MEASURED:
        (only,) = case["measured"]["rows"][row]
        assert (len(only["losses"]), len(only["step_s"])) == (25, 4)


def test_what_is_ended_leaves_no_process_and_no_weights(tmp_path):
    command = [sys.executable, "scripts/bench_gpu.py", "--toy", "--rows", "llamajax"]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while not [*tmp_path.glob("llamajax-bench-*/log")]:  # of the first process that measures
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert [*tmp_path.iterdir()] == []
    scene.wait_until(lambda: not is_there(process.pid), 10, "end of all that it has started")


def is_there(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_rows_learn_the_same_whatever_they_choose(tmp_path):
    """With several micro-batches and everything computed again: as with one and nothing, and as each other."""
    case = Case(model=TOY, seq_len=128, packed=True)
    write_weights(case, tmp_path)
    env = bench_gpu.environment(tmp_path, toy=True)
    rows, two = {}, Choice(micro_batch=2, remat="full")
    for row, choice in [*((row, two) for row in MEASURED), ("jax_naive", None)]:
        task = Task(row=row, case=case, weights=str(tmp_path), memory_bytes=8 * GIB, choice=choice, attention="sdpa")
        module = "torch_rows" if row in TORCH_ROWS else "jax_rows"
        command = [sys.executable, "-m", f"scripts.bench.{module}", task.encode()]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        rows[f"{row}, {choice}"] = [{"round": 1} | json.loads(done.stdout)]
    assert not any(refusals(case, 8 * GIB, None, rows).values())
