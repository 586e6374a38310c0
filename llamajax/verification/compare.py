"""Runs both sides of a verification, in every form, and explains how they differ."""

import time
from collections.abc import Callable
from typing import Any

import jax

from llamajax.config.parallel import ParallelConfig
from llamajax.config.run import Config
from llamajax.verification.diagnosis import clues
from llamajax.verification.differences import first_difference
from llamajax.verification.figures import figures, form_figures
from llamajax.verification.reference_run import Side, program, run_side
from llamajax.verification.scaling import NUM_STEPS, on_one_device
from llamajax.verification.variants import possible_forms, run_trials, suspects
from llamajax.watch.console import log


def certify(config: Config, verified: Config, trained: ParallelConfig, doing: Callable[[str], None]) -> dict[str, Any]:
    """Runs the steps on one device and on the mesh, in each possible form; tries which changes make a difference go away.

    Args:
        config: the run.
        verified: result of `llamajax.verification.scaling.scale_down`.
        trained: the forms that the run is trained in, from `llamajax.step.resolve.resolve`.
        doing: takes a line of progress.

    Returns:
        The `figures`.
    """
    started = time.monotonic()
    with jax.default_matmul_precision("highest"):
        truth = _timed_side("one device", on_one_device(verified), doing)
        forms = possible_forms(verified, trained)
        sides: dict[str, Side] = {}
        first_with: dict[str, str] = {}
        rows = []
        for form, own in forms.items():
            doing(f"{form}: tracing")
            same = first_with.setdefault(program(own), form)
            sides[form] = sides[same] if same != form else _timed_side(form, own, doing)
            rows.append(form_figures(form, same if same != form else None, sides[form], truth))
        shown = next((row["form"] for row in rows if not row["equal"]), rows[0]["form"])
        ours = sides[shown]
        first = first_difference(ours, truth)
        trials = run_trials(forms[shown], truth, first.step, doing) if first else []
    causes = clues(ours, truth, suspects(ours, trials))
    in_forms = config.changed({"parallel": trained}), verified.changed({"parallel": trained})
    return figures(*in_forms, rows, ours, truth, causes, trials, time.monotonic() - started)


def _timed_side(name: str, config: Config, doing: Callable[[str], None]) -> Side:
    """Runs the side's `NUM_STEPS` steps and logs a line when they are done."""
    started = time.monotonic()
    side = run_side(config, NUM_STEPS, lambda stage: doing(f"{name}: {stage}"))
    log(f"ran        {name}: {NUM_STEPS} steps in {time.monotonic() - started:.1f} s, most of it compiling")
    return side
