"""The cluster that a plan is for, and the options of the compiler."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from llamajax.config.domains import DomainConfig
from llamajax.config.rules import Bound, PositiveFloatOrUnset, PositiveInt, Section

PlannedGpu = Literal[
    "a100-40gb", "a100-80gb", "h100", "h200", "b200", "gb200",
    "rtx-3060-12gb", "rtx-3090", "rtx-4090", "rtx-5090", "a10g", "l4", "l40s",
]  # fmt: skip
"""GPUs that plans support; see `llamajax.estimates.gpus`."""
Imbalance = Annotated[float, Bound(lambda value: value >= 1, "must be at least 1, where all GPUs have equally many tokens")]


@dataclass(frozen=True, kw_only=True)
class HardwareConfig(Section):
    """Machines that `llamajax.plan` plans for. Training uses the devices that jax finds; it reads their memory and speed
    here where it chooses forms and schedules (`parallel`, `xla.latency_profile`)."""

    gpu: Literal["none", PlannedGpu] = "none"
    """GPU model of every node. A100, H100, H200, B200 and GB200 are modules with NVLink, all others cards in PCIe slots.
    `none`: no machine to plan for."""
    nodes: PositiveInt = 1
    """Number of nodes. A node is a group of GPUs joined by NVLink or by the PCIe slots of one board; a network joins the
    nodes."""
    gpus_per_node: PositiveInt = 8
    """GPUs per node. A rack GB200 NVL72 is one node of 72, although four of them share an operating system."""
    gpu_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one GPU and the others of its node; unset: that of the GPU's NVLink, or of its
    PCIe slot with 16 lanes."""
    node_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one node and the network. Unset, per GPU of the node: 12.5e9 for A100 (four ports
    of 200 Gb/s for eight), 50e9 for H100, H200, B200 and GB200 (a port of 400 Gb/s for each), 6.25e9 for L40S and 1.5625e9
    for L4 and A10G (cloud instances of eight). GeForce cards have no usual network: several nodes need this setting."""
    host_memory: PositiveFloatOrUnset = None
    """Bytes of memory of one node's host, nine tenths of which may hold data of its GPUs (`offload`). Unset, for each eight
    GPUs of the node: 1 TiB for A100 with 40 GB, 2 TiB for A100 with 80 GB, H100, H200 and B200 (NVIDIA DGX), 1.9 TB for
    GB200, 768 GiB for A10G and L4, 1.5 TiB for L40S (cloud instances). GeForce cards have no usual host: `offload` needs
    this setting there."""
    host_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one GPU and pinned memory of its host; unset: what PCIe with 16 lanes sustains, as
    in `hardware.calibration` or built in."""
    gpus_per_host_link: PositiveInt = 1
    """GPUs that share one link to the host, and so its bandwidth; 2 in a DGX A100, where two GPUs share a PCIe switch."""
    nvme_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second that the disks of `offload.tiers.nvme_dir` write for one GPU while all GPUs of the node write. The
    last layers keep values that could not be written in time in memory. Unset: 3.8 GB/s for A100 with 80 GB, H100, H200 and
    B200, half of it for A100 with 40 GB (disks of NVIDIA DGX). Other nodes have no usual disks, and only the last group of
    layers keeps its values."""
    domains: tuple[DomainConfig, ...] = ()
    """Groups of nodes with networks of their own, such as InfiniBand for some and RoCE for others. Training places one
    domain after the other, so that only the stages of `mesh.pipeline` communicate across domains. Empty: one network for
    all nodes."""
    domain_bandwidth: PositiveFloatOrUnset = None
    """Bytes per second, each way, between one node and the nodes of other domains."""
    calibration: str | None = None
    """YAML file of cost-model constants measured on this GPU, with a record of how they were measured; see
    `llamajax.estimates.calibration`. Constants that it leaves out, or all if unset, are the built-in ones."""
    expert_imbalance: Imbalance = 1.0
    """Tokens that come to the experts of the busiest GPU, over the mean of all GPUs; all wait for that one. 1: the router
    loads all experts equally. At worst one GPU gets the tokens of all that share the experts."""
    price_per_gpu_hour: PositiveFloatOrUnset = None
    """Price of one GPU for one hour, in any currency; unset: no prices in the plan."""
    token_budget: PositiveFloatOrUnset = None
    """Number of tokens for which the plan reports time and price; unset: the tokens of `train.num_steps` steps,
    or a billion with `train.num_epochs`."""

    def broken_rules(self) -> Iterator[str]:
        yield from self._broken_domains()
        own = bool(self.domains) and all(domain.node_bandwidth for domain in self.domains)
        if self.gpu.startswith("rtx-") and self.nodes > 1 and self.node_bandwidth is None and not own:
            yield (
                f"node_bandwidth: nodes of {self.gpu} have no usual network; set the bytes per second, each way, between one"
                " node and the others"
            )
        if self.calibration == "":
            yield "calibration: must not be empty; name a file, or null for the built-in constants"

    def _broken_domains(self) -> Iterator[str]:
        counts, names = [domain.nodes for domain in self.domains], [domain.name for domain in self.domains]
        if not self.domains:
            if self.domain_bandwidth is not None:
                yield "domain_bandwidth: has no effect without hardware.domains; name them, or remove this"
            return
        if len(counts) == 1:
            yield "domains: one domain is the whole cluster; name two or more, or remove domains"
        elif sum(counts) != self.nodes:
            total = f"{' + '.join(map(str, counts))} = {sum(counts)}"
            yield f"domains: {total} nodes, but hardware.nodes={self.nodes}; correct one of them"
        if len(set(names)) < len(names):
            yield f"domains: {max(names, key=names.count)} is the name of several domains; choose different names"
        if self.gpu != "none" and self.domain_bandwidth is None:
            yield (
                "domain_bandwidth: plans across domains need it; set the bytes per second, each way, between one node and"
                " the nodes of other domains"
            )

    def domain_problems(self, stages: int) -> Iterator[str]:
        """Yields one `key: rule; remedy` line if a domain's nodes are not a whole number of `stages`: only the pipeline may
        cross domains."""
        for index, domain in enumerate(self.domains):
            if stages * domain.nodes % self.nodes:
                own, least = stages * domain.nodes / self.nodes, Fraction(domain.nodes, self.nodes).denominator
                yield (
                    f"hardware.domains.{index}: {domain.name} has {domain.nodes} of {self.nodes} nodes, which hold {own:.3g}"
                    f" of mesh.pipeline={stages} stages, and a stage must be within one domain; set mesh.pipeline to a"
                    f" multiple of {least}, or other domains"
                )
                return

    @property
    def num_devices(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class XlaConfig(Section):
    """Options of the compiler, for training and for plans; without effect on the CPU."""

    latency_profile: str | None = "auto"
    """Costs of the step's instructions, with which the scheduler hides communication. A file, or `auto`: the costs that the
    cost model of `llamajax.plan` predicts for the GPUs in `hardware`, where they make the step faster; this takes two or
    three more compilations when a program is first trained. null: XLA's built-in estimates, which `auto` also uses where
    `hardware` names no GPU, or only one."""
    compilation_cache: str | None = "auto"
    """Folder of compiled programs, from which a second start loads what the first compiled. All processes share it, and
    nobody else may write to it. Programs are in its folder `llamajax-programs`; nothing beside that is touched. `auto`:
    `~/.cache/llamajax/compiled` (or in XDG_CACHE_HOME), on GPUs only. null: no cache. Above 4 GiB, a run that starts removes
    the programs that were not used for longest."""
    deterministic: bool = False
    """Make kernels on GPUs add in one fixed order, so that a restarted run repeats its losses to the last bit. cuDNN's
    backward pass of attention then works without atomics and loses up to 38% of its speed. Kernels are still chosen by
    timing when a program is first compiled, so the run needs a `compilation_cache`, which keeps the choice.
    docs/reliability.md says what is guaranteed where."""
    flags: tuple[str, ...] = ()
    """More XLA options, each `name=value`, which override those that llamajax sets; for example
    [xla_gpu_enable_while_loop_double_buffering=true]. Write lists as YAML. Passes in xla_disable_hlo_passes are disabled in
    addition to those that llamajax disables. Plans ignore `xla_dump_*`."""

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
