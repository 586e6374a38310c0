"""Published training speeds beside what `llamajax.planning` predicts for the same runs: the tables of docs/plan_accuracy.md.

    python scripts/plan_accuracy.py

Compiles every run for its cluster, without a GPU (extra `plan`), and writes the tables into the document between its
marks; some five minutes on two cores. All runs share the constants of `llamajax/planning/machine.py`; nothing here
depends on the published figure but the column that compares.
"""

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamajax.config import Config, DataConfig, HardwareConfig, MeshConfig, ModelConfig, OptimizerConfig, SourceConfig
from llamajax.config import TrainConfig
from llamajax.planning.compile import compile_for, prepare_environment
from llamajax.planning.machine import Machine
from llamajax.planning.network import all_reduce_seconds, ring_seconds
from llamajax.planning.schedule import make_plan, mesh_sizes, planned_machine, replayed
from llamajax.planning.timeline import Timeline

DOCUMENT = Path(__file__).parents[1] / "docs" / "plan_accuracy.md"

Exchange = Literal["ours", "zero3", "zero3 in turn", "hsdp", "zero1", "zero1 in turn", "zero1 every micro-batch"]
"""How weights and gradients travel. `ours`: as the compiled step has it. `zero3`: weights of a layer are gathered forward
and again backward, gradients scattered, all while the neighbouring layer computes (FSDP); `hsdp`: so within a node, and
gradients summed over nodes. `zero1`: gradients scattered during the last micro-batch's backward pass, weights gathered
during the first one's forward pass. `in turn`: nothing is computed meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published run, as nearly as our configuration can say it."""

    name: str
    published: float
    """Tokens per second and GPU."""
    source: str
    model: ModelConfig
    """With what their backward pass recomputed, or the policy of ours that is nearest to it."""
    seq_len: int
    sequences: int
    """Per GPU group that shares a sequence, and micro-batch."""
    grad_accum_steps: int = 1
    gpu: Literal["a100-80gb", "h100"]
    nodes: int
    node_bandwidth: float | None = None
    gpu_bandwidth: float | None = None
    memory_bandwidth: float | None = None
    """Where the card's memory is not the usual one."""
    power: float = 1.0
    """Limit over the usual one; clocks go with its cube root."""
    data: int = 1
    tensor: int = 1
    exchange: Exchange
    gradient_bytes: int = 2
    """Per parameter, on the wire."""

    @property
    def config(self) -> Config:
        """Weights and moments are split over all GPUs that hold different data."""
        replicas = self.nodes * 8 // self.tensor
        return Config(
            run_dir=self.name,
            model=self.model,
            data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=self.seq_len),
            train=TrainConfig(
                num_steps=1000,
                global_batch_size=self.sequences * replicas * self.grad_accum_steps,
                grad_accum_steps=self.grad_accum_steps,
            ),
            optimizer=OptimizerConfig(learning_rate=1e-4),
            mesh=MeshConfig(data=self.data, tensor=self.tensor),
            hardware=HardwareConfig(
                gpu=self.gpu, nodes=self.nodes, node_bandwidth=self.node_bandwidth, gpu_bandwidth=self.gpu_bandwidth
            ),
        )

    @property
    def machine(self) -> Machine:
        machine = planned_machine(self.config)
        gpu = dataclasses.replace(
            machine.gpu,
            peak_flops=machine.gpu.peak_flops * self.power ** (1 / 3),
            memory_bandwidth=self.memory_bandwidth or machine.gpu.memory_bandwidth,
        )
        return dataclasses.replace(machine, gpu=gpu)

    @property
    def tokens(self) -> int:
        """Per GPU and step."""
        return self.sequences * self.grad_accum_steps * self.seq_len // self.tensor


def llama(remat: str, dims: tuple[int, int, int, int, int, int], **changes) -> ModelConfig:
    """`dims`: vocabulary, width, MLP width, layers, heads, kv heads."""
    names = ("vocab_size", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads")
    sizes = dict(zip(names, dims, strict=True))
    return ModelConfig(
        **sizes, head_dim=128, max_seq_len=8192, remat=remat, attend_across_documents=True, **changes  # pyright: ignore
    )


LLAMA2_7B = (32000, 4096, 11008, 32, 32, 32)
LLAMA2_13B = (32000, 5120, 13824, 40, 40, 40)
LLAMA2_70B = (32000, 8192, 28672, 80, 64, 8)
LLAMA3_8B = (128256, 4096, 14336, 32, 32, 8)
MPT_7B = (50432, 4096, 10880, 32, 32, 32)
MPT_70B = (50688, 8192, 21888, 80, 64, 64)
KEPT = "save_attention_qkv_mlp"


def megatron_llama(nodes: int, published: float, exchange: Exchange, how: str) -> Run:
    """Tensor parallel 2, global batch 2048 sequences, micro-batch 4; its plain optimizer scatters fp32 gradients."""
    return Run(
        name=f"Megatron-LLaMA 13B, {nodes * 8} A100, {how}", published=published, source="Megatron-LLaMA README",
        model=llama(KEPT, LLAMA2_13B), seq_len=2048, sequences=4, grad_accum_steps=2048 // (4 * nodes * 4),
        gpu="a100-80gb", nodes=nodes, node_bandwidth=100e9, tensor=2, exchange=exchange,
        gradient_bytes=4 if exchange == "zero1 in turn" else 2,
    )  # fmt: skip


def mosaic(size: str, nodes: int, published: float) -> Run:
    model, sequences = (llama(KEPT, MPT_7B), 6) if size == "7B" else (llama("full", MPT_70B), 8)
    return Run(
        name=f"MosaicML {size}, {nodes * 8} H100", published=published, source="llm-foundry benchmarking README",
        model=model, seq_len=2048, sequences=sequences, gpu="h100", nodes=nodes, exchange="zero3", gradient_bytes=4,
    )  # fmt: skip


def maxtext(nodes: int, data: int, published: float) -> Run:
    return Run(
        name=f"MaxText Llama-2-70B, {nodes * 8} H100", published=published, source="dgxc-benchmarking v24.11.1",
        model=llama("save_attention_qkv", LLAMA2_70B), seq_len=4096, sequences=2, gpu="h100", nodes=nodes, data=data,
        exchange="ours",
    )  # fmt: skip


def nemo(nodes: int, published: float) -> Run:
    return Run(
        name=f"NeMo Llama-3.1-8B, {nodes * 8} H100", published=published, source="dgxc-benchmarking v25.04.02",
        model=llama(KEPT, LLAMA3_8B), seq_len=8192, sequences=1, grad_accum_steps=16, gpu="h100", nodes=nodes,
        exchange="zero1", gradient_bytes=4,
    )  # fmt: skip


RUNS = (
    megatron_llama(4, 2154, "zero1 in turn", "plain"),
    megatron_llama(32, 1890, "zero1 every micro-batch", "overlapped"),
    megatron_llama(64, 1845, "zero1 every micro-batch", "overlapped"),
    megatron_llama(32, 1630, "zero1 in turn", "plain"),
    megatron_llama(64, 1430, "zero1 in turn", "plain"),
    Run(
        name="Colossal-AI Llama-2-7B, 32 A800", published=3105, source="Colossal-AI examples/language/llama",
        model=llama("full", LLAMA2_7B), seq_len=4096, sequences=16, gpu="a100-80gb", nodes=4, gpu_bandwidth=200e9,
        exchange="zero3 in turn",
    ),
    Run(
        name="fms-fsdp Llama-2-7B, 128 A100", published=4550, source="fms-fsdp README", model=llama(KEPT, LLAMA2_7B),
        seq_len=4096, sequences=2, gpu="a100-80gb", nodes=16, node_bandwidth=50e9, data=16, exchange="hsdp",
    ),
    Run(
        name="torchtitan Llama-2-13B, 64 A100", published=2162, source="torchtitan docs/performance.md at 157a12c56",
        model=llama(KEPT, LLAMA2_13B), seq_len=4096, sequences=2, gpu="a100-80gb", nodes=8, node_bandwidth=200e9,
        exchange="zero3", gradient_bytes=4,
    ),
    mosaic("7B", 64, 9670),
    mosaic("70B", 64, 1007),
    maxtext(8, 1, 1170),
    maxtext(256, 16, 1159),
    nemo(1, 10682),
    nemo(16, 10630),
    Run(
        name="torchtitan Llama-3.1-8B, 8 H100 of 500 W", published=6667, source="torchtitan benchmarks, 2024-12",
        model=llama("save_attention_qkv", LLAMA3_8B), seq_len=8192, sequences=2, gpu="h100", nodes=1,
        memory_bandwidth=2.4e12, power=500 / 700, exchange="zero3", gradient_bytes=4,
    ),
)  # fmt: skip


def compiled(run: Run) -> Timeline:
    """The step, replayed; with the latency profile if its own schedule counts."""
    schedule = make_plan(run.config, suggest=False).chosen if run.exchange == "ours" else replayed(compile_for(run.config), run.config)
    return schedule.timeline
