"""Table of the weights of a layer, from which parameters, FLOPs and bytes are counted."""

from dataclasses import dataclass
from typing import Literal

Matmul = Literal["column", "row", "token", "expert"]


@dataclass(frozen=True)
class LayerWeight:
    """Weight of a layer."""

    path: str
    """Path in the layer, as modules and checkpoints name it."""
    dims: str
    """Dims, as numbers or letters: D embed, K kv heads, G query heads of each, C these with its key and its value, H head, F
    mlp; of experts E their number, I the width of their tokens, A their gates, M their mlp, S the shared expert's."""
    matmul: Matmul | None = None
    """How devices split a weight that multiplies tokens. `column` and `row`: over `mesh.tensor`, by columns, with tokens
    gathered before, or by rows, with results scattered after. `token`: not at all, each device multiplies its own tokens.
    `expert`: by experts, to which tokens travel. None: no matmul uses it."""
    result: str | None = None
    """Name of the matmul's result that the backward pass needs, as in `SAVED_BY_REMAT` (`config/model.py`); None: it needs
    none."""
    trait: str | None = None
    """Setting of `ModelConfig` that adds the weight, with dots for settings of sections; None: every such layer has it."""

    @property
    def name(self) -> str:
        """Name that its module uses."""
        return self.path.rpartition(".")[2]


LAYER_WEIGHTS = (
    LayerWeight("attention_norm.scale", "D"),
    LayerWeight("attention.wqkv", "D K C H", matmul="column", result="qkv"),
    LayerWeight("attention.qkv_bias", "K C H", trait="qkv_bias"),
    LayerWeight("attention.q_norm.scale", "H", trait="qk_norm"),
    LayerWeight("attention.k_norm.scale", "H", trait="qk_norm"),
    LayerWeight("attention.q_norm.scale", "K G H", trait="qk_norm_across_heads"),
    LayerWeight("attention.k_norm.scale", "K 1 H", trait="qk_norm_across_heads"),
    LayerWeight("attention.wo", "D K G H", matmul="row", result="residual"),
    LayerWeight("attention.output_bias", "D", trait="output_bias"),
    LayerWeight("mlp_norm.scale", "D"),
    LayerWeight("mlp.w_gate_up", "D 2 F", matmul="column", result="gate_up"),
    LayerWeight("mlp.gate_up_bias", "2 F", trait="mlp_bias"),
    LayerWeight("mlp.w_down", "D F", matmul="row"),
    LayerWeight("mlp.down_bias", "D", trait="mlp_bias"),
)
"""All weights of a layer, in the order of the forward pass."""
EXPERT_WEIGHTS = (
    LayerWeight("mlp.router", "D E", matmul="token", result="router_logits"),
    LayerWeight("mlp.bias", "E", trait="experts.has_bias"),
    LayerWeight("mlp.w_gate_up", "E I A M", matmul="expert", result="gate_up"),
    LayerWeight("mlp.w_down", "E M I", matmul="expert", result="expert_output"),
    LayerWeight("mlp.descend", "D I", matmul="token", result="latent", trait="experts.latent_dim"),
    LayerWeight("mlp.ascend", "D I", matmul="token", trait="experts.latent_dim"),
    LayerWeight("mlp.shared.w_gate_up", "D 2 S", matmul="column", result="gate_up", trait="experts.shared_mlp_dim"),
    LayerWeight("mlp.shared.w_down", "D S", matmul="row", result="shared_output", trait="experts.shared_mlp_dim"),
    LayerWeight("mlp.shared_gate", "D 1", matmul="token", result="shared_gate", trait="experts.shared_gate"),
)
"""Weights that replace those of the MLP in a layer with experts."""
PROJECTION_DIMS = {"q": "K G H", "k": "K H", "v": "K H", "o": "K G H", "gate": "F", "up": "F", "down": "F"}
"""Dims of each projection that adapters may have, besides D, in letters as above."""
MATRICES = tuple(weight.name for weight in LAYER_WEIGHTS if weight.matmul)
"""Matrices that may be multiplied in float8."""
Matrix = Literal["wqkv", "wo", "w_gate_up", "w_down"]
"""The same names, as the type of settings."""
EXPERT_MATRICES = tuple(weight.name for weight in EXPERT_WEIGHTS if weight.matmul and weight.name not in MATRICES)
"""Further matrices of layers with experts."""
