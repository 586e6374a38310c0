"""Settings of `model.experts`: layers whose MLP is replaced by many, of which every token chooses a few."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from llamajax.config.parallel import axes_of, num_parts
from llamajax.config.rules import (
    NonNegativeFloat,
    NonNegativeFloatOrUnset,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveIntOrUnset,
    Section,
)

Scores = Literal["softmax", "sigmoid"]
Tokens = Literal["batch", "row"]
BIAS = "layers.mlp.bias"
"""Name of the experts' biases, which no gradient moves."""
OF_A_RUN = ("balance_loss", "balance_over", "z_loss", "capacity_factor", "kernel")
"""Settings that say how a run trains experts; they do not come from weights, and weights do not depend on them."""
ExpertKernel = Literal["auto", "pallas", "tokamax", "plain"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Section):
    """Mixture of experts (arXiv:1701.06538): a router sends every token to a few of many MLPs."""

    num_experts: NonNegativeInt = 0
    """Experts of each layer. 0: a dense MLP of width `model.mlp_dim`, and no other setting of this section counts."""
    first_dense_layers: NonNegativeInt = 0
    """Layers at the beginning of the model that keep a dense MLP (DeepSeek)."""
    layer_step: PositiveInt = 1
    """Step from one layer with experts to the next; layers between them keep a dense MLP. With 2, and no dense layers at the
    beginning, the second, fourth, sixth layer have experts."""
    top_k: PositiveInt = 2
    """Experts that each token chooses."""
    mlp_dim: PositiveIntOrUnset = None
    """Width of an expert's hidden layer; unset: `model.mlp_dim`."""
    gated: bool = True
    """Experts are SwiGLU MLPs; otherwise down(silu(up(x)))."""
    latent_dim: PositiveIntOrUnset = None
    """Width in which tokens travel to experts and back, in which experts read and write them (BigMac, arXiv:2502.16927):
    two matrices that all tokens share lead from the residual stream to it and back. Unset: the residual stream's width."""
    shared_mlp_dim: NonNegativeInt = 0
    """Width of the shared expert, which processes all tokens (DeepSeekMoE, arXiv:2401.06066); 0: none."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a sigmoid gate, one number per token (Qwen2-MoE)."""
    scores: Scores = "softmax"
    """Function from the router's logits, over all experts, to scores, in float32."""
    normalize: bool = True
    """A token's chosen scores are divided by their sum, so that their weights add up to `weight_scale`."""
    weight_scale: PositiveFloat = 1.0
    """Factor of the weights."""
    num_groups: PositiveInt = 1
    """Groups of experts with consecutive numbers; a token chooses within `top_groups` of them (DeepSeek-V2,
    arXiv:2405.04434). A group's score is its largest, or with `scores: sigmoid` the sum of its two largest (DeepSeek-V3)."""
    top_groups: PositiveInt = 1
    """Groups that a token chooses its experts from."""
    balance_loss: NonNegativeFloat = 0.0
    """Weight of the loss that balances experts: E / k times the sum over experts of the share of choices times the mean
    score, which is 1 in balance. It is summed over layers."""
    balance_over: Tokens = "batch"
    """Tokens that the shares of choices are counted over. `batch`: all of a micro-batch, on all devices. `row`: each row of
    the batch by itself (DeepSeek-V3, section 2.1.2), which no other row and no micro-batch changes."""
    bias_update_rate: NonNegativeFloatOrUnset = None
    """Step by which each expert's bias moves after every optimizer step: up where an expert got less than the mean load,
    down where it got more (arXiv:2408.15664). The bias is added to scores for the choice, not for the weights. 0: it stays
    as it is. Unset: experts have no bias."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the squared log-partition function of the router's logits, which keeps them small (ST-MoE,
    arXiv:2202.08906). It is summed over layers."""
    capacity_factor: NonNegativeFloat = 0.0
    """Most tokens of a row that an expert takes, over the balanced number; further ones, those later in the row, lose this
    expert. 0: no token loses an expert (dropless)."""
    kernel: ExpertKernel = "auto"
    """Kernel that multiplies tokens by their experts' matrices. `pallas`: llamajax's own, for GPUs of compute capability 8.0
    and newer; it reads and writes tokens where they are. `tokamax` (extra `tokamax`, Python 3.12): written for Hopper, in
    16-bit types; it takes sorted copies of the tokens. `plain`: a loop over tiles of tokens, for CPUs; it would leave a GPU
    idle. `auto`: `pallas` on GPUs, else `plain`. A kernel that is named and cannot run is an error."""

    def broken_rules(self) -> Iterator[str]:
        if not self.enabled:
            return
        if self.top_k > self.num_experts:
            yield f"top_k: {self.top_k} must be at most num_experts={self.num_experts}"
        if self.num_experts % self.num_groups:
            yield f"num_groups: {self.num_groups} must divide num_experts={self.num_experts}"
        elif self.top_groups > self.num_groups or min(self.top_k, self.num_experts) > self.top_groups * (
            self.num_experts // self.num_groups
        ):
            yield (
                f"top_groups: {self.top_groups} groups of {self.num_experts // self.num_groups} experts must hold"
                f" top_k={self.top_k}, and be at most num_groups={self.num_groups}"
            )
        if self.shared_gate and not self.shared_mlp_dim:
            yield "shared_gate: has no effect without shared_mlp_dim; set that, or remove this"

    def undivided_layers(self, num_layers: int) -> Iterator[str]:
        """Yields a `key: rule; remedy` line if a model of so many layers does not end with a layer that has experts."""
        rest = num_layers - self.first_dense_layers
        if self.enabled and (rest <= 0 or rest % self.layer_step):
            after = f" - first_dense_layers={self.first_dense_layers}" if self.first_dense_layers else ""
            yield f"experts.layer_step: {self.layer_step} must divide num_layers={num_layers}{after}, which must be above 0"

    def dense_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the numbers of the layers without experts in a model of so many layers."""
        first = self.first_dense_layers
        return tuple(n for n in range(num_layers) if not self.enabled or n < first or (n - first + 1) % self.layer_step)

    def num_expert_layers(self, num_layers: int) -> int:
        """Returns the number of layers with experts in a model of so many layers."""
        return (num_layers - self.first_dense_layers) // self.layer_step if self.enabled else 0

    @property
    def counts_micro_batches(self) -> bool:
        """Whether the loss depends on which rows are in a micro-batch together."""
        return self.enabled and self.balance_loss > 0 and self.balance_over == "batch"

    @property
    def enabled(self) -> bool:
        """Whether the model has experts."""
        return self.num_experts > 0

    @property
    def has_bias(self) -> bool:
        """Whether each expert has a bias."""
        return self.bias_update_rate is not None

    @property
    def num_gates(self) -> int:
        """Number of matrices that lead into an expert's hidden layer."""
        return 2 if self.gated else 1

    def undivided(self, axes: Mapping[str, int]) -> Iterator[str]:
        """Yields a `key: rule; remedy` line if mesh axes of these sizes do not divide the experts."""
        parts, over = num_parts("experts", axes), " x ".join(f"mesh.{axis}={axes[axis]}" for axis in axes_of("experts"))
        if self.enabled and self.num_experts % parts:
            yield f"model.experts.num_experts: {self.num_experts} must be divisible by {over}"
        if not self.enabled and axes["expert"] > 1:
            yield f"mesh.expert: {axes['expert']} has no experts to split; use mesh.fsdp, or set model.experts.num_experts"
