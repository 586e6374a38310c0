"""Reads what the NVIDIA driver reports through `nvidia-smi`."""

import csv
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamajax.diagnostics.findings import Outcome, run

FIELDS = (
    "index", "name", "uuid", "driver_version", "memory.total", "memory.used", "persistence_mode", "compute_mode",
    "mig.mode.current", "ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "pcie.link.width.current",
    "pcie.link.width.max", "power.limit", "power.default_limit", "clocks_throttle_reasons.hw_slowdown", "fabric.state",
)  # fmt: skip
"""Properties of each card; drivers that do not know one leave it out."""
REMAPPED_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
APP_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
_LIMIT_S = 20.0


@dataclass(frozen=True)
class Smi:
    """Everything that `nvidia-smi` reports about the cards of this host."""

    cards: tuple[Mapping[str, str], ...] = ()
    """Values of `FIELDS` of each card, without units; memory is in MiB, power in watts."""
    apps: tuple[Mapping[str, str], ...] = ()
    """Values of `APP_FIELDS` of each process that computes on a card."""
    remapped: tuple[Mapping[str, str], ...] = ()
    """Values of `REMAPPED_FIELDS` of each card that can replace rows of its memory."""
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Link between each two cards, such as `NV18` or `SYS`."""
    problem: str = ""
    """Why there are no cards: what `nvidia-smi` printed."""
    is_installed: bool = True


def read() -> Smi:
    """Asks the driver; never waits longer than a minute or two."""
    if shutil.which("nvidia-smi") is None:
        return Smi(is_installed=False)
    outcome, cards = _query("gpu", FIELDS)
    if outcome.code != 0 or not cards:
        said = [line for line in (outcome.out + outcome.err).splitlines() if line.strip()]
        return Smi(problem=outcome.problem or (said[0] if said else f"ended with exit code {outcome.code}"))
    topology = run(["nvidia-smi", "topo", "-m"], _LIMIT_S)
    return Smi(
        cards=cards,
        apps=_query("compute-apps", APP_FIELDS)[1],
        remapped=_query("remapped-rows", REMAPPED_FIELDS)[1],
        links=parse_links(topology.out) if topology.code == 0 else {},
    )


def _query(what: str, fields: Sequence[str]) -> tuple[Outcome, tuple[Mapping[str, str], ...]]:
    """Asks for fields, without those that this driver refuses: it names one at a time."""
    asked = list(fields)
    while True:
        outcome = run(["nvidia-smi", f"--query-{what}={','.join(asked)}", "--format=csv,noheader,nounits"], _LIMIT_S)
        refused = re.search(r'Field "([^"]+)" is not a valid field to query', outcome.out + outcome.err)
        if refused is None or refused[1] not in asked:
            return outcome, parse_rows(outcome.out, asked)
        asked.remove(refused[1])


def parse_rows(text: str, fields: Sequence[str]) -> tuple[Mapping[str, str], ...]:
    """Returns rows of values with commas, by field. Values that a card does not have, such as `[N/A]` or `[Not Supported]`,
    are left out, and so are other lines, such as warnings of a corrupted infoROM."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    missing = re.compile(r"\[?(N/A|Not (Supported|Found)|Unknown Error|Insufficient Permissions)\]?")
    return tuple(
        {name: value for name, value in zip(fields, row, strict=True) if not missing.fullmatch(value)}
        for row in rows
        if len(row) == len(fields)
    )


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Returns the link between each two cards in the matrix of `nvidia-smi topo -m`, by their numbers, the lower one
    first."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.split() for line in plain.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and words[1:2] != ["X"]), [])
    numbers = [int(found[1]) for word in header if (found := re.fullmatch(r"GPU(\d+)", word))]
    rows = {int(found[1]): words[1:] for words in lines if words and (found := re.fullmatch(r"GPU(\d+)", words[0]))}
    return {
        (one, other): rows[one][column]
        for one in numbers
        for column, other in enumerate(numbers)
        if one < other and one in rows and column < len(rows[one])
    }
