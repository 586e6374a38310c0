"""A verification as text for people: what was scaled, step by step, tensor by tensor, and the verdict last."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from llamajax.watch.console import log, print_table

Figures = Mapping[str, Any]


def mesh(sizes: Mapping[str, int]) -> str:
    """Formats a mesh, such as `fsdp 2 x tensor 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "of one device"


def shape(tensor: Figures) -> str:
    """Formats a shape, such as `4 x 32`."""
    return " x ".join(map(str, tensor["shape"]))


def difference(value: float | None) -> str:
    """Formats a relative difference."""
    return "not finite" if value is None else "0" if value == 0 else f"{value:.1e}"


def first_difference(told: Figures) -> str:
    """Describes the first difference in one line."""
    first = told["first_difference"]
    what = f"{first['kind']} of {first['name']} [{shape(first)}]" if first["name"] else first["kind"]
    when = f"step {first['step']}" if first["step"] else "before the first step"
    return f"{when}: {what} differs by {difference(first['difference'])}"


def trials(told: Figures) -> str:
    """Lists the changes that remove the difference, in one line; empty if nothing was tried."""

    def several(cured: bool) -> str:
        return ", ".join(f"{trial['key']}: {trial['value']}" for trial in told["trials"] if trial["cured"] is cured)

    gone, stays = several(True), several(False)
    if not gone:
        return stays and f"none of these makes it go away: {stays}"
    return f"it goes away with {gone}{stays and f'; it stays with {stays}'}"


def form_verdict(row: Figures) -> str:
    """Returns the verdict on a row of `forms`."""
    same = "" if row["same_as"] is None else f", the same program as {row['same_as']}"
    return f"{'ok' if row['equal'] else 'differs'}{same}"


def verdict(told: Figures) -> str:
    """Returns one line: equal, or the first difference."""
    form = f" with {told['form']}" if told["form"] != told["forms"][0]["form"] else ""
    what = f"{len(told['steps'])} steps on {told['num_devices']} devices{form}"
    if told["equal"]:
        return (
            f"equal: loss, gradients, moments and weights of {what} match one device within {told['tolerance']:.0e}"
            f" (largest difference {difference(told['largest_difference'])})"
        )
    return f"different: {what} do not match one device; {first_difference(told)}"


def print_verification(told: Figures) -> None:
    """Prints the results of a verification; `told` are its `figures`."""
    if len(told["forms"]) > 1:
        forms = _table("form", "largest difference", "", left=(0, 2))
        for row in told["forms"]:
            forms.add_row(row["form"], difference(row["largest_difference"]), form_verdict(row))
        _print(forms)
    steps = _table("step", "tokens", "loss", "one device", "difference", "gradient norm", "difference", left=())
    for row in told["steps"]:
        relative = row["differences"]
        steps.add_row(
            str(row["step"]), f"{row['tokens']:,.0f}", _number(row["loss"]), _number(row["one_device"]["loss"]),
            difference(relative["loss"]), _number(row["gradient_norm"]), difference(relative["gradient_norm"]),
        )  # fmt: skip
    _print(steps)
    kinds = told["kinds"]
    tensors = _table("tensor", "shape", *(kind.replace("_", " ") for kind in kinds), "", left=(0, 1, 2 + len(kinds)))
    for tensor in told["tensors"]:
        values = (difference(tensor[kind]) if kind in tensor else "" for kind in kinds)
        tensors.add_row(tensor["name"], shape(tensor), *values, "ok" if tensor["equal"] else "[bold red]differs[/]")
    _print(tensors)
    log(f"verdict    {verdict(told)}")
    for index, clue in enumerate(told["clues"]):
        log(f"{'cause' if index == 0 else '':<10} {clue}")
    if told["trials"]:
        log(f"tried      {trials(told)}")


def print_changes(changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Prints the settings that differ from the run's."""
    table = _table("setting", "configured", "verified", left=(0,))
    for key, (before, after) in changes.items():
        table.add_row(key, *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in (before, after)))
    _print(table)


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6f}"


def _table(*columns: str, left: tuple[int, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index in left else "right", overflow="fold")
    return table


def _print(table: Table) -> None:
    print_table(table)
    log("")
