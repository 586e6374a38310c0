"""Scales a run down to a few devices: sizes shrink, but keep their relation to the mesh.

Every axis that is split stays split. Every size keeps its divisibility by each axis, by each product of axes and by twice
these; whether it is odd; and whether it is below them, as key/value heads may be below the tensor axis. So sizes that the
configured mesh divides evenly, replicates or pads are divided, replicated or padded here too.
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llamajax.config.data import DataConfig
from llamajax.config.experts import ExpertsConfig
from llamajax.config.file import config_to_dict, dotted
from llamajax.config.keys import keys
from llamajax.config.model import DType, ModelConfig
from llamajax.config.offload import ON_CARD
from llamajax.config.parallel import AXES, PLAIN, DistributedConfig, MeshConfig, axes_of, num_parts, product
from llamajax.config.quantized import LARGEST_BLOCK
from llamajax.config.run import Config
from llamajax.config.stages import leading
from llamajax.config.watch import ProfileConfig
from llamajax.errors import ConfigError

USUAL_DEVICES, MOST_DEVICES = 8, 64
NUM_STEPS = 5
LEARNING_RATE = 3e-3
"""Moves weights by a percent or so in five steps, so that results of stale weights show."""
LEAST_EPS = 3e-2
"""Adam divides by the root of the second moment: where a gradient is close to zero, its rounding would decide the sign of a
whole step. This value in the denominator, about the size of a usual gradient, limits the effect of rounding on a weight."""

Splits = Sequence[tuple[int, int]]
"""Numbers of parts that the configured mesh may split a size into, each with the number for the scaled mesh."""


def configured_axes(config: Config) -> dict[str, int]:
    """Returns the sizes of the run's mesh axes. Where the number of devices is unknown, an axis that takes the rest counts
    as `USUAL_DEVICES`."""
    mesh, distributed = config.mesh, config.distributed
    fixed = [size for axis in AXES if (size := getattr(mesh, axis)) != -1]
    if mesh.num_cpu_devices is not None and (not distributed.enabled or distributed.num_processes):
        return mesh.axis_sizes(mesh.num_cpu_devices * (distributed.num_processes or 1))
    if mesh.num_cpu_devices is None and config.hardware.gpu != "none":
        return mesh.axis_sizes(config.hardware.num_devices)
    return mesh.axis_sizes(math.prod(fixed) * (1 if len(fixed) == len(AXES) else USUAL_DEVICES))


def scaled_axes(sizes: Mapping[str, int], num_devices: int | None = None) -> dict[str, int]:
    """Returns the sizes of the axes on at most `num_devices` devices: divisors of the configured ones, or 2 for even and 3
    for odd ones; None: `USUAL_DEVICES`, or as many as keep every axis split.

    Raises:
        ConfigError: this many devices cannot keep every axis split.
    """

    def choices(size: int) -> list[int]:
        least = 1 if size == 1 else 2 + size % 2
        return sorted({least, *(n for n in range(least, MOST_DEVICES + 1) if size % n == 0 and n % 2 == size % 2)})

    all_choices = [choices(size) for size in sizes.values()]
    needed = math.prod(several[0] for several in all_choices)
    num_devices = max(USUAL_DEVICES, needed) if num_devices is None else num_devices
    if needed > num_devices:
        mesh = product({axis: size for axis, size in sizes.items() if size > 1})
        raise ConfigError(f"--devices: {num_devices} cannot keep every axis of {mesh} split; take {needed} or more")

    def rank(scaled: tuple[int, ...]) -> tuple[int, float]:
        return math.prod(scaled), -max(size / own for size, own in zip(sizes.values(), scaled, strict=True))

    best = max((some for some in itertools.product(*all_choices) if math.prod(some) <= num_devices), key=rank)
    return dict(zip(sizes, best, strict=True))


def fitting_axes(model: ModelConfig, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns `scaled_axes` on the usual number of devices; or on twice or four times as many, where fewer devices cannot
    keep the number of key/value heads below the number of devices that split them."""
    usual = scaled_axes(sizes)
    for axes in (usual, *(scaled_axes(sizes, times * math.prod(usual.values())) for times in (2, 4))):
        kv_heads, _ = scaled_heads(model, sizes, axes)
        if (kv_heads < num_parts("kv_heads", axes)) == (model.num_kv_heads < num_parts("kv_heads", sizes)):
            return axes
    return usual


def scale_down(config: Config, configured: Mapping[str, int], scaled: Mapping[str, int]) -> Config:
    """Returns the run on a mesh of emulated devices with axes of the sizes `scaled`: small, in fp32 and five steps long.

    Args:
        config: the run; with experts, as many parts as it is trained in.
        configured: sizes of its mesh axes.
        scaled: result of `scaled_axes`.

    Raises:
        ConfigError: no small sizes keep the rules that the configured ones keep.
    """
    splits = all_splits(configured, scaled)
    train, optimizer = config.train, config.optimizer
    seq_len = _scaled_size(config.data.seq_len, max(32, 8 * num_parts("seq", scaled)), splits)
    replicas = num_parts("micro_batch", configured)
    accumulated = _few(train.grad_accum_steps, 2)
    if scaled["pipeline"] > 1:  # enough to fill the stages, and whole rounds of them
        accumulated = min(train.grad_accum_steps, 2 * scaled["pipeline"])
    num_layers, chunks = _scaled_layers(config, configured["pipeline"], scaled["pipeline"])
    stages = _scaled_stages(config.mesh.stages, scaled["pipeline"])
    per_device = _few(max(1, train.global_batch_size // train.grad_accum_steps // replicas), 2)
    per_device = max(per_device, config.parallel.expert_parts or 1)  # each part has a row
    axes: dict[str, Any] = dict(scaled)
    batch_size = accumulated * per_device * num_parts("micro_batch", scaled)
    of_rollouts = {}
    if config.objective.is_on_policy:  # its rows are drawn, in no groups
        of_rollouts = {"objective.rollout.max_tokens": seq_len // 2, "objective.rollout.group_size": batch_size}
    return config.changed(
        _scaled_model(config, scaled_heads(config.model, configured, scaled), splits, configured, scaled)
        | of_rollouts
        | {key: "float32" for key, _, field in keys(Config) if DType in (field.type, *typing.get_args(field.type))}
        | {
            "mesh": MeshConfig(**axes, stages=stages, num_cpu_devices=math.prod(scaled.values())),
            "distributed": DistributedConfig(),
            "profile": ProfileConfig(),
            "model.attention_kernel": "plain",
            "model.matmul_dtype": "float8_unrounded" if config.model.float8_weights else "compute_dtype",
            "model.sliding_window": _scaled_window(config.model, config.data, configured, scaled, seq_len),
            "model.layer_types": tuple(dict.fromkeys(config.model.layer_types)),
            "model.num_layers": sum(stages) or num_layers,
            "parallel.pipeline_chunks": chunks,
            "data.seq_len": seq_len,
            "train.num_steps": NUM_STEPS,
            "train.num_epochs": None,
            "train.grad_accum_steps": accumulated,
            "train.global_batch_size": batch_size,
            "optimizer.learning_rate": LEARNING_RATE,
            "optimizer.eps": max(LEAST_EPS, optimizer.eps),
            "optimizer.warmup_steps": min(optimizer.warmup_steps, 2),
            "optimizer.decay_steps": optimizer.decay_steps and min(optimizer.decay_steps, 2),
        }
    )


def all_splits(configured: Mapping[str, int], scaled: Mapping[str, int]) -> Splits:
    """Returns every product of axes."""
    split = [axis for axis in configured if configured[axis] > 1]
    groups = itertools.chain.from_iterable(itertools.combinations(split, n) for n in range(len(split) + 1))
    return [(math.prod(configured[axis] for axis in group), math.prod(scaled[axis] for axis in group)) for group in groups]


def scaled_heads(model: ModelConfig, configured: Mapping[str, int], scaled: Mapping[str, int]) -> tuple[int, int]:
    """Returns the fewest key/value heads, and query heads per key/value head, that fit the axes that split heads or rows."""
    axes = [axis for axis in configured if axis in axes_of("kv_heads") + axes_of("seq")]
    splits = all_splits({axis: configured[axis] for axis in axes}, {axis: scaled[axis] for axis in axes})
    groups = model.num_heads // model.num_kv_heads

    def candidates() -> Iterator[tuple[int, int]]:
        for own_groups in (n for n in range(1, 9) if n <= groups and n % 2 == groups % 2 and (n == 1) == (groups == 1)):
            most = min(model.num_kv_heads, 2 + 2 * max(after for _, after in splits))
            yield from ((kv_heads, own_groups) for kv_heads in range(1, most + 1))

    def misfit(candidate: tuple[int, int]) -> tuple[int, ...]:
        kv_heads, own_groups = candidate
        of_keys = _misfit(model.num_kv_heads, kv_heads, splits)
        of_queries = _misfit(model.num_heads, kv_heads * own_groups, splits)
        return *map(sum, zip(of_keys, of_queries, strict=True)), kv_heads * own_groups

    return min(candidates(), key=misfit)


def on_one_device(config: Config) -> Config:
    """Returns the run in the plainest form: one device, nothing recomputed or in host memory, and one micro-batch, unless
    the loss depends on which rows that one holds."""
    steps = config.train.grad_accum_steps if config.model.experts.counts_micro_batches else 1
    plain = {"parallel": PLAIN, "offload": ON_CARD, "train.grad_accum_steps": steps, "model.remat": "none"}
    return config.changed({"mesh": MeshConfig(num_cpu_devices=1), **plain})


def changes(config: Config, scaled: Config) -> dict[str, tuple[Any, Any]]:
    """Returns every setting that differs in `scaled`: its dotted key, the configured and the verified value."""
    before, after = dotted(config_to_dict(config)), dotted(config_to_dict(scaled))
    return {key: (before.get(key), value) for key, value in after.items() if before.get(key) != value}


def _few(number: int, most: int) -> int:
    """Returns `most` or one more, odd if `number` is odd; at most `number`."""
    return min(number, most + number % 2)


def _misfit(size: int, own: int, splits: Splits) -> tuple[int, int, int]:
    """Returns how often `own` is not divided by the counterpart of a divisor of `size`: the splits, and twice them, because
    some forms split a part in two. Also returns how often its other relations to the splits differ, and whether it differs
    in being odd or one."""

    def relations(n: int, parts: int) -> tuple[bool, ...]:
        return n % parts == 0, parts % n == 0, n < parts

    real = [(before, after) for before, after in splits if before > 1]
    lost = sum(size % (times * before) == 0 and own % (times * after) != 0 for before, after in real for times in (1, 2))
    others = sum(relations(size, before) != relations(own, after) for before, after in real)
    return lost, others, (size % 2 != own % 2) + ((size == 1) != (own == 1))


def _scaled_size(size: int, target: int, splits: Splits) -> int:
    """Returns the size closest to `target` that relates to the scaled splits as `size` relates to the configured ones."""
    most = min(size, target + 2 * max(after for _, after in splits))
    return min(range(1, most + 1), key=lambda own: (*_misfit(size, own, splits), abs(own - target)))


def _scaled_model(
    config: Config, heads: tuple[int, int], splits: Splits, configured: Mapping[str, int], scaled: Mapping[str, int]
) -> dict[str, Any]:
    model, targets = config.model, {"vocab_size": 96, "embed_dim": 32, "mlp_dim": 48}
    sizes = {name: _scaled_size(getattr(model, name), target, splits) for name, target in targets.items()}
    if config.adapters.is_quantized:  # every part of a split matrix has whole blocks
        parts = {"embed_dim": num_parts("embed_tensor", scaled), "mlp_dim": num_parts("mlp", scaled)}
        sizes |= {name: LARGEST_BLOCK * count for name, count in parts.items() if count > 1}
    kv_heads, groups = heads
    sizes |= {"num_kv_heads": kv_heads, "num_heads": kv_heads * groups}
    sizes["head_dim"] = min(model.head_dim, 8)
    # Sums of D terms keep a size of about one: no score or gradient is so small or so large that rounding would show.
    init_std = 1 / math.sqrt(sizes["embed_dim"])
    sizes |= {"init_std": init_std, "experts": _scaled_experts(model, splits, configured, scaled)}
    return {f"model.{name}": value for name, value in sizes.items()}


def _scaled_experts(
    model: ModelConfig, splits: Splits, configured: Mapping[str, int], scaled: Mapping[str, int]
) -> ExpertsConfig:
    """Returns few small experts, of which a token chooses two or three, with groups and layers without experts where the
    configured model has some."""
    own = model.experts
    if not own.enabled:
        return own
    groups = min(own.num_groups, 4)
    wanted = max(8, 2 * num_parts("experts", scaled))
    many = min(own.num_experts, 2 * wanted)
    # Devices split experts, or their matrices where whole experts do not divide.
    parts = [(num_parts(dim, configured), num_parts(dim, scaled)) for dim in ("experts", "expert_shards")]

    def misfit(count: int) -> tuple[int, int]:
        unlike = sum((own.num_experts % before == 0) != (count % after == 0) for before, after in parts)
        return unlike, abs(count - wanted)

    num_experts = min((count for count in range(groups, many + 1) if count % groups == 0), key=misfit)
    of_group = num_experts // groups
    top_groups = max(1, groups * own.top_groups // own.num_groups)
    targets = {"mlp_dim": 16, "latent_dim": 16, "shared_mlp_dim": 24}
    sizes = {
        name: size and _scaled_size(size, target, splits)
        for name, target in targets.items()
        if (size := getattr(own, name)) is not None
    }
    return dataclasses.replace(
        own,
        num_experts=num_experts,
        num_groups=groups,
        top_groups=top_groups,
        top_k=min(_few(own.top_k, 2), top_groups * of_group),
        first_dense_layers=min(own.first_dense_layers, 1),
        layer_step=_few(own.layer_step, 2),
        **sizes,
    )


def _scaled_layers(config: Config, stages: int, scaled_stages: int) -> tuple[int, int | None]:
    """Returns the number of layers, and the chunks of each stage of a pipeline, if they are set: at most two layers in a
    chunk, and an empty slot where the configured stages have some."""
    chunks, layers, experts = config.parallel.pipeline_chunks, config.model.num_layers, config.model.experts
    before, step = (min(experts.first_dense_layers, 1), _few(experts.layer_step, 2)) if experts.enabled else (0, 1)
    if stages == 1 and config.model.dense_layers:
        return before + 2 * step, chunks
    if stages == 1:
        return _few(layers, 4), chunks
    own_chunks = None if chunks is None else _few(chunks, 2)
    groups, shared = stages * (chunks or 1), layers - leading(config.model.dense_layers)
    of_chunk = _few(-(-shared // groups), 2)
    return before + step * (scaled_stages * (own_chunks or 1) * of_chunk - (shared % groups != 0)), own_chunks


def _scaled_window(
    model: ModelConfig, data: DataConfig, configured: Mapping[str, int], scaled: Mapping[str, int], seq_len: int
) -> int | None:
    """Returns a window that spans as many devices' parts of a row as the configured window, and is narrower than a row if
    that one is."""
    window = model.sliding_window
    if window is None or window >= data.seq_len:
        return window
    of_part = window * num_parts("seq", configured) / data.seq_len
    return max(1 + (window > 1), min(seq_len - 1, round(of_part * seq_len / num_parts("seq", scaled))))


def _scaled_stages(counts: Sequence[int], scaled_stages: int) -> tuple[int, ...]:
    """Returns the layers of the stages with own programs: two in each, and one in the last if the configured ones differ."""
    return (2,) * (scaled_stages - 1) + (2 - (len(set(counts)) > 1),) if counts else ()
