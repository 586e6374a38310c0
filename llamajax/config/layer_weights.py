"""The weights of a layer: one table, from which parameters, FLOPs and bytes are counted."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerWeight:
    """A weight that every layer has."""

    path: str
    """In the layer, as its modules and checkpoints call it."""
    dims: str
    """Its dims, as numbers or in letters: D embed, K kv heads, G query heads of each, C these with its key and its value, H
    head, F mlp."""
    matmul: Literal["column", "row"] | None = None
    """Of one that tokens are multiplied with: what devices of `tensor` split, its columns or its rows. Tokens are gathered
    for the one, and results scattered behind the other."""
    result: str | None = None
    """What remat calls the result that the backward pass needs, see `SAVED_BY_REMAT` in `config/model.py`; None: it needs
    none."""
    trait: str | None = None
    """The setting of `ModelConfig` without which there is none."""

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
