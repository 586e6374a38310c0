"""Published run as its authors describe it: model, batch, cluster, and kind of program."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from llamajax.config.machine import HardwareConfig
from llamajax.estimates.calibration import Constants
from llamajax.estimates.gpus import planned_gpu
from llamajax.estimates.machine import Machine
from scripts.accuracy.programs import Attention, Program

Exchange = Literal["zero3", "zero3 in turn", "hsdp", "zero1", "zero1 in turn", "zero1 every micro-batch"]
"""Ways to send weights and gradients. `zero3`: a layer's weights are gathered in the forward and again in the backward pass,
and gradients scattered, all while the neighbouring layer computes (FSDP). `hsdp`: the same within a group, and gradients are
summed over `replicas` groups. `zero1`: gradients are scattered during the last micro-batch's backward pass, and weights
gathered during the first one's forward pass. `in turn`: communication does not overlap with computation."""
Matrix = Literal["q", "k", "v", "out", "gate", "up", "down"]
LAYER: tuple[Matrix, ...] = ("q", "k", "v", "out", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Dims that affect the cost."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    is_gated: bool = True
    """Whether the MLP has three matrices, one of them a gate; otherwise it has two."""

    @property
    def matrices(self) -> dict[Matrix, tuple[int, int]]:
        """Inputs and outputs of a layer's products."""
        D, F = self.embed_dim, self.mlp_dim
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gate: dict[Matrix, tuple[int, int]] = {"gate": (D, F)} if self.is_gated else {}
        return {
            "q": (D, heads), "k": (D, kv_heads), "v": (D, kv_heads), "out": (heads, D), **gate, "up": (D, F), "down": (F, D),
        }  # fmt: skip

    @property
    def layer_params(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.matrices.values())

    @property
    def num_params(self) -> int:
        """With an embedding and a head of its own."""
        return self.num_layers * self.layer_params + 2 * self.vocab_size * self.embed_dim


@dataclass(frozen=True, kw_only=True)
class Run:
    """One row of the tables."""

    name: str
    published: float
    """Tokens per second and GPU."""
    source: str
    program: Program
    model: Model
    seq_len: int
    sequences: int
    """Per micro-batch, of each group of `tensor` x `context` x `pipeline` GPUs."""
    grad_accum_steps: int = 1
    gpu: str
    """Name of the GPU in `hardware.gpu`."""
    nodes: int
    gpus_per_node: int = 8
    node_bandwidth: float | None = None
    gpu_bandwidth: float | None = None
    memory_bandwidth: float | None = None
    """Memory of the card, if unusual."""
    power: float = 1.0
    """Power limit relative to the usual one; clocks scale with its cube root."""
    replicas: int = 1
    """Groups of GPUs that each hold all weights, for `hsdp`."""
    tensor: int = 1
    hides_tensor: bool = False
    """Whether traffic of tensor parallelism overlaps with products."""
    context: int = 1
    """Number of GPUs that share a sequence; their exchange of keys and values counts as hidden."""
    pipeline: int = 1
    interleaved: int = 1
    """Number of stages per GPU."""
    head_apart: bool = False
    """Whether the last stage computes the head in addition to its layers, so that all others wait; otherwise its work counts
    as evenly spread."""
    sends_apart: bool = False
    """Whether stages wait while activations and their gradients travel, each GPU sending its part of the channels."""
    tensor_passes: int = 10
    """Gathers and scatters of all tokens per layer and micro-batch among `tensor` GPUs; an all-reduce counts as two."""
    exchange: Exchange
    gradient_bytes: int = 2
    """Per parameter, on the wire."""
    copies: float = 0.0
    """Bytes per parameter and micro-batch that kernels move to gather weights, and to send or sum gradients."""
    again: tuple[Matrix, ...] = ()
    """Products that the backward pass computes a second time."""
    attention_again: bool = False
    again_share: float = 1.0
    """Share of the layers that recompute, if not all do."""
    float8: bool = False
    """Whether the layers' products are in float8."""
    attention: Attention | None = None
    """Where it is not the one usual for the program."""
    is_listed: bool = False
    """Whether the tables have had this run from the beginning."""
    is_held_out: bool = False
    """Whether the run was found after the fit and takes no part in it."""

    @property
    def system(self) -> str:
        return self.name.split()[0]

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def shards(self) -> int:
        """Number of GPUs that shard the optimizer state of the same weights."""
        return self.num_gpus // (self.tensor * self.pipeline * self.replicas)

    def machine(self, share: float | None = None) -> Machine:
        """Its cluster, with the constants of the cost model; `share`: of the peak, by large products, in place of theirs."""
        name: Any = self.gpu
        gpu = planned_gpu(
            HardwareConfig(
                gpu=name,
                nodes=self.nodes,
                gpus_per_node=self.gpus_per_node,
                node_bandwidth=self.node_bandwidth,
                gpu_bandwidth=self.gpu_bandwidth,
            )
        )
        gpu = dataclasses.replace(
            gpu,
            peak_flops=gpu.peak_flops * self.power ** (1 / 3),
            memory_bandwidth=self.memory_bandwidth or gpu.memory_bandwidth,
        )
        return Machine(gpu=gpu, gpus_per_node=self.gpus_per_node, measured=Constants(matmul_efficiency=share))

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch in the layers of one GPU."""
        return self.sequences * self.seq_len // self.context

    @property
    def tokens_per_step(self) -> float:
        """Per GPU: of those that share a sequence or its layers, each counts for its part."""
        return self.tokens * self.grad_accum_steps / (self.tensor * self.pipeline)
