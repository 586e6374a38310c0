"""Parameters, FLOPs and bytes of a run by arithmetic. Nothing is compiled or measured, and jax is not needed.

Dims as in the model: D embed, N query heads, K kv heads, H head dim, F mlp, V vocab, L layers. "Planned" refers to the
cluster described in `config.hardware`.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping

from llamajax.config.layer_weights import LAYER_WEIGHTS, MATRICES, LayerWeight
from llamajax.config.model import SAVED_BY_REMAT, ModelConfig
from llamajax.config.offload import BY_TOKEN, ActivationName, saved_tokens
from llamajax.config.parallel import AXES, ParallelConfig, num_parts, splits_residual
from llamajax.config.run import Config
from llamajax.estimates.adapters import adapter_numbers, adapter_weights, base_bits
from llamajax.estimates.pipeline import StageWork, share_of_head

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def layer_shapes(model: ModelConfig) -> dict[LayerWeight, tuple[int, ...]]:
    """Returns the shape of each weight in a layer of the model."""
    D, K, H, F = model.embed_dim, model.num_kv_heads, model.head_dim, model.mlp_dim
    sizes = {"D": D, "K": K, "G": model.num_heads // K, "C": model.num_heads // K + 2, "H": H, "F": F, "1": 1, "2": 2}
    own = (weight for weight in LAYER_WEIGHTS if weight.trait is None or getattr(model, weight.trait))
    return {weight: tuple(sizes[dim] for dim in weight.dims.split()) for weight in own}


def layer_matrices(model: ModelConfig) -> dict[LayerWeight, int]:
    """Returns the number of parameters of each layer weight that takes part in a matmul."""
    return {weight: math.prod(shape) for weight, shape in layer_shapes(model).items() if weight.matmul}


def is_layer_matrix(name: str) -> bool:
    """Returns whether a name of `weights` is that of a layer's matrix."""
    return name.rpartition(".")[2] in MATRICES


def num_matmul_params(model: ModelConfig) -> int:
    """Returns the number of parameters that take part in a matmul: all but norms and the input embedding; the head
    counts."""
    return model.num_layers * sum(layer_matrices(model).values()) + model.head_rows * model.embed_dim


def num_params(model: ModelConfig) -> int:
    """Returns the number of all parameters."""
    return sum(weights(model).values())


def weights(model: ModelConfig) -> dict[str, int]:
    """Returns the number of parameters of every weight, over all layers, by its name in the model."""
    of_layers = {f"layers.{of.path}": model.num_layers * math.prod(shape) for of, shape in layer_shapes(model).items()}
    D = model.embed_dim
    sizes = {"embedding": model.vocab_size * D, **of_layers, "final_norm.scale": D}
    return sizes | {"head": model.head_rows * D} if model.has_own_head else sizes


def computed_model(model: ModelConfig, mesh: Mapping[str, int]) -> ModelConfig:
    """Returns the model as devices compute it: with a copy of a kv head per device where there are fewer heads than
    devices."""
    return dataclasses.replace(model, num_kv_heads=model.computed_kv_heads(mesh))


def layer_matrix_bytes(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of one layer's matrices in the compute dtype, in which their gradients are reduced."""
    return (
        sum(layer_matrices(computed_model(model, mesh)).values())
        * DTYPE_BYTES[model.compute_dtype]
        // num_parts("mlp", mesh)
    )


def gathered_layer_bytes(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of one layer's gathered matrices as a device computes with them."""
    matrices = layer_matrices(computed_model(model, mesh))
    return sum(size * factor_bytes(model, weight) for weight, size in matrices.items()) // num_parts("mlp", mesh)


def prefetched_bytes(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the bytes that prefetching keeps whole at once: the weights of two consecutive layers, and the gradients of
    one."""
    return 2 * gathered_layer_bytes(model, mesh) + layer_matrix_bytes(model, mesh)


def factor_bytes(model: ModelConfig, matrix: LayerWeight) -> int:
    """Returns the bytes per number of a layer's matrix, and of its other factor, in a matmul."""
    return 1 if matrix.name in model.float8_weights and model.matmul_dtype == "float8" else DTYPE_BYTES[model.compute_dtype]


def sent_bytes(config: Config, matrix: LayerWeight) -> float:
    """Returns the bytes per number of a layer's matrix in which devices send it to each other."""
    if config.adapters.is_quantized:
        return base_bits(config.adapters, is_layer_matrix=True) / 8
    return factor_bytes(config.model, matrix)


def flops_per_token(model: ModelConfig, seq_len: int, *, full_attention: bool = False, keys: float | None = None) -> int:
    """Returns the training FLOPs per token (forward and backward); recomputation is never counted.

    Six per matmul parameter, plus attention scores and values: `6*L*N*H*seq_len` when only the causal half counts,
    `12*L*N*H*seq_len` when the full square does (PaLM, arXiv:2204.02311, appendix B). In layers with a sliding window W,
    `2*W - W**2/seq_len` replaces `seq_len` in the former, and W in the latter. If queries cannot attend across documents,
    the former counts the average number of visible `keys` per query, if given, and the latter counts whole rows.
    """
    keys = mean_keys(model, seq_len, None) if keys is None else keys
    windows = sum(share * min(alike.sliding_window or seq_len, seq_len) for alike, share in kinds_of_layers(model))
    counted = windows if full_attention else keys
    return 6 * num_matmul_params(model) + math.floor(12 * model.num_layers * model.num_heads * model.head_dim * counted)


def kinds_of_layers(model: ModelConfig) -> list[tuple[ModelConfig, float]]:
    """Returns for each kind of layer in the model: the model with only such layers, and their share of the layers."""
    windows = Counter(itertools.islice(itertools.cycle(model.windows), model.num_layers))
    return [
        (dataclasses.replace(model, sliding_window=window, layer_types=()), count / model.num_layers)
        for window, count in windows.items()
    ]


def keys_seen(model: ModelConfig, index: float, document_length: float | None) -> float:
    """Returns the number of keys, without its own, that the query at an index of its row sees, in a model of identical
    layers.

    Documents that queries cannot attend across end at random positions: on average a query follows as many tokens of its own
    document as the mean length, or as many as the row and the window allow.
    """
    reach = min(index, model.sliding_window or index)
    if document_length is None or model.attend_across_documents:
        return reach
    return document_length * -math.expm1(-reach / document_length)


def mean_keys(model: ModelConfig, seq_len: int, document_length: float | None) -> float:
    """Returns `keys_seen` averaged over a row and over layers."""
    return sum(share * _mean_keys(alike, seq_len, document_length) for alike, share in kinds_of_layers(model))


def _mean_keys(model: ModelConfig, seq_len: int, document_length: float | None) -> float:
    window = min(model.sliding_window or seq_len, seq_len)
    if document_length is None or model.attend_across_documents:
        return window - window**2 / seq_len / 2
    last = keys_seen(model, window, document_length)
    return (document_length * (window - last) + (seq_len - window) * last) / seq_len


def mesh_sizes(config: Config) -> dict[str, int]:
    """Returns the sizes of the mesh axes on the planned cluster, outer to inner."""
    return config.mesh.axis_sizes(config.hardware.num_devices)


def trained_weights(config: Config, model: ModelConfig) -> dict[str, int]:
    """Returns `weights` without the frozen ones; those of adapters alone, where the run has some."""
    if config.adapters.enabled:
        return adapter_weights(config.adapters, model)
    return {name: size for name, size in weights(model).items() if not config.is_frozen(name)}


def state_bytes(config: Config) -> int:
    """Returns the bytes of a checkpoint: of all weights and moments, wherever they wait, or of adapters alone."""
    whole = dict.fromkeys(AXES, 1)
    if config.adapters.enabled:
        own = DTYPE_BYTES[config.model.param_dtype] + _adapter_moment_bytes(config)
        return own * sum(adapter_weights(config.adapters, config.model).values())
    return sum(_state_bytes(config, whole)) + state_host_bytes(config, whole)


def stored_state_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a device's weights and moments on the card between steps."""
    return sum(_state_bytes(config, mesh))


def minimum_state_bytes(config: Config) -> int:
    """Returns the bytes of weights and moments on a device, with copies of weights that wait in host memory, when every
    matrix is split over all devices that may split it, as in all stages of ZeRO between steps; norms and biases, a
    thousandth of the rest, are whole on every device of a stage."""
    mesh = mesh_sizes(config)
    return sum(_state_bytes(config, mesh)) + copy_bytes(config, mesh)[0]


MASTER = -1
"""Place of a weight itself beside its moments, which count from 0."""


def state_in_host_memory(config: Config) -> frozenset[tuple[str, int]]:
    """Returns the arrays of the state that wait in host memory between steps: names of weights, each with the number of one
    of its moments, or `MASTER`. These are the first of `_movable_state` with the share `offload.optimizer` of its bytes."""
    if not config.offload.state_share:
        return frozenset()
    order = _movable_state(config)
    wanted, before = config.offload.state_share * sum(size for _, size in order), 0
    chosen = set[tuple[str, int]]()
    for key, size in order:
        if before < wanted * (1 - 1e-9):
            chosen.add(key)
        before += size
    return frozenset(chosen)


def state_shares(config: Config) -> list[float]:
    """Returns the values of `offload.optimizer` that differ in effect, from 0 to 1."""
    sizes = [size for _, size in _movable_state(config)]
    return [size / sum(sizes) for size in itertools.accumulate(sizes, initial=0)]


def _movable_state(config: Config) -> list[tuple[tuple[str, int], int]]:
    """Returns the arrays of the state that may wait in host memory, with their bytes, in the order in which they go there.
    Moments come first, because the card holds no copies of them; then the weights of layers; last embedding and head."""
    sizes, moments = trained_weights(config, config.model), config.optimizer.moments
    of_layers = sorted(filter(is_layer_matrix, sizes), key=lambda name: -sizes[name])
    tables = [name for name in ("embedding", "head") if name in sizes]
    order = [(name, number) for number in range(moments.of_layer_matrices) for name in of_layers]
    order += [(name, MASTER) for name in of_layers]
    order += [(name, number) for number in range(moments.of_others) for name in tables]
    order += [(name, MASTER) for name in tables]
    model_width, moment_width = DTYPE_BYTES[config.model.param_dtype], DTYPE_BYTES[config.optimizer.moment_dtype]
    return [((name, n), sizes[name] * (model_width if n == MASTER else moment_width)) for name, n in order]


def state_host_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a device's part of the state that wait in host memory."""
    return sum(_state_bytes(config, mesh, on_host=True))


def copy_bytes(config: Config, mesh: Mapping[str, int]) -> tuple[int, int]:
    """Returns the bytes of a device's copies, in `model.compute_dtype`, of the weights that wait in host memory: on the
    card, and in host memory too."""
    names = {name for name, number in state_in_host_memory(config) if number == MASTER}
    away = names if config.offload.parameters == "all" else set[str]()
    shards, width = _stored_shards(config.parallel, mesh), DTYPE_BYTES[config.model.compute_dtype]

    def num_bytes(of: Callable[[str], bool]) -> int:
        sizes = {name: size for name, size in weights(config.model).items() if name in names and of(name)}
        return width * per_device(stored_by_stage(config.model, sizes, mesh), shards)

    on_host = num_bytes(lambda name: name in away and is_layer_matrix(name))
    return num_bytes(lambda name: True) - on_host, on_host


def _state_bytes(config: Config, mesh: Mapping[str, int], *, on_host: bool = False) -> tuple[int, int]:
    """Returns the bytes of weights and of moments that a device stores between steps, on the card or in host memory."""
    model, moments, shards = config.model, config.optimizer.moments, _stored_shards(config.parallel, mesh)
    if config.adapters.enabled:
        return _adapter_state_bytes(config, mesh) if not on_host else (0, 0)
    away = state_in_host_memory(config)
    own = {name: size for name, size in weights(model).items() if ((name, MASTER) in away) == on_host}
    kept = {
        name: size * sum(((name, n) in away) == on_host for n in range(moments.of_weight(is_matrix=is_layer_matrix(name))))
        for name, size in trained_weights(config, model).items()
    }
    stored, moment = (per_device(stored_by_stage(model, sizes, mesh), shards) for sizes in (own, kept))
    return DTYPE_BYTES[model.param_dtype] * stored, DTYPE_BYTES[config.optimizer.moment_dtype] * moment


def _adapter_state_bytes(config: Config, mesh: Mapping[str, int]) -> tuple[int, int]:
    """Returns the bytes of frozen weights and adapters, and of the adapters' moments, that a device stores."""
    numbers = adapter_numbers(config.adapters, config.model, mesh, zero_data=bool(config.parallel.zero_data))
    parallel = config.parallel
    if config.adapters.is_quantized:
        parallel = dataclasses.replace(parallel, zero_data=0)  # blocks stay whole
    held = stored_by_stage(config.model, weights(config.model), mesh)
    bits = {name: size * base_bits(config.adapters, is_layer_matrix=is_layer_matrix(name)) for name, size in held.items()}
    frozen = math.ceil(per_device(bits, _stored_shards(parallel, mesh)) / 8)
    return frozen + DTYPE_BYTES[config.model.param_dtype] * numbers, _adapter_moment_bytes(config) * numbers


def _adapter_moment_bytes(config: Config) -> int:
    """Returns the bytes of a parameter's moments."""
    return config.optimizer.moments.of_others * DTYPE_BYTES[config.optimizer.moment_dtype]


def _stored_shards(parallel: ParallelConfig, mesh: Mapping[str, int]) -> int:
    return num_parts("embed", mesh) * mesh["tensor"] * (mesh["data"] if parallel.zero_data else 1)


def stored_by_stage(model: ModelConfig, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns the numbers of each weight that a stage stores between steps, from those of all stages, by name: layers by
    stage, or columns of all layers where the stages do not divide them; parts of embedding and head where they divide."""
    stages = mesh["pipeline"]
    divided = {
        "layer": model.num_layers % stages == 0,
        "end": model.embed_dim % (stages * num_parts("embed", mesh)) == 0
        and model.vocab_size % num_parts("vocab", mesh) == 0,
    }

    def is_split(name: str) -> bool:
        if name in ("embedding", "head"):
            return divided["end"]
        return is_layer_matrix(name) or (name.startswith("layers.") and divided["layer"])

    return {name: size // stages if is_split(name) else size for name, size in sizes.items()}


def held_by_stage(config: Config, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns the numbers of each weight that a stage computes with, from those of all stages, by name: its own layers,
    embedding and head."""
    own, of_all = StageWork.of(config, mesh).layers, config.model.num_layers
    return {name: size * own // of_all if name.startswith("layers.") else size for name, size in sizes.items()}


def per_device(sizes: Mapping[str, float], shards: int) -> int:
    """Returns the count of numbers on one of `shards` devices, for arrays of the given sizes, split like the weights of the
    same names."""
    split = sum(size for name, size in sizes.items() if name in ("embedding", "head") or is_layer_matrix(name))
    return int(split // shards + sum(sizes.values()) - split)


def params_gathered_once(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the number of parameters that a device holds whole, except for `tensor`, from the first micro-batch of a step
    to the last, with gradients reduced at the end: embedding, head and, with prefetched layers, the first layer; all for
    `zero: 1`."""
    return _gathered_once(config, weights(computed_model(config.model, mesh)), mesh)


def _gathered_once(config: Config, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    sizes = held_by_stage(config, sizes, mesh)
    parallel, ends = config.parallel, sum(sizes.get(name, 0) for name in ("embedding", "head"))
    layers = sum(size for name, size in sizes.items() if is_layer_matrix(name))
    if parallel.zero == 1:
        return (ends + layers) // mesh["tensor"]
    if parallel.grad_reduce != "step":
        return 0
    return (ends + (layers // config.model.num_layers if parallel.prefetches else 0)) // mesh["tensor"]


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
    D, L, V, F = model.embed_dim, work.layers, model.vocab_size // tensor, model.mlp_dim // tensor
    heads = model.num_heads * model.head_dim // tensor
    qkv = heads + 2 * computed.num_kv_heads * model.head_dim // tensor
    rows = config.rows_per_device(mesh)
    tokens = tokens_per_device(config, mesh)
    layer_params = (num_params(computed) - (model.vocab_size + model.head_rows) * D) // model.num_layers // tensor

    stream = residual_width(config, mesh)
    on_card, on_host = (sum(values.values()) for values in saved_bytes(config, mesh))
    kept_weights = L * layer_params * wide if keeps_gathered_weights(config) else 0
    scores = min(max_chunk_scores, tokens * config.data.seq_len * model.num_heads // tensor)
    layer = tokens * wide * (4 * D + 6 * stream + 2 * heads + 2 * qkv + 4 * F) + 3 * scores * 4
    sizes, own_trained = (held_by_stage(config, of_all, mesh) for of_all in (weights(model), trained_weights(config, model)))
    own = per_device(sizes, num_parts("embed", mesh) * tensor)
    whole = params_gathered_once(config, mesh)
    # The subset with gradients.
    own_trained = per_device(own_trained, num_parts("embed", mesh) * tensor)
    whole_trained = _gathered_once(config, trained_weights(config, computed), mesh)
    summed = DTYPE_BYTES[config.train.grad_accum_dtype] if config.train.grad_accum_steps > 1 or work.stages > 1 else 0
    # A device's own part of the layers has a narrow copy if its gradients are reduced at the step's end.
    replicas = num_parts("micro_batch", mesh) * sequence // num_parts("embed", mesh)
    late = replicas > 1 and (config.parallel.grad_reduce == "step" or config.parallel.zero_data == 1)
    copied = per_device(sizes, tensor) if config.parallel.zero < 3 else whole + (own if late else 0)
    # Weights that are held whole for the step have no stored gradient until the end. Except for `zero: 1`, which holds all,
    # one such gradient of a micro-batch exists at a time: the head's is summed before the embedding's is computed. A
    # pipeline sums each layer's before it computes the next.
    waiting = own_trained - whole_trained // num_parts("embed", mesh)
    at_once = max(V * D, layer_params) if work.stages > 1 else whole_trained if config.parallel.zero == 1 else V * D
    held_back = min(whole_trained, at_once)
    # Matrices in float8 exist besides their sources; with `zero: 2` they replace the whole copies.
    matrices = layer_matrices(computed).items()
    rounded = L * sum(size for matrix, size in matrices if matrix.name in model.float8_weights) // tensor
    rounded = {1: rounded, 2: (1 - wide) * rounded, 3: rounded // num_parts("embed", mesh)}[config.parallel.zero]
    num_rows = math.ceil(model.head_rows / tensor)
    logits = min(max_chunk_logits, math.ceil(tokens * share_of_head(config, mesh)) * num_rows)
    loss = logits * (4 + 2 * wide) + num_rows * D * (wide + 2 * 4)
    collectives = 2 * D * F * wide + kept_weights
    if config.parallel.zero == 1 and work.stages > 1:
        collectives = 0
    elif config.parallel.prefetches:
        collectives, loss = prefetched_bytes(model, mesh), loss + gathered_layer_bytes(model, mesh)
    parameters, moments = _state_bytes(config, mesh)
    copies, away = copy_bytes(config, mesh)
    if away:
        waiting = max(0, waiting - away // wide)  # gradients of layers leave for host memory as they are made
    return {
        "parameters": parameters + copies,
        "optimizer": moments,
        "batch": 16 * rows * config.train.grad_accum_steps * config.data.seq_len // sequence,
        "gradients": (stored + summed) * waiting + wide * held_back + summed * whole_trained,
        # Of what waits on the host, the card holds the values of two layers: of one on its way, and of one in use.
        "activations": work.slots * work.layers_per_chunk * on_card + min(2, work.layers_per_chunk) * on_host,
        "logits": max(0, loss - layer - collectives),
        "collectives": collectives + wide * copied + rounded,
        "temporaries": layer,
    }


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
    qkv, F = heads + 2 * computed.num_kv_heads * model.head_dim // tensor, model.mlp_dim // tensor
    numbers: dict[ActivationName, float] = {"input": stream}
    if keeps_two_residuals(config, mesh):
        numbers["residual"] = stream
    if model.remat == "none":  # most hidden states are also widened to fp32
        D = model.embed_dim
        numbers |= {"attention": 6 * D + heads + 2 * qkv, "gate_up": 8 * D - 2 * stream + 2 * F}
    # With attention's output it saves the logarithm of the weights' sum, one fp32 number per head.
    named: dict[ActivationName, float] = {
        "attention": heads + model.num_heads // tensor * 4 / wide,
        "qkv": qkv,
        "gate_up": 2 * F,
    }
    numbers |= {name: count for name, count in named.items() if name in (SAVED_BY_REMAT[model.remat] or ())}
    of_tokens = saved_token_share(config, mesh)
    share = {name: of_tokens if name in BY_TOKEN else 1.0 for name in numbers}
    sizes: dict[ActivationName, int] = {name: int(share[name] * tokens * wide * count) for name, count in numbers.items()}
    on_card, away = dict[ActivationName, int](), dict[ActivationName, int]()
    for name, size in sizes.items():
        (away if name in config.offload.names else on_card)[name] = size
    return on_card, away


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
