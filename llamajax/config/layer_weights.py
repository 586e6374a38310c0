"""The weights of a layer: one table, from which parameters, FLOPs and bytes are counted."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerWeight:
    """A weight that every layer has."""

    path: str
    """In the layer, as its modules and checkpoints call it."""
    dims: str
    """The dims, as numbers or letters: D embed, K kv heads, G query heads of each, C these with its key and its value, H
    head, F mlp."""
    matmul: Literal["column", "row"] | None = None
    """How `mesh.tensor` splits a weight that tokens are multiplied with: by columns, before which tokens are gathered, or by
    rows, after which results are scattered. None: no matmul uses it."""
    result: str | None = None
    """Name of the matmul's result that the backward pass needs, as in `SAVED_BY_REMAT` (`config/model.py`); None: it needs
    none."""
    trait: str | None = None
    """The setting of `ModelConfig` that adds the weight; None: every model has it."""

    @property
    def name(self) -> str:
        """As its module calls it."""
        return self.path.rpartition(".")[2]


LAYER_WEIGHTS = (
    LayerWeight("attention_norm.scale", "D"),
    LayerWeight("attention.wqkv", "D K C H", matmul="column", result="qkv"),
    LayerWeight("attention.qkv_bias", "K C H", trait="qkv_bias"),
    LayerWeight("attention.q_norm.scale", "H", trait="qk_norm"),
    LayerWeight("attention.k_norm.scale", "H", trait="qk_norm"),
    LayerWeight("attention.wo", "D K G H", matmul="row", result="residual"),
    LayerWeight("attention.output_bias", "D", trait="output_bias"),
    LayerWeight("mlp_norm.scale", "D"),
    LayerWeight("mlp.w_gate_up", "D 2 F", matmul="column", result="gate_up"),
    LayerWeight("mlp.gate_up_bias", "2 F", trait="mlp_bias"),
    LayerWeight("mlp.w_down", "D F", matmul="row"),
    LayerWeight("mlp.down_bias", "D", trait="mlp_bias"),
)
"""In the order in which the forward pass takes them."""
MATRICES = tuple(weight.name for weight in LAYER_WEIGHTS if weight.matmul)
Matrix = Literal["wqkv", "wo", "w_gate_up", "w_down"]
"""The same names, as the type of settings."""
