"""The cluster that is planned for, and what its compiler is told."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llamajax.config.rules import PositiveFloatOrUnset, PositiveInt, Section

PlannedGpu = Literal[
    "a100-40gb", "a100-80gb", "h100", "h200", "b200", "gb200",
    "rtx-3060-12gb", "rtx-3090", "rtx-4090", "rtx-5090", "a10g", "l4", "l40s",
]  # fmt: skip
"""GPUs that plans know, see `llamajax.estimates.gpus`."""


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Section):
    """The machines that `llamajax.plan` plans for. Training takes the devices that jax finds; from here it knows how much
    they hold and how fast they are, where it chooses forms and schedules (`parallel`, `xla.latency_profile`)."""

    gpu: Literal["none", PlannedGpu] = "none"
    """GPU of every node; A100, H100, H200, B200 and GB200 are modules with NVLink, all others cards in PCIe slots. `none`:
    there is nothing to plan for."""
    nodes: PositiveInt = 1
    """Nodes: groups of GPUs that NVLink or the PCIe slots of one board join, and which a network joins."""
    gpus_per_node: PositiveInt = 8
    """GPUs per node. A rack GB200 NVL72 is one node of 72, though four of them share an operating system."""
    gpu_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one GPU and the others of its node; unset: the GPU's NVLink, or its PCIe slot
    with 16 lanes."""
    node_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one node and the network; unset: per GPU of the node 12.5e9 for A100 (four
    ports of 200 Gb/s for eight), 50e9 for H100, H200, B200 and GB200 (a port of 400 Gb/s for each), 6.25e9 for L40S and
    1.5625e9 for L4 and A10G (cloud instances of eight). GeForce cards have no usual network: several nodes need this."""
    calibration: str | None = None
    """Constants of the cost model that were measured on this GPU, with what they were measured by: a YAML file, see
    `llamajax.estimates.calibration`. What it leaves out, and all if unset, is as built in."""
    price_per_gpu_hour: PositiveFloatOrUnset = None
    """Price of one GPU for one hour, in any currency; unset: no prices in the plan."""
    token_budget: PositiveFloatOrUnset = None
    """Tokens that time and price are told for; unset: those of `train.num_steps` steps."""

    def broken_rules(self) -> Iterator[str]:
        if self.gpu.startswith("rtx-") and self.nodes > 1 and self.node_bandwidth is None:
            yield (
                f"node_bandwidth: nodes of {self.gpu} have no usual network; set the bytes per second, each way, between one"
                " node and the others"
            )
        if self.calibration == "":
            yield "calibration: must not be empty; name a file, or null for the built-in constants"

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class XlaConfig(Section):
    """What the compiler is told, by training and by plans alike; without effect on the CPU."""

    latency_profile: str | None = "auto"
    """Costs of the step's instructions, for the scheduler that hides communication: a file, or `auto` for what the cost
    model of `llamajax.plan` tells of the GPUs in `hardware`, where that makes the step faster; it takes two or three
    compilations more when a program is first trained. null: XLA's own guesses, as with `auto` where no GPU is named, or
    only one."""
    compilation_cache: str | None = "auto"
    """Where compiled programs are kept, so that a second start loads what the first compiled: a directory that nobody else
    may write to, shared by all processes; they lie in its folder `llamajax-programs`, and nothing beside that is touched.
    `auto` for `~/.cache/llamajax/compiled` (or in XDG_CACHE_HOME), on GPUs only. null: nowhere. Of more than 4 GiB a run
    that starts removes what was not used for longest."""
    deterministic: bool = False
    """On GPUs, whether kernels add in one order only, so that a run that is started again repeats its losses to the last
    bit. cuDNN's backward pass of attention then does without atomics, and loses up to 38% of its speed. Kernels are still
    chosen by timing when a program is first compiled, so the run needs a `compilation_cache`, which keeps the choice.
    docs/reliability.md says what is promised where."""
    flags: tuple[str, ...] = ()
    """More XLA options, `name=value` each, over those that llamajax sets; for example
    [xla_gpu_enable_while_loop_double_buffering=true]. Lists are written as YAML. Passes named in
    xla_disable_hlo_passes are disabled beside those that llamajax disables. Plans leave `xla_dump_*` out."""

    def broken_rules(self) -> Iterator[str]:
        if self.latency_profile == "":
            yield "latency_profile: must not be empty; name a file, auto, or null for none"
        if self.compilation_cache == "":
            yield "compilation_cache: must not be empty; name a directory, auto, or null for none"
        if self.deterministic and self.compilation_cache is None:
            yield "deterministic: needs compilation_cache, which keeps the choice of kernels; name a directory, or auto"
        for flag in self.flags:
            if not flag.startswith("xla_") or "=" not in flag or flag.endswith("="):
                yield f"flags: {flag!r} must be written xla_NAME=VALUE, without dashes in front"
