"""The layers of the stages of a pipeline, and the rules for `mesh.pipeline`."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import ParallelConfig, axes_of, num_parts
from llamajax.config.training import TrainConfig

EMPTY = -1
"""Index of the layer in an empty slot."""
LEAST_CHUNKS = 2
"""Fewest chunks of a stage with `parallel.pipeline: interleaved`."""


def layers_of_stages(
    num_layers: int, stages: int, chunks: int, counts: Sequence[int] = (), dense: Sequence[int] = ()
) -> list[list[list[int]]]:
    """Returns the indices of the layers in the slots of every stage, [stages, chunks, slots]; `EMPTY` for an empty slot.

    Chunk c of stage s follows chunk c of stage s - 1, and chunk c + 1 of the first stage follows chunk c of the last one.
    Where the layers do not fill all slots, the chunks at both ends of the model have one layer fewer, because embedding and
    head work there too.

    All stages compute a slot together, so it holds dense layers alone, or none. Dense layers at the beginning of the model
    come on top of the first chunk's even share: they add as many slots wherever they are.

    Args:
        num_layers: number of layers of the model.
        stages: number of stages.
        chunks: number of chunks per stage.
        counts: number of layers in each chunk, in the model's order; empty: as evenly as possible.
        dense: see `ModelConfig.dense_layers`.
    """
    groups, before = stages * chunks, leading(dense)
    if not counts:
        shared = num_layers - before
        most = -(-shared // groups)
        from_the_ends = sorted(range(groups), key=lambda group: (min(group, groups - 1 - group), group))
        shorter = set(from_the_ends[: groups * most - shared])
        counts = [most - (group in shorter) + before * (group == 0) for group in range(groups)]
    ends = itertools.accumulate(counts)
    by_group = _in_slots([range(end - count, end) for end, count in zip(ends, counts, strict=True)], dense)
    return [[by_group[chunk * stages + stage] for chunk in range(chunks)] for stage in range(stages)]


def leading(dense: Sequence[int]) -> int:
    """Returns the number of dense layers at the beginning of a model, without those of the round that its layers repeat;
    `dense` as for `layers_of_stages`."""

    def in_a_row(first: int) -> int:
        return sum(layer == number for number, layer in enumerate((own for own in dense if own >= first), first))

    return in_a_row(0) - in_a_row(in_a_row(0) + 1)


def _in_slots(groups: Sequence[Sequence[int]], dense: Sequence[int]) -> list[list[int]]:
    """Returns the layers of each group with `EMPTY` between them, so that no slot has layers of two kinds."""
    left, slots = [list(reversed(group)) for group in groups], []
    while any(left):
        is_dense = any(own[-1] in dense for own in left if own)
        slots.append([own.pop() if own and (own[-1] in dense) == is_dense else EMPTY for own in left])
    return [list(of_group) for of_group in zip(*slots, strict=True)]


def pipeline_problems(
    model: ModelConfig, parallel: ParallelConfig, train: TrainConfig, axes: Mapping[str, int], counts: Sequence[int] = ()
) -> Iterator[str]:
    """Yields one `key: rule; remedy` line for each reason why the stages of a mesh with these axes cannot run the model.
    `counts` is `mesh.stages`."""
    stages, layers, m = axes["pipeline"], model.num_layers, train.grad_accum_steps
    if stages == 1:
        return
    chunks = parallel.pipeline_chunks or (LEAST_CHUNKS if parallel.pipeline == "interleaved" else 1)
    if parallel.zero != 1:
        ticks = m + stages - 1
        yield (
            f"parallel.zero: {parallel.zero} would gather each stage's weights in all {ticks} ticks of a step"
            f" (train.grad_accum_steps={m} + mesh.pipeline={stages} - 1) instead of once; set 1, which still splits weights"
            " and optimizer state between steps"
        )
    if parallel.stack not in ("auto", "unrolled"):
        yield f"parallel.stack: {parallel.stack} is not a form of a stage's layers; set auto or unrolled with mesh.pipeline"
    dense, before = model.dense_layers, leading(model.dense_layers)
    if stages * chunks > layers - before:
        of_each = f" x {chunks} chunks per stage" if chunks > 1 else ""
        remedy = "set fewer stages, or 1f1b" if chunks > 1 else "set fewer stages"
        after = f" - {before} dense ones at the beginning" if before else ""
        yield f"mesh.pipeline: {stages} stages{of_each} need as many layers, and model.num_layers={layers}{after}; {remedy}"
        return
    if counts and (len(counts), sum(counts)) != (stages, layers):
        yield (
            f"mesh.stages: {list(counts)} are {sum(counts)} layers in {len(counts)} stages, and model.num_layers={layers},"
            f" mesh.pipeline={stages}; make them equal"
        )
        return
    if counts and (parallel.pipeline == "interleaved" or parallel.pipeline_head == "shared"):
        setting = "pipeline" if parallel.pipeline == "interleaved" else "pipeline_head"
        value = getattr(parallel, setting)
        yield f"parallel.{setting}: {value} needs one program of all stages, and with mesh.stages each has its own; set auto"
        return
    if parallel.pipeline == "interleaved" and m % stages:
        nearest = max(1, round(m / stages)) * stages
        yield (
            f"train.grad_accum_steps: {m} must be a multiple of mesh.pipeline={stages} for parallel.pipeline: interleaved;"
            f" set {nearest}, or 1f1b"
        )
    elif parallel.pipeline == "interleaved" and train.smallest_batch // train.micro_batch_size % stages:
        rows = train.micro_batch_size * stages
        yield (
            f"train.global_batch_ramp: start and increment must be multiples of {rows} sequences, a micro-batch for each of"
            f" mesh.pipeline={stages} stages, for parallel.pipeline: interleaved; change them, or set 1f1b or auto"
        )
    if layers % stages or chunks > 1 or len(set(counts)) > 1 or dense:
        dim = "embed" if model.num_kv_heads % axes["tensor"] == 0 else "embed_tensor"
        columns = stages * num_parts(dim, axes) * (axes["data"] if parallel.zero_data else 1)
        if model.embed_dim % columns:
            over = " x ".join(f"mesh.{axis}={axes[axis]}" for axis in ("pipeline", *axes_of(dim)) if axes[axis] > 1)
            why = "chunks" if layers % stages == 0 else f"{stages} stages that do not divide {layers} layers"
            why = "stages of unequal layers" if counts else why
            why = "stages of layers with and without experts" if dense else why
            yield f"model.embed_dim: {model.embed_dim} must be divisible by {over} for {why}; choose other sizes of these"
    period = len(model.windows)
    for own in dict.fromkeys(((), tuple(counts))):  # an evaluation shares the layers evenly
        slots = zip(*itertools.chain(*layers_of_stages(layers, stages, chunks, own, dense)), strict=True)
        kinds = [{layer % period for layer in slot if layer != EMPTY} for slot in slots]
        if any(len(of_slot) > 1 for of_slot in kinds):
            yield (
                f"mesh.{'stages' if own else 'pipeline'}: {stages} stages of {len(kinds)} layers do not hold whole rounds of"
                f" model.layer_types, which repeat every {period} layers; choose stages with a multiple of {period} layers"
            )
