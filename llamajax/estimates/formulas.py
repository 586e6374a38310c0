"""Parameters, FLOPs and bytes of a run by arithmetic. Nothing is compiled or measured, and jax is not needed.

Dims as in the model: D embed, N query heads, K kv heads, H head dim, F mlp, V vocab, L layers. "Planned" refers to the
cluster described in `config.hardware`.
"""

import dataclasses
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping

from llamajax.config.experts import ExpertsConfig
from llamajax.config.layer_weights import EXPERT_MATRICES, EXPERT_WEIGHTS, LAYER_WEIGHTS, MATRICES, LayerWeight
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import AXES, ParallelConfig, num_parts
from llamajax.config.run import Config
from llamajax.estimates.adapters import adapter_numbers, adapter_weights, base_bits
from llamajax.estimates.pipeline import StageWork

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


STACKS = ("dense_layers", "layers")
"""Names of the model's stacks of layers; the first has the layers without experts of a model with experts."""


def stacks(model: ModelConfig) -> dict[str, ModelConfig]:
    """Returns for each stack of layers, by its name, the model with only such layers."""
    dense = len(model.dense_layers)
    if not dense:
        return {"layers": model}
    alike = dataclasses.replace(model.experts, first_dense_layers=0, layer_step=1)
    return {
        "dense_layers": dataclasses.replace(model, experts=ExpertsConfig(), num_layers=dense),
        "layers": dataclasses.replace(model, experts=alike, num_layers=model.num_layers - dense),
    }


def layer_shapes(model: ModelConfig) -> dict[LayerWeight, tuple[int, ...]]:
    """Returns the shape of each weight in a layer of the model; with experts, if the model has some."""
    D, K, H, F, experts = model.embed_dim, model.num_kv_heads, model.head_dim, model.mlp_dim, model.experts
    sizes = {"D": D, "K": K, "G": model.num_heads // K, "C": model.num_heads // K + 2, "H": H, "F": F, "1": 1, "2": 2}
    sizes |= {"E": experts.num_experts, "I": experts.latent_dim or D, "A": experts.num_gates, "M": experts.mlp_dim or F}
    sizes |= {"S": experts.shared_mlp_dim}
    table = LAYER_WEIGHTS
    if experts.enabled:
        table = (*(weight for weight in LAYER_WEIGHTS if not weight.path.startswith("mlp.")), *EXPERT_WEIGHTS)
    own = (weight for weight in table if weight.trait is None or operator.attrgetter(weight.trait)(model))
    return {weight: tuple(sizes[dim] for dim in weight.dims.split()) for weight in own}


def layer_matrices(model: ModelConfig) -> dict[LayerWeight, int]:
    """Returns the number of parameters of each layer weight that takes part in a matmul; of all experts together."""
    return {weight: math.prod(shape) for weight, shape in layer_shapes(model).items() if weight.matmul}


def active_matrices(model: ModelConfig) -> dict[LayerWeight, int]:
    """Returns `layer_matrices` that multiply one token: of experts, those that it chooses."""
    own = model.experts
    return {
        matrix: size * own.top_k // own.num_experts if matrix.matmul == "expert" else size
        for matrix, size in layer_matrices(model).items()
    }


def is_layer_matrix(name: str) -> bool:
    """Returns whether a name of `weights` is that of a layer's matrix."""
    return name.rpartition(".")[2] in (*MATRICES, *EXPERT_MATRICES)


def is_of_layers(name: str) -> bool:
    """Returns whether a name of `weights` is that of a weight of layers."""
    return name.partition(".")[0] in STACKS


def num_matmul_params(model: ModelConfig) -> int:
    """Returns the number of parameters that multiply one token: all but norms, the input embedding and the experts that it
    does not choose; the head counts."""
    layers = sum(alike.num_layers * sum(active_matrices(alike).values()) for alike in stacks(model).values())
    return layers + model.head_rows * model.embed_dim


def num_params(model: ModelConfig) -> int:
    """Returns the number of all parameters."""
    return sum(weights(model).values())


def num_active_params(model: ModelConfig) -> int:
    """Returns the number of parameters that take part in the result for one token: all but the experts that it does not
    choose."""
    return sum(active_weights(model).values())


def weights(model: ModelConfig) -> dict[str, int]:
    """Returns the number of parameters of every weight, over all layers, by its name in the model."""
    of_layers = {
        f"{stack}.{of.path}": alike.num_layers * math.prod(shape)
        for stack, alike in stacks(model).items()
        for of, shape in layer_shapes(alike).items()
    }
    D = model.embed_dim
    sizes = {"embedding": model.vocab_size * D, **of_layers, "final_norm.scale": D}
    return sizes | {"head": model.head_rows * D} if model.has_own_head else sizes


def expert_weights(model: ModelConfig) -> dict[str, int]:
    """Returns `weights` of the experts alone, without the one that all tokens share."""
    own = [f"layers.{matrix.path}" for matrix in layer_matrices(model) if matrix.matmul == "expert"]
    return {name: size for name, size in weights(model).items() if name in own}


def active_weights(model: ModelConfig) -> dict[str, int]:
    """Returns `weights` that take part in the result for one token: of experts, those that it chooses."""
    own, experts = expert_weights(model), model.experts
    return {
        name: size * experts.top_k // experts.num_experts if name in own else size for name, size in weights(model).items()
    }


def computed_model(model: ModelConfig, mesh: Mapping[str, int]) -> ModelConfig:
    """Returns the model as devices compute it: with a copy of a kv head per device where there are fewer heads than
    devices."""
    return dataclasses.replace(model, num_kv_heads=model.computed_kv_heads(mesh))


def compute_parts(matrix: LayerWeight, mesh: Mapping[str, int]) -> int:
    """Returns the number of parts in which devices compute with a layer's matrix."""
    return {"expert": num_parts("experts", mesh), "token": 1}.get(matrix.matmul or "token", num_parts("mlp", mesh))


def _on_device(sizes: Mapping[LayerWeight, int], mesh: Mapping[str, int]) -> int:
    """Returns the sum of a device's parts of matrices, of which it computes with one part each."""
    by_parts = Counter[int]()
    for matrix, size in sizes.items():
        by_parts[compute_parts(matrix, mesh)] += size
    return sum(size // parts for parts, size in by_parts.items())


def layer_matrix_bytes(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of one layer's matrices in the compute dtype, in which their gradients are reduced."""
    width = DTYPE_BYTES[model.compute_dtype]
    matrices = layer_matrices(computed_model(model, mesh))
    return _on_device({matrix: size * width for matrix, size in matrices.items()}, mesh)


def gathered_layer_bytes(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of one layer's gathered matrices as a device computes with them."""
    matrices = layer_matrices(computed_model(model, mesh))
    return _on_device({matrix: size * factor_bytes(model, matrix) for matrix, size in matrices.items()}, mesh)


def prefetched_bytes(model: ModelConfig, mesh: Mapping[str, int]) -> int:
    """Returns the bytes that prefetching keeps whole at once: the weights of two consecutive layers, and the gradients of
    one."""
    return 2 * gathered_layer_bytes(model, mesh) + layer_matrix_bytes(model, mesh)


def factor_bytes(model: ModelConfig, matrix: LayerWeight) -> int:
    """Returns the bytes per number of a layer's matrix, and of its other factor, in a matmul."""
    return 1 if is_float8(model, matrix) and model.matmul_dtype == "float8" else DTYPE_BYTES[model.compute_dtype]


def is_float8(model: ModelConfig, matrix: LayerWeight) -> bool:
    """Returns whether training multiplies a layer's matrix in float8."""
    return matrix.name in model.float8_weights and matrix.matmul != "expert"


def sent_bytes(config: Config, matrix: LayerWeight) -> float:
    """Returns the bytes per number of a layer's matrix in which devices send it to each other."""
    if config.adapters.is_quantized:
        return base_bits(config.adapters, is_layer_matrix=True) / 8
    return factor_bytes(config.model, matrix)


def flops_per_token(model: ModelConfig, seq_len: int, *, full_attention: bool = False, keys: float | None = None) -> int:
    """Returns the training FLOPs per token (forward and backward); recomputation is never counted.

    Six per parameter that multiplies the token, plus attention scores and values: `6*L*N*H*seq_len` when only the causal
    half counts, `12*L*N*H*seq_len` when the full square does (PaLM, arXiv:2204.02311, appendix B). In layers with a sliding
    window W, `2*W - W**2/seq_len` replaces `seq_len` in the former, and W in the latter. If queries cannot attend across
    documents, the former counts the average number of visible `keys` per query, if given, and the latter counts whole rows.
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
    return sum(state_bytes_by_kind(config, whole)) + state_host_bytes(config, whole)


def stored_state_bytes(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the bytes of a device's weights and moments on the card between steps."""
    return sum(state_bytes_by_kind(config, mesh))


def minimum_state_bytes(config: Config) -> int:
    """Returns the bytes of weights and moments on a device, with copies of weights that wait in host memory, when every
    matrix is split over all devices that may split it, as in all stages of ZeRO between steps; norms and biases, a
    thousandth of the rest, are whole on every device of a stage."""
    mesh = mesh_sizes(config)
    return sum(state_bytes_by_kind(config, mesh)) + copy_bytes(config, mesh)[0]


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
    """Returns the values of `offload.optimizer` that differ in effect, from 0 to 1, as far as the run can have them."""
    if config.model.dense_layers:
        return [0.0]
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
    return sum(state_bytes_by_kind(config, mesh, on_host=True))


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


def state_bytes_by_kind(config: Config, mesh: Mapping[str, int], *, on_host: bool = False) -> tuple[int, int]:
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
        "layer": model.num_layers % stages == 0 and not model.dense_layers,
        "end": model.embed_dim % (stages * num_parts("embed", mesh)) == 0
        and model.vocab_size % num_parts("vocab", mesh) == 0,
    }

    def is_split(name: str) -> bool:
        if name in ("embedding", "head"):
            return divided["end"]
        return is_layer_matrix(name) or (is_of_layers(name) and divided["layer"])

    return {name: size // stages if is_split(name) else size for name, size in sizes.items()}


def held_by_stage(config: Config, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns the numbers of each weight that a stage computes with, from those of all stages, by name: its own layers,
    embedding and head."""
    work, stacked = StageWork.of(config, mesh), stacks(config.model)

    def held(name: str, size: int) -> int:
        stack, _, _ = name.partition(".")
        return size * work.layers_of(stack) // stacked[stack].num_layers if stack in stacked else size

    return {name: held(name, size) for name, size in sizes.items()}


def per_device(sizes: Mapping[str, float], shards: int) -> int:
    """Returns the count of numbers on one of `shards` devices, for arrays of the given sizes, split like the weights of the
    same names."""
    split = sum(size for name, size in sizes.items() if name in ("embedding", "head") or is_layer_matrix(name))
    return int(split // shards + sum(sizes.values()) - split)


def params_gathered_once(config: Config, mesh: Mapping[str, int]) -> int:
    """Returns the number of parameters that a device holds whole, except for `tensor`, from the first micro-batch of a step
    to the last, with gradients reduced at the end: embedding, head and, with prefetched layers, the first layer; all for
    `zero: 1`."""
    return gathered_once(config, weights(computed_model(config.model, mesh)), mesh)


def gathered_once(config: Config, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    """Returns `params_gathered_once` among the weights of the given sizes, of all stages."""
    sizes = held_by_stage(config, sizes, mesh)
    parallel, ends = config.parallel, sum(sizes.get(name, 0) for name in ("embedding", "head"))
    if parallel.zero > 1 and parallel.grad_reduce != "step":
        return 0
    together = 1 if parallel.zero == 1 else config.model.num_layers
    experts = sum(sizes.get(name, 0) for name in expert_weights(config.model))
    others = sum(size for name, size in sizes.items() if is_layer_matrix(name)) - experts
    if parallel.zero > 1 and not parallel.prefetches:
        experts = others = 0
    return (ends + others // together) // mesh["tensor"] + experts // together // num_parts("experts", mesh)


def computed_per_device(model: ModelConfig, sizes: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    """Returns the count of numbers on a device that holds weights as it computes with them, for weights of the given sizes:
    its parts of experts, and its columns or rows of other matrices."""
    own = expert_weights(model)
    experts = sum(size for name, size in sizes.items() if name in own)
    others = {name: size for name, size in sizes.items() if name not in own}
    return experts // num_parts("experts", mesh) + per_device(others, mesh["tensor"])
