"""The cost model's latencies as a profile that XLA's scheduler reads in place of a measured one.

Without latencies the scheduler places collectives blindly. Given this text as a file (compiler option
`xla_gpu_pgle_profile_file_or_directory_path`), a second compilation of the same program starts collectives early enough to
hide them, where there is computation to hide them behind. XLA identifies instructions by their names before scheduling,
which the text of the first compilation contains.
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
"""File name; its suffix makes XLA read the file as text."""


def latency_text(latencies: Mapping[str, float]) -> str:
    """Returns a `tensorflow.profiler.ProfiledInstructionsProto` in text format; names of such files end in `.pbtxt`.

    Args:
        latencies: seconds by instruction, as in the `Timeline` of the program scheduled without latencies.
    """
    return _as_text({name: seconds * 1e6 for name, seconds in latencies.items()})


def read_latencies(path: str) -> str:
    """Reads the latencies in a user's file, text or binary, in the format of `latency_text`.

    XLA itself silently continues when it cannot read them.

    Raises:
        ConfigError: the file does not exist or contains no latencies.
    """
    try:
        content = Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise ConfigError(f"xla.latency_profile: {path} cannot be read: {error.strerror}; name a file, or auto") from error
    costs = text_costs(content) or _binary_costs(content)
    if not costs:
        raise ConfigError(
            f"xla.latency_profile: {path} contains no latencies; name a ProfiledInstructionsProto, as text:"
            ' costs { name: "fusion.1" cost_us: 2.5 }, or write auto'
        )
    return _as_text(costs)


def _as_text(costs: Mapping[str, float]) -> str:
    """Returns latencies in microseconds by instruction, in protocol buffers' text format."""
    return "".join(f'costs {{ name: "{name}" cost_us: {microseconds:.3f} }}\n' for name, microseconds in costs.items())


def text_costs(content: bytes) -> dict[str, float]:
    """Returns microseconds by instruction; empty if `content` is anything but such text."""
    text, costs, position = content.decode(errors="replace"), {}, 0
    while found := _COST.match(text, position):
        try:
            costs[found[1]] = float(found[2])
        except ValueError:
            return {}
        position = found.end()
    return costs if position == len(text) else {}


def _binary_costs(content: bytes) -> dict[str, float]:
    """Returns microseconds by instruction from the wire format: field 1 holds costs; in a cost, field 1 is the name and
    field 2 the double."""
    try:
        costs = [decode(cost) for cost in decode(content)[1]]
        return {cost[1][0].decode(): struct.unpack("<d", cost[2][0])[0] for cost in costs}
    except (KeyError, IndexError, TypeError, AttributeError, UnicodeDecodeError, struct.error):
        return {}
