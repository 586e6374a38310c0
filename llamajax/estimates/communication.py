"""Communication by arithmetic: the least bytes that a mesh must send, and the numbers that each form of split rows sends."""

import math
from collections.abc import Mapping

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import SequenceForm, num_parts
from llamajax.config.run import Config
from llamajax.estimates.formulas import (
    DTYPE_BYTES,
    computed_model,
    held_by_stage,
    keeps_gathered_weights,
    layer_matrices,
    sent_bytes,
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
    `pipeline`: a stage gathers its own layers, and embedding and head, whose gradients are also reduced over the stages. All
    stages run every tick, so idle ones send as much as the others; see `pipeline_bytes`.
    """
    model, train, work = computed_model(config.model, mesh), config.train, StageWork.of(config, mesh)
    width, matrices = DTYPE_BYTES[model.compute_dtype], layer_matrices(model)
    factors = {matrix: sent_bytes(config, matrix) for matrix in matrices}
    shards = num_parts("embed", mesh)
    replicas = num_parts("micro_batch", mesh) * num_parts("seq", mesh) / shards
    weights = width * sum(held_by_stage(config, num_weights(model), mesh).values()) / mesh["tensor"]
    ends = width * sum(_ends(model).values()) / mesh["tensor"]
    # Gradients of trained weights alone are sent.
    trained = held_by_stage(config, trained_weights(config, model), mesh)
    back = width * sum(trained.values()) / mesh["tensor"]
    ends_back = width * sum(trained.get(name, 0) for name in _ends(model)) / mesh["tensor"]
    layers_back = back - ends_back
    rows = train.global_batch_size / num_parts("micro_batch", mesh)
    tokens = rows * config.data.seq_len / mesh["sequence"] / train.grad_accum_steps
    # Layers as gathered, and as their gradients are reduced. Prefetching turns around at the last layer, so one gather of
    # its weights serves both passes; and the first layer may be gathered once.
    layers = weights - ends
    saved = sum((width - factors[matrix]) * size for matrix, size in matrices.items())
    gathered = layers - work.layers * saved / mesh["tensor"]
    parallel, micro_batches = config.parallel, train.grad_accum_steps
    at_the_end = parallel.grad_reduce == "step" or parallel.zero == 1
    prefetches = parallel.prefetches
    gathers = 1 if keeps_gathered_weights(config) else 2 - 1 / model.num_layers if prefetches else 2
    often, first = gathers * gathered + layers_back, (gathered + layers_back) / model.num_layers
    if parallel.zero == 1:
        sharded = ends + gathered + back
    elif parallel.zero == 2:
        late = (ends_back + (layers_back / model.num_layers if prefetches else 0)) if at_the_end else 0
        sharded = ends + gathered + late + (back - late) * micro_batches
    elif at_the_end:
        sharded = ends + ends_back + often * micro_batches
        sharded += first * (1 - micro_batches) if prefetches else 0
    else:
        sharded = (often + ends + ends_back) * micro_batches
    exchanged = 0
    if model.num_kv_heads > config.model.num_kv_heads:
        by_head = (matrix for matrix in matrices if "K" in matrix.dims)
        sizes = sum(matrices[matrix] * (gathers * factors[matrix] + width) for matrix in by_head)
        exchanged = model.num_layers * sizes / (shards * mesh["tensor"])
    columns, rest = (
        {matrix for matrix in matrices if (matrix.matmul == "column") == is_column} for is_column in (True, False)
    )
    forward = sum(factors[matrix] for matrix in columns) + width * len(rest)
    again = 0 if model.remat == "none" else 1
    backward = sum(again * factors[matrix] + width for matrix in columns) + sum(factors[matrix] for matrix in rest)
    reductions = 1 if at_the_end or parallel.zero_data else micro_batches
    ends_stored = stored_by_stage(model, _ends(model), mesh)
    owned = layers_back + width * sum(ends_stored[name] for name in _ends(model) if name in trained) / mesh["tensor"]
    # Bytes for each channel of a token that devices of `tensor` gather or scatter, in the layers, by embedding and head.
    of_layers = work.layers_per_chunk * (work.forward_passes * forward + work.backward_passes * backward)
    passes = work.forward_passes + work.backward_passes
    of_ends = width * (passes + 2 * work.heads * share_of_head(config, mesh))
    return (
        sharded * (shards - 1) / shards
        + exchanged * micro_batches * (mesh["tensor"] - 1) / mesh["tensor"]
        + 2 * owned / shards * (replicas - 1) / replicas * reductions
        + (of_layers + of_ends) * tokens * model.embed_dim * (mesh["tensor"] - 1) / mesh["tensor"]
        + work.layers_per_chunk * passes / 2 * width * tokens * sequence_numbers(config.model, mesh, parallel.sequence)
        + sum(pipeline_bytes(config, mesh).values())
    )


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
    layers = width * work.layers * sum(layer_matrices(model).values()) / parts
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
