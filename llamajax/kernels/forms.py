"""Which form attention takes over rows that are split, by arithmetic."""

from collections.abc import Mapping

from llamajax.config.model import ModelConfig
from llamajax.config.parallel import SequenceForm, num_parts
from llamajax.config.run import Config
from llamajax.estimates.communication import sequence_numbers
from llamajax.estimates.formulas import DTYPE_BYTES
from llamajax.kernels.choice import Kernel, Site, obstacle
from llamajax.units import format_bytes


def sequence_form(config: Config, axes: Mapping[str, int]) -> tuple[SequenceForm, str]:
    """The form that `parallel.sequence` names, or that `auto` comes to for training on GPUs; and why, in one line.

    A fused kernel is worth more than any bytes: the plain form moves every score through the GPU's memory several times.
    Without one, a ring computes hardly more than the half of the scores that causal rows need, and hides what it sends. Else
    what sends less is taken.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
    """
    parts = num_parts("seq", axes)
    if parts == 1:
        return "gather", "no row is split"
    if (given := config.given_form("sequence")) is not None:
        return given
    tokens = config.train.global_batch_size / config.train.grad_accum_steps / num_parts("batch", axes)
    tokens *= config.data.seq_len / parts
    width = DTYPE_BYTES[config.model.compute_dtype]

    def sent(form: SequenceForm) -> float:
        return width * tokens * sequence_numbers(config, axes, form)

    forms: tuple[SequenceForm, ...] = ("gather", "ring", "ulysses")
    possible: list[SequenceForm] = [form for form in forms if not config.sequence_problems(form, axes)]
    bytes_of_forms = ", ".join(f"{format_bytes(sent(form))} by {form}" for form in possible)
    told = f"a device sends per layer and micro-batch {bytes_of_forms}"
    fused = can_fuse(config.model, axes, "ulysses")
    if "ulysses" in possible and fused:
        return "ulysses", f"whole rows can be one fused kernel's; {told}"
    if "ring" in possible:
        share = (2 * parts + 1) / (4 * parts)
        return "ring", f"it computes {share:.0%} of the scores that whole rows have, and hides what it sends; {told}"
    return min(possible, key=sent), f"it sends least; {told}"


def can_fuse(model: ModelConfig, axes: Mapping[str, int], form: SequenceForm) -> bool:
    """Whether some fused kernel computes attention in this form on GPUs."""
    asked = model.attention_kernel
    kernels: tuple[Kernel, ...] = ("cudnn", "pallas") if asked == "auto" else (asked,)
    site = Site.of(model, axes, form, is_gpu=True)
    return any(kernel != "plain" and obstacle(kernel, site) is None for kernel in kernels)
