"""Experts by arithmetic: the blocks in which tokens travel to them, as `llamajax.parallel.dispatch` lays them out, the rows
that a device multiplies, and the bytes that devices send each other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llamajax.config.model import SAVED_BY_REMAT
from llamajax.config.parallel import ExchangeForm, num_parts, splits_residual
from llamajax.config.run import Config

_SLOT_MULTIPLE = 8
"""Slots of a block are a multiple of this number."""


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Sizes of one all-to-all of a layer on a device, and of the products that follow it."""

    peers: int
    """Devices that hold different experts."""
    experts: int
    """Experts of a device."""
    choices: int
    """Choices of the device's own tokens; with all experts equally loaded, also the rows that come to the device."""
    slots: int
    """Tokens that a block has room for; each peer gets one block."""
    width: int
    """Numbers of a token that travel."""
    terms: int
    """Numbers that represent a float32."""
    is_ragged: bool
    """Whether filled slots travel alone."""

    @staticmethod
    def of(config: Config, mesh: Mapping[str, int]) -> "Dispatch":
        """Returns the blocks of a run with experts on a mesh with axes of these sizes."""
        model, own, peers = config.model, config.model.experts, num_parts("experts", mesh)
        seq = "residual_seq" if splits_residual(config.data.seq_len, mesh) else "seq"
        tokens = config.rows_per_device(mesh) * config.data.seq_len // num_parts(seq, mesh)
        if seq == "seq":  # devices that share matmuls have the same tokens, of which each sends a part
            tokens = -(-tokens // mesh["tensor"])
        experts, width = own.num_experts // peers, own.latent_dim or model.embed_dim
        slots = block_slots(tokens, own.top_k, peers, experts, config.parallel.expert_slots)
        terms = 1 if model.compute_dtype == "float32" else 3
        return Dispatch(
            peers=peers, experts=experts, choices=tokens * own.top_k, slots=slots, width=width, terms=terms,
            is_ragged=exchange_form(config, mesh)[0] == "ragged",
        )  # fmt: skip

    @property
    def block_rows(self) -> int:
        """Returns the rows of a block: those of its header with weights and counts, and its slots."""
        return self.header_rows + self.slots

    @property
    def header_rows(self) -> int:
        """Returns the rows of a block's header."""
        return header_rows(self.slots, self.experts, self.width, self.terms)

    @property
    def rows(self) -> int:
        """Returns the rows of all blocks."""
        return self.peers * self.block_rows

    @property
    def places(self) -> int:
        """Returns the most rows that a device multiplies in one round."""
        return self.peers * self.slots

    @property
    def sent_numbers(self) -> float:
        """Returns the numbers that a device sends to others in one all-to-all, on average."""
        rows = self.header_rows + min(self.slots, self.choices / self.peers) if self.is_ragged else self.block_rows
        return (self.peers - 1) * rows * self.width

    def loads(self, imbalance: float) -> list[float]:
        """Returns the rows of each round on a device with `imbalance` times the mean number of rows; at worst it gets those
        of all peers."""
        rows = min(imbalance, self.peers) * self.choices
        rounds = max(1, math.ceil(rows / self.places - 1e-9))
        return [min(self.places, rows - number * self.places) for number in range(rounds)]


def exchange_form(config: Config, mesh: Mapping[str, int]) -> tuple[ExchangeForm, str]:
    """Returns the form that `parallel.expert_exchange` names, or that `auto` resolves to; and the reason in one line."""
    if config.mesh.num_cpu_devices is not None and config.parallel.expert_exchange == "ragged":
        return "blocks", "XLA has ragged all-to-alls for GPUs alone"
    if (given := config.given_form("expert_exchange")) is not None:
        return given
    if not config.model.experts.enabled or num_parts("experts", mesh) == 1:
        return "blocks", "no token travels"
    return "blocks", "for XLA's ragged all-to-all the host sends every part by itself"


def block_slots(tokens: int, top_k: int, peers: int, experts: int, slots: float) -> int:
    """Returns the slots of a block.

    Args:
        tokens: tokens of a device.
        top_k: experts that each chooses.
        peers: devices that hold different experts.
        experts: experts of a device.
        slots: `parallel.expert_slots`.
    """
    most = tokens * min(top_k, experts)
    wanted = math.ceil(slots * tokens * top_k / peers) if slots else most
    return min(most, -(-wanted // _SLOT_MULTIPLE) * _SLOT_MULTIPLE)


def header_rows(slots: int, experts: int, width: int, terms: int) -> int:
    """Returns the rows of a block that hold the weight of each slot and the number of tokens for each expert.

    Args:
        slots: slots of the block.
        experts: experts of a device.
        width: numbers in a row.
        terms: numbers that represent a float32.
    """
    return math.ceil(terms * (slots + experts) / width)


def num_exchanges(config: Config) -> int:
    """Returns the all-to-alls of a layer, forward and backward: tokens to the experts and back, and their gradients; the
    tokens again for the gradients of experts, and results again where a matrix multiplies them, for its gradient, unless
    they are kept."""
    kept = SAVED_BY_REMAT[config.model.remat]
    if kept is None:
        return 4
    return 4 + ("dispatched" not in kept) + (config.model.experts.latent_dim is not None and "expert_output" not in kept)
