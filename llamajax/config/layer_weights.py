"""Table of the weights of a layer, from which parameters, FLOPs and bytes are counted."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerWeight:
    """Weight that every layer has."""

    path: str
    """Path in the layer, as modules and checkpoints name it."""
    dims: str
    """Dims, as numbers or letters: D embed, K kv heads, G query heads of each, C these with its key and its value, H head, F
    mlp."""
    matmul: Literal["column", "row"] | None = None
    """How `mesh.tensor` splits a weight that multiplies tokens: by columns, with tokens gathered before, or by rows, with
    results scattered after. None: no matmul uses it."""
    result: str | None = None
    """Name of the matmul's result that the backward pass needs, as in `SAVED_BY_REMAT` (`config/model.py`); None: it needs
    none."""
    trait: str | None = None
    """Setting of `ModelConfig` that adds the weight; None: every model has it."""

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
PROJECTION_DIMS = {"q": "K G H", "k": "K H", "v": "K H", "o": "K G H", "gate": "F", "up": "F", "down": "F"}
"""Dims of each projection that adapters may have, besides D, in letters as above."""
MATRICES = tuple(weight.name for weight in LAYER_WEIGHTS if weight.matmul)
Matrix = Literal["wqkv", "wo", "w_gate_up", "w_down"]
"""The same names, as the type of settings."""
