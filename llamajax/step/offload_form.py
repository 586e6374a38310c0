"""Resolves `offload`, and says why."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llamajax.config.model import SAVED_BY_REMAT
from llamajax.config.offload import (
    BY_TOKEN,
    NOT_PIPELINE,
    NOT_SCAN,
    ON_CARD,
    ActivationName,
    OffloadConfig,
    offload_problems,
)
from llamajax.config.run import Config
from llamajax.estimates.device_memory import (
    host_bytes,
    kept_block_bytes,
    kept_results,
    residual_width,
    saved_bytes,
    tokens_per_device,
)
from llamajax.estimates.formulas import (
    DTYPE_BYTES,
    active_matrices,
    computed_model,
    copy_bytes,
    flops_per_token,
    num_matmul_params,
    state_host_bytes,
    state_shares,
)
from llamajax.estimates.host_memory import host_room
from llamajax.estimates.machine import Machine, planned_machine
from llamajax.estimates.nvme import planned_disk
from llamajax.estimates.offload import LayerCosts, Limits, Placement, best, fits, hidden_fraction, placed
from llamajax.kernels.choice import Site, choose
from llamajax.units import format_bytes

_LAST_LAYERS = 1
"""Layers whose values stay on the card in every form of the stack."""


class OffloadChoice(NamedTuple):
    """A choice of what waits in host memory, with the alternatives."""

    offload: OffloadConfig
    """With names in `activations`."""
    reason: str
    """The reason in one line; empty where nothing may wait there."""
    candidates: tuple["Candidate", ...] = ()
    """Choices that were compared; empty where settings or the machine leave none. Of saved values, for the chosen place of
    the state: none in host memory, those that are saved whole, all of them for the share of tokens whose copies hide, and
    all of them."""
    chosen: "Candidate | None" = None
    """The one that was chosen, with its costs by formulas."""


def offload_form(
    config: Config, axes: Mapping[str, int], budget: float | None, needed: Callable[[Config], dict[str, int]]
) -> OffloadChoice:
    """Returns what waits in host memory for a run with a chosen `model.remat`.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
        budget: bytes of a GPU for arrays; None: unknown.
        needed: returns the bytes on a device by purpose, for a run with a chosen `offload`.
    """
    asked = config.offload
    if "auto" not in (asked.activations, asked.optimizer, asked.parameters):
        return OffloadChoice(asked, _as_told(asked))
    obstacle = "there is no GPU, or hardware.gpu does not name it" if budget is None else _obstacle(config, axes)
    if budget is None or obstacle is not None:
        parameters = "all" if asked.parameters == "all" else "none"
        return OffloadChoice(_with(asked, asked.names, None, asked.state_share, parameters), f"nothing: {obstacle}")
    costs, machine = layer_costs(config, axes), planned_machine(config)
    disk = planned_disk(config)
    bandwidth = machine.host_link if disk is None else min(machine.host_link, disk.bandwidth)
    found: list[Candidate] = []
    for share, parameters in _state_places(config):
        run = dataclasses.replace(config, offload=_with(asked, (), None, share, parameters))
        bytes_of, state = needed(run), host_bytes(run, axes)
        layer_bytes = copy_bytes(run, axes)[1] / config.model.num_layers
        kept = bytes_of["activations"] - config.model.num_layers * kept_block_bytes(run, axes)
        own_costs = dataclasses.replace(costs, weight_bytes=layer_bytes)
        limits = Limits(
            layers=config.model.num_layers,
            staying=_LAST_LAYERS,
            bandwidth=bandwidth,
            card_bytes=max(0.0, budget - sum(bytes_of.values()) + kept),
            host_bytes=max(0.0, host_room(config) - state) if disk is None else disk.room_bytes,
        )
        update_s = (state_host_bytes(run, axes) + copy_bytes(run, axes)[1]) / machine.host_link
        placement, is_fitting = _placement(own_costs, limits, asked)
        found.append(Candidate(share, parameters, state, update_s, own_costs, limits, placement, is_fitting))
    fitting = [candidate for candidate in found if candidate.fits]
    steps = config.train.grad_accum_steps
    chosen = min(fitting, key=lambda own: (own.seconds(steps), own.state_bytes)) if fitting else found[-1]
    parted = bool(set(chosen.placement.names) & set(BY_TOKEN)) and chosen.placement.fraction < 1
    names, fraction = chosen.placement.names, chosen.placement.fraction if parted else None
    offload = _with(asked, names, fraction, chosen.share, chosen.parameters)
    candidates = tuple(_compared(chosen)) if asked.activations == "auto" else (chosen,)
    return OffloadChoice(offload, _reason(chosen), candidates, chosen)


def _compared(chosen: "Candidate") -> Iterator["Candidate"]:
    costs, every = chosen.costs, tuple(chosen.costs.sizes)
    hidden = hidden_fraction(costs, chosen.limits, every)
    choices = {((), 1.0), (tuple(name for name in every if name not in BY_TOKEN), 1.0), (every, hidden), (every, 1.0)}
    choices.add((chosen.placement.names, chosen.placement.fraction))
    for names, fraction in sorted(choices, key=lambda choice: (len(choice[0]), choice[1])):
        placement = placed(costs, chosen.limits, names, fraction)
        yield dataclasses.replace(chosen, placement=placement, fits=fits(placement, chosen.limits))


def _state_places(config: Config) -> list[tuple[float, Literal["none", "all"]]]:
    """Returns the places of the state that `offload` allows: shares of it, each with or without the copies of layers."""
    asked = config.offload
    shares = state_shares(config) if asked.optimizer == "auto" else [asked.state_share]
    if asked.parameters == "all":
        return [(shares[-1], "all")]
    beyond: list[tuple[float, Literal["none", "all"]]] = [(1.0, "all")] if asked.parameters == "auto" else []
    possible = shares[-1] == 1.0 and not list(_parameter_obstacles(config))
    return [*((share, "none") for share in shares), *(beyond if possible else [])]


def _parameter_obstacles(config: Config) -> Iterator[str]:
    asked = dataclasses.replace(config.offload, activations="none", fraction=None, optimizer=1.0, parameters="all")
    yield from offload_problems(asked, config.model, config.mesh, config.parallel)


def _with(
    asked: OffloadConfig,
    names: tuple[ActivationName, ...],
    fraction: float | None,
    share: float,
    parameters: Literal["none", "all"],
) -> OffloadConfig:
    """Returns the section with chosen values, in a form that breaks no rule."""
    dtype = asked.gradient_dtype if share else "float32"
    return dataclasses.replace(
        asked,
        activations=names or "none",
        fraction=fraction,
        optimizer=share or "none",
        parameters=parameters,
        gradient_dtype=dtype,
    )


@dataclass(frozen=True)
class Candidate:
    """A place of the state, with the best choice of saved values beside it."""

    share: float
    """Share of weights and moments in host memory."""
    parameters: Literal["none", "all"]
    """Whether copies and gradients of layers are there too."""
    state_bytes: int
    """Bytes of all of these."""
    update_s: float
    """Time to copy what the update needs, each way."""
    costs: LayerCosts
    limits: Limits
    placement: Placement
    fits: bool

    def seconds(self, micro_batches: int) -> float:
        """Returns the time of a step's layers and update."""
        return micro_batches * self.placement.layers_s + self.update_s


def _placement(costs: LayerCosts, limits: Limits, asked: OffloadConfig) -> tuple[Placement, bool]:
    """Returns the best choice of saved values, and whether it fits; where none does, the one with the least on the card."""
    every = tuple(costs.sizes)
    if asked.activations == "auto" and asked.fraction is None and (found := best(costs, limits)) is not None:
        return found, True
    if asked.activations == "auto":
        told = hidden_fraction(costs, limits, every) if asked.fraction is None else asked.fraction
        found = placed(costs, limits, every, told)
    else:
        found = placed(costs, limits, asked.names, asked.saved_share)
    return found, fits(found, limits)


def _obstacle(config: Config, axes: Mapping[str, int]) -> str | None:
    """Returns the reason why `auto` chooses nothing."""
    if axes["pipeline"] > 1:
        return NOT_PIPELINE
    return f"parallel.stack: scan {NOT_SCAN}" if config.parallel.stack == "scan" else None


def _as_told(offload: OffloadConfig) -> str:
    """Returns what settings name, in one line; empty if they name nothing."""
    parts = [_told(", ".join(offload.names), offload.saved_share)] if offload.names else []
    parts += [f"{offload.state_share:.0%} of weights and moments"] if offload.state_share else []
    parts += ["copies and gradients of layers"] if offload.parameters == "all" else []
    return f"{'; '.join(parts)}: offload says so" if parts else ""


def _reason(chosen: Candidate) -> str:
    found, limits, costs = chosen.placement, chosen.limits, chosen.costs
    parts = []
    if chosen.share:
        beside = ", and copies and gradients of layers" if chosen.parameters == "all" else ""
        parts.append(
            f"{chosen.share:.0%} of weights and moments{beside}, {format_bytes(chosen.state_bytes)} per GPU, copied in"
            f" {chosen.update_s:.3g} s per step each way"
        )
    if found.names:
        parts.append(
            f"{_told(', '.join(found.names), found.fraction)}, {format_bytes(int(found.host_bytes))} per GPU, copied in"
            f" {1e3 * found.copy_s:.3g} ms per layer each way, while it computes for {1e3 * costs.forward_s:.3g} ms forward"
        )
    told = "; ".join(parts) or f"nothing: {format_bytes(int(found.card_bytes))} of saved values should fit the card"
    if chosen.fits:
        return told
    return (
        f"{told}; but it should not fit: saved values take {format_bytes(int(found.card_bytes))} on the card, where"
        f" {format_bytes(int(limits.card_bytes))} are left, and {format_bytes(int(found.host_bytes))} in host memory, where"
        f" {format_bytes(int(limits.host_bytes))} are left"
    )


def _told(names: str, fraction: float) -> str:
    return names if fraction == 1 else f"{names} for {fraction:.1%} of the tokens where they can be parted"


def layer_costs(config: Config, axes: Mapping[str, int]) -> LayerCosts:
    """Returns the costs of one layer on a device of the planned cluster: products and attention at the rates of the cost
    model, everything else at the bandwidth of the card's memory.

    Raises:
        ConfigError: see `planned_machine` and `llamajax.kernels.choice.choose`.
    """
    machine = planned_machine(config)
    model, tokens = computed_model(config.model, axes), tokens_per_device(config, axes)
    calibration, tensor, width = machine.calibration, axes["tensor"], DTYPE_BYTES[config.model.compute_dtype]
    product_s = 2 * tokens / tensor / (machine.gpu.peak_flops * calibration.matmul_efficiency)
    matrices, kept = active_matrices(model), kept_results(config, axes)
    lost = sum(size for matrix, size in matrices.items() if matrix.result not in kept)
    lost = 0 if SAVED_BY_REMAT[model.remat] is None else lost
    attention_s, attention_back_s = _attention_seconds(config, axes, machine)
    on_card, _ = saved_bytes(dataclasses.replace(config, offload=ON_CARD), axes)
    by_token: dict[str, int] = {name: on_card[name] for name in BY_TOKEN if name in on_card}
    # The parts of qkv and of the MLP's output are written, joined, and read.
    parted = by_token.get("qkv", 0) + width * tokens * residual_width(config, axes)
    memory = machine.gpu.memory_bandwidth * calibration.memory_efficiency
    again_s = {
        name: product_s * sum(size for matrix, size in matrices.items() if matrix.result == name) for name in by_token
    }
    return LayerCosts(
        forward_s=sum(matrices.values()) * product_s + attention_s,
        backward_s=(2 * sum(matrices.values()) + lost) * product_s + attention_back_s,
        sizes=on_card,
        again_s=again_s,
        parting_s=2 * parted / memory,
        is_divisible=not model.experts.enabled,
    )


def step_seconds(config: Config, axes: Mapping[str, int]) -> float:
    """Returns the seconds of all layers of a step, and of its update's copies, for a resolved `offload`."""
    bandwidth, offload = planned_machine(config).host_link, config.offload
    limits = Limits(
        layers=config.model.num_layers, staying=_LAST_LAYERS, bandwidth=bandwidth, card_bytes=0.0, host_bytes=0.0
    )  # fmt: skip
    copies = copy_bytes(config, axes)[1]
    costs = dataclasses.replace(layer_costs(config, axes), weight_bytes=copies / config.model.num_layers)
    layers_s = placed(costs, limits, offload.names, offload.saved_share).layers_s
    return config.train.grad_accum_steps * layers_s + (state_host_bytes(config, axes) + copies) / bandwidth


def _attention_seconds(config: Config, axes: Mapping[str, int], machine: Machine) -> tuple[float, float]:
    """Returns the seconds of one layer's attention forward, and backward with what it recomputes."""
    model, seq_len = config.model, config.data.seq_len
    site = Site.of(model, axes, config.parallel.sequence, is_gpu=True, capability=machine.gpu.compute_capability)
    kernel, _ = choose(model.attention_kernel, site)
    calibration = machine.calibration
    forward, backward = calibration.attention(model.head_dim)
    if kernel in ("pallas", "triton"):
        forward, backward = calibration.pallas_efficiency, calibration.pallas_backward_efficiency
    elif kernel == "tokamax":
        forward, backward = calibration.tokamax_efficiency, calibration.tokamax_backward_efficiency
    flops = (flops_per_token(model, seq_len) - 6 * num_matmul_params(model)) / 3 / model.num_layers / axes["tensor"]
    seconds = tokens_per_device(config, axes) * flops / machine.gpu.peak_flops
    again = seconds / forward if model.remat == "full" else 0.0
    return seconds / forward, 2.5 * seconds / backward + again
