"""Published runs. Add a row here and run `python scripts/plan_accuracy.py` to rewrite the tables.

Rows of `_FOUND_LATER` take no part in the fit of the constants, so they test it.
"""

import dataclasses
from typing import Any, NamedTuple

from scripts.accuracy.programs import (
    COMPILED,
    CURRENT_SCALING,
    EAGER,
    EAGER_NORMS,
    LLMQ,
    MAXTEXT,
    MEGATRON_2021,
    MEGATRON_2023,
    MPT,
    TRANSFORMER_ENGINE,
    Program,
)
from scripts.accuracy.run import LAYER, Exchange, Matrix, Model, Run

# Bytes per parameter and micro-batch that sharding copies. FSDP of one flat parameter: gradients are put together (4) and
# divided (4), for float32 widened before that (4, 6 and 8). FSDP by parameter: weights are copied out of what was gathered,
# forward and backward (4 each), and gradients into what is sent, widened (6). Sums over micro-batches in float32 by a kernel
# of their own: the gradient is read, and the sum read and written (10).
FLAT, FLAT_FLOAT32, BY_PARAMETER, SUMS_APART = 8, 18, 14, 10


def llama(
    vocab_size: int, embed_dim: int, mlp_dim: int, num_layers: int, num_heads: int, num_kv_heads: int, **others: Any
) -> Model:
    return Model(
        vocab_size=vocab_size, embed_dim=embed_dim, mlp_dim=mlp_dim, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_kv_heads, **others,
    )  # fmt: skip


def mpt(embed_dim: int, num_layers: int) -> Model:
    """scripts/train/yamls/pretrain: four times as wide inside, heads of 128."""
    heads = embed_dim // 128
    return llama(50368, embed_dim, 4 * embed_dim, num_layers, heads, heads, is_gated=False)


LLAMA2_7B = llama(32000, 4096, 11008, 32, 32, 32)
LLAMA2_13B = llama(32000, 5120, 13824, 40, 40, 40)
LLAMA2_34B = llama(32000, 8192, 22016, 48, 64, 8)
LLAMA2_70B = llama(32000, 8192, 28672, 80, 64, 8)
LLAMA3_8B = llama(128256, 4096, 14336, 32, 32, 8)
LLAMA3_70B = llama(128256, 8192, 28672, 80, 64, 8)
LLAMA3_405B = llama(128256, 16384, 53248, 126, 128, 8)
NEMOTRON_15B = llama(256000, 6144, 24576, 32, 48, 8, is_gated=False)
QWENS = {
    "0.5B": llama(151936, 896, 4864, 24, 14, 2, head_dim=64),
    "1.5B": llama(151936, 1536, 8960, 28, 12, 2),
    "3B": llama(151936, 2048, 11008, 36, 16, 2),
    "7B": llama(152064, 3584, 18944, 28, 28, 4),
}
MPTS = {
    "1B": mpt(2048, 24), "3B": mpt(2560, 32), "7B": mpt(4096, 32), "13B": mpt(5120, 40), "30B": mpt(7168, 48),
    "70B": mpt(8192, 80),
}  # fmt: skip


def megatron_llama(nodes: int, published: float, exchange: Exchange, how: str) -> Run:
    """examples/LLaMA/LLaMA_13_slurm.sh: tensor parallel 2, micro-batches of 4, 2,048 sequences per step; README: four ports
    of 200 Gb/s per node. FlashAttention 1 is computed again by its backward pass."""
    return Run(
        name=f"Megatron-LLaMA 13B, {nodes * 8} A100, {how}", published=published, source="alibaba/Megatron-LLaMA",
        program=MEGATRON_2023, model=LLAMA2_13B, seq_len=2048, sequences=4, grad_accum_steps=2048 // (4 * nodes * 4),
        gpu="a100-80gb", nodes=nodes, node_bandwidth=100e9, tensor=2, exchange=exchange, gradient_bytes=4, copies=SUMS_APART,
        attention_again=True,
    )  # fmt: skip


def mosaic(size: str, gpu: Any, nodes: int, sequences: int, published: float, *, full: bool = False, **changes: Any) -> Run:
    """scripts/train/benchmarking/README.md; `full`: its column of activation checkpointing."""
    run = Run(
        name=f"MosaicML MPT-{size}, {nodes * 8} {gpu.upper()}", published=published, source="mosaicml/llm-foundry",
        program=MPT, model=MPTS[size], seq_len=2048, sequences=sequences, gpu=gpu, nodes=nodes, exchange="zero3",
        gradient_bytes=4, copies=FLAT_FLOAT32, again=LAYER if full else (), attention_again=full,
        node_bandwidth=200e9 if gpu.startswith("a100") else None,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def maxtext(
    model: Model, what: str, nodes: int, replicas: int, published: float, seq_len: int = 4096, **changes: Any
) -> Run:
    """maxtext/README_70b.md and configure.sh of NVIDIA/dgxc-benchmarking: two sequences per GPU, FSDP (x data parallel)."""
    run = Run(
        name=f"MaxText {what}, {nodes * 8} H100", published=published, source="NVIDIA/dgxc-benchmarking v24.11.1",
        program=MAXTEXT, model=model, seq_len=seq_len, sequences=2, gpu="h100", nodes=nodes, replicas=replicas,
        exchange="hsdp" if replicas > 1 else "zero3", again=("gate", "up"), attention_again=True,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def maxtext3(nodes: int, replicas: int, published: float, *, what: str = "Llama-3-70B", **changes: Any) -> Run:
    """The same of v25.04.02, which keeps queries, keys and values alone (POLICY=save_qkv_proj)."""
    return maxtext(
        LLAMA3_70B, what, nodes, replicas, published, 8192, source="NVIDIA/dgxc-benchmarking v25.04.02",
        again=("out", "gate", "up"), **changes,
    )  # fmt: skip


def fms(size: str, model: Model, gpu: Any, published: float, **changes: Any) -> Run:
    """README: 128 A100 with 400 Gb/s per node, 96 H100 with 800; what is computed again, told from HFU over MFU there."""
    nodes = 16 if gpu == "a100-80gb" else 12
    run = Run(
        name=f"fms-fsdp Llama-2-{size}, {nodes * 8} {gpu[:4].upper()}", published=published,
        source="foundation-model-stack/fms-fsdp", program=COMPILED, model=model, seq_len=4096, sequences=2, gpu=gpu,
        nodes=nodes, node_bandwidth=50e9 if gpu == "a100-80gb" else 100e9, exchange="zero3", copies=FLAT,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def nemo(nodes: int, published: float, **changes: Any) -> Run:
    """llama3.1/README.md: two GPUs share a sequence, 32 micro-batches of one."""
    run = Run(
        name=f"NeMo Llama-3.1-8B, {nodes * 8} H100", published=published, source="NVIDIA/dgxc-benchmarking v25.04.02",
        program=TRANSFORMER_ENGINE, model=LLAMA3_8B, seq_len=8192, sequences=1, grad_accum_steps=32, gpu="h100",
        nodes=nodes, context=2, exchange="zero1", gradient_bytes=4,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def nemo_gb200(nodes: int, seconds: float) -> Run:
    """llama3.1/README.md of v25.07, the examples in its text: 64 sequences per step for each 128 GPUs, in bfloat16. A rack's
    64 GPUs are taken as one node."""
    return nemo(
        nodes, 8192 * 64 / 128 / seconds, name=f"NeMo Llama-3.1-405B, {64 * nodes} GB200", gpu="gb200", gpus_per_node=64,
        source="NVIDIA/dgxc-benchmarking v25.07", model=LLAMA3_405B, tensor=4, hides_tensor=True, pipeline=8, interleaved=8,
    )  # fmt: skip


def bridge(what: str, gpu: Any, nodes: int, published: float, **changes: Any) -> Run:
    """docs/performance-summary.md of NVIDIA-NeMo/Megatron-Bridge, container 25.11, FP8-CS: scaled by the largest of what is
    rounded. 64 GPUs of a rack GB200 are taken."""
    run = Run(
        name="", published=published, source="NVIDIA-NeMo/Megatron-Bridge 25.11",
        program=CURRENT_SCALING, model=LLAMA3_8B, seq_len=8192, sequences=1, gpu=gpu, nodes=nodes, exchange="zero1",
        gradient_bytes=2, float8=True, hides_tensor=True,
    )  # fmt: skip
    run = dataclasses.replace(run, **changes)
    return dataclasses.replace(run, name=f"Megatron-Bridge {what} float8, {run.num_gpus} {gpu.upper()}")


def llmq(size: str, gpu: Any, sequences: int, tokens_per_s: float, *, count: int = 1, float8: bool = False) -> Run:
    """README and benchmarks/ of IST-DASLab/llmq: rows of 1,024 tokens, 512 of them per step, nothing computed again."""
    return Run(
        name=f"LLM.Q Qwen2.5-{size}{' float8' * float8}, {count} {gpu.upper()}", published=tokens_per_s / count,
        source="IST-DASLab/llmq", program=LLMQ, model=QWENS[size], seq_len=1024, sequences=sequences,
        grad_accum_steps=512 // (sequences * count), gpu=gpu, nodes=1, gpus_per_node=count, exchange="zero1", float8=float8,
    )  # fmt: skip


EVERY_SECOND: tuple[Matrix, ...] = ("k", "out", "up")
"""torchtitan's selective checkpointing by operation: every second product is computed again, in the order of its model."""


def titan_a100(name: str, model: Model, seq_len: int, sequences: int, published: float, **changes: Any) -> Run:
    """docs/performance.md of 2024-05 (157a12c56): 64 A100, no compiler, norms fused; the network is not stated."""
    run = Run(
        name=f"torchtitan {name}, 64 A100", published=published, source="pytorch/torchtitan", program=EAGER, model=model,
        seq_len=seq_len, sequences=sequences, gpu="a100-80gb", nodes=8, node_bandwidth=200e9, exchange="zero3",
        gradient_bytes=4, copies=BY_PARAMETER,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def titan_h100(name: str, nodes: int, published: float, program: Program, **changes: Any) -> Run:
    """benchmarks/llama3_h100_202412_torchtitan.md: cards of 500 W with 2.4 TB/s."""
    run = Run(
        name=f"torchtitan {name}, {nodes * 8} H100 of 500 W", published=published, source="pytorch/torchtitan",
        program=program, model=LLAMA3_8B, seq_len=8192, sequences=2, gpu="h100", nodes=nodes, memory_bandwidth=2.4e12,
        power=500 / 700, exchange="zero3", gradient_bytes=4, copies=BY_PARAMETER, again=EVERY_SECOND,
    )  # fmt: skip
    return dataclasses.replace(run, **changes)


def titan_h200(nodes: int, published: float) -> Run:
    """benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md."""
    run = titan_h100("", nodes, published, COMPILED, gpu="h200", power=1.0, memory_bandwidth=None, float8=True)
    return dataclasses.replace(run, name=f"torchtitan Llama-3.1-8B, compiled, float8, {nodes * 8} H200")


FULL: dict[str, Any] = {"again": LAYER, "attention_again": True}
NARROW: dict[str, Any] = {"gradient_bytes": 2, "copies": FLAT}
"""MosaicML's `PURE`: gradients travel in bfloat16."""
_LISTED = (
    megatron_llama(4, 2154, "zero1 in turn", "plain"),
    megatron_llama(32, 1890, "zero1 every micro-batch", "overlapped"),
    megatron_llama(64, 1845, "zero1 every micro-batch", "overlapped"),
    megatron_llama(32, 1630, "zero1 in turn", "plain"),
    megatron_llama(64, 1430, "zero1 in turn", "plain"),
    Run(
        name="Colossal-AI Llama-2-7B, 32 A800", published=3105, source="hpcaitech/ColossalAI", program=EAGER_NORMS,
        model=LLAMA2_7B, seq_len=4096, sequences=16, gpu="a100-80gb", nodes=4, gpu_bandwidth=200e9,
        exchange="zero3 in turn", **FULL,
    ),
    fms("7B", LLAMA2_7B, "a100-80gb", 4550, exchange="hsdp", replicas=16),
    titan_a100("Llama-2-13B", LLAMA2_13B, 4096, 2, 2162),
    mosaic("7B", "h100", 64, 6, 9670),
    mosaic("70B", "h100", 64, 8, 1007, full=True),
    maxtext(LLAMA2_70B, "Llama-2-70B", 8, 1, 1170),
    maxtext(LLAMA2_70B, "Llama-2-70B", 256, 16, 1159),
    nemo(1, 10682),
    nemo(16, 10630),
    titan_h100("Llama-3.1-8B, compiled", 1, 6667, COMPILED),
    mosaic("7B", "a100-80gb", 1, 6, 4641, grad_accum_steps=2),
    mosaic("7B", "h100", 1, 6, 10643),
    mosaic("7B", "h100", 16, 6, 10475),
    mosaic("70B", "h100", 16, 8, 1058, full=True),
    fms("7B", LLAMA2_7B, "h100", 9600, exchange="hsdp", replicas=12),
    maxtext(LLAMA2_70B, "Llama-2-70B", 64, 4, 1155),
)  # fmt: skip
"""Runs that have been in the tables from the beginning."""
_OTHERS = (
    mosaic("70B", "a100-80gb", 8, 8, 410, full=True, grad_accum_steps=4, **NARROW),
    mosaic("30B", "a100-80gb", 1, 3, 916, full=True, grad_accum_steps=21),
    mosaic("13B", "a100-80gb", 1, 2, 2262, grad_accum_steps=3),
    mosaic("3B", "a100-80gb", 1, 10, 10811, grad_accum_steps=2),
    mosaic("1B", "a100-80gb", 1, 14, 20513, grad_accum_steps=4),
    fms("13B", LLAMA2_13B, "a100-80gb", 2150, **FULL, again_share=1 / 3),
    fms("34B", LLAMA2_34B, "a100-80gb", 820, **FULL),
    fms("70B", LLAMA2_70B, "a100-80gb", 410, **FULL),
    titan_a100("Llama-3-8B", LLAMA3_8B, 8192, 1, 2973, again=EVERY_SECOND),
    titan_a100("Llama-3-70B", LLAMA3_70B, 8192, 1, 331, **FULL),
    titan_a100("Llama-2-70B", LLAMA2_70B, 4096, 2, 353, **FULL),
    mosaic("70B", "a100-40gb", 16, 4, 376, full=True, **NARROW),
    mosaic("30B", "a100-40gb", 16, 6, 865, full=True, **NARROW),
    mosaic("13B", "a100-40gb", 8, 16, 1976, full=True, **NARROW),
    mosaic("7B", "a100-40gb", 1, 12, 3679, full=True, grad_accum_steps=4, **NARROW),
    mosaic("3B", "a100-40gb", 1, 5, 10065, grad_accum_steps=8, **NARROW),
    mosaic("1B", "a100-40gb", 1, 8, 19271, grad_accum_steps=8, **NARROW),
    mosaic("30B", "h100", 16, 8, 2199, full=True),
    mosaic("13B", "h100", 16, 16, 5080, full=True),
    mosaic("13B", "h100", 1, 2, 4792),
    mosaic("3B", "h100", 16, 8, 23422),
    mosaic("1B", "h100", 1, 14, 45455),
    fms("13B", LLAMA2_13B, "h100", 4850, **FULL, again_share=1 / 3),
    fms("34B", LLAMA2_34B, "h100", 1830, **FULL),
    fms("70B", LLAMA2_70B, "h100", 890, **FULL),
    titan_h100("Llama-3.1-8B, eager", 1, 5762, EAGER_NORMS),
    titan_h100("Llama-3.1-8B, eager", 16, 5605, EAGER_NORMS),
    titan_h100("Llama-3.1-8B, compiled", 16, 6514, COMPILED),
    titan_h100(
        "Llama-3.1-70B, compiled, tensor 8", 32, 597.3, COMPILED, model=LLAMA3_70B, sequences=16, tensor=8, **FULL,
    ),
    maxtext3(16, 1, 1053),
    maxtext3(64, 4, 1056),
    maxtext3(256, 16, 1031),
    Run(
        name="MaxText Llama-2-7B, 8 H100", published=11361, source="NVIDIA/JAX-Toolbox docs/frameworks/maxtext",
        program=COMPILED, attention="cudnn", model=LLAMA2_7B, seq_len=4096, sequences=2, gpu="h100", nodes=1,
        exchange="zero3",
    ),
    nemo(
        8, 1118, name="NeMo Llama-3.1-70B, 64 H100", model=LLAMA3_70B, grad_accum_steps=64, tensor=4, hides_tensor=True,
        pipeline=4, interleaved=5,
    ),
    nemo(
        64, 207.1, name="NeMo Llama-3.1-405B, 512 H100", model=LLAMA3_405B, grad_accum_steps=64, tensor=8,
        hides_tensor=True, pipeline=8, interleaved=8,
    ),
    nemo(
        2, 6159, name="NeMo Nemotron4-15B, 16 H100", model=NEMOTRON_15B, seq_len=4096, sequences=2, grad_accum_steps=4,
        tensor=2, hides_tensor=True, context=1,
    ),
    maxtext(LLAMA2_70B, "Llama-2-70B float8", 8, 1, 1895, float8=True),
    maxtext3(16, 1, 1806, what="Llama-3-70B float8", float8=True),
    nemo(1, 14048, name="NeMo Llama-3.1-8B float8, 8 H100", float8=True),
    nemo(16, 13739, name="NeMo Llama-3.1-8B float8, 128 H100", float8=True),
    nemo(
        8, 1662, name="NeMo Llama-3.1-70B float8, 64 H100", model=LLAMA3_70B, grad_accum_steps=64, tensor=4,
        hides_tensor=True, pipeline=8, interleaved=5, context=1, float8=True,
    ),
    nemo(
        64, 331.1, name="NeMo Llama-3.1-405B float8, 512 H100", model=LLAMA3_405B, grad_accum_steps=64, tensor=8,
        hides_tensor=True, pipeline=8, interleaved=8, float8=True,
    ),
    titan_h100("Llama-3.1-8B, compiled, float8", 1, 8532, COMPILED, float8=True),
    titan_h100("Llama-3.1-8B, compiled, float8", 16, 8380, COMPILED, float8=True),
    titan_h200(4, 10938),
    titan_h200(8, 10753),
    maxtext(
        LLAMA3_70B, "Llama-3.1-70B", 32, 1, 1056, 8192, name="MaxText Llama-3.1-70B, 256 H200", gpu="h200",
        source="AI-Hypercomputer/gpu-recipes a3ultra", attention_again=False,
    ),
    Run(
        name="Colossal-AI Llama-7B, 8 H200", published=8771, source="hpcaitech/ColossalAI", program=EAGER_NORMS,
        model=LLAMA2_7B, seq_len=4096, sequences=36, gpu="h200", nodes=1, exchange="zero1", **FULL,
    ),
    Run(
        name="Colossal-AI Llama-70B, 16 H200", published=837, source="hpcaitech/ColossalAI", program=EAGER_NORMS,
        model=LLAMA2_70B, seq_len=4096, sequences=48, gpu="h200", nodes=2, exchange="zero1", **FULL,
    ),
    bridge("Llama-3-8B", "h100", 1, 14451, grad_accum_steps=16, exchange="zero3", **FULL, again_share=5 / 32),
    bridge("Llama-3-70B", "h100", 8, 1602, model=LLAMA3_70B, grad_accum_steps=64, tensor=4, pipeline=8, interleaved=5),
    bridge(
        "Llama-3.1-405B", "h100", 128, 292, model=LLAMA3_405B, grad_accum_steps=64, tensor=8, pipeline=8, interleaved=8,
        context=2,
    ),
    bridge("Llama-3-8B", "b200", 1, 30624, sequences=2, grad_accum_steps=8),
    bridge(
        "Llama-3.1-405B", "b200", 16, 661, model=LLAMA3_405B, grad_accum_steps=32, tensor=4, pipeline=8, interleaved=8,
        context=2,
    ),
    bridge("Llama-3-8B", "gb200", 1, 31508, sequences=2, grad_accum_steps=8),
    bridge(
        "Llama-3-70B", "gb200", 1, 4312, gpus_per_node=64, model=LLAMA3_70B, sequences=2, grad_accum_steps=2,
        exchange="zero3", copies=FLAT,
    ),
    bridge(
        "Llama-3.1-405B", "gb200", 4, 813, gpus_per_node=64, model=LLAMA3_405B, grad_accum_steps=384, tensor=4, pipeline=16,
        interleaved=4,
    ),
    llmq("0.5B", "rtx-4090", 16, 39850),
    llmq("1.5B", "rtx-4090", 4, 14072),
    llmq("0.5B", "rtx-4090", 16, 154e3, count=4),
    llmq("0.5B", "rtx-4090", 16, 47645, float8=True),
    llmq("1.5B", "rtx-4090", 4, 20330, float8=True),
    llmq("0.5B", "rtx-4090", 16, 181e3, count=4, float8=True),
    llmq("1.5B", "rtx-4090", 8, 72e3, count=4, float8=True),
    llmq("0.5B", "rtx-5090", 16, 55e3),
    llmq("0.5B", "rtx-5090", 16, 69e3, float8=True),
    llmq("1.5B", "rtx-5090", 8, 27e3, float8=True),
    llmq("1.5B", "rtx-5090", 8, 107e3, count=4, float8=True),
    llmq("0.5B", "l40s", 16, 44e3),
    llmq("1.5B", "l40s", 8, 17e3),
    llmq("3B", "l40s", 4, 8900),
    llmq("0.5B", "l40s", 16, 169e3, count=4),
    llmq("1.5B", "l40s", 8, 65e3, count=4),
    llmq("3B", "l40s", 8, 35e3, count=4),
    llmq("0.5B", "l40s", 32, 47e3, float8=True),
    llmq("1.5B", "l40s", 8, 20e3, float8=True),
    llmq("3B", "l40s", 4, 11e3, float8=True),
)  # fmt: skip
_FOUND_LATER = (
    nemo_gb200(2, 9.347),
    nemo_gb200(4, 9.479),
    llmq("0.5B", "h100", 32, 149.5e3),
    llmq("1.5B", "h100", 32, 58.8e3),
    llmq("3B", "h100", 16, 30.9e3),
    llmq("7B", "h100", 4, 13.8e3),
    llmq("0.5B", "h100", 32, 164e3, float8=True),
    llmq("1.5B", "h100", 32, 73.0e3, float8=True),
    llmq("3B", "h100", 16, 40.4e3, float8=True),
    llmq("0.5B", "l40s", 32, 185e3, count=4, float8=True),
    llmq("1.5B", "l40s", 16, 79e3, count=4, float8=True),
    llmq("3B", "l40s", 8, 44e3, count=4, float8=True),
)
RUNS = (
    *(dataclasses.replace(run, is_listed=True) for run in _LISTED),
    *_OTHERS,
    *(dataclasses.replace(run, is_held_out=True) for run in _FOUND_LATER),
)


def mt_nlg(nodes: int, micro_batches: int, seconds: float) -> Run:
    """arXiv:2201.11990: 1,920 rows per step, 8 GPUs of a node share a layer, 35 stages, all layers recomputed; its cluster
    has eight ports of 200 Gb/s per node."""
    return Run(
        name=f"MT-NLG 530B, {nodes * 8:,} A100", published=MT_NLG_ROWS * 2048 / (nodes * 8) / seconds,
        source="arXiv:2201.11990", program=MEGATRON_2021,
        model=llama(51200, 20480, 4 * 20480, 105, 128, 128, head_dim=160, is_gated=False),
        seq_len=2048, sequences=1, grad_accum_steps=micro_batches, gpu="a100-80gb", nodes=nodes, node_bandwidth=200e9,
        tensor=8, tensor_passes=12, pipeline=35, head_apart=True, sends_apart=True, exchange="zero1 in turn",
        gradient_bytes=4, copies=SUMS_APART, **FULL,
    )  # fmt: skip


class Step(NamedTuple):
    """Published figures of a step."""

    seconds: float
    tflops: int
    """TFLOP/s per GPU, recomputation included."""


MT_NLG_ROWS = 1920
"""Rows of a step of MT-NLG."""
MT_NLG = {
    mt_nlg(nodes, micro_batches, step.seconds): step
    for nodes, micro_batches, step in ((280, 240, Step(60.1, 126)), (350, 192, Step(50.2, 121)), (420, 160, Step(44.4, 113)))
}
"""Runs of MT-NLG, which are no part of `RUNS`: they test pipelines, and set no constant and no range that plans print."""
SCALING = (
    ("Megatron-LLaMA 13B, 32 A100, plain", "Megatron-LLaMA 13B, 256 A100, overlapped"),
    ("Megatron-LLaMA 13B, 32 A100, plain", "Megatron-LLaMA 13B, 512 A100, overlapped"),
    ("Megatron-LLaMA 13B, 32 A100, plain", "Megatron-LLaMA 13B, 256 A100, plain"),
    ("Megatron-LLaMA 13B, 32 A100, plain", "Megatron-LLaMA 13B, 512 A100, plain"),
    ("MaxText Llama-2-70B, 64 H100", "MaxText Llama-2-70B, 2048 H100"),
    ("MaxText Llama-3-70B, 128 H100", "MaxText Llama-3-70B, 2048 H100"),
    ("NeMo Llama-3.1-8B, 8 H100", "NeMo Llama-3.1-8B, 128 H100"),
    ("MosaicML MPT-7B, 8 H100", "MosaicML MPT-7B, 512 H100"),
    ("MosaicML MPT-70B, 128 H100", "MosaicML MPT-70B, 512 H100"),
)
"""Pairs of runs with speeds per GPU to divide."""
