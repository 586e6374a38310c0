"""Resolves `parallel.expert_parts`, and says why."""

from collections.abc import Mapping

from llamajax.config.parallel import num_parts
from llamajax.config.run import Config

MOST_PARTS = 4
"""More parts than this hide little more: of the rows that n parts send, one in 2 n - 1 has no work beside it."""
LEAST_ROWS = 1024
"""Least rows of an expert per part, in balance. Kernels multiply tiles of 128 rows, and the last tile of each expert is half
empty on average."""


def parts_form(config: Config, axes: Mapping[str, int]) -> tuple[int | None, str]:
    """Returns the parts of a device's rows that take turns at the experts, None without experts, and the reason in one
    line."""
    experts, peers, rows = config.model.experts, num_parts("experts", axes), config.rows_per_device(axes)
    if config.parallel.expert_parts is not None:
        return config.parallel.expert_parts, "parallel.expert_parts says so"
    if not experts.enabled:
        return None, "there are no experts"
    if peers == 1:
        return 1, "no token travels"
    if config.mesh.num_cpu_devices is not None:
        return 1, "emulated devices hide nothing"
    tokens = rows * config.data.seq_len // num_parts("seq", axes)
    of_expert = tokens * experts.top_k * peers // experts.num_experts
    possible = [n for n in range(1, MOST_PARTS + 1) if n <= rows and (n == 1 or of_expert // n >= LEAST_ROWS)]
    parts = possible[-1]
    told = f"of {rows} rows per device, with {of_expert // parts:,} rows for each expert"
    return parts, f"{told}; the tokens of one part travel while the device computes with another"
