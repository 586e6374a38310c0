"""The cost model's latencies as a profile that XLA's scheduler reads in place of a measured one.

Without latencies the scheduler places collectives blindly. Given this text as a file (its compiler option
`xla_gpu_pgle_profile_file_or_directory_path`), a second compilation of the same program starts collectives early enough
to hide them, where there is anything to hide them behind. XLA finds instructions by the names they had before
scheduling, which the first compilation's text tells.
"""

from collections.abc import Mapping
from pathlib import Path

import jax

from llamajax.config import Config
from llamajax.config_file import config_to_dict
from llamajax.data import cache
from llamajax.planning.hardware import planned_gpu
from llamajax.planning.hlo import Module, parse
from llamajax.planning.machine import Machine
from llamajax.planning.replay import latencies
from llamajax.xla_flags import compile_with, compiler_options


def latency_profile(module: Module, machine: Machine, mesh: Mapping[str, int]) -> str:
    """A `tensorflow.profiler.ProfiledInstructionsProto` in text format; file names of it end with `.pbtxt`.

    Args:
        module: the program as scheduled without a profile.
        machine: what it runs on.
        mesh: sizes of the mesh axes, outer to inner.
    """
    return "".join(
        f'costs {{ name: "{name}" cost_us: {seconds * 1e6:.3f} }}\n'
        for name, seconds in latencies(module, machine, mesh).items()
    )


def cached_profile(config: Config, lowered: jax.stages.Lowered) -> Path:
    """The file with the latencies of `config`'s step: made with one more compilation when it is first asked for.

    It is kept in `data.cache_dir`, by all that decides the program, its hardware and the version of jax.

    Args:
        config: the run; its `hardware` names the GPU.
        lowered: its step, lowered for the current mesh.

    Raises:
        ConfigError: the configuration names no GPU.
    """
    machine = Machine(gpu=planned_gpu(config.hardware), gpus_per_node=config.hardware.gpus_per_node)
    mesh, settings = dict(jax.sharding.get_mesh().shape), config_to_dict(config)
    parts = [settings[name] for name in ("model", "train", "optimizer", "hardware", "xla")]
    key = cache.digest("latencies-1", parts, mesh, config.data.seq_len, jax.__version__)
    entry = Path(config.data.cache_dir).expanduser() / "latencies" / key
    path = entry / "latencies.pbtxt"
    with cache.locked(entry):
        if not path.exists():
            blind = compile_with(lowered, compiler_options(config, jax.sharding.get_mesh().size)).as_text()
            assert blind is not None
            cache.write_atomically(path, latency_profile(parse(blind), machine, mesh).encode())
    return path
