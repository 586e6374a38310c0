"""Checks the driver, the cards and the links between them."""

import glob
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from llamajax.diagnostics.findings import Finding
from llamajax.diagnostics.nvidia_smi import Smi
from llamajax.estimates.gpus import find_gpu
from llamajax.units import format_bytes

DRIVERS = {13: 580, 12: 525}
"""Oldest driver branch for each version of CUDA, from the installation guide of jax."""

_MIB = 2**20
_IDLE_BYTES = 1 << 30
"""Memory that a driver and a display take on a card without a program."""

_REMEDIES = {
    "version mismatch": "the driver was updated while an older one is loaded; restart the machine",
    "communicate with the NVIDIA driver": "the driver is not loaded; install one of branch {branch} or later, or restart the"
    " machine after a kernel update",
    "Unknown Error": "the container has lost its devices; start it again, with --gpus all",
    "No devices were found": "the driver sees no card; look for Xid lines in dmesg, and at the power and seat of the card",
    "fallen off the bus": "look for Xid lines in dmesg, restart the machine; if it returns, have the card replaced",
    "device handle": "a card has failed; look for Xid lines in dmesg, then restart the machine",
    "did not answer": "a card may have fallen off the bus; look for Xid lines in dmesg, then restart the machine",
}
_BAD_STATES = {"In Progress": "still starting", "Not Started": "not started"}


def check_driver(smi: Smi, cuda: int, *, devices: str = "/dev/nvidia[0-9]*") -> Iterator[Finding]:
    """Checks that the driver answers and is new enough for the CUDA version of the installed jax.

    Args:
        smi: what the driver reports.
        cuda: major version of CUDA.
        devices: pattern of the cards' device files.
    """
    branch = DRIVERS[cuda]
    if not smi.is_installed:
        if glob.glob(devices):
            remedy = "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility, or start it with --gpus all"
            yield Finding("driver", "warn", "GPUs exist, but nvidia-smi is not installed: they cannot be checked", remedy)
        else:
            yield Finding("driver", "ok", "no NVIDIA GPU here: runs emulate devices (mesh.num_cpu_devices)")
        return
    if smi.problem:
        remedy = next(
            (remedy for text, remedy in _REMEDIES.items() if text in smi.problem), "check the driver's installation"
        )
        yield Finding("driver", "fail", f"nvidia-smi: {smi.problem}", remedy.format(branch=branch))
        return
    version = smi.cards[0]["driver_version"] if smi.cards else "0"
    major = int(re.match(r"\d*", version)[0] or 0)  # pyright: ignore[reportOptionalSubscript] (always matches)
    if major < branch:
        remedy = f"install a driver of branch {branch} or later"
        yield Finding("driver", "fail", f"{version} is too old for CUDA {cuda}, which jax was built for", remedy)
    else:
        yield Finding("driver", "ok", f"{version}; CUDA {cuda} needs {branch} or later")


def check_cards(smi: Smi) -> Iterator[Finding]:
    """Checks what could slow cards down, or keep programs from them."""
    if not smi.cards:
        return
    names = Counter(card["name"] for card in smi.cards)
    text = ", ".join(f"{count} x {name}" for name, count in names.items())
    if len(names) > 1:
        remedy = "name those of one kind in CUDA_VISIBLE_DEVICES; a step takes as long as on the slowest"
        yield Finding("GPUs", "warn", text, remedy)
    else:
        yield Finding("GPUs", "ok", text)
    for check, told, remedy, cards in (
        (
            "MIG",
            "GPU {} is cut into instances, of which jax takes one",
            "sudo nvidia-smi -mig 0",
            _with(smi, "mig.mode.current", "Enabled"),
        ),
        (
            "persistence",
            "off for GPU {}: each start waits for the driver",
            "sudo nvidia-smi -pm 1",
            _with(smi, "persistence_mode", "Disabled"),
        ),
        (
            "slowdown",
            "hardware slows GPU {} down: heat or power",
            "look at nvidia-smi -q -d PERFORMANCE, fans and power supply",
            _with(smi, "clocks_throttle_reasons.hw_slowdown", "Active"),
        ),
        (
            "power limit",
            "below its default for GPU {}",
            "sudo nvidia-smi -pl WATTS, if the limit is not deliberate",
            _limited(smi),
        ),
    ):
        if cards:
            yield Finding(check, "warn", told.format(", ".join(cards)), remedy)
    if closed := _with(smi, "compute_mode", "Prohibited"):
        yield Finding("compute mode", "fail", f"programs may not use GPU {', '.join(closed)}", "sudo nvidia-smi -c DEFAULT")


def check_memory(smi: Smi, share: float | None) -> Iterator[Finding]:
    """Checks that no other program holds the cards' memory.

    Args:
        smi: what the driver reports.
        share: share of a card's memory that a run takes; None: no run is planned, and used memory is only reported.
    """
    is_clean = bool(smi.cards)
    for card in smi.cards:
        used, total = (_MIB * float(card.get(name, 0)) for name in ("memory.used", "memory.total"))
        if used < _IDLE_BYTES:
            continue
        is_clean = False
        apps = [app for app in smi.apps if app.get("gpu_uuid") == card.get("uuid")]
        # The driver has no names of other containers' programs.
        by = ", ".join(f"{app.get('process_name', 'another container')} (pid {app.get('pid')})" for app in apps)
        text = f"GPU {card['index']}: {format_bytes(used)} of {format_bytes(total)} taken{f' by {by}' if by else ''}"
        is_too_much = share is not None and used > (1 - share) * total
        remedy = "end that program, or leave this card out of CUDA_VISIBLE_DEVICES"
        yield Finding("GPU memory", "fail" if is_too_much else "warn", text, remedy)
    least = min((float(card.get("memory.total", 0)) for card in smi.cards), default=0)
    if is_clean and least:  # cards that share the host's memory report none
        yield Finding("GPU memory", "ok", f"free; {format_bytes(_MIB * least)} per card")


def check_errors(smi: Smi) -> Iterator[Finding]:
    """Checks the memory errors of cards that count them."""
    counted = [card for card in smi.cards if card.get("ecc.mode.current") == "Enabled"]
    bad = [card["index"] for card in counted if int(card.get("ecc.errors.uncorrected.volatile.total", "0")) > 0]
    by_uuid = {card.get("uuid"): card["index"] for card in smi.cards}
    for name, text, remedy in (
        ("remapped_rows.failure", "cannot replace bad memory rows any more", "have the card replaced"),
        (
            "remapped_rows.pending",
            "replaces bad memory rows at its next reset",
            "drain the host, then nvidia-smi --gpu-reset",
        ),
    ):
        cards = [by_uuid.get(row.get("gpu_uuid"), "?") for row in smi.remapped if row.get(name, "0") not in ("0", "No")]
        if cards:
            yield Finding("GPU errors", "fail", f"GPU {', '.join(cards)} {text}", remedy)
    if bad:
        remedy = "reset the card (nvidia-smi --gpu-reset); if errors return, have it replaced"
        yield Finding(
            "GPU errors", "fail", f"uncorrected memory errors since the driver started: GPU {', '.join(bad)}", remedy
        )
    elif counted:
        yield Finding(
            "GPU errors", "ok", f"no uncorrected memory errors on {len(counted)} of {len(smi.cards)} cards with ECC"
        )


def check_links(smi: Smi) -> Iterator[Finding]:
    """Checks the links between cards, and the width of their PCIe links. The generation is not compared: idle cards lower
    it."""
    for card in smi.cards:
        now, most = (card.get(f"pcie.link.width.{which}") for which in ("current", "max"))
        if now and most and int(now) < int(most):
            remedy = "seat the card again, or use a slot with all lanes; host copies take longer by the same factor"
            yield Finding("PCIe", "warn", f"GPU {card['index']} uses {now} of {most} lanes", remedy)
    states = {state: _with(smi, "fabric.state", state) for state in _BAD_STATES}
    for state, cards in states.items():
        if cards:
            remedy = "sudo systemctl start nvidia-fabricmanager, of the driver's own version"
            yield Finding("NVLink", "fail", f"the fabric of GPU {', '.join(cards)} is {_BAD_STATES[state]}", remedy)
    if not smi.links:
        return
    kinds = Counter(smi.links.values())
    text = ", ".join(f"{kind} between {count} pairs" for kind, count in kinds.most_common())
    known = find_gpu(smi.cards[0]["name"])
    if known is not None and known.link == "NVLink" and not any(kind.startswith("NV") for kind in kinds):
        remedy = "sudo systemctl start nvidia-fabricmanager, of the driver's own version; then see nvidia-smi nvlink -s"
        yield Finding("links", "fail", f"{text}, but {known.name} modules are joined by NVLink", remedy)
    elif len(kinds) == 1:
        (kind,) = kinds
        yield Finding("links", "ok", f"{kind} between all {len(smi.cards)} cards")
    elif all(kind.startswith("NV") for kind in kinds):
        most = max(int(kind.removeprefix("NV")) for kind in kinds)
        weak = _weakest({pair: kind for pair, kind in smi.links.items() if kind != f"NV{most}"})
        remedy = "some NVLinks are down; see nvidia-smi nvlink -s, and have the host checked"
        yield Finding("links", "warn", f"{text}; fewer at GPU {weak}", remedy)
    elif any(kind.startswith("NV") for kind in kinds):
        remedy = "if all cards should have NVLink, see nvidia-smi nvlink -s; if pairs are bridged, put mesh.tensor on a pair"
        yield Finding("links", "warn", text, remedy)
    else:
        yield Finding("links", "ok", f"{text}; no NVLink")


def _weakest(weak: Mapping[tuple[int, int], str]) -> str:
    """Returns the cards that most of the weak links have in common."""
    counts = Counter(card for pair in weak for card in pair)
    most = max(counts.values())
    return ", ".join(str(card) for card in sorted(counts) if counts[card] == most)


def _with(smi: Smi, name: str, value: str) -> list[str]:
    return [card["index"] for card in smi.cards if card.get(name) == value]


def _limited(smi: Smi) -> list[str]:
    limits = [(card["index"], card.get("power.limit"), card.get("power.default_limit")) for card in smi.cards]
    return [index for index, now, default in limits if now and default and float(now) < float(default) - 1]
