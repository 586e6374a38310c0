"""Published training speeds beside what `llamajax.planning` predicts for the same runs: the tables of docs/plan_accuracy.md.

    python scripts/plan_accuracy.py

Compiles every run for its cluster, without a GPU (extra `plan`), and writes the tables into the document between their
marks: some five minutes on two cores. All runs share the constants of `llamajax/planning/cost/gpu.py`; published speeds
are only compared with.
"""

import dataclasses
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of programs that are too large, and some were

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.formulas import mesh_sizes, num_params
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.planning.cost.gpu import Machine, planned_machine
from llamajax.planning.cost.network import all_reduce_seconds, ring_seconds
from llamajax.planning.cost.replay import replay
from llamajax.planning.cost.timeline import Timeline
from llamajax.planning.plan import make_plan
from llamajax.planning.xla.compile import compile_for, prepare_environment
from llamajax.planning.xla.parse import parse
from llamajax.watch.console import CONSOLE

DOCUMENT = Path(__file__).parents[1] / "docs" / "plan_accuracy.md"

Exchange = Literal["ours", "zero3", "zero3 in turn", "hsdp", "zero1", "zero1 in turn", "zero1 every micro-batch"]
"""How weights and gradients travel. `ours`: as in the compiled step. `zero3`: weights of a layer are gathered forward
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
    """On GitHub: in its README, or for MosaicML scripts/train/benchmarking, for torchtitan docs/performance.md and
    benchmarks/llama3_h100_202412_torchtitan.md, for NVIDIA maxtext/README_70b.md and llama3.1/README.md."""
    model: ModelConfig
    """With the policy of ours for recomputation that is nearest to theirs."""
    seq_len: int
    sequences: int
    """Per micro-batch, on each GPU or group of `tensor` GPUs."""
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
    attention: Literal["cudnn", "flash 1", "flash 2"] = "cudnn"
    """Their kernel; cuDNN's is ours."""
    recomputes_attention: bool = False
    """Beside what `model.remat` says."""
    is_check: bool = False
    """Not one of the runs that the constants were chosen by."""
    unfused: int = 0
    """Bytes per token, layer and channel that their elementwise kernels move beyond what fused ones do."""

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


Remat = Literal["save_attention_qkv_mlp", "save_attention_qkv", "full"]
KEPT: Remat = "save_attention_qkv_mlp"
"""Of runs without recomputation: all matmul outputs are kept but the attention's last, 3% of the products."""


def llama(remat: Remat, dims: tuple[int, int, int, int, int, int]) -> ModelConfig:
    """`dims`: vocabulary, width, MLP width, layers, heads, kv heads. All saw their whole row, documents or not."""
    vocab_size, embed_dim, mlp_dim, num_layers, num_heads, num_kv_heads = dims
    return ModelConfig(
        vocab_size=vocab_size, embed_dim=embed_dim, mlp_dim=mlp_dim, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=128, max_seq_len=8192, remat=remat, attend_across_documents=True,
    )  # fmt: skip


LLAMA2_7B = (32000, 4096, 11008, 32, 32, 32)
LLAMA2_13B = (32000, 5120, 13824, 40, 40, 40)
LLAMA2_70B = (32000, 8192, 28672, 80, 64, 8)
LLAMA3_8B = (128256, 4096, 14336, 32, 32, 8)
MPT_7B = (50368, 4096, 10880, 32, 32, 32)
MPT_70B = (50368, 8192, 21888, 80, 64, 64)


def megatron_llama(nodes: int, published: float, exchange: Exchange, how: str) -> Run:
    """Of examples/LLaMA/LLaMA_13_slurm.sh: tensor parallel 2, micro-batches of 4, 2,048 sequences per step."""
    return Run(
        name=f"Megatron-LLaMA 13B, {nodes * 8} A100, {how}", published=published, source="alibaba/Megatron-LLaMA",
        model=llama(KEPT, LLAMA2_13B), seq_len=2048, sequences=4, grad_accum_steps=2048 // (4 * nodes * 4),
        gpu="a100-80gb", nodes=nodes, node_bandwidth=100e9, tensor=2, exchange=exchange,
        gradient_bytes=4, attention="flash 1", recomputes_attention=True, unfused=110,
    )  # fmt: skip


def mosaic(size: str, nodes: int, published: float, **changes: Any) -> Run:
    """MPT: as wide as a LLaMA, with an MLP of two matrices; ours of three has as many weights."""
    model, sequences = (llama(KEPT, MPT_7B), 6) if size == "7B" else (llama("full", MPT_70B), 8)
    run = Run(
        name=f"MosaicML MPT-{size}, {nodes * 8} H100", published=published, source="mosaicml/llm-foundry",
        model=model, seq_len=2048, sequences=sequences, gpu="h100", nodes=nodes, exchange="zero3", gradient_bytes=4,
        attention="flash 2", unfused=20,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def maxtext(nodes: int, data: int, published: float, **changes: Any) -> Run:
    return Run(
        **changes, name=f"MaxText Llama-2-70B, {nodes * 8} H100", published=published,
        source="NVIDIA/dgxc-benchmarking v24.11.1", model=llama("save_attention_qkv", LLAMA2_70B), seq_len=4096, sequences=2,
        gpu="h100", nodes=nodes, data=data, exchange="ours",
    )  # fmt: skip


def fms(gpu: Literal["a100-80gb", "h100"], nodes: int, node_bandwidth: float, published: float, **changes: Any) -> Run:
    return Run(
        **changes, name=f"fms-fsdp Llama-2-7B, {nodes * 8} {gpu[:4].upper()}", published=published,
        source="foundation-model-stack/fms-fsdp", model=llama(KEPT, LLAMA2_7B), seq_len=4096, sequences=2, gpu=gpu,
        nodes=nodes, node_bandwidth=node_bandwidth, data=nodes, exchange="hsdp", attention="flash 2",
    )  # fmt: skip


def nemo(nodes: int, published: float) -> Run:
    """Two of their GPUs share a sequence (context parallel 2), so each takes 32 halves where ours takes 16 wholes."""
    return Run(
        name=f"NeMo Llama-3.1-8B, {nodes * 8} H100", published=published, source="NVIDIA/dgxc-benchmarking v25.04.02",
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
        name="Colossal-AI Llama-2-7B, 32 A800", published=3105, source="hpcaitech/ColossalAI",
        model=llama("full", LLAMA2_7B), seq_len=4096, sequences=16, gpu="a100-80gb", nodes=4, gpu_bandwidth=200e9,
        exchange="zero3 in turn", attention="flash 2", unfused=440,
    ),
    fms("a100-80gb", 16, 50e9, 4550),
    Run(
        name="torchtitan Llama-2-13B, 64 A100", published=2162, source="pytorch/torchtitan",
        model=llama(KEPT, LLAMA2_13B), seq_len=4096, sequences=2, gpu="a100-80gb", nodes=8, node_bandwidth=200e9,
        exchange="zero3", gradient_bytes=4, attention="flash 2", unfused=110,
    ),
    mosaic("7B", 64, 9670),
    mosaic("70B", 64, 1007),
    maxtext(8, 1, 1170),
    maxtext(256, 16, 1159),
    nemo(1, 10682),
    nemo(16, 10630),
    Run(
        name="torchtitan Llama-3.1-8B, 8 H100 of 500 W", published=6667, source="pytorch/torchtitan",
        model=llama("save_attention_qkv", LLAMA3_8B), seq_len=8192, sequences=2, gpu="h100", nodes=1,
        memory_bandwidth=2.4e12, power=500 / 700, exchange="zero3", gradient_bytes=4, attention="flash 2",
    ),
    mosaic(
        "7B", 1, 4641, name="MosaicML MPT-7B, 8 A100", gpu="a100-80gb", grad_accum_steps=2, node_bandwidth=200e9,
        is_check=True,
    ),
    mosaic("7B", 1, 10643, is_check=True),
    mosaic("7B", 16, 10475, is_check=True),
    mosaic("70B", 16, 1058, is_check=True),
    fms("h100", 12, 100e9, 9600, is_check=True),
    maxtext(64, 4, 1155, is_check=True),
)  # fmt: skip


def step_seconds(run: Run, timeline: Timeline) -> float:
    """One step of theirs: our kernels, their communication.

    Every micro-batch's compute is a third forward, or a quarter with full recomputation. What tensor parallelism
    exchanges is never hidden.
    """
    if run.exchange == "ours":
        return timeline.step_time_s
    machine, model, micro_batches = run.machine, run.model, run.grad_accum_steps
    mesh = mesh_sizes(run.config)
    layer = num_params(model) / model.num_layers / run.tensor
    weights = _along(mesh["fsdp"], mesh["tensor"], 2 * layer, machine)
    gradients = _along(mesh["fsdp"], mesh["tensor"], run.gradient_bytes * layer, machine)
    if run.exchange == "hsdp":
        gradients += all_reduce_seconds(run.gradient_bytes * layer / mesh["fsdp"], run.data, run.data, machine)
    weights, gradients = weights * model.num_layers, gradients * model.num_layers
    compute = their_compute(run, timeline)
    in_turn = sum(use.seconds for use in timeline.collectives if use.collective.axis == "tensor")
    forward = compute / micro_batches * (1 / 4 if model.remat == "full" else 1 / 3)
    backward = compute / micro_batches - forward
    slowdown = machine.calibration.compute_slowdown
    edges = (weights + gradients) / model.num_layers

    def beside(compute: float, exchange: float) -> float:
        """Seconds that `exchange` adds to the `compute` it runs beside."""
        return max(exchange * slowdown / (1 + slowdown), exchange - compute)

    match run.exchange:
        case "zero3" | "hsdp":
            added = micro_batches * (beside(forward, weights) + beside(backward, weights + gradients) + edges)
        case "zero3 in turn":
            added = micro_batches * (2 * weights + gradients)
        case "zero1":
            added = beside(forward, weights) + beside(backward, gradients) + edges
        case "zero1 every micro-batch":
            added = beside(forward, weights) + micro_batches * beside(backward, gradients) + edges
        case "zero1 in turn":
            added = weights + gradients
    return compute + in_turn + added


# TFLOP/s of FlashAttention-2, forward and backward, causal, heads of 128, by sequence length: the charts in its repository.
# FlashAttention-1 takes twice as long (arXiv:2307.08691, abstract).
_FLASH_2 = {"a100-80gb": {2048: 155e12, 4096: 173e12, 8192: 182e12}, "h100": {2048: 265e12, 4096: 294e12, 8192: 308e12}}


def their_compute(run: Run, timeline: Timeline) -> float:
    """Our kernels' seconds, with their attention's in place of ours, and more for what they do not fuse."""
    model, calibration, gpu = run.model, run.machine.calibration, run.machine.gpu
    moved = run.unfused * model.embed_dim * model.num_layers * run.tokens
    if run.gradient_bytes == 4 and run.exchange in ("zero3", "zero1 every micro-batch"):
        moved += 6 * num_params(model) / run.tensor * run.grad_accum_steps  # bf16 gradients, copied into fp32 to be sent
    moving = moved / (gpu.memory_bandwidth * calibration.memory_efficiency)
    if run.attention == "cudnn":
        return timeline.compute_s + moving
    # Two products forward, five backward, half of each masked.
    products = 7 + 2 * (model.remat == "full" or run.recomputes_attention)
    flops = products * run.tokens * model.num_layers * model.num_heads * model.head_dim * run.seq_len
    rate = _FLASH_2[run.gpu][run.seq_len] * run.power ** (1 / 3) / (2 if run.attention == "flash 1" else 1)
    return timeline.compute_s - timeline.compute_by_kind["attention"] + flops / rate + moving


def _along(group_size: int, stride: int, num_bytes: float, machine: Machine) -> float:
    """Seconds of an all-gather or reduce-scatter of `num_bytes` over devices that lie `stride` apart."""
    nodes = max(1, group_size * stride // machine.gpus_per_node)
    return ring_seconds(num_bytes * (group_size - 1) / group_size, group_size - 1, nodes - 1, group_size, nodes, machine)


SCALING = (
    ("Megatron-LLaMA 13B, 32 A100, plain", "Megatron-LLaMA 13B, 256 A100, overlapped"),
    ("Megatron-LLaMA 13B, 32 A100, plain", "Megatron-LLaMA 13B, 512 A100, overlapped"),
    ("Megatron-LLaMA 13B, 32 A100, plain", "Megatron-LLaMA 13B, 256 A100, plain"),
    ("Megatron-LLaMA 13B, 32 A100, plain", "Megatron-LLaMA 13B, 512 A100, plain"),
    ("MaxText Llama-2-70B, 64 H100", "MaxText Llama-2-70B, 2048 H100"),
    ("NeMo Llama-3.1-8B, 8 H100", "NeMo Llama-3.1-8B, 128 H100"),
    ("MosaicML MPT-7B, 8 H100", "MosaicML MPT-7B, 512 H100"),
    ("MosaicML MPT-70B, 128 H100", "MosaicML MPT-70B, 512 H100"),
)
"""Pairs of runs whose speeds per GPU are divided."""


def predict(run: Run) -> float:
    """Tokens per second and GPU."""
    if run.exchange == "ours":
        timeline = make_plan(run.config, suggest=False).chosen.timeline
    else:
        # For the card that was; the step itself is compiled for the usual one.
        timeline = replay(parse(compile_for(run.config).hlo), run.machine, mesh_sizes(run.config))
    return run.tokens / step_seconds(run, timeline)


def table(header: str, rows: list[tuple[str, ...]]) -> str:
    """Markdown: a column of names, three of numbers, and words."""
    columns = header.count("|") + 1
    rule = "|".join(["---"] + ["---:"] * 3 + ["---"] * (columns - 4))
    return "\n".join([f"| {header} |", f"|{rule}|"] + [f"| {' | '.join(row)} |" for row in rows])


def tables(predicted: dict[str, float]) -> dict[str, str]:
    """Those of the document, by the mark they stand behind."""
    published = {run.name: run.published for run in RUNS}
    errors = {run.name: predicted[run.name] / run.published - 1 for run in RUNS}
    result = {}
    for mark, is_check in (("runs", False), ("checks", True)):
        runs = [run for run in RUNS if run.is_check == is_check]
        rows = [
            (run.name, f"{run.published:,.0f}", f"{predicted[run.name]:,.0f}", f"{errors[run.name]:+.1%}", run.source)
            for run in runs
        ]
        sizes = [abs(errors[run.name]) for run in runs]
        result[mark] = (
            table("tokens/s/GPU | published | predicted | error | source", rows)
            + f"\n\nMedian absolute error {statistics.median(sizes):.1%}, largest {max(sizes):.1%}."
        )
    rows = []
    for first, second in SCALING:
        theirs, ours = published[second] / published[first], predicted[second] / predicted[first]
        rows.append((f"{second} / {first}", f"{theirs:.3f}", f"{ours:.3f}", f"{ours - theirs:+.3f}"))
    result["scaling"] = table("speed per GPU / that of the smaller run | published | predicted | difference", rows)
    return result


def main() -> None:
    prepare_environment()
    predicted = {}
    for number, run in enumerate(RUNS, 1):
        predicted[run.name] = predict(run)
        error = predicted[run.name] / run.published - 1
        CONSOLE.print(
            f"{number:2}/{len(RUNS)}  {run.name}: predicted {predicted[run.name]:,.0f}, published {run.published:,.0f}"
            f" tokens/s/GPU, {error:+.1%}",
            soft_wrap=True,
        )
    text = DOCUMENT.read_text(encoding="utf-8")
    for mark, content in tables(predicted).items():
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        _, _, after = rest.partition(f"<!-- end of {mark} -->")
        text = f"{before}<!-- {mark} -->\n{content}\n<!-- end of {mark} -->{after}"
    DOCUMENT.write_text(text, encoding="utf-8")
    CONSOLE.print(f"wrote {DOCUMENT.name}")


if __name__ == "__main__":
    main()
