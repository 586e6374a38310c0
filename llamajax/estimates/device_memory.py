"""The memory of one device by arithmetic: the values that the forward pass saves, the arrays of the fullest moment, and the
part that waits in host memory."""

import math
from collections.abc import Mapping

from llamajax.config.model import SAVED_BY_REMAT, ModelConfig
from llamajax.config.offload import BY_TOKEN, ActivationName, saved_tokens
from llamajax.config.parallel import num_parts, splits_residual
from llamajax.config.run import Config
from llamajax.estimates.experts import Dispatch
from llamajax.estimates.formulas import (
    DTYPE_BYTES,
    computed_model,
    computed_per_device,
    copy_bytes,
    expert_weights,
    gathered_layer_bytes,
    gathered_once,
    held_by_stage,
    is_float8,
    layer_matrices,
    num_params,
    params_gathered_once,
    per_device,
    prefetched_bytes,
    state_bytes_by_kind,
    state_host_bytes,
    trained_weights,
    weights,
)
from llamajax.estimates.pipeline import StageWork, share_of_head

_BLOCKS = 7
"""Arrays with all rows of blocks that are alive at once in the backward pass, in compiled steps: tokens, their gradients and
those of results, as sent and as received, and a sum."""


def expected_bytes(
    config: Config, mesh: Mapping[str, int], *, max_chunk_scores: int, max_chunk_logits: int
) -> dict[str, int]:
    """Returns the bytes on a device by purpose; accurate to some 15%.

    Weights, moments and gradients: their sizes over the shards. Activations: the values that `model.remat` saves of every
    layer; a stage of a pipeline saves its layers once per slot. The rest is alive at different times, so the larger counts.
    In a layer's backward pass these are its hidden states, gate and up with their gradients, attention scores in chunks and
    gathered weights. In the loss these are the head, its gradient in fp32, as summed and as one chunk of logits adds to it,
    and that chunk.

    Args:
        config: the run.
        mesh: sizes of the mesh axes.
        max_chunk_scores: attention scores alive at once without a fused kernel.
        max_chunk_logits: logits alive at once.
    """
    model, computed = config.model, computed_model(config.model, mesh)
    tensor, sequence = mesh["tensor"], mesh["sequence"]
    stored, wide = DTYPE_BYTES[model.param_dtype], DTYPE_BYTES[model.compute_dtype]
    if config.offload.state_share:
        stored = DTYPE_BYTES[config.offload.gradient_dtype]
    work = StageWork.of(config, mesh)
    D, L, V = model.embed_dim, work.layers, model.vocab_size // tensor
    heads = model.num_heads * model.head_dim // tensor
    qkv = heads + 2 * computed.num_kv_heads * model.head_dim // tensor
    rows = config.rows_per_device(mesh)
    tokens = tokens_per_device(config, mesh)
    experts = sum(expert_weights(computed).values())
    layer_params = (num_params(computed) - experts - (model.vocab_size + model.head_rows) * D) // model.num_layers // tensor
    layer_params += experts // model.num_layers // num_parts("experts", mesh)

    stream = residual_width(config, mesh)
    on_card, on_host = (sum(values.values()) for values in saved_bytes(config, mesh))
    layers = work.slots * work.layers_per_chunk
    kept_weights = L * layer_params * wide if keeps_gathered_weights(config) else 0
    scores = min(max_chunk_scores, tokens * config.data.seq_len * model.num_heads // tensor)
    layer = tokens * wide * (4 * D + 6 * stream + 2 * heads + 2 * qkv) + 3 * scores * 4 + mlp_bytes(config, mesh)
    sizes, own_trained = (held_by_stage(config, of_all, mesh) for of_all in (weights(model), trained_weights(config, model)))
    own = per_device(sizes, num_parts("embed", mesh) * tensor)
    whole = params_gathered_once(config, mesh)
    # The subset with gradients.
    own_trained = per_device(own_trained, num_parts("embed", mesh) * tensor)
    whole_trained = gathered_once(config, trained_weights(config, computed), mesh)
    summed = DTYPE_BYTES[config.train.grad_accum_dtype] if config.train.grad_accum_steps > 1 or work.stages > 1 else 0
    # A device's own part of the layers has a narrow copy if its gradients are reduced at the step's end.
    replicas = num_parts("micro_batch", mesh) * sequence // num_parts("embed", mesh)
    late = replicas > 1 and (config.parallel.grad_reduce == "step" or config.parallel.zero_data == 1)
    copied = computed_per_device(model, sizes, mesh) if config.parallel.zero < 3 else whole + (own if late else 0)
    # Weights that are held whole for the step have no stored gradient until the end. Except for `zero: 1`, which holds all,
    # one such gradient of a micro-batch exists at a time: the head's is summed before the embedding's is computed. A
    # pipeline sums each layer's before it computes the next.
    waiting = own_trained - whole_trained // num_parts("embed", mesh)
    at_once = max(V * D, layer_params) if work.stages > 1 else whole_trained if config.parallel.zero == 1 else V * D
    held_back = min(whole_trained, at_once)
    # Matrices in float8 exist besides their sources; with `zero: 2` they replace the whole copies.
    matrices = layer_matrices(computed).items()
    rounded = L * sum(size for matrix, size in matrices if is_float8(model, matrix)) // tensor
    rounded = {1: rounded, 2: (1 - wide) * rounded, 3: rounded // num_parts("embed", mesh)}[config.parallel.zero]
    num_rows = math.ceil(model.head_rows / tensor)
    logits = min(max_chunk_logits, math.ceil(tokens * share_of_head(config, mesh)) * num_rows)
    loss = logits * (4 + 2 * wide) + num_rows * D * (wide + 2 * 4)
    collectives = _largest_matrix(model, mesh) * wide + kept_weights
    if config.parallel.zero == 1 and work.stages > 1:
        collectives = 0
    elif config.parallel.prefetches:
        collectives, loss = prefetched_bytes(model, mesh), loss + gathered_layer_bytes(model, mesh)
    parameters, moments = state_bytes_by_kind(config, mesh)
    copies, away = copy_bytes(config, mesh)
    if away:
        waiting = max(0, waiting - away // wide)  # gradients of layers leave for host memory as they are made
    return {
        "parameters": parameters + copies,
        "optimizer": moments,
        "batch": 16 * rows * config.train.grad_accum_steps * config.data.seq_len // sequence,
        "gradients": (stored + summed) * waiting + wide * held_back + summed * whole_trained,
        # Of what waits on the host, the card holds the values of two layers: of one on its way, and of one in use.
        "activations": layers * (on_card + kept_block_bytes(config, mesh)) + min(2, work.layers_per_chunk) * on_host,
        "logits": max(0, loss - layer - collectives),
        "collectives": collectives + wide * copied + rounded,
        "temporaries": layer,
    }


def _largest_matrix(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the numbers of a layer's largest matrix as a device computes with it: the MLP's first one, or all experts'."""
    largest = 2 * model.embed_dim * (model.mlp_dim // mesh["tensor"])
    experts = (matrix for matrix in layer_matrices(model).items() if matrix[0].matmul == "expert")
    return max([size // num_parts("experts", mesh) for _, size in experts], default=largest)


def mlp_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a device's arrays in the backward pass of a layer's MLP. With experts these are the blocks that
    come and go, and the experts' hidden states for all places."""
    model, tokens = config.model, tokens_per_device(config, mesh)
    wide, tensor = DTYPE_BYTES[model.compute_dtype], mesh["tensor"]
    own = model.experts
    if not own.enabled:
        return tokens * wide * 4 * (model.mlp_dim // tensor)
    way, hidden = Dispatch.of(config, mesh), own.mlp_dim or model.mlp_dim
    numbers = _BLOCKS * way.rows * way.width + 2 * own.num_gates * way.places * hidden
    return wide * (numbers + 4 * tokens * own.shared_mlp_dim // tensor)


def tokens_per_device(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the tokens of a micro-batch that a device computes, alone or together with the devices that share them."""
    return config.rows_per_device(mesh) * config.data.seq_len // mesh["sequence"]


def residual_width(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the numbers per token of the residual stream on a device."""
    tensor, D = mesh["tensor"], config.model.embed_dim
    return D // tensor if tensor > 1 and splits_residual(config.data.seq_len, mesh) else D


def saved_token_share(config: Config, mesh: Mapping[str, int]) -> float:
    """Returns the share of a device's tokens whose `BY_TOKEN` values are saved: that of `offload`, in whole tokens."""
    is_shared = residual_width(config, mesh) < config.model.embed_dim
    length = config.data.seq_len // num_parts("residual_seq" if is_shared else "seq", mesh)
    return saved_tokens(config.offload.saved_share, length) / length


def saved_bytes(config: Config, mesh: Mapping[str, int]) -> tuple[dict[ActivationName, int], dict[ActivationName, int]]:
    """Returns the bytes that a layer's forward pass saves on a device for the backward pass, by name: of values that stay on
    the card, and of values that wait in host memory. The names are those of `offload.activations`."""
    model, computed, tensor = config.model, computed_model(config.model, mesh), mesh["tensor"]
    tokens, wide = tokens_per_device(config, mesh), DTYPE_BYTES[model.compute_dtype]
    stream, heads = residual_width(config, mesh), model.num_heads * model.head_dim // tensor
    qkv, gate_up, others = heads + 2 * computed.num_kv_heads * model.head_dim // tensor, *_saved_by_mlp(config, mesh)
    numbers: dict[ActivationName, float] = {"input": stream}
    if keeps_two_residuals(config, mesh):
        numbers["residual"] = stream
    if model.remat == "none":  # most hidden states are also widened to fp32
        D = model.embed_dim
        numbers |= {"attention": 6 * D + heads + 2 * qkv, "gate_up": 8 * D - 2 * stream + gate_up + others}
    # With attention's output it saves the logarithm of the weights' sum, one fp32 number per head.
    named: dict[ActivationName, float] = {
        "attention": heads + model.num_heads // tensor * 4 / wide,
        "qkv": qkv,
        "gate_up": gate_up,
    }
    numbers |= {name: count for name, count in named.items() if name in (SAVED_BY_REMAT[model.remat] or ())}
    of_tokens = saved_token_share(config, mesh)
    share = {name: of_tokens if name in BY_TOKEN else 1.0 for name in numbers}
    sizes: dict[ActivationName, int] = {name: int(share[name] * tokens * wide * count) for name, count in numbers.items()}
    on_card, away = dict[ActivationName, int](), dict[ActivationName, int]()
    for name, size in sizes.items():
        (away if name in config.offload.names else on_card)[name] = size
    return on_card, away


def kept_block_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of the blocks with tokens for experts, and of narrow results, that a layer's forward pass keeps on
    the card by their names; averaged over layers."""
    model = config.model
    if not model.experts.enabled or "dispatched" not in (SAVED_BY_REMAT[model.remat] or ()):
        return 0
    _, blocks = _saved_by_mlp(config, mesh)
    own = residual_width(config, mesh) / model.embed_dim * (model.experts.latent_dim or 0)
    return int(tokens_per_device(config, mesh) * DTYPE_BYTES[model.compute_dtype] * (blocks + own))


def _saved_by_mlp(config: Config, mesh: Mapping[str, int]) -> tuple[float, float]:
    """Returns the numbers per token, averaged over layers, that a layer's MLP saves on a device: of gate and up, and, if it
    saves everything, of the blocks that carry tokens to experts. What experts compute from gates is computed again."""
    model, tensor, own = config.model, mesh["tensor"], config.model.experts
    dense = 2.0 * (model.mlp_dim // tensor)
    if not own.enabled:
        return dense, 0.0
    way, tokens = Dispatch.of(config, mesh), tokens_per_device(config, mesh)
    share = len(own.dense_layers(model.num_layers)) / model.num_layers
    hidden = way.places * (own.mlp_dim or model.mlp_dim) / tokens
    gate_up = own.num_gates * hidden + 2 * own.shared_mlp_dim / tensor
    return share * dense + (1 - share) * gate_up, (1 - share) * way.rows * way.width / tokens


def host_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of host memory that one device's data take."""
    # With the copies of layers, their gradients wait there, and the sums over micro-batches.
    _, copies = copy_bytes(config, mesh)
    wide, steps = DTYPE_BYTES[config.model.compute_dtype], config.train.grad_accum_steps
    sums = DTYPE_BYTES[config.train.grad_accum_dtype] if steps > 1 else 0
    gradients = copies * (wide + sums) // wide
    return saved_host_bytes(config, mesh) + state_host_bytes(config, mesh) + copies + gradients


def saved_host_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a device's saved values that wait in host memory. The last layer's stay on the card; where layers
    are written out, also those of the layer before it."""
    _, away = saved_bytes(config, mesh)
    staying = 2 if config.parallel.stack == "unrolled" else 1
    return max(0, config.model.num_layers - staying) * sum(away.values())


def keeps_two_residuals(config: Config, mesh: Mapping[str, int]) -> bool:
    """Returns whether a layer also saves the residual between attention and MLP: where more than its input is saved, and
    where devices that share matmuls have different tokens between them."""
    return config.model.remat != "full" or (mesh["tensor"] > 1 and splits_residual(config.data.seq_len, mesh))


def keeps_gathered_weights(config: Config) -> bool:
    """Returns whether weights gathered for the forward pass are kept for the backward pass."""
    return config.model.remat == "none" and not config.parallel.prefetches


def kept_results(config: Config, mesh: Mapping[str, int]) -> frozenset[str | None]:
    """Returns the results of a layer's matmuls (`LayerWeight.result`) that the backward pass does not compute again: those
    that the forward pass keeps, and those that it does not need."""
    own = config.model.experts
    kept = {None, *(SAVED_BY_REMAT[config.model.remat] or ())}
    kept |= {"residual"} if keeps_two_residuals(config, mesh) else set()
    kept |= set() if own.latent_dim else {"expert_output"}
    return frozenset(kept | (set() if own.shared_gate else {"shared_output"}))
