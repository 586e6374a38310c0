"""Plans every shipped configuration and stores the results. Run it when a change is meant to change the plans.

    python scripts/plans.py [NAME ...]

Writes figures to tests/planning/golden.json, under the installed version of jax; a test compares later plans with them. With
jax 0.10.2, also writes the reports to docs/plans/, a table of all plans to docs/plans/README.md, and the predictions to the
headers of configs/*.yaml. Needs the extra `plan`; each plan takes one to twelve minutes on two idle cores.

"expected" in golden.json, edited by hand, states the contents that the configuration requires of a plan under any version of
jax. A plan with other contents is not stored, nor one that other settings make faster.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
PLANS = ROOT / "docs" / "plans"
GOLDEN = ROOT / "tests" / "planning" / "golden.json"
MODELS = ("llama", "mixtral", "qwen3", "deepseek", "bigmac")
"""How the names of planned configurations begin."""
_13B = "llama2_13b_32xa100_80gb"
_8B, _7B = "llama3_1_8b_8xh200", "llama2_7b_8xa100_80gb"
_ROWS = {
    "mesh.fsdp": 1,
    "mesh.sequence": 8,
    "train.global_batch_size": 1,
    "train.grad_accum_steps": 1,
    "model.remat": "full",
}
_128KI = _ROWS | {"hardware.gpu": "h100", "data.seq_len": 1 << 17, "model.max_seq_len": 1 << 17}
_1MI = _ROWS | {"data.seq_len": 1 << 20, "model.max_seq_len": 1 << 20}
VARIANTS: dict[str, tuple[str, dict[str, int | str]]] = {
    "llama2_13b_256xa100_80gb": (_13B, {"hardware.nodes": 32, "mesh.fsdp": 256, "train.grad_accum_steps": 1}),
    "llama2_70b_tensor8_512xa100_40gb": ("llama2_70b_512xa100_40gb", {"mesh.fsdp": 64, "mesh.tensor": 8}),
    "llama2_7b_1mi_ulysses_8xa100_80gb": (_7B, _1MI | {"parallel.sequence": "ulysses"}),
    "llama3_1_8b_512xh100": (
        _8B,
        {
            "hardware.gpu": "h100",
            "hardware.nodes": 64,
            "mesh.fsdp": 512,
            "train.global_batch_size": 512,
            "train.grad_accum_steps": 1,
        },
    ),
    "llama3_1_8b_128ki_ring_8xh100": (_8B, _128KI | {"parallel.sequence": "ring"}),
    "llama3_1_8b_128ki_ulysses_8xh100": (_8B, _128KI | {"parallel.sequence": "ulysses"}),
    "llama3_2_1b_auto_8xh100": ("llama3_2_1b_8xh100", {"model.remat": "auto"}),
    "llama3_1_70b_tensor8_256xh100": ("llama3_1_70b_256xh100", {"mesh.data": 1, "mesh.fsdp": 32, "mesh.tensor": 8}),
}
"""Plans of a configuration on another cluster or mesh: name of the configuration and overrides."""
GOLDEN_KEYS = ("peak_bytes", "exposed_comm_s", "step_time_s", "elementwise_bytes", "num_kernels")
DOCUMENTED = "0.10.2"
"""Version of jax for the documented plans."""
EXACT = 0.01
"""Allowed relative difference of executed from expected FLOPs."""
BETTER = 1.005
"""Factor by which other settings must be faster to count as better."""


def plans() -> dict[str, tuple[str, dict[str, int | str]]]:
    """Returns configuration and overrides by the name of the plan."""
    shipped: dict[str, tuple[str, dict[str, int | str]]] = {
        path.stem: (path.stem, {}) for path in CONFIGS.glob("*.yaml") if path.stem.startswith(MODELS)
    }
    return dict(sorted((shipped | VARIANTS).items()))


def arguments(name: str) -> list[str]:
    """Returns the arguments of `python -m llamajax.plan`."""
    config, changes = plans()[name]
    return [
        "--config",
        f"configs/{config}.yaml",
        *(text for key, value in changes.items() for text in (f"--{key}", str(value))),
    ]


def run(name: str) -> tuple[str, dict[str, Any], float, float]:
    """Plans. Returns the report, its figures, the seconds taken, and the peak resident memory in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "llamajax.plan", *arguments(name), "--alternatives", "--json", str(figures)]
        started = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "140"})
        assert process.stdout is not None
        report = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{name}: planning failed")
        return report, json.loads(figures.read_text()), time.monotonic() - started, usage.ru_maxrss / 2**20


def wrong(name: str, told: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    """Returns the figures of a plan that break a rule, one line each."""
    wanted = golden["expected"][name]
    formula = sum(wanted["flops"].values())
    flops = (told["flops"] - told["rematerialized_flops"]) * told["num_devices"]
    best = min(told["step_time_s"], *alternatives(told).values())
    factor = told["wire_bytes_factor"]
    rules = (
        (told["fits"], "it does not fit the card"),
        (not told["not_understood"], f"instructions whose cost is a guess: {told['not_understood']}"),
        (
            told["attention_kernel"] == wanted["attention_kernel"],
            f"{told['attention_kernel']} computes attention, not {wanted['attention_kernel']}",
        ),
        (
            abs(flops / formula - 1) <= EXACT,
            f"{flops:.4g} FLOPs are executed, {flops / formula:.3f} of the expected {formula:.4g}",
        ),
        (
            factor is None or 0.99 < factor <= 1.03,
            f"it sends {factor or 0:.3f} of the least for its forms",
        ),
        (
            told["sync_collectives_in_loops"] <= wanted["sync_collectives_in_loops"],
            f"{told['sync_collectives_in_loops']} collectives in loops run while nothing else does;"
            f" {wanted['sync_collectives_in_loops']} are expected",
        ),
        (
            told["num_communicators"] <= wanted["num_communicators"],
            f"it needs {told['num_communicators']} communicators; {wanted['num_communicators']} are expected",
        ),
        (told["step_time_s"] <= BETTER * best, f"a step takes {best:.4g} s with {told['best_changes']}"),
    )
    return [f"{name}: {message}" for holds, message in rules if not holds]


def alternatives(told: dict[str, Any]) -> dict[str, float]:
    """Returns seconds per step by settings."""
    guesses = {"changes": {"xla.latency_profile": None}, "step_time_s": told["without_profile"]["step_time_s"]}
    return {
        ", ".join(f"{key}: {json.dumps(value)}" for key, value in sorted(other["changes"].items())): other["step_time_s"]
        for other in (guesses, *told["alternatives"])
    }


def expected(told: dict[str, Any]) -> str:
    """Returns the comment in a configuration's header that states its plan."""
    total, capacity = ((told["peak_bytes"] + told["allowance_bytes"]) / 2**30, told["capacity_bytes"] / 2**30)
    text = (
        f"Expected: not measured. llamajax.plan predicts {total:.1f} of {capacity:.1f} GiB per GPU,"
        f" {told['step_time_s']:.3g} s per step, {told['tokens_per_sec_per_device']:,.0f} tokens/s per GPU,"
        f" MFU {told['mfu']:.1%} ({date.today()}, jax {told['jax_version']})."
    )
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, 118))


def index() -> str:
    """Returns the table of all stored plans."""
    lines = [
        "# What `python -m llamajax.plan` predicts for the shipped configurations",
        "",
        "Predicted, not measured; how far such predictions were off published runs is in",
        "[plan_accuracy.md](../plan_accuracy.md). Written by `scripts/plans.py`.",
        "",
        "| plan | verdict | planned in |",
        "|---|---|---|",
    ]
    for path in sorted(PLANS.glob("*.txt")):
        text = path.read_text().splitlines()
        verdict = next(line.removeprefix("verdict").strip() for line in text if line.startswith("verdict"))
        lines.append(f"| [{path.stem}]({path.name}) | {verdict} | {text[-1].removeprefix('planned in ')} |")
    return "\n".join([*lines, ""])


def main(names: list[str]) -> None:
    """Plans the configurations `names`, or all."""
    if unknown := set(names) - set(plans()):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(plans())}")
    PLANS.mkdir(parents=True, exist_ok=True)
    golden = json.loads(GOLDEN.read_text())
    for name in names or plans():
        report, told, seconds, gib = run(name)
        if problems := wrong(name, told, golden):
            raise SystemExit("\n".join(problems))
        kept = {key: told[key] for key in GOLDEN_KEYS} | {"alternatives": alternatives(told)}
        if told["by_remat"]:
            kept["by_remat"] = {remat: own["elementwise_bytes"] for remat, own in told["by_remat"].items()}
        golden.setdefault(told["jax_version"], {})[name] = kept
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
        print(
            f"{name:34} {seconds:4.0f} s  {gib:.1f} GiB  {report.splitlines()[0].removeprefix('verdict').strip()}",
            flush=True,
        )
        if told["jax_version"] != DOCUMENTED:
            continue
        text = "\n".join(line.rstrip() for line in report.splitlines())
        command = " ".join(["python -m llamajax.plan", *arguments(name), "--alternatives"])
        (PLANS / f"{name}.txt").write_text(f"$ {command}\n{text}\n\nplanned in {seconds:.0f} s, {gib:.1f} GiB resident\n")
        if name not in VARIANTS:
            path = CONFIGS / f"{name}.yaml"
            path.write_text(re.sub(r"# Expected:(.*\n# )*?.*\)\.\n", expected(told), path.read_text(), count=1))
        (PLANS / "README.md").write_text(index())


if __name__ == "__main__":
    main(sys.argv[1:])
