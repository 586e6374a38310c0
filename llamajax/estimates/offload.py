"""Chooses by arithmetic what layers save on the card, what in host memory, and what they compute again.

Values that wait in host memory cost no time while their copies take no longer than the layer that computes meanwhile (MEMO,
arXiv:2407.12117, section 4.2). Everything here is for one device and one micro-batch.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llamajax.config.offload import BY_TOKEN, ActivationName


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of one layer; times in seconds."""

    forward_s: float
    """Time of the forward pass."""
    backward_s: float
    """Time of the backward pass, without the recomputation of what could wait in host memory."""
    sizes: Mapping[ActivationName, float]
    """Bytes of each value that the layer saves."""
    again_s: Mapping[str, float]
    """Time to recompute each of the `BY_TOKEN` values for all tokens."""
    parting_s: float
    """Time, in each pass, to part the tokens whose values are saved from the others."""
    is_divisible: bool = True
    """Whether the `BY_TOKEN` values may be saved for a share of the tokens."""
    weight_bytes: float = 0.0
    """Bytes of the layer's weights that come from host memory in each pass, and of its gradients, which leave for it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Memory and bandwidth that the layers share."""

    layers: int
    staying: int
    """Number of last layers with all values on the card."""
    bandwidth: float
    """Bytes per second, each way, between card and host memory."""
    card_bytes: float
    """Memory of the card for saved values."""
    host_bytes: float
    """Host memory for saved values."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A choice of what waits in host memory."""

    names: tuple[ActivationName, ...]
    """Values that wait in host memory."""
    fraction: float
    """Share of the tokens whose `BY_TOKEN` values are saved, if they wait in host memory; the rest is recomputed."""
    layers_s: float
    """Time of all layers in both passes."""
    copy_s: float
    """Time of one layer's copies, each way."""
    card_bytes: float
    host_bytes: float


def placed(costs: LayerCosts, limits: Limits, names: tuple[ActivationName, ...], fraction: float = 1.0) -> Placement:
    """Returns what a choice of values and of a share of tokens costs. It may exceed the limits."""
    whole, by_token = _away(costs, names)
    away, staying = whole + fraction * by_token, sum(costs.sizes.values()) - whole - by_token
    copy_s, parting_s = away / limits.bandwidth, costs.parting_s if by_token and 0 < fraction < 1 else 0.0
    again_s = (1 - fraction) * sum(costs.again_s[name] for name in names if name in BY_TOKEN)
    weights_s = costs.weight_bytes / limits.bandwidth
    forward_s = max(costs.forward_s + parting_s, copy_s, weights_s)
    backward_s = max(costs.backward_s + parting_s + again_s, copy_s + weights_s)
    return Placement(
        names=names,
        fraction=fraction,
        layers_s=limits.layers * (forward_s + backward_s),
        copy_s=copy_s,
        # Of what waits in host memory, the card holds one layer's on its way and another's in use.
        card_bytes=limits.layers * staying + min(2, limits.layers) * away,
        host_bytes=max(0, limits.layers - limits.staying) * away,
    )


def best(costs: LayerCosts, limits: Limits) -> Placement | None:
    """Returns the fastest choice within the limits, and among equally fast ones the one that sends least; None: there is
    none. It is exact: for given values, time is convex and piecewise linear in the share of tokens."""
    choices = (
        placed(costs, limits, names, fraction)
        for count in range(len(costs.sizes) + 1)
        for names in itertools.combinations(costs.sizes, count)
        for fraction in _turning_points(costs, limits, names)
    )
    fitting = [choice for choice in choices if fits(choice, limits)]
    return min(fitting, key=lambda choice: (choice.layers_s, choice.host_bytes), default=None)


def hidden_fraction(costs: LayerCosts, limits: Limits, names: tuple[ActivationName, ...]) -> float:
    """Returns the largest share of tokens whose copies hide behind the forward pass of a layer and fit in host memory: the
    closed form of MEMO, min(B T - W, M / (n - s) - W) / V, between 0 and 1.

    B is the bandwidth, T the time of the forward pass, W the bytes of the values that are saved whole, V those of the values
    of all tokens that may be saved for a share of them, M the host memory, n the layers and s the layers that stay.
    """
    whole, by_token = _away(costs, names)
    if not costs.is_divisible:
        return 1.0
    room = min(limits.bandwidth * costs.forward_s, limits.host_bytes / max(1, limits.layers - limits.staying))
    return min(max((room - whole) / by_token, 0.0), 1.0) if by_token else 1.0


def _away(costs: LayerCosts, names: tuple[ActivationName, ...]) -> tuple[float, float]:
    """Returns the bytes of the named values that are saved whole, and of those that may be saved for a share of tokens."""
    whole = sum(costs.sizes[name] for name in names if name not in BY_TOKEN)
    return whole, sum(costs.sizes[name] for name in names) - whole


def _turning_points(costs: LayerCosts, limits: Limits, names: tuple[ActivationName, ...]) -> Iterator[float]:
    """Yields the shares of tokens at which time, as a function of them, has a corner or reaches a limit."""
    yield 1.0
    whole, by_token = _away(costs, names)
    if not by_token or not costs.is_divisible:
        return
    yield 0.0
    staying = limits.layers * (sum(costs.sizes.values()) - whole - by_token)
    again_s = sum(costs.again_s[name] for name in names if name in BY_TOKEN)
    parted_forward_s, parted_backward_s = costs.forward_s + costs.parting_s, costs.backward_s + costs.parting_s
    B = limits.bandwidth
    for fraction in (
        (B * parted_forward_s - whole) / by_token,
        (costs.weight_bytes - whole) / by_token,
        (B * (parted_backward_s + again_s) - whole - costs.weight_bytes) / (by_token + B * again_s),
        (limits.host_bytes / max(1, limits.layers - limits.staying) - whole) / by_token,
        ((limits.card_bytes - staying) / min(2, limits.layers) - whole) / by_token,
    ):
        if 0 < fraction < 1:
            yield fraction


def fits(choice: Placement, limits: Limits) -> bool:
    """Returns whether a choice is within the limits."""
    rounding = 1 + 1e-9
    return choice.card_bytes <= rounding * limits.card_bytes and choice.host_bytes <= rounding * limits.host_bytes
