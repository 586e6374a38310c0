"""Finds reasons to reject a row: it skips work, is faster than the machine allows, or is not what it claims."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from scripts.bench.case import LOSS_STEPS, Case
from scripts.bench.figures import Ceiling, Run

LOSS_TOLERANCE = 2e-2
GRADIENT_TOLERANCE = 0.03
"""Relative tolerance for the gradient norm of all tensors of a kind in the first step. bfloat16 alone causes 0.4% at toy
size."""


def refusals(
    case: Case, memory_bytes: float, best: Ceiling | None, rows: Mapping[str, Sequence[Run]]
) -> dict[str, list[str]]:
    """Returns the reasons not to trust each row's figures, one line each.

    Args:
        case: the case; at toy size neither times nor kernels are compared.
        memory_bytes: memory of the device.
        best: the ceiling; None: it was not measured.
        rows: runs of each row, one for each round.
    """
    good = {row: [run for run in runs if "step_s" in run] for row, runs in rows.items()}
    found = {row: [f"round {run['round']}: {run['error']}" for run in runs if "error" in run] for row, runs in rows.items()}
    for row, runs in good.items():
        if not runs:
            continue
        others = {name: own for name, own in good.items() if name != row and own}
        problems = [_memory(runs, memory_bytes), _learning(runs), _tokens(runs, others)]
        if not case.is_toy:
            problems += [_above(best, runs), *_not_fused(row, runs)]
        problems += [
            _disagrees("losses", runs, others, _losses_apart, LOSS_TOLERANCE, ".4f"),
            _disagrees("gradients of the first step", runs, others, _gradients_apart, GRADIENT_TOLERANCE, ".1%"),
        ]
        found[row] += [problem for problem in problems if problem is not None]
    return found


def _above(best: Ceiling | None, runs: Sequence[Run]) -> str | None:
    fastest = min(seconds for run in runs for seconds in run["step_s"])
    if best is None:
        return "the ceiling was not measured, and nothing tells whether this row is possible"
    if fastest >= best.step_s:
        return None
    times = f"{1e3 * fastest:,.1f} ms for a step, and its products and attention alone take {1e3 * best.step_s:,.1f} ms"
    return f"faster than the ceiling: {times}; it does not do all the work"


def _memory(runs: Sequence[Run], memory_bytes: float) -> str | None:
    peak = max(max(run["peak_bytes"], run.get("reserved_bytes", 0)) for run in runs)
    if peak <= memory_bytes:
        return None
    return f"peak memory {peak / 2**30:.1f} GiB of {memory_bytes / 2**30:.1f} GiB: more than there is"


def _not_fused(row: str, runs: Sequence[Run]) -> Iterator[str]:
    """Checks the first round; later rounds run the same programs. `jax_naive` uses XLA's attention on purpose."""
    for way in ("forward", "backward"):
        if row != "jax_naive" and not runs[0]["attention"][way]:
            yield f"no fused attention {way}: none of its kernels is one"


def _learning(runs: Sequence[Run]) -> str | None:
    for run in runs:
        losses = run["losses"][:LOSS_STEPS]
        if len(losses) < LOSS_STEPS or not all(map(math.isfinite, losses)):
            return f"{LOSS_STEPS} finite losses are needed, and round {run['round']} has {losses}"
        if losses[-1] >= losses[0]:
            return f"nothing is learnt: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at step {LOSS_STEPS}"
    return None


def _tokens(runs: Sequence[Run], others: Mapping[str, Sequence[Run]]) -> str | None:
    seen = {run["tokens"] for own in (runs, *others.values()) for run in own}
    return None if len(seen) == 1 else f"the rows have not seen the same tokens: {', '.join(sorted(seen))}"


def _losses_apart(runs: Sequence[Run], others: Sequence[Run]) -> tuple[float, str]:
    """Returns the largest difference of two rows' losses in any of their rounds, and its step."""
    pairs = [(run["losses"][:LOSS_STEPS], its["losses"][:LOSS_STEPS]) for run in runs for its in others]
    differences = [(abs(x - y), step) for own, its in pairs for step, (x, y) in enumerate(zip(own, its, strict=False), 1)]
    distance, step = max((math.inf if math.isnan(distance) else distance, step) for distance, step in differences)
    return distance, f"step {step}"


def _gradients_apart(runs: Sequence[Run], others: Sequence[Run]) -> tuple[float, str]:
    """Returns the largest difference of two rows' norms, as a share of the larger norm, and its tensors. Losses of random
    tokens hardly show whether attention is right; its gradients do."""
    own, its = runs[0]["gradients"], others[0]["gradients"]
    if unlike := sorted(own.keys() ^ its.keys()):
        return math.inf, unlike[0]
    shares = [(abs(own[name] - its[name]) / max(own[name], its[name], 1e-30), name) for name in own]
    return max((math.inf if math.isnan(share) else share, name) for share, name in shares)


def _disagrees(
    what: str,
    runs: Sequence[Run],
    others: Mapping[str, Sequence[Run]],
    apart: Callable[[Sequence[Run], Sequence[Run]], tuple[float, str]],
    tolerance: float,
    form: str,
) -> str | None:
    """Reports rows that are far from most others. One wrong row does not make all others wrong; of two rows that differ,
    neither is known to be right. `apart` returns the distance of two rows and its place."""
    found = {name: apart(runs, own) for name, own in others.items()}
    far = {name: place for name, place in found.items() if not place[0] < tolerance}
    if 2 * len(far) <= len(found):
        return None
    name, (distance, where) = max(far.items(), key=lambda item: item[1][0])
    return f"{what} are {distance:{form}} from {name}'s at {where}, and less than {tolerance:{form}} is allowed"
