"""Maps our arrays to Hugging Face tensors and back, with one table for both directions.

Our arrays stack all layers along a leading dimension L and fuse projections that are multiplied together. Hugging Face has
one tensor per layer and projection, [out, in] as torch stores a linear layer. Both pair head dimension i with i + H/2 for
rotary positions, so nothing is permuted. Adapters have the names that PEFT gives them.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamajax.config.adapters import PROJECTIONS, AdaptersConfig, Projection
from llamajax.config.architectures import architecture_of
from llamajax.config.model import Head, ModelConfig
from llamajax.errors import ConfigError, show
from llamajax.model import Llama
from llamajax.weights.safetensors import Stored

Box = tuple[slice, ...]
"""Start and stop in every dimension of an array."""


@dataclass(frozen=True)
class Tensor:
    """A Hugging Face tensor, and the part of one of our arrays that it corresponds to."""

    hf_name: str
    """Name of the tensor; `{layer}` is the layer number."""
    array: str
    """Name of our array in a checkpoint."""
    part: tuple[int | slice, ...] = ()
    """Index of the part within one layer's block of a stacked array."""
    in_dims: int | None = None
    """Number of leading dimensions of the part that are the input of a linear layer: 0 for a bias. None if the tensor equals
    the part, with all dimensions but the first merged."""
    head: Head = "vocabulary"
    """Kind of head that the tensor is, if it is one."""

    @property
    def rows_dim(self) -> int:
        """Dimension of our array, or of one layer of it, that the rows of the tensor run along."""
        gone = [dim for dim, at in enumerate(self.part) if isinstance(at, int)]
        kept = (dim for dim in itertools.count() if dim not in gone)
        return next(itertools.islice(kept, self.in_dims or 0, None))


_LAYER, _OURS, _HEAD = "model.layers.{layer}", "model.layers", "model.head"
_SCORE = "score.weight"
_ALL = slice(None)
OF_PEFT = "base_model.model."
"""Prefix that PEFT puts before the names of a model's modules."""

_SLAB_BYTES = 2 << 20
"""Bytes read at a time: small enough to stay in the processor's cache until transposed."""


def _of_adapter(projection: Projection) -> Iterator[Tensor]:
    """Yields the tensors of a projection's adapter; see `llamajax.model.adapters.Adapter` for the shapes of ours."""
    part, hf_part = ("attention", "self_attn") if projection in ("q", "k", "v", "o") else ("mlp", "mlp")
    ours, theirs = f"{_OURS}.{part}.{projection}_adapter", f"{OF_PEFT}{_LAYER}.{hf_part}.{projection}_proj"
    in_dims = None if projection in ("o", "down") else 1  # both factors of a row matrix are stored as torch does
    yield Tensor(f"{theirs}.lora_A.weight", f"{ours}.a", in_dims=in_dims)
    yield Tensor(f"{theirs}.lora_B.weight", f"{ours}.b", in_dims=in_dims)
    yield Tensor(f"{theirs}.lora_magnitude_vector", f"{ours}.magnitude", in_dims=0)


TENSORS = (
    Tensor("model.embed_tokens.weight", "model.embedding"),
    Tensor(f"{_LAYER}.input_layernorm.weight", f"{_OURS}.attention_norm.scale"),
    Tensor(f"{_LAYER}.self_attn.q_proj.weight", f"{_OURS}.attention.wqkv", (_ALL, _ALL, slice(-2)), in_dims=1),
    Tensor(f"{_LAYER}.self_attn.k_proj.weight", f"{_OURS}.attention.wqkv", (_ALL, _ALL, -2), in_dims=1),
    Tensor(f"{_LAYER}.self_attn.v_proj.weight", f"{_OURS}.attention.wqkv", (_ALL, _ALL, -1), in_dims=1),
    Tensor(f"{_LAYER}.self_attn.q_proj.bias", f"{_OURS}.attention.qkv_bias", (_ALL, slice(-2)), in_dims=0),
    Tensor(f"{_LAYER}.self_attn.k_proj.bias", f"{_OURS}.attention.qkv_bias", (_ALL, -2), in_dims=0),
    Tensor(f"{_LAYER}.self_attn.v_proj.bias", f"{_OURS}.attention.qkv_bias", (_ALL, -1), in_dims=0),
    Tensor(f"{_LAYER}.self_attn.q_norm.weight", f"{_OURS}.attention.q_norm.scale"),
    Tensor(f"{_LAYER}.self_attn.k_norm.weight", f"{_OURS}.attention.k_norm.scale"),
    Tensor(f"{_LAYER}.self_attn.o_proj.weight", f"{_OURS}.attention.wo"),
    Tensor(f"{_LAYER}.self_attn.o_proj.bias", f"{_OURS}.attention.output_bias"),
    Tensor(f"{_LAYER}.post_attention_layernorm.weight", f"{_OURS}.mlp_norm.scale"),
    Tensor(f"{_LAYER}.mlp.gate_proj.weight", f"{_OURS}.mlp.w_gate_up", (_ALL, 0), in_dims=1),
    Tensor(f"{_LAYER}.mlp.up_proj.weight", f"{_OURS}.mlp.w_gate_up", (_ALL, 1), in_dims=1),
    Tensor(f"{_LAYER}.mlp.gate_proj.bias", f"{_OURS}.mlp.gate_up_bias", (0,)),
    Tensor(f"{_LAYER}.mlp.up_proj.bias", f"{_OURS}.mlp.gate_up_bias", (1,)),
    Tensor(f"{_LAYER}.mlp.down_proj.weight", f"{_OURS}.mlp.w_down"),
    Tensor(f"{_LAYER}.mlp.down_proj.bias", f"{_OURS}.mlp.down_bias"),
    Tensor("model.norm.weight", "model.final_norm.scale"),
    Tensor("lm_head.weight", _HEAD),
    Tensor(_SCORE, _HEAD, head="score"),
    *itertools.chain.from_iterable(map(_of_adapter, PROJECTIONS)),
)
"""All tensors, in the order of a forward pass; then those of adapters. A model omits those it does not have: biases, q/k
norms, a tied head; it has one kind of head at most."""


@functools.cache
def our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every array of the model, without adapters, by its name in a checkpoint."""
    return {f"model.{name}": leaf.shape for name, leaf in Llama.shapes(config).items()}


@functools.cache
def adapter_shapes(config: ModelConfig, adapters: AdaptersConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every array of the model's adapters, by its name in a checkpoint."""
    saved = Llama.shapes(config, adapters).items()
    return {f"model.{name}": leaf.shape for name, leaf in saved if not adapters.is_frozen(name)}


def is_adapter(array: str) -> bool:
    """Returns whether one of our arrays belongs to an adapter."""
    return "_adapter." in array


def is_stacked(array: str) -> bool:
    """Returns whether one of our arrays has a leading dimension L."""
    return array.startswith(f"{_OURS}.")


def tensors_of(array: str, head: Head = "vocabulary") -> list[Tensor]:
    """Returns the tensors that make up one of our arrays (or one layer of it) in a model with this kind of head."""
    return [tensor for tensor in TENSORS if tensor.array == array and (array != _HEAD or tensor.head == head)]


def rows_dim(array: str) -> int:
    """Returns the dimension of one of our arrays that the rows of its tensors run along."""
    return tensors_of(array)[0].rows_dim + is_stacked(array)


def hf_shapes(config: ModelConfig, adapters: AdaptersConfig | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every Hugging Face tensor by name, in the order of `TENSORS`, layer by layer.

    Args:
        config: the model.
        adapters: adapters, for their tensors in place of the model's.
    """
    ours = our_shapes(config) if adapters is None else adapter_shapes(config, adapters)
    shapes = {}
    own = (tensor for tensor in TENSORS if tensor.array in ours and tensor in tensors_of(tensor.array, config.head))
    for of_layer, some in itertools.groupby(own, key=lambda tensor: is_stacked(tensor.array)):
        of_one = {}
        for tensor in some:
            in_dims = tensor.in_dims or 0
            part = _part_shape(tensor, ours[tensor.array][of_layer:])
            ins, outs = math.prod(part[:in_dims]), math.prod(part[in_dims:])
            equal = (part[0], math.prod(part[1:])) if len(part) > 1 else part
            of_one[tensor.hf_name] = equal if tensor.in_dims is None else (outs, ins) if in_dims else (outs,)
        for layer in range(config.num_layers if of_layer else 1):
            shapes |= {hf_name.format(layer=layer): shape for hf_name, shape in of_one.items()}
    return shapes


def tensors_for(config: ModelConfig, found: Mapping[str, Stored], directory: Path) -> dict[str, Stored]:
    """Returns the tensors in `directory` that the model consists of, after comparing names and shapes.

    Raises:
        ConfigError: a tensor is missing, has another shape, or belongs to another model.
    """
    shapes = hf_shapes(config)
    if missing := [name for name in shapes if name not in found]:
        raise ConfigError(f"{directory}: {missing[0]} is missing, and {len(missing) - 1} more; download the whole model")
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise ConfigError(
                f"{found[name].file}: {name} is {list(found[name].shape)}, but config.json asks for {list(shape)};"
                " the files are from two models"
            )
    extra = [name for name in found if name not in shapes]
    if extra == ["lm_head.weight"] and not config.has_own_head:
        if not found["lm_head.weight"].equals(found["model.embed_tokens.weight"]):
            raise ConfigError(
                f"{found['lm_head.weight'].file}: lm_head.weight differs from model.embed_tokens.weight, but config.json"
                " says tie_word_embeddings; correct one of them"
            )
    elif extra:
        architecture = architecture_of(config).name
        more = f", and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConfigError(f"{found[extra[0]].file}: {show(extra[0])} is no tensor of a {architecture}{more}; remove it")
    return {name: found[name] for name in shapes}


def _part_shape(tensor: Tensor, block_shape: tuple[int, ...]) -> tuple[int, ...]:
    return np.broadcast_to(np.int8(0), block_shape)[tensor.part].shape


def to_hf(tensor: Tensor, part: np.ndarray) -> np.ndarray:
    """Converts a part of our array (or of one layer of it) to its tensor, or rows of it; copies if it is transposed."""
    if tensor.in_dims is None:
        return part.reshape(part.shape[0], -1) if part.ndim > 1 else part
    ins, outs = part.shape[: tensor.in_dims], part.shape[tensor.in_dims :]
    values = np.empty((math.prod(outs), math.prod(ins)) if ins else math.prod(outs), part.dtype)
    _copy(np.moveaxis(values.reshape(*outs, *ins), range(len(outs)), range(len(ins), part.ndim)), part)
    return values


def first_row(tensor: Tensor, shape: tuple[int, ...], box: Box) -> int:
    """Returns the row of the tensor at which a part of our array (or of one layer of it), of `shape`, begins."""
    rows_in_one = 1 if tensor.in_dims is None else math.prod(_part_shape(tensor, shape)[tensor.in_dims + 1 :])
    return box[tensor.rows_dim].start * rows_in_one


def part_index(tensor: Tensor, shape: tuple[int, ...], box: Box) -> tuple[slice | int, ...]:
    """Returns the tensor's part of a box in our array (or in one layer of it), of `shape`, without negative numbers."""
    index = zip(_index(tensor, len(shape)), box, shape, strict=True)
    return tuple(
        at % size if isinstance(at, int) else dim if at == _ALL else slice(*at.indices(size)) for at, dim, size in index
    )


def from_hf(
    array: str, layer: int, tensors: Mapping[str, Stored], shape: tuple[int, ...], box: Box, block: np.ndarray
) -> None:
    """Fills `block` with a part of one of our arrays or, if it is stacked, of one layer of it.

    Reads only the tensor rows that the part needs, but all of their columns, because files are read in contiguous blocks.

    Args:
        array: name of our array in a checkpoint.
        layer: the layer, if the array is stacked.
        tensors: Hugging Face tensors by name.
        shape: shape of the array or, if it is stacked, of one layer of it.
        box: the part of `shape`; dimensions that `Tensor.part` slices are whole.
        block: destination of the box's shape, in any dtype.
    """
    for tensor in tensors_of(array, "score" if _SCORE in tensors else "vocabulary"):
        stored, in_dims = tensors[tensor.hf_name.format(layer=layer)], tensor.in_dims or 0
        full = _part_shape(tensor, shape)
        index = zip(_index(tensor, len(shape)), box, strict=True)
        cut = [dim if at == _ALL else _ALL for at, dim in index if not isinstance(at, int)]
        ins, outs = full[:in_dims], full[in_dims:]
        rows = range(outs[0])[cut[in_dims]]
        rows_in_one = 1 if tensor.in_dims is None else math.prod(outs[1:])
        part = np.moveaxis(block[tensor.part], range(in_dims, len(full)), range(len(outs)))  # in the order of the tensor
        step = max(1, _SLAB_BYTES * stored.shape[0] // (stored.nbytes * rows_in_one))
        for at in range(0, len(rows), step):
            slab = rows[at : at + step]
            values = stored.read(slab.start * rows_in_one, slab.stop * rows_in_one).astype(block.dtype, copy=False)
            values = values.reshape(len(slab), *outs[1:], *ins)[(_ALL, *cut[in_dims + 1 :], *cut[:in_dims])]
            order = (range(len(outs)), range(in_dims, len(full)))
            _copy(np.moveaxis(part[at : at + step], *order), np.moveaxis(values, *order))


def _index(tensor: Tensor, num_dims: int) -> tuple[int | slice, ...]:
    return (*tensor.part, *(_ALL for _ in range(num_dims - len(tensor.part))))


def _copy(destination: np.ndarray, source: np.ndarray) -> None:
    """Copies between arrays of one dtype and different memory orders, in tiles that fit the cache: 2 to 5 times faster."""
    if source.ndim > 3:  # tiles span the first and last dimension; dimensions between would make them too large
        for i in range(source.shape[1]):
            _copy(destination[:, i], source[:, i])
        return
    # As plain integers: numpy copies bfloat16 elements one at a time through a function.
    bits = np.dtype(f"u{source.dtype.itemsize}")
    destination, source = destination.view(bits), source.view(bits)
    if source.flags.c_contiguous and destination.flags.c_contiguous:
        destination[...] = source
        return
    for i in range(0, source.shape[0], 256):
        for j in range(0, source.shape[-1], 128):
            at = (slice(i, i + 256), ..., slice(j, j + 128))
            destination[at] = source[at]
