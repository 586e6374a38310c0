"""Compiling the training step; its XLA options are one table, so that training and plans compile the same program.

They are given to the one compilation they are for, not to the process through XLA_FLAGS: an option that a jaxlib does not
know is then an error to explain, where XLA_FLAGS would abort the process.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import jaxlib.version

from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.estimates.formulas import gathered_layer_bytes, layer_matrix_bytes
from llamajax.step.batch import FIELDS, batch_sharding
from llamajax.step.resolve import ResolvedRun
from llamajax.step.state import TrainState
from llamajax.step.step import train_step

Option = str | bool

_ASSUMED_FRACTION = 0.80
"""Of a GPU's memory, what XLA's scheduler counts on (`GetSchedulerMemoryLimit`), whatever the process takes."""
_DISABLED = "xla_disable_hlo_passes"
EXCLUDES_NONDETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
"""Excludes kernels that add with atomics. `xla_gpu_deterministic_ops` would also end the choice of kernels by timing."""
PIPELINES = jaxlib.version.__version_info__ >= (0, 11)
"""Whether XLA may bring gathers forward by iterations of its own, which gets in the way of ours."""


def compiler_options(run: ResolvedRun, *, latencies: str | None = None, untimed: bool = False) -> dict[str, Option]:
    """The options to compile a run's training step with, for GPUs.

    Args:
        run: the run; `xla.flags` replace what is set here, and passes that they disable are disabled as well as those that
            would compute wrong numbers.
        latencies: file with the costs of instructions that the scheduler is to go by.
        untimed: for the program that such a file is made from, which has the same names and is scheduled without.
    """
    config, axes, options = run.config, run.mesh, dict[str, Option]()
    num_devices = math.prod(axes.values())
    if config.xla.deterministic:
        options[EXCLUDES_NONDETERMINISTIC] = True
    if num_devices > 1:
        # Off by default for A100, where every collective would then block the GPU.
        options["xla_gpu_enable_latency_hiding_scheduler"] = True
        # In percent: what arrays may take. Where the scheduler thinks that full, it hides nothing, without a word.
        options["xla_gpu_memory_limit_slop_factor"] = str(int(100 * run.memory_fraction / _ASSUMED_FRACTION))
        # It makes of a gather whose own part is taken back a permute between no devices, which gives zeros (jaxlib 0.10.2).
        disabled = ["all-gather-to-collective-permute-simplifier"]
        if config.parallel.prefetches:
            # `model.remat` says what is computed again; XLA counts a loop's stacks anew for each layer of an iteration.
            disabled.append("rematerialization")
        options[_DISABLED] = ",".join(disabled)
        if config.parallel.tensor == "ring":
            # Weights come from other nodes while tokens pass within one: one at a time, they would wait for every hop.
            options["xla_gpu_experimental_parallel_collective_overlap_limit"] = "2"
    if num_devices > 1 and config.parallel.prefetches:
        # One collective per layer and direction: just below a layer's bytes the gather falls apart.
        layer = {
            "all_gather": gathered_layer_bytes(config.model, axes),
            "reduce_scatter": layer_matrix_bytes(config.model, axes),
        }
        for collective, size in layer.items():
            options[f"xla_gpu_{collective}_combine_threshold_bytes"] = str(size + size // 50)
        if config.parallel.stack == "prefetch":
            # The two buffers for weights change places with every layer, which costs a copy unless two layers make an
            # iteration; but without latencies the scheduler hides less in it.
            options["xla_gpu_enable_while_loop_double_buffering"] = untimed or latencies is not None
        if PIPELINES:
            options["xla_gpu_pipeline_all_gather"] = "COLLECTIVE_PIPELINING_MODE_OFF"
    if latencies is not None:
        options["xla_gpu_pgle_profile_file_or_directory_path"] = latencies
    own = dict(map(_parse, config.xla.flags))
    if _DISABLED in options and _DISABLED in own:
        own[_DISABLED] = f"{options[_DISABLED]},{own[_DISABLED]}"
    return options | own


def told(options: Mapping[str, Option], device_kind: str) -> str:
    """The options in one line, each as `config.xla.flags` takes it, and for which jaxlib and devices they are."""
    written = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    return f"jaxlib {jaxlib.version.__version__}, {device_kind}: {' '.join(written) or 'none'}"


def check_flags(flags: Sequence[str]) -> None:
    """Raises `ConfigError` where `xla.flags` are none of this jaxlib's, at the price of compiling next to nothing."""
    compile_with(jax.jit(lambda: 0).lower(), dict(map(_parse, flags)))


def lower(run: ResolvedRun, state: TrainState) -> jax.stages.Lowered:
    """`train_step`, traced and lowered for the current mesh; no array is made.

    Args:
        run: the run.
        state: its `llamajax.step.state.abstract_state`.
    """
    config = run.config
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size, config.data.seq_len)
    batch = dict.fromkeys(FIELDS, jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding()))
    return train_step.lower(run, state, batch)


def compile_with(lowered: jax.stages.Lowered, options: dict[str, Option]) -> jax.stages.Compiled:
    """Compiles with `options`.

    Raises:
        ConfigError: this jaxlib does not know an option, or not its value.
        EnvironmentMismatchError: the compiler cannot write its temporary files.
    """
    folder = os.environ.get("TMPDIR")
    if options and folder and not os.access(folder, os.W_OK | os.X_OK):  # jaxlib 0.12 would end the process
        raise EnvironmentMismatchError(
            f"TMPDIR: the compiler cannot write to {folder}; set it to a directory that can be written to"
        )
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown:
            raise ConfigError(
                f"xla.flags: jaxlib {jaxlib.version.__version__} does not know {unknown[1]}; remove it or correct it"
            ) from error
        unfit = re.search(r"While setting option (\w+), (.*) is not a valid (.*) value", str(error))
        if unfit:
            raise ConfigError(f"xla.flags: {unfit[2]} is no {unfit[3]}, which {unfit[1]} takes; correct it") from error
        raise


def _parse(flag: str) -> tuple[str, Option]:
    """`name=value`; XLA wants truth values as such and takes everything else as text."""
    name, _, value = flag.partition("=")
    return name, value.lower() == "true" if value.lower() in ("true", "false") else value
