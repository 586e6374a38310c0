"""Checks that this host has what a run needs: files, devices, room and memory."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from llamajax import disk
from llamajax.config.data import is_remote
from llamajax.config.run import Config
from llamajax.diagnostics.findings import Finding
from llamajax.diagnostics.host import total_memory
from llamajax.errors import ConfigError
from llamajax.estimates.device_memory import host_bytes
from llamajax.estimates.formulas import state_bytes
from llamajax.estimates.gpus import planned_gpu
from llamajax.estimates.host_memory import SHARE
from llamajax.units import format_bytes

_STORES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
"""Packages through which fsspec reads addresses that begin with these words; the extra `remote` has them."""
_KERNELS = {"tokamax": "tokamax", "triton": "triton"}
_LOCAL_KEPT = 3  # checkpoints that `checkpoint.local_dir` keeps
_FILES_OPENED = 100


def check_files(config: Config) -> Iterator[Finding]:
    """Checks that the files which the configuration names exist and can be read, and the packages that it needs."""
    problems = config.file_problems() + list(_unreadable(config)) + list(_packages(config))
    for problem in problems:
        text, _, remedy = problem.rpartition("; ")
        yield Finding("files", "fail", text or problem, remedy if text else "")
    if not problems:
        yield Finding("files", "ok", "all files, folders and packages that the configuration names")


def _unreadable(config: Config) -> Iterator[str]:
    """Yields a line for each source with a file that cannot be opened, of its first hundred."""
    for number, source in enumerate(config.data.sources):
        paths = (
            path
            for pattern in source.patterns
            if not is_remote(pattern)
            for path in disk.matching(os.path.expanduser(pattern))
        )
        for path in islice((path for path in paths if os.path.isfile(path)), _FILES_OPENED):
            try:
                with open(path, "rb") as file:
                    file.read(1)
            except OSError as error:
                yield f"data.sources.{number}: {path}: {error.strerror}; change its owner or mode"
                break


def _packages(config: Config) -> Iterator[str]:
    stores = {path.partition("://")[0] for source in config.data.sources for path in source.patterns if is_remote(path)}
    for store in sorted(stores & _STORES.keys()):
        if importlib.util.find_spec(_STORES[store]) is None:
            yield f"data.sources: {store}:// needs {_STORES[store]}; pip install 'llamajax[remote]'"
    kernel = _KERNELS.get(config.model.attention_kernel)
    if kernel is not None and importlib.util.find_spec(kernel) is None:
        yield f"model.attention_kernel: {kernel} is not installed; pip install 'llamajax[{kernel}]'"


def check_devices(config: Config, cards: Sequence[Mapping[str, str]], num_hosts: int) -> Iterator[Finding]:
    """Checks the cards of this host against the configuration.

    Args:
        config: the run.
        cards: values of `nvidia_smi.FIELDS` of each card.
        num_hosts: number of hosts of the run.
    """
    hardware = config.hardware
    if config.mesh.num_cpu_devices is not None:
        yield Finding("devices", "ok", f"the run emulates {config.mesh.num_cpu_devices} devices (mesh.num_cpu_devices)")
        return
    if not cards:
        yield Finding(
            "devices",
            "fail",
            "the run needs GPUs, and this host has none",
            "run on a host with GPUs, or set mesh.num_cpu_devices to try it",
        )
        return
    if hardware.gpu != "none":
        if len(cards) != hardware.gpus_per_node:
            yield Finding(
                "devices",
                "fail",
                f"{len(cards)} GPUs, but hardware.gpus_per_node={hardware.gpus_per_node}",
                "correct it, or take all GPUs of the host",
            )
        if num_hosts != hardware.nodes:
            remedy = "start it on that many hosts, or correct hardware.nodes"
            yield Finding("devices", "warn", f"{num_hosts} host(s) here, but hardware.nodes={hardware.nodes}", remedy)
        planned, names = planned_gpu(hardware), {card["name"] for card in cards}
        if not names <= set(planned.device_kinds):
            text = f"{', '.join(sorted(names))}, but hardware.gpu={hardware.gpu} is {planned.device_kinds[0]}"
            yield Finding("devices", "warn", text, "correct hardware.gpu: schedules and memory are chosen for it")
    num_devices = len(cards) * num_hosts
    for problem in config.placement_problems(num_devices):
        text, _, remedy = problem.rpartition("; ")
        yield Finding("mesh", "fail", f"{text or problem} (over {num_devices} GPUs)", remedy if text else "correct the mesh")
    memory = min(float(card.get("memory.total", 0)) for card in cards) * 2**20
    share = state_bytes(config) / num_devices
    if memory and not config.offload.state_share and share > memory:
        text = f"weights and moments alone take {format_bytes(share)} per GPU of {format_bytes(memory)}"
        yield Finding("GPU memory", "fail", text, "take more GPUs, or offload; llamajax plan compares what fits")


def check_host_memory(config: Config, num_local: int, num_devices: int) -> Iterator[Finding]:
    """Checks the memory of this host against what `offload` puts there, or against the state of emulated devices.

    Args:
        config: the run.
        num_local: number of its devices on this host.
        num_devices: number of all its devices.
    """
    have = total_memory()
    if config.mesh.num_cpu_devices is not None:
        need, what = float(state_bytes(config)), "weights and moments of emulated devices"
    else:
        if "auto" in (config.offload.activations, config.offload.optimizer, config.offload.parameters):
            yield Finding(
                "memory for the run", "ok", "offload: auto is resolved when the run starts; llamajax plan reports it"
            )
            return
        try:
            need = float(num_local * host_bytes(config, config.mesh.axis_sizes(num_devices)))
        except ConfigError:  # the mesh does not fit the devices, which `check_devices` reports
            return
        what = f"data of {num_local} GPUs (offload)"
    if need == 0:
        return
    room = min(SHARE * have, config.offload.tiers.host_bytes or SHARE * have)
    text = f"{what} take {format_bytes(need)} of {format_bytes(have)}"
    is_enough = need <= room
    remedy = f"lower offload, or take a host with {format_bytes(need / SHARE)}"
    yield Finding("memory for the run", "ok" if is_enough else "fail", text, "" if is_enough else remedy)


def folders(config: Config, num_hosts: int) -> dict[str, tuple[Path, float, float]]:
    """Returns the folders that a run writes to, by setting: path, bytes without which it fails, and bytes that it takes in
    the end."""
    checkpoint, run_dir, state = config.checkpoint, Path(config.run_dir), float(state_bytes(config))
    there = sum(name.isdecimal() for name in disk.names_in(run_dir.expanduser() / "checkpoints"))
    found = {
        "run_dir": (run_dir, state, state * max(1, checkpoint.keep_last + 1 - there)),
        "data.cache_dir": (Path(config.data.cache_dir), 0.0, 0.0),
    }
    if checkpoint.local_dir is not None:
        own = state / num_hosts
        found["checkpoint.local_dir"] = (Path(checkpoint.local_dir), own, (_LOCAL_KEPT + 1) * own)
    if config.offload.tiers.nvme_dir is not None:
        found["offload.tiers.nvme_dir"] = (Path(config.offload.tiers.nvme_dir), 0.0, config.offload.tiers.nvme_bytes or 0.0)
    if config.xla.compilation_cache not in (None, "auto"):
        found["xla.compilation_cache"] = (Path(str(config.xla.compilation_cache)), 0.0, 0.0)
    return found
