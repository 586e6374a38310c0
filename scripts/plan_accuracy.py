"""Compares published training speeds with the cost model's predictions, in the tables of docs/plan_accuracy.md.

    python scripts/plan_accuracy.py          write the tables, and the errors that plans report
    python scripts/plan_accuracy.py --fit    print the fitted share of the peak for products

Takes seconds and compiles nothing: the kernels of a run's own program describe it (`scripts/accuracy/`). All runs share the
constants of `llamajax/estimates/machine.py`. One constant is fitted for each family of GPUs with enough runs: the share of
the peak that products reach, chosen so that the median signed error of all runs is zero.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for a machine where llamajax is not installed

from llamajax.estimates.megatron import hardware_flops
from llamajax.planning.cost.accuracy import KEPT
from llamajax.watch.console import CONSOLE
from scripts.accuracy import holmes
from scripts.accuracy.published import MT_NLG, MT_NLG_ROWS, RUNS, SCALING
from scripts.accuracy.run import Run
from scripts.accuracy.step import predict, step_seconds

DOCUMENT = Path(__file__).parents[1] / "docs" / "plan_accuracy.md"
FITTED = ("A100", "H100", "B200", "L40S")
"""Families of GPUs with a fitted share of the peak: those with runs, and with a share that products do not measure."""
_LEFT_OUT = 0.1
"""Largest share of the runs left out at each end of the range that plans print."""


def error(run: Run, share: float | None = None) -> float:
    """Returns predicted over published speed, minus one; positive if the run was slower than predicted."""
    return predict(run, share) / run.published - 1


def family(run: Run) -> str:
    """Returns the family of GPUs that share constants."""
    return run.machine().gpu.family


def fitted(runs: Sequence[Run]) -> float:
    """Returns the share of the peak that makes the median error zero, over those of `runs`, one family, that take part."""
    runs = [run for run in runs if not run.is_held_out]
    low, high, share = 0.3, 1.0, 0.65
    for _ in range(14):  # to 0.00004
        low, high = (low, share) if statistics.median(error(run, share) for run in runs) > 0 else (share, high)
        share = (low + high) / 2
    return share


def left_out(runs: Sequence[Run]) -> dict[str, float]:
    """Returns errors by name, each with the share fitted without the run's own system. Covers runs on GPUs with a fitted
    share that other systems were also run on."""
    result = {}
    for name, system in dict.fromkeys((family(run), run.system) for run in runs if family(run) in FITTED):
        of_family = [run for run in runs if family(run) == name]
        others = [run for run in of_family if run.system != system]
        if not all(run.is_held_out for run in others):
            share = fitted(others)
            result |= {run.name: error(run, share) for run in of_family if run.system == system}
    return result


def table(header: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Formats a Markdown table: words in the first and last column, numbers between."""
    columns = header.count("|") + 1
    rule = "|".join(["---"] + ["---:"] * (columns - 2) + ["---"])
    return "\n".join([f"| {header} |", f"|{rule}|"] + [f"| {' | '.join(row)} |" for row in rows])


def summary(errors: Sequence[float]) -> str:
    """Summarizes errors in words."""
    return (
        f"{len(errors)} runs: median error {statistics.median(errors):+.1%}, median absolute error"
        f" {statistics.median(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}"
    )


def tables(predicted: dict[str, float], unseen: dict[str, float]) -> dict[str, str]:
    """Returns the document's tables by their marks; `unseen`: errors by name, with the run's own system left out."""
    errors = {run.name: predicted[run.name] / run.published - 1 for run in RUNS}
    result = {}
    for mark, is_listed in (("runs", True), ("others", False)):
        runs = [run for run in RUNS if run.is_listed == is_listed]
        rows = [
            (run.name, f"{run.published:,.0f}", f"{predicted[run.name]:,.0f}", f"{errors[run.name]:+.1%}",
             f"{unseen[run.name]:+.1%}" if run.name in unseen else "", run.source)
            for run in runs
        ]  # fmt: skip
        result[mark] = (
            table("tokens/s/GPU | published | predicted | error | system left out | source", rows)
            + f"\n\n{summary([errors[run.name] for run in runs])}.\nWith each run's own system left out of the fit:"
            f" {summary([unseen[run.name] for run in runs if run.name in unseen])}."
        )
    groups = dict.fromkeys((run.program.kind, family(run)) for run in RUNS)
    rows = []
    for kind, name in [*sorted(groups), *(("all", name) for name in dict.fromkeys(name for _, name in groups))]:
        runs = [run for run in RUNS if family(run) == name and kind in ("all", run.program.kind)]
        own, others = [errors[run.name] for run in runs], [abs(unseen[run.name]) for run in runs if run.name in unseen]
        sizes = (f"{statistics.median(several):.1%}" if several else "" for several in ([abs(each) for each in own], others))
        rows.append((kind, str(len(runs)), f"{statistics.median(own):+.1%}", *sizes, name))
    header = "kind of program | runs | median error | median absolute | system left out, median absolute | GPUs like"
    result["kinds"] = table(header, rows)
    result["pipelines"] = pipelines()
    published = {run.name: run.published for run in RUNS}
    result["scaling"] = table(
        "speed per GPU | published | predicted | over that of",
        [
            (larger, f"{(p := published[larger] / published[smaller]):.3f}",
             f"{(q := predicted[larger] / predicted[smaller]):.3f} ({q - p:+.3f})", smaller)
            for smaller, larger in SCALING
        ],
    )  # fmt: skip
    result["domains"] = table(
        "TFLOP/s per GPU | published | predicted | error | how",
        [
            (name, f"{known:.0f}" if known else "", f"{own:.0f}", f"{own / known - 1:+.1%}" if known else "", how)
            for name, known, own, how in holmes.table_rows()
        ],
    )
    return result


def fitted_to(run: Run, seconds: float) -> float:
    """Returns the share of the peak with which a run's step takes these seconds."""
    low, high, share = 0.3, 1.0, 0.65
    for _ in range(20):
        low, high = (share, high) if step_seconds(run, run.machine(share)) > seconds else (low, share)
        share = (low + high) / 2
    return share


def pipelines() -> str:
    """Returns the table of MT-NLG's runs: the FLOPs of its formula, and the seconds of a step with the constants as they are
    and with the share of the peak of the first run."""
    first, published = next(iter(MT_NLG.items()))
    share = fitted_to(first, published.seconds)
    rows = []
    for run, told in MT_NLG.items():
        model = run.model
        flops = hardware_flops(
            sequences=MT_NLG_ROWS, seq_len=run.seq_len, num_layers=model.num_layers, embed_dim=model.embed_dim,
            vocab_size=model.vocab_size,
        )  # fmt: skip
        own, like_first = (step_seconds(run, run.machine(of_peak)) for of_peak in (None, share))
        rows.append((
            run.name, f"{told.tflops}", f"{flops / told.seconds / run.num_gpus / 1e12:.1f}", f"{told.seconds:.1f} s",
            f"{own:.1f} s ({own / told.seconds - 1:+.1%})", f"{like_first:.1f} s ({like_first / told.seconds - 1:+.1%})",
            run.source,
        ))  # fmt: skip
    header = (
        "TFLOP/s per GPU, and step | published | formula | published | constants as they are | products as in the first run"
    )
    return table(f"{header} | source", rows) + f"\n\nThe first run asks for {share:.3f} of the peak in products."


def kept(errors: Callable[[Run], float]) -> dict[str, dict[str, float]]:
    """Returns the errors that plans print, by GPU: the number of runs, and how much faster and slower than predicted most of
    them were, as shares of the predicted speed; a tenth is left out at each end, and `within` counts the rest."""
    result = {}
    for gpu in sorted({run.gpu for run in RUNS}):
        ratios = sorted(1 / (1 + errors(run)) - 1 for run in RUNS if run.gpu == gpu)
        left = int(_LEFT_OUT * len(ratios))
        within = ratios[left : len(ratios) - left]
        result[gpu] = {
            "runs": len(ratios), "within": len(within), "least": round(within[0], 3), "most": round(within[-1], 3),
        }  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="print the shares and write nothing")
    if parser.parse_args().fit:
        for name in FITTED:
            runs = [run for run in RUNS if family(run) == name]
            number = sum(not run.is_held_out for run in runs)
            CONSOLE.print(f"{name}: {fitted(runs):.3f} of the peak, by {number} runs")
        return
    predicted = {run.name: predict(run) for run in RUNS}
    text = DOCUMENT.read_text(encoding="utf-8")
    for mark, content in tables(predicted, left_out(RUNS)).items():
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        _, _, after = rest.partition(f"<!-- end of {mark} -->")
        text = f"{before}<!-- {mark} -->\n{content}\n<!-- end of {mark} -->{after}"
    DOCUMENT.write_text(text, encoding="utf-8")
    KEPT.write_text(json.dumps(kept(error), indent=1) + "\n", encoding="utf-8")
    CONSOLE.print(f"wrote {DOCUMENT.name} and {KEPT.name}: {summary([error(run) for run in RUNS])}", soft_wrap=True)


if __name__ == "__main__":
    main()
