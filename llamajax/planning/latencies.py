"""The cost model's latencies as a profile that XLA's scheduler reads in place of a measured one.

Without latencies the scheduler places collectives blindly. Given this text as a file (its compiler option
`xla_gpu_pgle_profile_file_or_directory_path`), a second compilation of the same program starts collectives early enough
to hide them, where there is anything to hide them behind. XLA finds instructions by the names they had before
scheduling, which the first compilation's text tells.
"""

import functools
import math
import re
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from llamajax import disk
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.errors import ConfigError, EnvironmentMismatchError
from llamajax.parallel.allowance import memory_fraction
from llamajax.parallel.processes import everyones
from llamajax.planning.cost.gpu import Machine, planned_machine
from llamajax.planning.cost.replay import latencies, replay
from llamajax.planning.cost.timeline import Timeline
from llamajax.planning.xla.buffers import decode
from llamajax.planning.xla.hlo import Module
from llamajax.planning.xla.parse import parse
from llamajax.step.compile import Option, compile_with, compiler_options

_COST = re.compile(r'\s*costs\s*:?\s*\{\s*name\s*:\s*"([^"\\]*)"\s*,?\s*cost_us\s*:\s*([-+.\w]+)\s*\}\s*')
_FILE = "latencies.pbtxt"
"""The ending tells XLA that it is text."""
_GUESSES = "# XLA's own guesses are better here\n"
"""Stands in for the latencies that the cost model made, where they do not help."""

Preference = tuple[bool, float]
"""For one schedule among others of the same program: the least is the best."""


def preference(timeline: Timeline, *, fits: bool) -> Preference:
    """The one that fits before one that does not, and then the faster one: latencies can also mislead the scheduler."""
    return not fits, timeline.step_time_s


def latency_source(config: Config, num_devices: int) -> str | None:
    """What is asked of the step on so many devices: `auto`, a file of latencies, or None for XLA's own guesses."""
    source = config.xla.latency_profile
    return None if source == "auto" and (config.hardware.gpu == "none" or num_devices == 1) else source


def latency_text(module: Module, machine: Machine, mesh: Mapping[str, int]) -> str:
    """A `tensorflow.profiler.ProfiledInstructionsProto` in text format; file names of it end with `.pbtxt`.

    Args:
        module: the program as scheduled without latencies.
        machine: what it runs on.
        mesh: sizes of the mesh axes, outer to inner.
    """
    return _as_text({name: seconds * 1e6 for name, seconds in latencies(module, machine, mesh).items()})


def read_latencies(path: str) -> str:
    """The latencies in a file that a person names, text or binary, as `latency_text` writes them.

    XLA itself goes on without a word when it cannot read them.

    Raises:
        ConfigError: there is no such file, or it holds no latencies.
    """
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"xla.latency_profile: {path} cannot be read: {error.strerror}; name a file, or auto") from error
    costs = _text_costs(content) or _binary_costs(content)
    if not costs:
        raise ConfigError(
            f"xla.latency_profile: {path} holds no latencies; name a ProfiledInstructionsProto, as text:"
            ' costs { name: "fusion.1" cost_us: 2.5 }, or write auto'
        )
    return _as_text(costs)


def compile_here(config: Config, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles training's step for the devices of the current mesh; all processes call this together.

    Args:
        config: the run.
        lowered: its step, lowered for that mesh.

    Raises:
        ConfigError: `config.xla` says what this jaxlib does not know; see `gpu_options` too.
    """
    options = gpu_options(config, lowered) if jax.default_backend() == "gpu" else {}
    return compile_with(lowered, options)


def gpu_options(config: Config, lowered: jax.stages.Lowered) -> dict[str, Option]:
    """What XLA is told of training's step on GPUs, the same in all processes, which call this together.

    What the cost model tells of a program, and whether it helps, is kept in `data.cache_dir`; it takes two more compilations
    when the first process does not have it.

    Raises:
        ConfigError: see `read_latencies`.
        EnvironmentMismatchError: the processes were given different files of latencies.
    """
    mesh = dict(jax.sharding.get_mesh().shape)
    num_devices = math.prod(mesh.values())
    options = functools.partial(compiler_options, config, num_devices)
    source = latency_source(config, num_devices)
    folder = Path(config.data.cache_dir).expanduser() / "latencies"
    if source is None:
        return options()
    if source != "auto":
        text = _same_file(source)
        return options(latencies=_keep(folder / cache.key_of(text), text))
    machine = planned_machine(config)
    budget = memory_fraction(config) * machine.gpu.memory_bytes
    described = [lowered.as_text(), options(), repr(machine), repr(machine.calibration), mesh, jax.__version__]
    entry = folder / cache.key_of("latencies-2", described)
    path = entry / _FILE
    # Those of the first process: two hosts may choose other kernels.
    text = everyones(path.read_text() if path.exists() else "")[0]
    if text != _GUESSES and not _text_costs(text.encode()):
        text = everyones(_judged(lowered, options, machine, mesh, budget))[0]
    kept = _keep(entry, text)
    return options(latencies=None if text == _GUESSES else kept)


def _same_file(source: str) -> str:
    """The latencies in a file, which must be those of every process."""
    text = read_latencies(source)
    digests = everyones(cache.key_of(text))
    if other := next((number for number, digest in enumerate(digests) if digest != digests[0]), None):
        raise EnvironmentMismatchError(
            f"xla.latency_profile: {source} of process {other} is not that of process 0; give all the same file"
        )
    return text


def _judged(
    lowered: jax.stages.Lowered, options: Callable[..., dict[str, Option]], machine: Machine, mesh: Mapping[str, int],
    budget: float,
) -> str:  # fmt: skip
    """The latencies of `lowered`, or `_GUESSES` where scheduling by them does not help.

    `options` makes the compiler's options, with a file of latencies; `budget` is the bytes that a device has for arrays.
    """

    def compiled(file: str | None) -> tuple[Module, Preference]:
        step = compile_with(lowered, options(latencies=file))
        hlo, memory = step.as_text(), step.memory_analysis()
        assert hlo is not None
        assert memory is not None
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        needed = memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
        module = parse(hlo)
        return module, preference(replay(module, machine, mesh), fits=needed <= budget)

    module, guessed = compiled(None)
    text = latency_text(module, machine, mesh)
    with tempfile.TemporaryDirectory(prefix="llamajax-latencies-") as folder:
        _, informed = compiled(_keep(Path(folder), text))
    return text if informed < guessed else _GUESSES


def _keep(folder: Path, text: str) -> str:
    """The file in `folder` that holds `text`."""
    path = folder / _FILE
    with disk.locked(folder):
        if not path.exists() or path.read_text() != text:
            disk.write_atomically(path, text.encode())
    return str(path)


def _as_text(costs: Mapping[str, float]) -> str:
    """Latencies in microseconds by instruction, in protocol buffers' text format."""
    return "".join(f'costs {{ name: "{name}" cost_us: {microseconds:.3f} }}\n' for name, microseconds in costs.items())


def _text_costs(content: bytes) -> dict[str, float]:
    """Microseconds by instruction; empty if `content` is anything but such text."""
    text, costs, position = content.decode(errors="replace"), {}, 0
    while found := _COST.match(text, position):
        try:
            costs[found[1]] = float(found[2])
        except ValueError:
            return {}
        position = found.end()
    return costs if position == len(text) else {}


def _binary_costs(content: bytes) -> dict[str, float]:
    """The same of the wire format: field 1 holds costs, whose field 1 is the name and 2 the double."""
    try:
        costs = [decode(cost) for cost in decode(content)[1]]
        return {cost[1][0].decode(): struct.unpack("<d", cost[2][0])[0] for cost in costs}
    except (KeyError, IndexError, TypeError, AttributeError, UnicodeDecodeError, struct.error):
        return {}
