"""Resolves `parallel.pipeline`, `pipeline_chunks` and `pipeline_head` by arithmetic, and says why."""

import dataclasses
from collections.abc import Mapping

from llamajax.config.parallel import HeadForm, PipelineForm
from llamajax.config.run import Config
from llamajax.config.stages import pipeline_problems
from llamajax.estimates.formulas import DTYPE_BYTES, computed_model, layer_matrices, layer_matrix_bytes
from llamajax.estimates.gpus import Gpu

_OWN_PROGRAMS = "each stage of mesh.stages runs its own programs"


def pipeline_form(config: Config, axes: Mapping[str, int], gpu: Gpu | None) -> tuple[PipelineForm, int, str]:
    """Returns the order in which stages work, the chunks of each stage, and the reason in one line.

    Chunks cut the ticks that fill and drain the pipeline, when a stage waits, to a part of them. But a stage then reads
    another chunk's weights in every tick, so XLA copies them and the sums of their gradients.
    """
    parallel, stages, m = config.parallel, axes["pipeline"], config.train.grad_accum_steps
    if config.mesh.stages:
        return "1f1b", 1, f"{_OWN_PROGRAMS}; a plan counts the longest stage for all"
    if parallel.pipeline == "1f1b":
        return "1f1b", 1, "parallel.pipeline says so"
    possible = [n for n in range(2, config.model.num_layers // stages + 1) if _can_have(config, axes, n)]
    asked = possible if parallel.pipeline_chunks in (None, 1) else [parallel.pipeline_chunks]
    if parallel.pipeline == "interleaved":
        if gpu is None:
            return "interleaved", asked[0], "parallel.pipeline says so"
        best = min(asked, key=lambda n: _waiting_seconds(config, axes, gpu, n))
        return "interleaved", best, f"parallel.pipeline says so; {_told(config, axes, gpu, best, 1)}"
    if gpu is None:
        return "1f1b", 1, "no GPU is named"
    if m % stages:
        return "1f1b", 1, f"{m} micro-batches are no multiple of {stages} stages"
    if not possible:
        return "1f1b", 1, f"{config.model.num_layers} layers form no chunks on {stages} stages"
    best = min((1, *asked), key=lambda n: _waiting_seconds(config, axes, gpu, n))
    other = 1 if best > 1 else min(asked, key=lambda n: _waiting_seconds(config, axes, gpu, n))
    return "interleaved" if best > 1 else "1f1b", best, _told(config, axes, gpu, best, other)


def _can_have(config: Config, axes: Mapping[str, int], chunks: int) -> bool:
    """Returns whether each stage can have this many chunks of equally many layers."""
    parallel = dataclasses.replace(config.parallel, pipeline="interleaved", pipeline_chunks=chunks)
    is_even = config.model.num_layers % (axes["pipeline"] * chunks) == 0
    return is_even and not list(pipeline_problems(config.model, parallel, config.train, axes))


def _told(config: Config, axes: Mapping[str, int], gpu: Gpu, *chunks: int) -> str:
    waits = (f"{_waiting_seconds(config, axes, gpu, n):.2g} s with {n} chunk{'s' * (n > 1)} per stage" for n in chunks)
    return f"stages wait or copy for {', '.join(waits)}"


def _waiting_seconds(config: Config, axes: Mapping[str, int], gpu: Gpu, chunks: int) -> float:
    """Returns the seconds per step in which a stage waits for others, or copies weights and sums of gradients."""
    stages, m = axes["pipeline"], config.train.grad_accum_steps
    model, layers = computed_model(config.model, axes), config.model.num_layers / stages
    tokens = config.rows_per_device(axes) * config.data.seq_len / axes["sequence"]
    again = 8 if model.remat == "full" else 6
    unit_s = again * tokens * layers * sum(layer_matrices(model).values()) / axes["tensor"] / gpu.peak_flops / chunks
    copied = 0.0
    if chunks > 1:
        # Read and written: the weights of both passes; read, added to and written: the sums.
        weights = layer_matrix_bytes(config.model, axes) * layers / chunks
        sums = weights / DTYPE_BYTES[model.compute_dtype] * DTYPE_BYTES[config.train.grad_accum_dtype]
        copied = (4 * weights + 4 * sums) / gpu.memory_bandwidth
    return (stages - 1) * unit_s + (m * chunks + stages - 1) * copied


def head_form(config: Config, axes: Mapping[str, int], gpu: Gpu | None) -> tuple[HeadForm, str]:
    """Returns the stages that compute head and loss, and the reason in one line.

    All stages run in lockstep, so while the last one computes the head, the others have nothing else to do. Shared, it takes
    a part of the time, plus two collectives between all stages.
    """
    if config.mesh.stages:
        return "last", _OWN_PROGRAMS
    if (asked := config.parallel.pipeline_head) != "auto":
        return asked, "parallel.pipeline_head says so"
    if gpu is None:
        return "last", "no GPU is named, so nothing tells whether sharing pays"
    stages, width = axes["pipeline"], DTYPE_BYTES[config.model.compute_dtype]
    tokens = config.rows_per_device(axes) * config.data.seq_len / axes["sequence"]
    numbers = tokens * config.model.embed_dim / axes["tensor"]
    part = (stages - 1) / stages
    saved_s = part * 6 * numbers * config.model.vocab_size / gpu.peak_flops
    link = gpu.gpu_bandwidth
    of_node = config.hardware.domain_bandwidth or gpu.node_bandwidth
    if stages > 1 and config.hardware.nodes > 1 and of_node is not None:
        link = of_node / config.hardware.gpus_per_node
    sent_s = 2 * part * numbers * width / link
    told = f"sharing saves {1000 * saved_s:.2g} ms per micro-batch and sends for {1000 * sent_s:.2g} ms"
    return ("shared" if saved_s > sent_s else "last"), told
