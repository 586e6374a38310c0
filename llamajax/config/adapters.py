"""Settings of `adapters`: small matrices that are trained beside the frozen weights of a model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llamajax.config.model import DType, ModelConfig
from llamajax.config.quantized import QuantizedForm
from llamajax.config.rules import PositiveFloat, PositiveInt, Section, ShareBelowOne
from llamajax.config.training import TrainConfig

AdapterKind = Literal["none", "lora", "rslora", "dora"]
Projection = Literal["q", "k", "v", "o", "gate", "up", "down"]
BaseForm = Literal["float32", "bfloat16", "float8", "int8", "nf4"]
PROJECTIONS: tuple[Projection, ...] = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class AdaptersConfig(Section):
    """Low-rank additions to the matrices of all layers. They alone are trained; the weights of `init_from` are frozen."""

    kind: AdapterKind = "none"
    """`lora`: the product of two small matrices is added to each target, times `alpha / rank` (arXiv:2106.09685). `rslora`:
    times `alpha / sqrt(rank)` (arXiv:2312.03732). `dora`: the length of every output's column is trained apart from its
    direction (arXiv:2402.09353). `none`: no adapters; all weights are trained."""
    rank: PositiveInt = 16
    """Columns of the first matrix of an adapter, and rows of the second."""
    alpha: PositiveFloat = 32.0
    """Number that scales the additions, see `kind`."""
    dropout: ShareBelowOne = 0.0
    """Share of an adapter's inputs that are set to zero in training, the others scaled up; equal on every mesh."""
    targets: tuple[Projection, ...] = PROJECTIONS
    """Projections of every layer that have an adapter."""
    base: BaseForm = "bfloat16"
    """Form in which devices store, and send each other, the frozen matrices of the layers: `float32`, `bfloat16`, or blocks
    of 64 numbers with a scale in `float8`, `int8` or `nf4` (QLoRA, arXiv:2305.14314). Products are in `model.compute_dtype`
    in any case. Embedding, head and norms stay in bfloat16, beside a float32 base in float32."""
    double_quantization: bool = True
    """Store the scales of blocks in eight bits too."""

    @property
    def enabled(self) -> bool:
        return self.kind != "none"

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen matrices of layers are stored in blocks with scales."""
        return self.quantized_form is not None

    @property
    def quantized_form(self) -> QuantizedForm | None:
        """Format of the frozen matrices' codes; None: they are not quantized."""
        return self.base if self.enabled and self.base in ("float8", "int8", "nf4") else None

    def is_frozen(self, name: str) -> bool:
        """Whether the parameter of this name is not trained beside adapters."""
        return "_adapter." not in name or name.endswith("_adapter.number")

    @property
    def base_dtype(self) -> DType:
        """Type of the frozen weights that are not quantized."""
        return "float32" if self.base == "float32" else "bfloat16"

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    @property
    def described(self) -> str:
        """The adapters in a few words."""
        name = {"none": "none", "lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA"}[self.kind]
        base = f"{self.base} with scales in eight bits" if self.is_quantized and self.double_quantization else self.base
        return f"{name} of rank {self.rank}, alpha {self.alpha:g}, on {', '.join(self.targets)}; frozen layers in {base}"

    def broken_rules(self) -> Iterator[str]:
        if not self.targets:
            yield "targets: must name at least one projection; remove it for all"
        if len(set(self.targets)) < len(self.targets):
            yield f"targets: {list(self.targets)} names a projection twice; remove one"


def adapter_problems(
    adapters: AdaptersConfig, model: ModelConfig, train: TrainConfig, init_from: str | None, *, moves_state: bool
) -> Iterator[str]:
    """Yields one `key: rule; remedy` line for every broken rule between adapters and other settings of a run."""
    if not adapters.enabled:
        return
    if init_from is None:
        yield "adapters.kind: needs init_from; name the model that the adapters add to, or set none"
    if adapters.is_quantized and model.matmul_dtype != "compute_dtype":
        rule = f"{model.matmul_dtype} rounds weights again that adapters.base={adapters.base} has rounded"
        yield f"model.matmul_dtype: {rule}; set adapters.base to bfloat16, or remove this"
    if train.frozen:
        yield "train.frozen: has no effect with adapters, beside which all weights are frozen; remove it"
    if moves_state:
        yield "offload.optimizer: adapters have a small state, which stays on the card; remove it"
