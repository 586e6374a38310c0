"""The cluster that is planned for, and what its compiler is told."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llamajax.config.rules import PositiveFloatOrUnset, PositiveInt, Section


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Section):
    """The machines that `llamajax.plan` plans for. Training takes the devices that jax finds; from here it knows how much
    they hold and how fast they are, where it chooses forms and schedules (`parallel`, `xla.latency_profile`)."""

    gpu: Literal["none", "a100-40gb", "a100-80gb", "h100", "h200"] = "none"
    """GPU of every node, all of them SXM modules; `none`: there is nothing to plan for."""
    nodes: PositiveInt = 1
    """Nodes: machines whose GPUs are joined by NVLink, and which a network joins."""
    gpus_per_node: PositiveInt = 8
    """GPUs per node."""
    gpu_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one GPU and the others of its node; unset: the GPU's NVLink."""
    node_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one node and the network; unset: per GPU of the node 12.5e9 for A100 (four
    ports of 200 Gb/s for eight), 50e9 for H100 and H200 (a port of 400 Gb/s for each)."""
    calibration: str | None = None
    """Constants of the cost model that were measured on this GPU, with what they were measured by: a YAML file, see
    `llamajax.config.calibration`. What it leaves out, and all if unset, is as built in."""
    price_per_gpu_hour: PositiveFloatOrUnset = None
    """Price of one GPU for one hour, in any currency; unset: no prices in the plan."""
    token_budget: PositiveFloatOrUnset = None
    """Tokens that time and price are told for; unset: those of `train.num_steps` steps."""

    def broken_rules(self) -> Iterator[str]:
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
    flags: tuple[str, ...] = ()
    """More XLA options, `name=value` each, over those that llamajax sets; for example
    [xla_gpu_enable_while_loop_double_buffering=true]. Lists are written as YAML. Passes named in
    xla_disable_hlo_passes are disabled beside those that llamajax disables. Plans leave `xla_dump_*` out."""

    def broken_rules(self) -> Iterator[str]:
        if self.latency_profile == "":
            yield "latency_profile: must not be empty; name a file, auto, or null for none"
        if self.compilation_cache == "":
            yield "compilation_cache: must not be empty; name a directory, auto, or null for none"
        for flag in self.flags:
            if not flag.startswith("xla_") or "=" not in flag or flag.endswith("="):
                yield f"flags: {flag!r} must be written xla_NAME=VALUE, without dashes in front"
