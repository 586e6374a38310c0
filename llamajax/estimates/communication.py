"""Communication by arithmetic: the least bytes that a mesh must send, and the numbers that each form of split rows sends."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import SequenceForm, num_parts
from llamajax.config.run import Config
from llamajax.estimates.device_memory import keeps_gathered_weights
from llamajax.estimates.experts import Dispatch, num_exchanges
from llamajax.estimates.formulas import (
    DTYPE_BYTES,
    computed_model,
    expert_weights,
    held_by_stage,
    layer_matrices,
    sent_bytes,
    stacks,
    stored_by_stage,
    trained_weights,
)
from llamajax.estimates.formulas import weights as num_weights
from llamajax.estimates.pipeline import StageWork, residual_tokens, share_of_head


def least_wire_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Returns the least bytes that a device must send per step with the parallelism of `mesh`, summed over links.

    Rings over n devices pass (n - 1) / n of an array on. `zero: 3`: every micro-batch gathers the layers forward and again
    backward, unless gathered weights are kept (`model.remat: none`), gathers embedding and head once, and scatters all
    gradients. Lower stages gather everything once per step, and `zero: 1` scatters once too; the same holds for embedding,
    head and, with prefetched layers, the first layer, where `grad_reduce` is `step`. Axes that share tokens but not the
    state reduce the gradients of their own shard for every micro-batch, or once.
    `tensor`: attention and MLP each gather their tokens and scatter their outputs, forward and backward. The backward pass
    gathers the tokens again for the gradients of weights, unless they are kept. Embedding and loss do the same once. Tokens
    for a matmul in float8 are sent in float8.
    `sequence`: see `sequence_numbers`. Where kv heads are fewer than the devices of `tensor`, the devices exchange their
    stored parts of attention's matrices before they gather them.
    `expert`: experts' matrices are gathered, and their gradients scattered, over the devices that hold the same experts;
    see `expert_bytes` for tokens.
    `pipeline`: a stage gathers its own layers, and embedding and head, whose gradients are also reduced over the stages. All
    stages run every tick, so idle ones send as much as the others; see `pipeline_bytes`.
    """
    model, train, work = computed_model(config.model, mesh), config.train, StageWork.of(config, mesh)
    width, matrices, parallel = DTYPE_BYTES[model.compute_dtype], layer_matrices(model), config.parallel
    factors = {matrix: sent_bytes(config, matrix) for matrix in matrices}
    shards = num_parts("embed", mesh)
    replicas = num_parts("micro_batch", mesh) * num_parts("seq", mesh) / shards
    # Gradients of trained weights alone are sent.
    trained = held_by_stage(config, trained_weights(config, model), mesh)
    others, experts = _weights_of_stage(config, model, mesh)
    rows = train.global_batch_size / num_parts("micro_batch", mesh)
    tokens = rows * config.data.seq_len / mesh["sequence"] / train.grad_accum_steps
    micro_batches = train.grad_accum_steps
    at_the_end = parallel.grad_reduce == "step" or parallel.zero == 1
    exchanged = 0
    if model.num_kv_heads > config.model.num_kv_heads:
        by_head = (matrix for matrix in matrices if "K" in matrix.dims)
        sizes = sum(matrices[matrix] * (_gathers(config) * factors[matrix] + width) for matrix in by_head)
        exchanged = model.num_layers * sizes / (shards * mesh["tensor"])
    reductions = 1 if at_the_end or parallel.zero_data else micro_batches
    ends_stored = stored_by_stage(model, _ends(model), mesh)
    layers_back = sum(size for name, size in trained.items() if name not in _ends(model))
    owned = width * (layers_back + sum(ends_stored[name] for name in _ends(model) if name in trained)) / mesh["tensor"]
    # Bytes for each channel of a token that devices of `tensor` gather or scatter, in the layers, by embedding and head.
    passes, of_layers = work.forward_passes + work.backward_passes, 0.0
    for stack, alike in stacks(model).items():
        forward, backward = _bytes_per_channel(config, alike)
        of_layers += work.slots_of(stack) * (work.forward_passes * forward + work.backward_passes * backward)
    of_ends = width * (passes + 2 * work.heads * share_of_head(config, mesh))
    return (
        _sharded_bytes(config, others, shards)
        + _sharded_bytes(config, experts, num_parts("expert_embed", mesh))
        + exchanged * micro_batches * (mesh["tensor"] - 1) / mesh["tensor"]
        + 2 * owned / shards * (replicas - 1) / replicas * reductions
        + (of_layers + of_ends) * tokens * model.embed_dim * (mesh["tensor"] - 1) / mesh["tensor"]
        + work.layers_per_chunk * passes / 2 * width * tokens * sequence_numbers(config.model, mesh, parallel.sequence)
        + expert_bytes(config, mesh)
        + sum(pipeline_bytes(config, mesh).values())
    )


class _Weights(NamedTuple):
    """Bytes of weights that a device computes with, in the layers of its stage, and of embedding and head."""

    gathered: float
    """Bytes of the layers, as sent to the device."""
    back: float
    """Bytes of the layers' gradients."""
    ends: float
    ends_back: float


def _weights_of_stage(config: Config, model: ModelConfig, mesh: Mapping[str, int]) -> tuple[_Weights, _Weights]:
    """Returns the bytes of all weights but the experts', and of the experts'."""
    width, work = DTYPE_BYTES[model.compute_dtype], StageWork.of(config, mesh)
    weights, trained = (
        held_by_stage(config, of_all, mesh) for of_all in (num_weights(model), trained_weights(config, model))
    )
    names, ends = expert_weights(model), _ends(model)

    def of(sizes: Mapping[str, int], is_one: Callable[[str], bool], parts: int) -> float:
        return width * sum(size for name, size in sizes.items() if is_one(name)) / parts

    def is_other(name: str) -> bool:
        return name not in names and name not in ends

    factors = {matrix: sent_bytes(config, matrix) for matrix in layer_matrices(model)}
    saved = sum((width - factors[matrix]) * size for matrix, size in layer_matrices(model).items())
    tensor, experts = mesh["tensor"], num_parts("experts", mesh)
    return (
        _Weights(
            gathered=of(weights, is_other, tensor) - work.layers * saved / tensor,
            back=of(trained, is_other, tensor),
            ends=of(weights, ends.__contains__, tensor),
            ends_back=of(trained, ends.__contains__, tensor),
        ),
        _Weights(of(weights, names.__contains__, experts), of(trained, names.__contains__, experts), 0.0, 0.0),
    )


def _gathers(config: Config) -> float:
    """Returns how often a micro-batch gathers the weights of a layer. Prefetching turns around at the last layer, so one
    gather of its weights serves both passes."""
    if keeps_gathered_weights(config):
        return 1
    return 2 - 1 / config.model.num_layers if config.parallel.prefetches else 2


def _sharded_bytes(config: Config, of: _Weights, shards: int) -> float:
    """Returns the bytes that a device sends to gather weights from `shards` devices, and to scatter their gradients."""
    parallel, micro_batches = config.parallel, config.train.grad_accum_steps
    back = of.back + of.ends_back
    at_the_end, prefetches = parallel.grad_reduce == "step" or parallel.zero == 1, parallel.prefetches
    # The first layer may be gathered once.
    often, first = _gathers(config) * of.gathered + of.back, (of.gathered + of.back) / config.model.num_layers
    if parallel.zero == 1:
        sharded = of.ends + of.gathered + back
    elif parallel.zero == 2:
        late = (of.ends_back + (of.back / config.model.num_layers if prefetches else 0)) if at_the_end else 0
        sharded = of.ends + of.gathered + late + (back - late) * micro_batches
    elif at_the_end:
        sharded = of.ends + of.ends_back + often * micro_batches
        sharded += first * (1 - micro_batches) if prefetches else 0
    else:
        sharded = (often + of.ends + of.ends_back) * micro_batches
    return sharded * (shards - 1) / shards


def _bytes_per_channel(config: Config, model: ModelConfig) -> tuple[float, float]:
    """Returns the bytes for each channel of a token that devices of `tensor` gather or scatter in a layer, forward and
    backward."""
    width = DTYPE_BYTES[model.compute_dtype]
    columns, rows = (
        [sent_bytes(config, matrix) for matrix in layer_matrices(model) if matrix.matmul == kind]
        for kind in ("column", "row")
    )
    again = 0 if model.remat == "none" else 1
    return sum(columns) + width * len(rows), sum(again * factor + width for factor in columns) + sum(rows)


def expert_bytes(config: Config, mesh: Mapping[str, int]) -> float:
    """Returns the bytes that a device sends per step so that tokens reach their experts and return, in all-to-alls of whole
    blocks; see `num_exchanges`."""
    model, work = config.model, StageWork.of(config, mesh)
    if not model.experts.enabled:
        return 0.0
    layers = work.slots_of("layers")
    passes = (work.forward_passes + work.backward_passes) / 2
    sent = Dispatch.of(config, mesh).sent_numbers * DTYPE_BYTES[model.compute_dtype]
    return layers * passes * num_exchanges(config) * sent


def pipeline_bytes(config: Config, mesh: Mapping[str, int]) -> dict[str, float]:
    """Returns the bytes that a device sends to other stages per step, by purpose.

    `permutes`: one micro-batch's residual stream to the next stage in each tick with a forward pass, and a gradient to the
    previous stage in each one with a backward pass.
    `head`: where stages share the head's tokens, the last stage scatters each micro-batch's hidden states, and gathers their
    gradients. `ends`: gradients of embedding and head, summed over the stages, and, where these store parts of both, the
    parts. `layers`: weights and gradients on their way between the stored state and the stages, see `StageWork.exchanges`.
    """
    model, work = computed_model(config.model, mesh), StageWork.of(config, mesh)
    width, parts = DTYPE_BYTES[model.compute_dtype], num_parts("embed", mesh) * mesh["tensor"]
    p, others = work.stages, (work.stages - 1) / work.stages
    ends = width * sum(_ends(model).values()) / parts
    held = sum(work.layers_of(stack) * sum(layer_matrices(alike).values()) for stack, alike in stacks(model).items())
    layers = width * held / parts
    residual = width * config.rows_per_device(mesh) * residual_tokens(config, mesh) * model.embed_dim
    shared = config.parallel.pipeline_head == "shared"
    return {
        "permutes": (work.forward_passes + work.backward_passes) * residual * min(p - 1, 1),
        "head": 2 * work.heads * residual * share_of_head(config, mesh) * p * others * shared,
        "ends": 2 * ends * others,
        "layers": 2 * layers * others * work.exchanges,
    }


def _ends(model: ModelConfig) -> dict[str, int]:
    return {name: size for name, size in num_weights(model).items() if name in ("embedding", "head")}


def sequence_numbers(model: ModelConfig, mesh: Mapping[str, int], form: SequenceForm) -> float:
    """Returns the numbers per own token that a device sends in a layer to see rows that are split, forward and backward.

    `gather`: keys and values forward, again backward unless they are kept, and their gradients. `ring`: the same in as many
    hops, plus the hops of a recomputed forward pass, which shares its first hop with the backward pass. `ulysses`: queries,
    keys, values and output, each to its heads and each gradient back, and again unless they are kept; if kv heads are fewer
    than the devices, each is sent to every device that needs it.
    """
    model = computed_model(model, mesh)
    parts, H = num_parts("seq", mesh), model.head_dim
    heads, kv_heads = (n // num_parts("kv_heads", mesh) for n in (model.num_heads, model.computed_kv_heads(mesh)))
    keys_and_values = 2 * kv_heads * H
    if form == "ulysses":
        copied = keys_and_values * parts // math.gcd(kv_heads, parts)
        forward = 2 * heads * H + copied
        return (2 if model.remat == "none" else 3) * forward * (parts - 1) / parts
    if form == "ring":
        hops = 3 * (parts - 1) + (parts - 2 if model.remat == "full" and parts > 1 else 0)
    else:
        hops = (2 if model.remat == "none" else 3) * (parts - 1)
    return keys_and_values * hops
