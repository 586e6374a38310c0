"""What `auto` comes to in `parallel`: the forms in which the devices of a mesh share the training step, and why."""

import dataclasses
from collections.abc import Mapping

from llamajax.config.formulas import layer_matrix_bytes
from llamajax.config.parallel import StackForm, num_parts
from llamajax.config.run import Config
from llamajax.kernels.forms import sequence_form
from llamajax.units import format_bytes


def with_forms(config: Config, axes: Mapping[str, int]) -> tuple[Config, dict[str, str]]:
    """The run with every form of `parallel` chosen, and by setting in one line which and why, where there is a choice.

    Args:
        config: the run.
        axes: sizes of the mesh axes.
    """
    chosen = {"stack": stack_form(config, axes), "sequence": sequence_form(config, axes)}
    parallel = dataclasses.replace(config.parallel, **{setting: form for setting, (form, _) in chosen.items()})
    told = {setting: f"{form}: {reason}" for setting, (form, reason) in chosen.items()}
    if num_parts("seq", axes) == 1:
        del told["sequence"]
    return dataclasses.replace(config, parallel=parallel), told


def stack_form(config: Config, axes: Mapping[str, int]) -> tuple[StackForm, str]:
    """How the layers run, and why, in one line."""
    if config.parallel.stack != "auto":
        return config.parallel.stack, "parallel.stack says so"
    shards = num_parts("embed", axes)
    if num_parts("batch", axes) * num_parts("seq", axes) == 1:
        return "scan", "there is nothing to gather or to reduce"
    if config.mesh.num_cpu_devices is not None:
        return "scan", "emulated devices hide nothing"
    layer = format_bytes(layer_matrix_bytes(config.model) / num_parts("mlp", axes))
    what = f"{layer} of a layer's weights come from {shards} devices" if shards > 1 else f"{layer} of gradients are reduced"
    return "prefetch", f"{what} while another layer computes"
