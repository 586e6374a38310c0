"""Purposes and names of the arrays in a compiled step, from the scopes of the program.

The contract with model and step is `jax.named_scope`: the names below, which `tests/planning/test_scopes.py` finds in a
compiled step, and the names of the state's arrays. Where jax and XLA report no scope, an array is identified by its shape
among the shapes of the program's arguments and gathers.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from llamajax.config.parallel import num_parts
from llamajax.config.run import Config
from llamajax.estimates.formulas import computed_model, expert_weights, is_layer_matrix, stacks
from llamajax.estimates.formulas import weights as num_weights
from llamajax.estimates.pipeline import StageWork
from llamajax.planning.cost.network import collective_kind
from llamajax.planning.xla.buffers import Buffer
from llamajax.planning.xla.hlo import Computation, Instruction, Module, arrays

MemoryKind = Literal[
    "parameters", "optimizer", "batch", "gradients", "activations", "logits", "collectives", "temporaries", "gaps",
    "workspace",
]  # fmt: skip
MEMORY_KINDS: dict[MemoryKind, str] = {
    "parameters": "master weights, and copies of those that are in host memory",
    "optimizer": "the optimizer's moments",
    "batch": "the batch and counters",
    "gradients": "gradients: the stored shards, and full ones that are not scattered yet",
    "activations": "saved by the forward pass for the backward pass",
    "logits": "logits, and arrays that the loss computes from them",
    "collectives": "weights gathered for compute, and other buffers of collectives",
    "temporaries": "everything else that is alive at the fullest moment",
    "gaps": "unused between the arrays at that moment",
    "workspace": "cuDNN's workspace for attention; counted whole, although its peak may be at another moment",
}
"""Purposes of memory, with a description for the report."""

LAYERS = "layers"
"""Scope around the stack: the stack keeps arrays directly in this scope for every layer."""
PLACES = {
    "embed": "embed", LAYERS: "layers", "attention": "layers/attention", "mlp": "layers/mlp", "final_norm": "final_norm",
    "loss": "loss", "update": "update",
}  # fmt: skip
"""Parts of the step, with their names in the report."""
VALUES = {
    "qkv": "qkv", "scores": "attention scores", "attend": "attention output", "output_projection": "output projection",
    "gate_up": "gate_up", "gated": "gated", "down_projection": "down projection", "logits": "logits",
    "d_hidden": "gradient of hidden states", "d_head": "gradient of head",
}  # fmt: skip
"""Values computed inside the parts."""
EXPERT_VALUES = {"router": "router scores", "multiply": "experts' hidden states"}
"""Values computed in layers with experts."""
WEIGHT = "gather_weight"
"""Scope around the conversion of a stored weight to the one that compute uses."""
SCOPES = (*PLACES, *VALUES, WEIGHT)
_VALUES = VALUES | EXPERT_VALUES
_SCOPES = (*SCOPES, *EXPERT_VALUES)

_WEIGHT_PATHS = "model.", "copies."
"""Paths in the state of weights, and of copies of those in host memory."""
_UNNAMED = "hidden states"
"""Name of a kept value that has no scope of its own."""
_RESIDUAL = ("embed", "attention", "mlp", "final_norm")
"""Places with hidden states (sums and norms) as their own arrays [B, T, D], outside of inner scopes."""
_WEIGHTS = {
    "embed": "embedding", "loss": "head", "d_head": "head", "qkv": "qkv weight", "output_projection": "output weight",
    "gate_up": "gate_up weight", "down_projection": "down weight",
}  # fmt: skip
"""Scopes that use a weight, with the weight's name."""


@dataclass(frozen=True)
class StageArrays:
    """Arrays that only a stage of a pipeline has."""

    slots: int = 0
    """Leading dim of the values kept for backward passes; 0: there is no pipeline."""
    whole: Mapping[int, str] = field(default_factory=dict)
    """Names of the weights that the stage holds whole, by the count of numbers on a device in one layer of each chunk."""

    @staticmethod
    def of(config: Config, mesh: Mapping[str, int]) -> "StageArrays":
        """Returns the arrays of a run on a mesh with axes of these sizes."""
        work, model = StageWork.of(config, mesh), computed_model(config.model, mesh)
        if work.stages == 1:
            return StageArrays()
        counts, experts = num_weights(model), expert_weights(model)
        num_layers = {stack: alike.num_layers for stack, alike in stacks(model).items()}

        def of_device(name: str) -> int:
            stack, _, _ = name.partition(".")
            parts = num_parts("experts", mesh) if name in experts else mesh["tensor"]
            return counts[name] * work.chunks // num_layers[stack] // parts

        whole = {of_device(name): name.replace(".", "/") for name in counts if is_layer_matrix(name)}
        whole[counts["embedding"] // mesh["tensor"]] = "embedding or head" if "head" in counts else "embedding"
        return StageArrays(work.slots, whole)


class Namer:
    """Names the buffers of one compiled step; weights that are `is_frozen` have no gradients."""

    def __init__(
        self,
        module: Module,
        arguments: tuple[Buffer, ...],
        is_frozen: Callable[[str], bool],
        stage: StageArrays = StageArrays(),
    ):
        self._whole = stage.whole
        weights = {_argument_path(argument.op_name): argument for argument in reversed(arguments)}
        weights = {path.partition(".")[2]: w for path, w in weights.items() if path.startswith(_WEIGHT_PATHS)}
        self._param_dtypes = {weight.dtype for weight in weights.values()}
        # A device's shard of a weight, all layers together; the first weight with a shape gives the shape its name.
        self._stored = {w.shape: name.replace(".", "/") for name, w in weights.items() if not is_frozen(name)}
        self._gathered = _gathered_sizes(module)
        # Tokens of one micro-batch, from [micro-batches, B, T] on the device.
        self._tokens = {math.prod(a.shape[1:]) for a in arguments if a.op_name.startswith("batch")}
        # A loop that writes slots may have lost the name of the value, so that another loop's name counts.
        stacks = sorted(_stacked(module, stage.slots), key=lambda stack: stage.slots > 0 and _UNNAMED not in stack[1])
        self._stacked = dict(stacks)

    def tell(self, buffer: Buffer) -> tuple[MemoryKind, str]:
        """Returns the purpose of a buffer and its readable name, such as `layers/mlp gate_up, recomputed`."""
        if buffer.opcode == "parameter":
            path = _argument_path(buffer.op_name)
            is_moment = path.startswith("opt_state") and buffer.shape  # its other arrays are counters
            return "parameters" if path.startswith(_WEIGHT_PATHS) else "optimizer" if is_moment else "batch", path
        phase, scopes = _phase(buffer.op_name), _scopes(buffer.op_name)
        is_gather, scopes = WEIGHT in scopes, [scope for scope in scopes if scope != WEIGHT] or ["step"]
        place = next((PLACES[scope] for scope in reversed(scopes) if scope in PLACES), "step")
        weight = _WEIGHTS.get(scopes[-1], "weight")
        weight = f"{place} {weight}" if place.startswith("layers") else weight
        if kind := collective_kind(buffer.opcode.removesuffix("-done")):
            is_gather = is_gather and kind == "all-gather"
            return "collectives", f"{weight}, gathered" if is_gather else f"{place} {kind} ({phase})"
        if buffer.dtype in (*self._param_dtypes, "f32") and buffer.shape in self._stored:  # "f32": summed over micro-batches
            return "gradients", f"gradient of {self._stored[buffer.shape]}"
        if buffer.dtype in self._param_dtypes:
            for shape, stored in self._stored.items():
                if sorted(shape) == sorted(buffer.shape):
                    return "temporaries", f"{stored} or its gradient, copied to another layout"
        is_residual = scopes[-1] in _RESIDUAL and not is_gather and len(buffer.shape) == 3
        # The lookup's gradient [D, V] may have as many rows as there are tokens.
        is_activation = is_residual or (scopes[-1] != "embed" and self._has_tokens(buffer))
        is_weight = is_gather or (scopes[-1] in _WEIGHTS and not is_activation)
        if is_weight and math.prod(buffer.shape) in self._gathered:
            if phase == "backward" or buffer.dtype == "f32":
                return "gradients", f"gradient of {weight}, not scattered yet"
            return "collectives", f"{weight}, gathered"
        is_kept = (scopes == [LAYERS] and phase == "forward") or scopes == ["step"]  # no scope: XLA's allocation of stacks
        if is_kept and buffer.shape in self._stacked:
            return "activations", self._stacked[buffer.shape]
        if scopes == ["step"] and (name := self._whole.get(math.prod(buffer.shape))):
            is_sum = buffer.dtype == "f32"
            return ("gradients", f"summed gradient of {name}") if is_sum else ("collectives", f"{name}, gathered")
        # Layers outside a loop keep their arrays where they created them.
        is_kept_in_place = not self._stacked and phase == "forward" and (is_activation or place.startswith("layers"))
        primitive = re.sub(r"\W+", " ", buffer.op_name.split("/")[-1]).strip() or buffer.instruction
        value = "hidden states" if is_residual else _VALUES.get(scopes[-1])
        what = primitive if value is None else f"gradient of {value}" if phase == "backward" else value
        again = ", recomputed" if phase == "recomputed" else ""
        kind = "logits" if place == "loss" else "activations" if is_kept_in_place else "temporaries"
        return kind, f"{place} {what}{again}"

    def _has_tokens(self, buffer: Buffer) -> bool:
        """Returns whether the first dims are the tokens of a micro-batch, as in activations and their gradients."""
        return not self._tokens.isdisjoint(itertools.accumulate(buffer.shape, operator.mul))


def _gathered_sizes(module: Module) -> set[int]:
    """Returns the element counts of the weights that compute uses: results of gathers, or, where every device has all,
    narrow copies."""
    made = [i for c in module.computations.values() for i in c.instructions.values() if _scopes(i.op_name)[-1:] == [WEIGHT]]
    gathers = [i for i in made if i.opcode in ("all-gather", "all-gather-done")]
    return {array.num_elements for instruction in gathers or made for array in arrays(instruction.shape)}


def _stacked(module: Module, slots: int) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yields the shapes of the stacks that the forward pass saves for every layer, or a pipeline in `slots` for its
    micro-batches, with the name of each one."""
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            name = instruction.op_name
            if instruction.opcode != "dynamic-update-slice":
                continue
            dims = next(arrays(instruction.shape)).dims
            of_layers = _phase(name) == "forward" and _scopes(name) == [LAYERS]
            of_slots = slots in dims and not _scopes(name)  # in any place: XLA chooses the order of dims
            if of_layers or of_slots:
                scopes = [_scopes(source.op_name) for source in _sources(computation, instruction.operands[1])]
                made_in = next((own[-1] for own in scopes if own and own != [LAYERS]), LAYERS)
                value = _VALUES.get(made_in, _UNNAMED)
                yield dims, f"{value} of {slots} micro-batches" if of_slots else f"{value} of every layer"


def _sources(computation: Computation, name: str) -> Iterator[Instruction]:
    """Yields an instruction, the instruction that computes its first operand, and so on."""
    instruction = computation.instructions[name]
    yield instruction
    if instruction.operands:
        yield from _sources(computation, instruction.operands[0])


def _scopes(op_name: str) -> list[str]:
    """Returns the known scopes of an instruction, outer to inner."""
    return [part for part in re.split(r"[/():]", op_name) if part in _SCOPES]


def _phase(op_name: str) -> str:
    """Returns the phase of the step: `forward`, `backward`, `recomputed` (forward again, within backward) or `update`."""
    if "rematted_computation" in op_name:
        return "recomputed"
    return "backward" if "transpose(" in op_name else "forward" if "jvp(" in op_name else "update"


def _argument_path(op_name: str) -> str:
    """Returns `model.layers.mlp.w_down` for the argument `state.model.layers.mlp.w_down.value`."""
    return op_name.removeprefix("state.").removesuffix(".value")
