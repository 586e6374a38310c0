"""Resolves `parallel.pipeline`, `pipeline_chunks` and `pipeline_head`, and says why."""

from collections.abc import Mapping

from llamajax.config.parallel import HeadForm, PipelineForm
from llamajax.config.run import Config
from llamajax.config.stages import LEAST_CHUNKS
from llamajax.estimates.formulas import DTYPE_BYTES
from llamajax.estimates.gpus import Gpu

_OWN_PROGRAMS = "each stage of mesh.stages runs its own programs"


def pipeline_form(config: Config, axes: Mapping[str, int]) -> tuple[PipelineForm, int | None, str]:
    """Returns the order in which stages work, the chunks of each stage, and the reason in one line.

    Chunks cut the ticks that fill and drain the pipeline to a part of them. But a stage then reads another chunk's weights
    in every tick, so XLA copies them and the sums of their gradients, and the short passes hide less communication. So far
    that costs more in every plan (LOG.md), so a run has chunks only where its user asks for them.
    """
    parallel, stages = config.parallel, axes["pipeline"]
    if config.mesh.stages:
        return "1f1b", 1, f"{_OWN_PROGRAMS}; a plan counts the longest stage for all"
    if stages == 1:
        given: PipelineForm = "1f1b" if parallel.pipeline == "auto" else parallel.pipeline
        return given, parallel.pipeline_chunks, "there is one stage"
    if parallel.pipeline == "interleaved":
        layers, chunks = config.model.num_layers, parallel.pipeline_chunks
        even = (n for n in range(LEAST_CHUNKS, layers // stages + 1) if layers % (stages * n) == 0)
        return "interleaved", chunks or next(even, LEAST_CHUNKS), "parallel.pipeline says so"
    if parallel.pipeline == "1f1b":
        return "1f1b", 1, "parallel.pipeline says so"
    m = config.train.grad_accum_steps
    return (
        "1f1b",
        1,
        f"{stages - 1} of {m + stages - 1} ticks fill or drain; interleaved chunks cut these, and copy more in all",
    )


def head_form(config: Config, axes: Mapping[str, int], gpu: Gpu | None) -> tuple[HeadForm, str]:
    """Returns the stages that compute head and loss, and the reason in one line.

    All stages run in lockstep, so while the last one computes the head, the others have nothing else to do. Shared, it takes
    a part of the time, plus two collectives between all stages.
    """
    if config.mesh.stages:
        return "last", _OWN_PROGRAMS
    if (asked := config.parallel.pipeline_head) != "auto":
        return asked, "parallel.pipeline_head says so"
    if gpu is None or axes["pipeline"] == 1:
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
