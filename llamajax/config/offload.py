"""Settings of `offload`: data that waits in host memory, or on a disk, while the GPU does not need it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from llamajax.config.model import SAVED_BY_REMAT, DType, ModelConfig, Remat
from llamajax.config.parallel import MeshConfig, ParallelConfig
from llamajax.config.rules import Bound, PositiveFloatOrUnset, Section, Share

ActivationName = Literal["input", "residual", "attention", "qkv", "gate_up"]
Activations = Literal["none", "auto"] | tuple[ActivationName, ...]
NOT_SCAN = "cannot bring values back from host memory in time"
NOT_PIPELINE = "a pipeline keeps its values on the card"
OptimizerPlace = Annotated[
    Literal["none", "auto"] | float,
    Bound(lambda value: isinstance(value, str) or 0 <= value <= 1, "must be none, auto or between 0 and 1"),
]
BY_TOKEN: tuple[ActivationName, ...] = ("qkv", "gate_up")
"""Values that the backward pass can recompute for some tokens alone; attention needs all tokens of a row."""


@dataclass(frozen=True, kw_only=True)
class TiersConfig(Section):
    """Memory beside the card."""

    host_bytes: PositiveFloatOrUnset = None
    """Bytes of one host's memory that data of its GPUs may take; unset: nine tenths of `hardware.host_memory`."""
    nvme_dir: str | None = None
    """Folder on a local NVMe disk, such as `/local/scratch`, for the values of `offload.activations`: host memory then holds
    those of a few groups of layers, and the disk the rest until the backward pass needs them (SSDTrain, arXiv:2408.10013).
    Each process writes its own devices' values to files without a name, whose space is free again when the process ends.
    The step is several programs, one for each group of layers. Unset: no disk."""
    nvme_bytes: PositiveFloatOrUnset = None
    """Bytes of one node's disks that the files in `nvme_dir` may take; unset: the free space of the disk at the start."""

    def broken_rules(self) -> Iterator[str]:
        if self.nvme_dir == "":
            yield "nvme_dir: must not be empty; name a folder on a local disk, or null for none"
        if self.nvme_bytes is not None and self.nvme_dir is None:
            yield "nvme_bytes: has no effect without offload.tiers.nvme_dir; name a folder there, or remove this"


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(Section):
    """Data that waits in the host's memory, pinned, while the GPU does not need it."""

    activations: Activations = "none"
    """Values that layers save for the backward pass and that wait in host memory: they leave while the next layer computes
    and return one layer ahead. `auto` chooses them, and the `fraction`, from bandwidths and memory in `hardware`, so that
    the step is fastest. Names: `input` of each layer, `residual` after attention, outputs of `attention`, `qkv` and
    `gate_up`, as far as `model.remat` saves them; with `model.remat: none`, `attention` and `gate_up` are all values of that
    part."""
    fraction: Share | None = None
    """Share of each device's tokens whose `qkv` and `gate_up` are saved, if they wait in host memory; the backward pass
    recomputes those of the other tokens, but never attention (MEMO, arXiv:2407.12117). Unset: `auto` chooses it; for given
    names, all tokens."""

    optimizer: OptimizerPlace = "none"
    """Share of weights and moments, in `model.param_dtype` and `optimizer.moment_dtype`, that wait in host memory: `none`,
    `auto` for as few as the card needs, or a number, 1 for all matrices. The card then holds copies of such weights in
    `model.compute_dtype`. Each layer's part is brought to the card for its update and sent back, while its neighbours
    travel. An update of one matrix must not depend on others."""
    parameters: Literal["none", "auto", "all"] = "none"
    """Whether the copies that steps compute with, and the gradients, of the matrices of layers wait in host memory too, so
    that the card holds those of two or three layers: `all`, which needs `optimizer: 1`, or `auto`, where nothing else fits.
    Each micro-batch brings every layer twice and sends its gradients once, so it pays with many tokens per micro-batch."""
    gradient_dtype: DType = "float32"
    """Type of gradients between the backward pass and such an update. `bfloat16` halves their memory and rounds each once;
    it is the type in which they are computed. Several micro-batches are summed in `train.grad_accum_dtype` first."""
    tiers: TiersConfig = field(default_factory=TiersConfig)
    """Memory beside the card."""

    @property
    def names(self) -> tuple[ActivationName, ...]:
        """Returns the values that wait in host memory; none while `auto` is not resolved."""
        return () if isinstance(self.activations, str) else self.activations

    @property
    def saved_share(self) -> float:
        """Returns the share of tokens whose `BY_TOKEN` values are saved; 1 while the fraction is not resolved."""
        return 1.0 if self.fraction is None or not set(self.names) & set(BY_TOKEN) else self.fraction

    @property
    def state_share(self) -> float:
        """Returns the share of weights and moments that waits in host memory; 0 while `auto` is not resolved."""
        return 0.0 if isinstance(self.optimizer, str) else self.optimizer

    def broken_rules(self) -> Iterator[str]:
        if len(set(self.names)) < len(self.names):
            yield f"activations: {max(self.names, key=self.names.count)} is named twice; name it once"
        if self.fraction is not None and not set(self.names) & set(BY_TOKEN) and self.activations != "auto":
            yield f"fraction: has no effect unless activations names {' or '.join(BY_TOKEN)}; add one, or remove this"
        if self.parameters == "all" and self.state_share < 1:
            yield "parameters: all needs optimizer: 1, which moves their master weights first; set it, or auto for both"
        if self.gradient_dtype != "float32" and self.optimizer in ("none", 0.0):
            yield f"gradient_dtype: {self.gradient_dtype} has no effect without offload.optimizer; set it, or remove this"


def saved_tokens(share: float, count: int) -> int:
    """Returns how many of a device's `count` tokens of a row are a share of them: a multiple of 128, the tile of most
    products, where there are enough of them."""
    tokens = int(share * count)
    return tokens - tokens % 128 if count >= 1024 and tokens < count else tokens


def saved_by(remat: Remat, *, is_shared: bool) -> tuple[ActivationName, ...]:
    """Returns the names of the values that layers save under a policy of `model.remat`, which is not `auto`; `is_shared`:
    devices of `mesh.tensor` have different tokens between matmuls."""
    if remat == "none":
        return "input", "residual", "attention", "gate_up"
    if remat == "full":
        return ("input", "residual") if is_shared else ("input",)
    saved = SAVED_BY_REMAT[remat] or ()
    names: tuple[ActivationName, ...] = ("residual", "attention", "qkv", "gate_up")
    return "input", *(name for name in names if name in saved)


def offload_problems(
    offload: OffloadConfig, model: ModelConfig, mesh: MeshConfig, parallel: ParallelConfig
) -> Iterator[str]:
    """Yields one `key: rule; remedy` line for each reason why what such a run names cannot wait in host memory."""
    if offload.state_share and mesh.pipeline != 1:
        yield "offload.optimizer: the stages of a pipeline keep their state on the card; set none, or mesh.pipeline: 1"
    if model.dense_layers:
        if offload.state_share:
            yield "offload.optimizer: state in host memory needs layers of one kind, and some have no experts; set none"
        if offload.tiers.nvme_dir is not None:
            yield "offload.tiers.nvme_dir: needs layers of one kind, and some have no experts; remove it"
    if offload.parameters == "all":
        yield from _parameter_problems(model, parallel)
    if offload.tiers.nvme_dir is not None and offload.parameters == "all":
        yield "offload.tiers.nvme_dir: needs the weights on the card; remove it, or set offload.parameters: none"
    if offload.tiers.nvme_dir is not None and offload.activations == "none":
        yield "offload.tiers.nvme_dir: has no effect without offload.activations; name values or auto there, or remove this"
    if offload.fraction is not None and model.experts.enabled:
        yield f"offload.fraction: {offload.fraction} parts the tokens, and experts are balanced over all of them; remove it"
    if not offload.names:
        return
    saved = offload.names if model.remat == "auto" else saved_by(model.remat, is_shared=mesh.tensor != 1)
    if unsaved := [name for name in offload.names if name not in saved]:
        yield (
            f"offload.activations: model.remat={model.remat} does not save {', '.join(unsaved)}, only {', '.join(saved)};"
            " name these, or choose another policy"
        )
    if parallel.stack == "scan":
        yield f"parallel.stack: scan {NOT_SCAN}; choose prefetch, unrolled or auto"
    if mesh.pipeline != 1:
        yield f"offload.activations: {NOT_PIPELINE}; set none, or mesh.pipeline: 1"


def _parameter_problems(model: ModelConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yields one line for each setting that needs the copies of all layers on the card."""
    told = "offload.parameters: all brings each layer's copies to the card alone"
    if parallel.stack == "scan":
        yield f"parallel.stack: scan {NOT_SCAN}; choose prefetch, unrolled or auto"
    if parallel.zero < 3 or parallel.zero_data:
        yield f"{told}, which needs parallel.zero: 3 and zero_data: 0; set these"
    if parallel.grad_reduce == "step":
        yield f"{told}, and cannot reduce gradients at the end of the step; set parallel.grad_reduce: micro or auto"
    if model.float8_weights:
        yield f"{told}, in model.compute_dtype; set model.matmul_dtype: compute_dtype"


ON_CARD = OffloadConfig()
"""Nothing waits in host memory."""
