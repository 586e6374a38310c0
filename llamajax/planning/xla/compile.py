"""Compiles the training step for a cluster, on a machine that has no GPU.

XLA's compiler for GPUs comes with jax's CUDA plugin and needs no driver: it reads the properties of the card
(`target_config`) and the number of cards. The result is the very program that training would run, scheduled and with all its
memory laid out; it cannot run here.
"""

import importlib.metadata
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib.version
from jax.experimental import topologies

from llamajax.config.run import Config
from llamajax.errors import ConfigError, EnvironmentMismatchError, UserError
from llamajax.estimates.gpus import Gpu, planned_gpu
from llamajax.parallel.mesh import make_mesh
from llamajax.planning.xla.buffers import BufferAssignment, read_buffer_assignment
from llamajax.step.compile import EXCLUDES_NONDETERMINISTIC, Option, compile_with, compiler_options, lower
from llamajax.step.resolve import ResolvedRun
from llamajax.step.state import abstract_state

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
REMEDY = "pip install 'llamajax[plan]'"
DUMP: dict[str, Option] = {
    "xla_dump_hlo_as_proto": True, "xla_dump_hlo_module_re": ".*", "xla_dump_compress_protos": False,
    "xla_dump_max_hlo_modules": "-1",
}  # fmt: skip
"""Options that write the buffer assignment, which XLA outputs only as a file; they override the dump options in
XLA_FLAGS."""

_NEED_A_GPU = (EXCLUDES_NONDETERMINISTIC, "xla_gpu_deterministic_ops")
"""Options that choose among kernels of the same work; jaxlib 0.12 cannot compile with them without a GPU. A plan loses
nothing without them: the step has no scatter that they would change, and the cost model includes their price."""


class CompilerMissingError(UserError):
    """XLA's compiler for GPUs is not installed, has another version than jax, or cannot be loaded."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The training step as one device of the cluster would run it."""

    run: ResolvedRun
    hlo: str
    """Scheduled module, as text."""
    buffers: BufferAssignment
    """Memory of the program."""
    peak_bytes: int
    """XLA's own figure for arguments, results and arrays alive at the fullest moment, without the gaps between them."""
    options: dict[str, Option]
    """Options that the compiler received."""
    compile_s: float
    """Seconds of tracing, lowering and compiling."""
    jax_version: str


def prepare_environment() -> None:
    """Keeps jax away from this machine's GPUs, if any; call it before any other use of jax."""
    jax.config.update("jax_platforms", "cpu")


def check_compiler() -> None:
    """Raises `CompilerMissingError` with the remedy if this machine cannot compile for GPUs."""
    versions = {}
    for package in PLUGINS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not versions:
        raise CompilerMissingError(f"compiling for GPUs needs {PLUGINS[0]}, which is not installed; {REMEDY}")
    if jaxlib.version.__version__ not in versions.values():
        found = ", ".join(f"{package} {version}" for package, version in versions.items())
        raise CompilerMissingError(f"{found} does not fit jaxlib {jaxlib.version.__version__}; {REMEDY}")


def compile_for(run: ResolvedRun, *, latencies: str | None = None, untimed: bool = False) -> CompiledStep:
    """Compiles a run's training step for the cluster that its `hardware` describes.

    Args:
        run: the run, from `resolve_planned`.
        latencies: file with the costs of instructions for the scheduler.
        untimed: see `compiler_options`.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is not installed.
        ConfigError: the configuration names no GPU, does not fit the cluster, or sets an unknown XLA option.
    """
    check_compiler()
    config = run.config
    if problems := config.placement_problems(config.hardware.num_devices):
        raise ConfigError("\n".join(problems))
    started = time.monotonic()
    mesh = planned_mesh(config)
    told = compiler_options(run, latencies=latencies, untimed=untimed)
    told = {name: value for name, value in told.items() if not name.startswith("xla_dump_") and name not in _NEED_A_GPU}
    # Kernels such as tokamax's are lowered for the architecture of the default device.
    planned = jax.default_device(mesh.devices.flat[0])
    with jax.set_mesh(mesh), planned, tempfile.TemporaryDirectory(prefix="llamajax-plan-") as folder:
        try:
            lowered = lower(run, abstract_state(config))
        except EnvironmentMismatchError as error:
            raise CompilerMissingError(f"{error}; or {REMEDY}") from error
        try:
            compiled = compile_with(lowered, told | {"xla_dump_to": folder} | DUMP)
        except jax.errors.JaxRuntimeError as error:
            if "No PTX compilation provider" in str(error) or "libdevice not found" in str(error):
                raise CompilerMissingError(
                    f"compiling for GPUs needs NVIDIA's ptxas and libdevice, which were not found; {REMEDY}"
                ) from error
            raise
        (proto,) = Path(folder).glob("*jit_train_step*after_optimizations.hlo.pb")
        buffers = read_buffer_assignment(proto.read_bytes())
    stats = compiled.memory_analysis()
    assert stats is not None
    hlo = compiled.as_text()
    assert hlo is not None
    return CompiledStep(
        run=run,
        hlo=hlo,
        buffers=buffers,
        peak_bytes=stats.peak_memory_in_bytes,
        options=told,
        compile_s=time.monotonic() - started,
        jax_version=jax.__version__,
    )


def planned_mesh(config: Config) -> jax.sharding.Mesh:
    """Returns the mesh of `config` over the GPUs that `config.hardware` describes; programs can be compiled for it, but not
    run.

    Raises:
        CompilerMissingError: XLA's compiler for GPUs is installed, but jax could not load it.
        ConfigError: the configuration names no GPU, or its mesh does not fit their number.
    """
    cluster = config.hardware
    target = target_config(planned_gpu(cluster))
    # Partitions x hosts x devices: as on a real cluster, where XLA treats every node as a separate partition.
    lies = f"{cluster.nodes}x1x{cluster.gpus_per_node}"
    try:
        topology = topologies.get_topology_desc(platform="cuda", topology_name="plan", target_config=target, topology=lies)
    except NotImplementedError as error:
        raise CompilerMissingError(
            f"jax could not load its CUDA plugin, which compiles for GPUs ({error}); {REMEDY}"
        ) from error
    return make_mesh(config.mesh, topology.devices)


def target_config(gpu: Gpu) -> str:
    """Returns the facts that XLA needs to compile for `gpu` without having one: a `stream_executor.GpuTargetConfigProto` as
    text."""
    major, minor = gpu.compute_capability
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: {gpu.threads_per_core}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fp32_lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(gpu.memory_bandwidth)}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.description}"
"""
