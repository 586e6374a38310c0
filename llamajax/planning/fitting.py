"""Changes to make when a plan does not fit the card: candidates by formula, then compiled to confirm that they fit."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from llamajax.config.model import REMATS
from llamajax.config.parallel import num_parts
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.errors import ConfigError
from llamajax.planning.cost.flops import planned_flops
from llamajax.planning.memory import MemoryPlan, estimate
from llamajax.step.resolve import resolve_planned

ESTIMATE_MARGIN = 1.1
"""Candidates are compiled even if their estimate exceeds the card by this factor, because the estimate is that inexact."""
MAX_COMPILES = 8

Changes = dict[str, Any]
"""New values by dotted keys of a configuration."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A changed configuration that fits according to the formulas."""

    changes: Changes
    config: Config
    flops_ratio: float
    """FLOPs of a step relative to the unchanged configuration; recomputation counts."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A changed configuration that was compiled and fits."""

    candidate: Candidate
    memory: MemoryPlan
    step_time_s: float


def suggestions(
    config: Config, memory: MemoryPlan, *, compiled: Callable[[Config], tuple[MemoryPlan, float]], wanted: int = 3
) -> list[Suggestion]:
    """Returns up to `wanted` changes to `config`, cheapest in FLOPs first, that were compiled and fit; fewer if there are
    fewer.

    Args:
        config: the configuration that does not fit.
        memory: the memory that it needs.
        compiled: compiles a configuration and returns its memory and seconds per step.
        wanted: largest number of suggestions.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is not installed.
    """
    found: list[Suggestion] = []
    tried: list[Changes] = []
    # Formulas cannot predict exactly what XLA keeps alive: every compilation shows how far they are too low.
    shortfall = _shortfall(config, memory)
    for _ in range(MAX_COMPILES):
        candidate = next((offer for offer in candidates(config, shortfall) if offer.changes not in tried), None)
        if candidate is None or len(found) == wanted:
            break
        tried.append(candidate.changes)
        needed, seconds = compiled(candidate.config)
        if not needed.fits:
            shortfall = max(shortfall, _shortfall(candidate.config, needed))
            continue
        found.append(Suggestion(candidate=candidate, memory=needed, step_time_s=seconds))
    return found


def _shortfall(config: Config, memory: MemoryPlan) -> float:
    """Returns the compiled memory relative to the formulas' estimate."""
    return max(1.0, memory.peak_bytes / estimate(resolve_planned(config)).peak_bytes)


def candidates(config: Config, shortfall: float = 1.0) -> Iterator[Candidate]:
    """Yields changes after which `config` should fit by the formulas times `shortfall`: first other forms of split rows;
    then single changes, pairs and triples, each with the fewest devices and then the fewest FLOPs first.

    It offers only the smallest sufficient change of each kind, and no combination that includes a sufficient change.
    """
    yield from _other_sequence_forms(config)
    stronger = REMATS[REMATS.index(config.model.remat) + 1 :]
    moments = [{"optimizer.moment_dtype": "bfloat16"}] if config.optimizer.moment_dtype == "float32" else []
    remat = [{"model.remat": policy} for policy in stronger]
    kinds: list[list[Changes]] = [remat, list(_accumulation(config.train)), moments, *_mesh(config)]
    for count in (1, 2, 3):
        several = itertools.combinations(kinds, count)
        offers = [_smallest(config, itertools.product(*kinds_together), shortfall) for kinds_together in several]
        yield from sorted(
            (offer for offer in offers if offer is not None),
            key=lambda offer: (offer.config.hardware.num_devices, offer.flops_ratio),
        )


def _other_sequence_forms(config: Config) -> Iterator[Candidate]:
    """Yields other ways for devices to share rows. Formulas do not distinguish them: one may need memory beyond the formulas
    that another does not."""
    run = resolve_planned(config)
    if num_parts("seq", run.mesh) == 1:
        return
    present = run.config.parallel.sequence
    for form in ("ulysses", "gather", "ring"):
        if form != present and (candidate := _if_it_fits(config, {"parallel.sequence": form}, 1.0)) is not None:
            yield candidate


def _smallest(config: Config, choices: Iterable[tuple[Changes, ...]], shortfall: float) -> Candidate | None:
    """Returns the first choice with changes that suffice together, but not with one fewer."""
    for parts in choices:
        changes = _together(parts)
        if len(changes) < sum(map(len, parts)):
            continue  # two changes to the same setting
        candidate = _if_it_fits(config, changes, shortfall)
        fewer = itertools.combinations(parts, len(parts) - 1) if len(parts) > 1 else ()
        if candidate and not any(_if_it_fits(config, _together(some), shortfall) for some in fewer):
            return candidate
    return None


def _together(parts: Iterable[Changes]) -> Changes:
    return {key: value for part in parts for key, value in part.items()}


def _if_it_fits(config: Config, changes: Changes, shortfall: float) -> Candidate | None:
    try:
        candidate = config.changed(changes)
    except ConfigError:
        return None
    run = resolve_planned(candidate)
    expected = estimate(run)
    if shortfall * expected.peak_bytes > ESTIMATE_MARGIN * expected.budget_bytes:
        return None
    ratio = planned_flops(run).total / planned_flops(resolve_planned(config)).total
    return Candidate(changes=changes, config=candidate, flops_ratio=ratio)


def _accumulation(train: TrainConfig) -> Iterator[Changes]:
    """Yields smaller micro-batches; the batch of a step stays the same."""
    most = train.micro_batch_size
    yield from (
        {"train.grad_accum_steps": train.grad_accum_steps * times} for times in range(2, most + 1) if most % times == 0
    )


def _mesh(config: Config) -> Iterator[list[Changes]]:
    """Yields more shards of the state, rows or layers split over more devices of a node, and more nodes: one kind of change
    each."""
    hardware, accumulation = config.hardware, config.train.grad_accum_steps
    axes = config.mesh.axis_sizes(hardware.num_devices)
    powers = [2**power for power in range(1, 10)]
    yield [
        {"mesh.data": axes["data"] // times, "mesh.fsdp": axes["fsdp"] * times}
        for times in powers
        if axes["data"] % times == 0
    ]
    # With fewer devices to share a micro-batch, use more micro-batches, so that no device gets more rows.
    for axis in ("sequence", "tensor"):
        yield [
            {
                f"mesh.{axis}": axes[axis] * times,
                "mesh.fsdp": axes["fsdp"] // times,
                "train.grad_accum_steps": accumulation * times,
            }
            for times in powers
            if axes[axis] * times <= hardware.gpus_per_node and axes["fsdp"] % times == 0
        ]
    yield [
        {
            "hardware.nodes": hardware.nodes * times,
            "mesh.fsdp": axes["fsdp"] * times,
            "train.grad_accum_steps": max(1, accumulation // times),
        }
        for times in (2, 4)
    ]
