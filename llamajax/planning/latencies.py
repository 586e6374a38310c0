"""The cost model's latencies as a profile that XLA's scheduler reads in place of a measured one.

Without latencies the scheduler places collectives blindly. Given this text as a file (its compiler option
`xla_gpu_pgle_profile_file_or_directory_path`), a second compilation of the same program starts collectives early enough
to hide them, where there is anything to hide them behind. XLA finds instructions by the names they had before
scheduling, which the first compilation's text tells.
"""

import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from llamajax.errors import ConfigError
from llamajax.planning.xla.buffers import decode

_COST = re.compile(r'\s*costs\s*:?\s*\{\s*name\s*:\s*"([^"\\]*)"\s*,?\s*cost_us\s*:\s*([-+.\w]+)\s*\}\s*')

FILE_NAME = "latencies.pbtxt"
"""The ending tells XLA that it is text."""


def latency_text(latencies: Mapping[str, float]) -> str:
    """A `tensorflow.profiler.ProfiledInstructionsProto` in text format; file names of it end with `.pbtxt`.

    Args:
        latencies: seconds by instruction, as `Timeline` has them of the program scheduled without latencies.
    """
    return _as_text({name: seconds * 1e6 for name, seconds in latencies.items()})


def read_latencies(path: str) -> str:
    """The latencies in a file that a person names, text or binary, as `latency_text` writes them.

    XLA itself goes on without a word when it cannot read them.

    Raises:
        ConfigError: there is no such file, or it holds no latencies.
    """
    try:
        content = Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise ConfigError(f"xla.latency_profile: {path} cannot be read: {error.strerror}; name a file, or auto") from error
    costs = text_costs(content) or _binary_costs(content)
    if not costs:
        raise ConfigError(
            f"xla.latency_profile: {path} holds no latencies; name a ProfiledInstructionsProto, as text:"
            ' costs { name: "fusion.1" cost_us: 2.5 }, or write auto'
        )
    return _as_text(costs)


def _as_text(costs: Mapping[str, float]) -> str:
    """Latencies in microseconds by instruction, in protocol buffers' text format."""
    return "".join(f'costs {{ name: "{name}" cost_us: {microseconds:.3f} }}\n' for name, microseconds in costs.items())


def text_costs(content: bytes) -> dict[str, float]:
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
