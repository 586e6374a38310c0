"""Compiles the training step. Its XLA options are one table, so that training and plans compile the same program.

The options go to this one compilation, not to the process through XLA_FLAGS: an option that a jaxlib does not support is
then an error with an explanation, where XLA_FLAGS would abort the process.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import jaxlib.version

from llamajax.config.run import Config
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.estimates.formulas import gathered_layer_bytes, layer_matrix_bytes
from llamajax.step.batch import Batch, batch_sharding, fields
from llamajax.step.resolve import ResolvedRun
from llamajax.step.state import TrainState
from llamajax.step.step import train_step

Option = str | bool

_ASSUMED_FRACTION = 0.80
"""Share of a GPU's memory that XLA's scheduler assumes to have (`GetSchedulerMemoryLimit`), whatever the process may use."""
_DISABLED = "xla_disable_hlo_passes"
_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
EXCLUDES_NONDETERMINISTIC = "xla_gpu_exclude_nondeterministic_ops"
"""Option that excludes kernels that add with atomics. `xla_gpu_deterministic_ops` would also disable the choice of kernels
by timing."""
PIPELINES = jaxlib.version.__version_info__ >= (0, 11)
"""Whether XLA can move gathers to earlier iterations on its own, which conflicts with our prefetching."""


def compiler_options(run: ResolvedRun, *, latencies: str | None = None, untimed: bool = False) -> dict[str, Option]:
    """Returns the options to compile a run's training step with, for GPUs.

    Args:
        run: the run; `xla.flags` override these options, except that passes which would compute wrong numbers stay disabled
            besides the passes that the flags disable.
        latencies: file with the costs of instructions for the scheduler.
        untimed: compile the program that such a file is made from: it has the same names and is scheduled without latencies.
    """
    config, axes, options = run.config, run.mesh, dict[str, Option]()
    num_devices = math.prod(axes.values())
    if config.xla.deterministic:
        options[EXCLUDES_NONDETERMINISTIC] = True
    is_copying = bool(config.offload.names) or config.offload.state_share > 0
    if num_devices > 1 or is_copying:
        # Off by default for A100 and for one GPU, where every collective or copy would then block the GPU.
        options["xla_gpu_enable_latency_hiding_scheduler"] = True
        # In percent: the memory that arrays may use. Where the scheduler assumes less, it silently hides nothing.
        options["xla_gpu_memory_limit_slop_factor"] = str(int(100 * run.memory_fraction / _ASSUMED_FRACTION))
        # This pass turns a gather with only its own part read back into a permute between no devices, which yields zeros
        # (jaxlib 0.10.2).
        disabled = ["all-gather-to-collective-permute-simplifier"]
        if config.parallel.prefetches:
            # `model.remat` decides what is recomputed; XLA counts a loop's stacks again for each layer of an iteration.
            disabled.append("rematerialization")
        options[_DISABLED] = ",".join(disabled)
        if is_copying:
            # In a loop, a copy to or from a layer's place in a stack counts as asynchronous computation. By default two may
            # be in flight; a layer has one for each value, both ways.
            options["xla_gpu_experimental_parallel_async_compute_limit"] = "8"
        if config.parallel.tensor == "ring" or axes["pipeline"] > 1:
            # Weights, or activations of stages, come from other nodes while tokens pass within a node; one at a time, they
            # would wait for every hop.
            options[_AT_ONCE] = "2"
        elif (config.parallel.expert_parts or 1) > 1:
            # A layer's weights arrive and gradients leave while the tokens of several parts travel one after the other.
            options[_AT_ONCE] = "3"
        if config.parallel.expert_exchange == "ragged":
            # By default jaxlib 0.12 splits it into parts within and between nodes, which send five times the bytes.
            options["xla_gpu_unsupported_enable_ragged_all_to_all_multi_host_decomposer"] = False
            if jaxlib.version.__version_info__ >= (0, 11):
                options["xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"] = True
        if axes["pipeline"] > 1:
            # One communicator per pipeline; otherwise one of all devices, in which NCCL is slow (openxla/xla#40505).
            options["xla_gpu_collective_permute_connected_components"] = True
            # Forward and backward passes of a tick hide each other's collectives; combined, they would wait for each other.
            residual = config.rows_per_device(axes) * config.data.seq_len * config.model.embed_dim // axes["tensor"]
            for collective in ("all_gather", "reduce_scatter"):
                options[f"xla_gpu_{collective}_combine_threshold_bytes"] = str(residual)
    if num_devices > 1 and config.parallel.prefetches and axes["pipeline"] == 1:
        # One collective per layer and direction: with a threshold just below a layer's bytes the gather is split.
        layer = {
            "all_gather": gathered_layer_bytes(config.model, axes),
            "reduce_scatter": layer_matrix_bytes(config.model, axes),
        }
        for collective, size in layer.items():
            options[f"xla_gpu_{collective}_combine_threshold_bytes"] = str(size + size // 50)
        if config.parallel.stack == "prefetch":
            # The two weight buffers swap with every layer, which costs a copy unless an iteration has two layers; but
            # without latencies the scheduler hides less in such an iteration. Of parts that take turns XLA cannot make one:
            # it finds a cycle (jaxlib 0.10.2).
            in_turns = (config.parallel.expert_parts or 1) > 1
            options["xla_gpu_enable_while_loop_double_buffering"] = (untimed or latencies is not None) and not in_turns
        if PIPELINES:
            options["xla_gpu_pipeline_all_gather"] = "COLLECTIVE_PIPELINING_MODE_OFF"
    if latencies is not None:
        options["xla_gpu_pgle_profile_file_or_directory_path"] = latencies
    own = dict(map(_parse, config.xla.flags))
    if _DISABLED in options and _DISABLED in own:
        own[_DISABLED] = f"{options[_DISABLED]},{own[_DISABLED]}"
    return options | own


def told(options: Mapping[str, Option], device_kind: str) -> str:
    """Returns the options in one line, each in the syntax of `config.xla.flags`, with the jaxlib and the device kind that
    they are for."""
    written = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    return f"jaxlib {jaxlib.version.__version__}, {device_kind}: {' '.join(written) or 'none'}"


def check_flags(flags: Sequence[str]) -> None:
    """Raises `ConfigError` where this jaxlib does not support the `xla.flags`; it compiles a trivial program to find out."""
    compile_with(jax.jit(lambda: 0).lower(), dict(map(_parse, flags)))


def lower(run: ResolvedRun, state: TrainState) -> jax.stages.Lowered:
    """Traces and lowers `train_step` for the current mesh; no array is created.

    Args:
        run: the run.
        state: `llamajax.step.state.abstract_state` of the run.
    """
    return train_step.lower(run, state, abstract_batch(run.config))


def abstract_batch(config: Config) -> Batch:
    """Returns a batch of the run as `jax.ShapeDtypeStruct`, on the current mesh."""
    shape = (config.train.grad_accum_steps, config.train.micro_batch_size, config.data.seq_len)
    sharding = batch_sharding()
    return {name: cast(Any, jax.ShapeDtypeStruct(shape, of, sharding=sharding)) for name, of in fields(config).items()}


def compile_with(lowered: jax.stages.Lowered, options: dict[str, Option]) -> jax.stages.Compiled:
    """Compiles with `options`.

    Raises:
        ConfigError: this jaxlib does not support an option or its value.
        EnvironmentMismatchError: the compiler cannot write its temporary files.
    """
    folder = os.environ.get("TMPDIR")
    if options and folder and not os.access(folder, os.W_OK | os.X_OK):  # jaxlib 0.12 would abort the process
        raise EnvironmentMismatchError(f"TMPDIR: the compiler cannot write to {folder}; set it to a writable directory")
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown:
            raise ConfigError(
                f"xla.flags: jaxlib {jaxlib.version.__version__} does not support {unknown[1]}; remove or correct it"
            ) from error
        unfit = re.search(r"While setting option (\w+), (.*) is not a valid (.*) value", str(error))
        if unfit:
            raise ConfigError(f"xla.flags: {unfit[2]} is no valid {unfit[3]} value for {unfit[1]}; correct it") from error
        raise


def _parse(flag: str) -> tuple[str, Option]:
    """Parses `name=value`; XLA needs booleans as such and everything else as text."""
    name, _, value = flag.partition("=")
    return name, value.lower() == "true" if value.lower() in ("true", "false") else value
