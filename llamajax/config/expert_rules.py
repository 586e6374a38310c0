"""Rules between experts and the other sections of a run."""

from collections.abc import Iterator, Mapping

from llamajax.config.adapters import AdaptersConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import ParallelConfig

_OF_ATTENTION = ("q", "k", "v", "o")


def expert_problems(
    model: ModelConfig,
    adapters: AdaptersConfig,
    parallel: ParallelConfig,
    rows: int,
    axes: Mapping[str, int],
) -> Iterator[str]:
    """Yields one `key: rule; remedy` line for each reason why mesh axes of these sizes cannot run the model's experts.
    `rows` is the number of rows of a micro-batch that a device has."""
    experts, parts = model.experts, parallel.expert_parts
    if not experts.enabled:
        if parts is not None:
            yield f"parallel.expert_parts: {parts} has no effect without model.experts.num_experts; set that, or remove it"
        if parallel.expert_exchange == "ragged":
            yield "parallel.expert_exchange: ragged has no effect without model.experts.num_experts; set that, or auto"
        return
    if parts is not None and rows < parts:
        yield f"parallel.expert_parts: {parts} must be at most the {rows} rows of a micro-batch that a device has"
    if adapters.enabled and not set(adapters.targets) <= set(_OF_ATTENTION):
        yield f"adapters.targets: experts have no adapters; name only those of {list(_OF_ATTENTION)}"
    if adapters.enabled and adapters.is_quantized:
        yield f"adapters.base: {adapters.base} is no form of experts; set bfloat16"
