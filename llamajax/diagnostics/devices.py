"""Checks that jax starts the devices, that they compute, and that they can add over all of them, in a process of its own."""

import json
import os
import sys
from collections.abc import Iterator, Mapping

from llamajax.diagnostics.findings import Finding, run

LIMIT_S = 120.0
_PROGRAM = """
import json, os, sys
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other programs may compute on the same cards
import jax, numpy
devices = jax.local_devices()
found = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
ones = numpy.full((512, 512), 1 / 512, numpy.float32)
found["wrong"] = [d.id for d in devices if abs(float((jax.device_put(ones, d) @ jax.device_put(ones, d)).sum()) - 512) > 1]
if len(devices) > 1:
    mesh = jax.make_mesh((len(devices),), ("all",), devices=devices)
    spec = jax.sharding.PartitionSpec
    rows = jax.device_put(numpy.arange(len(devices), dtype=numpy.float32), jax.sharding.NamedSharding(mesh, spec("all")))
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=spec("all"), out_specs=spec()))
    found["sum"] = float(add(rows)[0]) == sum(range(len(devices)))
print("FOUND" + json.dumps(found))
"""
_REMEDIES = {
    "Unable to load cuDNN": "remove LD_LIBRARY_PATH, or the older cuDNN in it",
    "no supported devices found": "check CUDA_VISIBLE_DEVICES, and that this user may open /dev/nvidia*",
    "system not yet initialized": "sudo systemctl start nvidia-fabricmanager, of the driver's own version",
    "NCCL": "run again with NCCL_DEBUG=INFO; in a container, give it --shm-size=8g --ulimit memlock=-1",
}


def check_devices(num_cards: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the devices that jax finds.

    Args:
        num_cards: number of cards that the driver reports.
        environment: variables of the process that asks jax.
    """
    outcome = run([sys.executable, "-c", _PROGRAM], LIMIT_S, dict(environment))
    line = next((line for line in outcome.out.splitlines() if line.startswith("FOUND")), None)
    if line is None:
        said = (outcome.err.strip() or outcome.problem or f"ended with code {outcome.code}").splitlines()[-1]
        remedy = next(
            (remedy for text, remedy in _REMEDIES.items() if text in outcome.err),
            "run python -c 'import jax; jax.devices()'",
        )
        yield Finding("jax devices", "fail", f"jax cannot use the devices: {said}", remedy)
        return
    yield from check_found(json.loads(line.removeprefix("FOUND")), num_cards, environment)


def check_found(found: Mapping[str, object], num_cards: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Checks what the process of `check_devices` found."""
    text = f"{found['count']} x {found['kind']}"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    expected = num_cards if visible is None else min(num_cards, len([name for name in visible.split(",") if name.strip()]))
    if found["platform"] == "cpu" and num_cards and not environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        yield Finding(
            "jax devices", "fail", f"only the CPU, but the driver has {num_cards} GPUs", "pip install 'llamajax[cuda13]'"
        )
    elif found["platform"] != "cpu" and found["count"] != expected:
        remedy = "check CUDA_VISIBLE_DEVICES, and that this user may open all of /dev/nvidia*"
        yield Finding("jax devices", "fail", f"{text}, but the driver has {expected}", remedy)
    else:
        yield Finding("jax devices", "ok", text)
    if wrong := found["wrong"]:
        yield Finding(
            "products", "fail", f"devices {wrong} compute wrong numbers", "take this host out, and have it checked"
        )
    if "sum" in found:
        remedy = "run again with NCCL_DEBUG=INFO, then with NCCL_P2P_DISABLE=1 to tell the links from the rest"
        is_right = bool(found["sum"])
        text = f"the sum over {found['count']} devices is {'right' if is_right else 'wrong'}"
        yield Finding("collectives", "ok" if is_right else "fail", text, "" if is_right else remedy)


def environment_of_probe() -> dict[str, str]:
    """Returns the variables of the process that asks jax: this one's, with jax's own warnings hidden."""
    return dict(os.environ) | {"TF_CPP_MIN_LOG_LEVEL": "3"}
