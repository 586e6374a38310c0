"""A cluster as the cost model sees it: the data sheets' figures, and the share of them that real programs reach."""

import dataclasses
import functools
import math
from dataclasses import dataclass, field

from llamajax.config.run import Config
from llamajax.estimates.calibration import Constants, read_measurement
from llamajax.estimates.gpus import Gpu, planned_gpu


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Shares of the data sheet that a family of GPUs sustains, one fixed set for every model and cluster; values measured on
    a GPU may replace them (`hardware.calibration`)."""

    matmul_efficiency: float
    """Share of the peak that large bfloat16 products reach in a long run; smaller ones reach less, see
    `kernels.dot_seconds`."""
    attention_efficiency: float
    """Share of the peak that cuDNN's attention reaches forward: causal, heads of 128, counting the causal half only."""
    attention_backward_efficiency: float
    attention_64_efficiency: float
    """The same share with heads of 64."""
    attention_64_backward_efficiency: float
    pallas_efficiency: float
    """Share of the peak that `llamajax.kernels.pallas` reaches forward, in either language: causal, heads of 128, counting
    the tiles that it computes."""
    pallas_backward_efficiency: float
    tokamax_efficiency: float
    """The same share for tokamax's kernels; unused on GPUs that it does not support."""
    tokamax_backward_efficiency: float
    grouped_efficiency: float
    """Share of the peak that products of rows with their experts' matrices reach in whole tiles of many rows
    (`llamajax.kernels.grouped_pallas`)."""
    memory_efficiency: float
    """Share of the memory bandwidth that elementwise kernels and reductions reach."""
    host_bandwidth: float
    """Bytes per second, each way, between one GPU and pinned host memory."""
    node_link_efficiency: float
    """Share of the network's line rate that NCCL reaches."""
    kernel_s: float = 2e-6
    """Seconds that every kernel costs before its first byte: launch gap, ramp-up and tail."""
    float8_share: float = 0.88
    """Share of `matmul_efficiency` that float8 products reach of their own peak, which is twice as high."""
    matmul_start_s: float = 3.5e-6
    """Further seconds that a product costs: to fill its pipeline and to write its last tiles."""
    gpu_link_efficiency: float = 0.8
    """Share of NVLink's bandwidth that NCCL reaches."""
    compute_slowdown: float = 0.19
    """Relative slow-down of a kernel while a collective runs: NCCL takes cores and memory bandwidth."""

    def attention(self, head_dim: int) -> tuple[float, float]:
        """Returns the shares of the peak that cuDNN's attention with heads of `head_dim` reaches forward and backward:
        linear between 64 and 128, constant beyond."""
        wide = min(max((head_dim - 64) / 64, 0.0), 1.0)
        return (
            (1 - wide) * self.attention_64_efficiency + wide * self.attention_efficiency,
            (1 - wide) * self.attention_64_backward_efficiency + wide * self.attention_backward_efficiency,
        )


# Products: the only fitted share, by `python scripts/plan_accuracy.py --fit`: with it the median error of all published runs
# on such GPUs is zero (docs/plan_accuracy.md). The best product measured anywhere reaches 271 TFLOP/s = 0.87 on an A100, 795
# = 0.80 on an H100 (stas00/ml-engineering, compute/accelerator, "maximum achievable matmul FLOPS"); training sustains less.
# `kernels.dot_seconds` accounts for a product's shape. Its start comes from XLA's own table of an H100
# (xla/service/gpu/model/matmul_interpolator_data.h): the smallest products there take 5.9 us, and a total start of 5.5 us
# meets 87 products within 4% in the median, where 2.0 us are 16% too short.
# Float8: the best product on an H100 reaches 0.709 of its peak, in bfloat16 0.803 (stas00/ml-engineering, as above).
# cuDNN's attention on H100, heads of 128: 530 TFLOP/s forward and 450 backward at 4K to 8K causal (FlashAttention-3,
# arXiv:2407.08608, figures 5 and 6). Heads of 64 in the same figures: forward, causal, 379 of 529 at 8K; backward, not
# causal, 432 of 518. On A100, FlashAttention-2 reaches 180 with heads of 128 and 165 with 64, both passes together (its
# repository's charts), and cuDNN 0.82 of that.
# Nobody has measured llamajax's own kernels, which Triton compiles. Triton's FlashAttention on H100 reaches 353 TFLOP/s
# forward at 4K causal (FlashAttention-3, figure 5; the same with heads of 64 and of 128). We assume this share for A100 as
# well, where it is closer to the best, and a sixth less for the backward passes. tokamax on H100: its authors' times, which
# it ships (version 0.0.17, data/autotuning; heads of 128, 4K and 8K causal), are 567 and 620 TFLOP/s forward, 571 and 614
# backward, where it computes seven products.
# Nobody has measured llamajax's grouped products either. MegaBlocks' block-sparse ones, in tiles of 128 x 128, reach 0.986
# of cuBLAS's rate on an A100 (arXiv:2211.15841, section 6.3): 0.72 of the peak, with training's share. ScatterMoE's in
# Triton, which read rows where they are as ours do, take 1.86 times as long as SonicMoE's for fine-grained experts on an
# H100 (arXiv:2512.14080, abstract): 0.43, if those are as fast as the best product. We assume 0.5 for large groups, on both.
# Memory: copies and fused updates reach 0.85 to 0.9 on both. NVLink: nccl-tests' bus bandwidth of 230 of 300 GB/s and 360 of
# 450 GB/s. Network: nccl-tests reach 0.8 to 0.9 of line rate with adaptive routing of packets (InfiniBand, H100); clusters
# of A100 use Ethernet, where flows collide (arXiv:2406.04594), and Megatron-LLaMA's 256 and 512 A100 with 4 x 200 Gb/s per
# node used 0.38 of it.
# Slow-down: 18.9% on average, measured on A100 and H100 (arXiv:2507.03114). Hosts: PCIe 4 and 5 with 16 lanes.
CALIBRATIONS = {
    "A100": Calibration(
        matmul_efficiency=0.73,
        attention_efficiency=0.52,
        attention_backward_efficiency=0.45,
        attention_64_efficiency=0.48,
        attention_64_backward_efficiency=0.41,
        pallas_efficiency=0.36,
        pallas_backward_efficiency=0.30,
        tokamax_efficiency=0.60,
        tokamax_backward_efficiency=0.60,
        grouped_efficiency=0.50,
        memory_efficiency=0.85,
        node_link_efficiency=0.38,
        host_bandwidth=25e9,
    ),
    "H100": Calibration(
        matmul_efficiency=0.62,
        attention_efficiency=0.53,
        attention_backward_efficiency=0.45,
        attention_64_efficiency=0.38,
        attention_64_backward_efficiency=0.375,
        pallas_efficiency=0.36,
        pallas_backward_efficiency=0.30,
        tokamax_efficiency=0.60,
        tokamax_backward_efficiency=0.60,
        grouped_efficiency=0.50,
        memory_efficiency=0.85,
        node_link_efficiency=0.85,
        host_bandwidth=50e9,
    ),
}
"""Shares by `Gpu.family`."""

# B200: grouped products lose the share that Triton's attention loses. cuDNN 9.13's attention reaches 1,613 / 1.3 TFLOP/s
# forward at best, which is 0.55, compared with 0.53 on an H100, and Triton's 1,613 / 2.7 (FlashAttention-4,
# arXiv:2603.05451, abstract). NVLink: nccl-tests reach 840 of 900 GB/s on a whole NVL72, but with sums in its switches
# (coreweave/nccl-tests, pull request 43).
# GeForce: products of 8,192 reach 163.5 of an RTX 4090's 165.2 TFLOP/s (xytpai/gpuk), and no less in training: its clock
# rises above the data sheet's, and with that share IST-DASLab/llmq's runs are still faster than predicted. PCIe 4 without
# peer-to-peer: 25.8 GB/s for both ways together (tinygrad/open-gpu-kernel-modules, issue 6: RTX 4090), and nccl-tests' bus
# bandwidth of 12.7 GB/s there (pull request 22); PCIe 5: 28 of 63 GB/s with eight RTX 5090 (NVIDIA/nccl, issue 1639). With
# peer-to-peer NCCL is no faster between two sockets (NVIDIA/nccl-tests, issue 74: A40).
# The data sheets of L40S and L4 promise more than their 350 W and 72 W sustain: an L40S trains 3B in bfloat16 with 46% of
# the peak and 93% of GeForce's half of it (IST-DASLab/llmq, README), so attention is assumed to reach half of its share. The
# shares of products on B200 and L40S are fitted like those on A100 and H100, each to the runs of one system; GeForce's share
# is the one measured for products.
_CARD = dataclasses.replace(
    CALIBRATIONS["A100"], matmul_efficiency=0.99, node_link_efficiency=0.85, gpu_link_efficiency=0.40
)
CALIBRATIONS |= {
    "B200": dataclasses.replace(
        CALIBRATIONS["H100"],
        matmul_efficiency=0.565,
        pallas_efficiency=0.27,
        pallas_backward_efficiency=0.22,
        grouped_efficiency=0.37,
    ),
    "RTX-4090": _CARD,
    "RTX-5090": dataclasses.replace(_CARD, gpu_link_efficiency=0.44, host_bandwidth=50e9),
    "L40S": dataclasses.replace(
        _CARD,
        matmul_efficiency=0.615,
        attention_efficiency=0.26,
        attention_backward_efficiency=0.23,
        attention_64_efficiency=0.24,
        attention_64_backward_efficiency=0.21,
        pallas_efficiency=0.18,
        pallas_backward_efficiency=0.15,
        grouped_efficiency=0.31,
    ),
}
_DETERMINISTIC_LOSS = 0.379
"""Share of the rate that attention's backward pass loses without atomics: the largest loss measured for FlashAttention-3 on
H800 (arXiv:2601.21824, abstract). Nobody has published cuDNN's."""


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Nodes joined by one network."""

    num_nodes: int
    node_bandwidth: float
    """Bytes per second, each way, between one node and the others of the domain."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of GPU, `gpus_per_node` of them in every node; devices 0, 1, 2 ... fill node after node."""

    gpu: Gpu
    gpus_per_node: int = 8
    domains: tuple[Domain, ...] = ()
    """Domains of unlike networks, which nodes fill in this order; empty: `gpu.node_bandwidth` joins all nodes."""
    domain_bandwidth: float = math.inf
    """Bytes per second, each way, between one node and the nodes of other domains."""
    measured: Constants = field(default_factory=Constants)
    """Measured constants that replace the built-in ones."""
    deterministic: bool = False
    """Whether cuDNN's backward pass of attention may not use atomics."""
    host_bandwidth: float | None = None
    """Bytes per second, each way, of a link between GPUs and their host; None: that of `calibration`."""
    gpus_per_host_link: int = 1

    @property
    def built_in(self) -> Calibration:
        return CALIBRATIONS[self.gpu.family]

    @functools.cached_property
    def calibration(self) -> Calibration:
        measured = {name: value for name, value in vars(self.measured).items() if value is not None}
        found = dataclasses.replace(self.built_in, **measured)
        if not self.deterministic:
            return found
        kept = 1 - _DETERMINISTIC_LOSS
        return dataclasses.replace(
            found,
            attention_backward_efficiency=kept * found.attention_backward_efficiency,
            attention_64_backward_efficiency=kept * found.attention_64_backward_efficiency,
        )

    @property
    def gpu_link(self) -> float:
        """Bytes per second, each way, that one GPU actually exchanges with the others of its node."""
        return self.gpu.gpu_bandwidth * self.calibration.gpu_link_efficiency

    @property
    def host_link(self) -> float:
        """Bytes per second, each way, between one GPU and pinned memory of its host while all GPUs of the node copy."""
        return (self.host_bandwidth or self.calibration.host_bandwidth) / self.gpus_per_host_link

    @property
    def node_link(self) -> float:
        """Bytes per second, each way, of one GPU's equal share of its node's connection to the network."""
        if self.gpu.node_bandwidth is None:
            return math.inf  # only one node
        return self.gpu.node_bandwidth / self.gpus_per_node * self.calibration.node_link_efficiency


def planned_machine(config: Config) -> Machine:
    """Returns the cluster that `config.hardware` describes.

    Raises:
        ConfigError: it names no GPU, or measured constants that cannot be used: see `read_measurement`.
    """
    hardware, measurement = config.hardware, read_measurement(config.hardware)
    measured = measurement.constants if measurement is not None else Constants()
    gpu = planned_gpu(hardware)
    return Machine(
        gpu=gpu,
        gpus_per_node=hardware.gpus_per_node,
        domains=tuple(
            Domain(num_nodes=domain.nodes, node_bandwidth=domain.node_bandwidth or gpu.node_bandwidth or math.inf)
            for domain in hardware.domains
        ),
        domain_bandwidth=hardware.domain_bandwidth or math.inf,
        measured=measured,
        deterministic=config.xla.deterministic,
        host_bandwidth=hardware.host_bandwidth,
        gpus_per_host_link=hardware.gpus_per_host_link,
    )
