"""Resolves `offload.activations` and `offload.fraction`, and says why."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from llamajax.config.model import SAVED_BY_REMAT
from llamajax.config.offload import BY_TOKEN, ON_CARD, ActivationName, OffloadConfig
from llamajax.config.run import Config
from llamajax.estimates.formulas import (
    DTYPE_BYTES,
    computed_model,
    flops_per_token,
    keeps_two_residuals,
    layer_matrices,
    num_matmul_params,
    residual_width,
    saved_bytes,
    tokens_per_device,
)
from llamajax.estimates.host_memory import host_room
from llamajax.estimates.machine import Machine, planned_machine
from llamajax.estimates.offload import LayerCosts, Limits, Placement, best, hidden_fraction, placed
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
    placement: Placement | None = None
    """What the choice costs by formulas; None: nothing was to choose."""


def offload_form(config: Config, axes: Mapping[str, int], card_bytes: float | None, obstacle: str) -> OffloadChoice:
    """Returns what waits in host memory for a run with a chosen `model.remat`.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
        card_bytes: memory of the card for saved values; None: unknown, or `auto` cannot choose.
        obstacle: the reason, in that case.
    """
    asked = config.offload
    if asked.activations == "none":
        return OffloadChoice(asked, "")
    if asked.activations != "auto":
        names = ", ".join(asked.names) or "nothing"
        return OffloadChoice(asked, f"{_told(names, asked.saved_share)}: offload.activations says so")
    if card_bytes is None:
        none = dataclasses.replace(asked, activations=(), fraction=None)
        return OffloadChoice(none, f"nothing: {obstacle}")
    costs, limits = layer_costs(config, axes), _limits(config, axes, card_bytes)
    found = best(costs, limits) if asked.fraction is None else None
    if found is None:
        # The least that the card can hold, so that a plan says by how much it does not fit.
        every = tuple(costs.sizes)
        fraction = hidden_fraction(costs, limits, every) if asked.fraction is None else asked.fraction
        found = placed(costs, limits, every, fraction)
    parted = bool(set(found.names) & set(BY_TOKEN)) and found.fraction < 1
    chosen = dataclasses.replace(asked, activations=found.names, fraction=found.fraction if parted else None)
    return OffloadChoice(chosen, _reason(costs, limits, found), found)


def _reason(costs: LayerCosts, limits: Limits, found: Placement) -> str:
    if found.card_bytes > 1.001 * limits.card_bytes or found.host_bytes > 1.001 * limits.host_bytes:
        return (
            f"{_told(', '.join(found.names), found.fraction)}, but nothing fits: {format_bytes(int(found.card_bytes))} of"
            f" {format_bytes(int(limits.card_bytes))} on the card, {format_bytes(int(found.host_bytes))} of"
            f" {format_bytes(int(limits.host_bytes))} in host memory"
        )
    if not found.names:
        return f"nothing: {format_bytes(int(found.card_bytes))} of saved values should fit the card"
    return (
        f"{_told(', '.join(found.names), found.fraction)}: {format_bytes(int(found.host_bytes))} per GPU, copied in"
        f" {1e3 * found.copy_s:.3g} ms per layer each way, while it computes for {1e3 * costs.forward_s:.3g} ms forward"
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
    matrices = layer_matrices(model)
    saved = SAVED_BY_REMAT[model.remat]
    kept = {None, *(saved or ()), *(["residual"] if keeps_two_residuals(config, axes) else [])}
    lost = 0 if saved is None else sum(size for matrix, size in matrices.items() if matrix.result not in kept)
    attention_s, attention_back_s = _attention_seconds(config, axes, machine)
    on_card, _ = saved_bytes(dataclasses.replace(config, offload=ON_CARD), axes)
    by_token = {name: on_card[name] for name in BY_TOKEN if name in on_card}
    # The parts of qkv and of the MLP's output are written, joined, and read.
    parted = by_token.get("qkv", 0) + width * tokens * residual_width(config, axes)
    memory = machine.gpu.memory_bandwidth * calibration.memory_efficiency
    products = {matrix.result: size * product_s for matrix, size in matrices.items()}
    again_s: dict[ActivationName, float] = {name: products[name] for name in by_token}
    return LayerCosts(
        forward_s=sum(matrices.values()) * product_s + attention_s,
        backward_s=(2 * sum(matrices.values()) + lost) * product_s + attention_back_s,
        sizes=on_card,
        again_s=again_s,
        parting_s=2 * parted / memory,
    )


def layers_seconds(config: Config, axes: Mapping[str, int]) -> float:
    """Returns the seconds of all layers in both passes of a micro-batch, for a resolved `offload`."""
    costs, limits = layer_costs(config, axes), _limits(config, axes, 0.0)
    return placed(costs, limits, config.offload.names, config.offload.saved_share).layers_s


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


def _limits(config: Config, axes: Mapping[str, int], card_bytes: float) -> Limits:
    return Limits(
        layers=config.model.num_layers,
        staying=_LAST_LAYERS,
        bandwidth=planned_machine(config).host_link,
        card_bytes=card_bytes,
        host_bytes=host_room(config),
    )
