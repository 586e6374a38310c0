"""Holmes (arXiv:2312.03549): training across InfiniBand and RoCE, as the cost model predicts it.

Only the bandwidths of the three networks are fitted, to the published runs on four nodes. The runs on eight nodes, and those
on both networks, are predicted. No constant of the cost model takes part.
"""

import dataclasses
from collections.abc import Sequence

from llamajax.estimates.partition import partition
from scripts.accuracy.programs import MEGATRON_2023
from scripts.accuracy.run import Model, Run
from scripts.accuracy.step import compute_seconds, step_seconds

GPT_3_6B = Model(
    vocab_size=51200, embed_dim=3072, mlp_dim=4 * 3072, num_layers=30, num_heads=32, num_kv_heads=32, head_dim=96,
    is_gated=False,
)  # fmt: skip
GPT_7_5B = Model(
    vocab_size=51200, embed_dim=4096, mlp_dim=4 * 4096, num_layers=36, num_heads=32, num_kv_heads=32, is_gated=False
)
FOUR_NODES = {"InfiniBand": 197.0, "RoCE": 160.0, "Ethernet": 122.0}
EIGHT_NODES = {"InfiniBand": 148.0, "RoCE": 145.0, "Ethernet": 83.0}
"""Published TFLOP/s per GPU: GPT 3.6B (a summary of the paper at linnk.ai)."""
HYBRID_7_5B = 197.0
"""Published TFLOP/s per GPU: GPT 7.5B on four nodes of each network, read off a chart in the repository CodexDive/Holmes; 5
more or less."""
BATCH = 768
"""Rows per step of GPT 3.6B. Assumed, like two stages without tensor parallelism and twice these rows for GPT 7.5B: with 512
or 1,536 rows other bandwidths are fitted, and predictions for eight nodes differ by 1%."""


def run(nodes: int, node_bandwidth: float, model: Model = GPT_3_6B, rows: int = BATCH) -> Run:
    """Returns the run as examples/pretrain_gpt_4_nodes.sh in Holmes' repository describes it: micro-batches of 4 rows of
    2,048 tokens, FlashAttention, attention computed again, an optimizer that exchanges during both passes."""
    replicas, gpu = nodes * 8 // 2, "a100-80gb"
    return Run(
        name=f"Holmes, {nodes} nodes", published=1.0, source="arXiv:2312.03549", program=MEGATRON_2023, model=model,
        seq_len=2048, sequences=4, grad_accum_steps=rows // (4 * replicas), gpu=gpu, nodes=nodes,
        node_bandwidth=node_bandwidth, pipeline=2, exchange="zero1", gradient_bytes=4, copies=10, attention="flash 2",
        attention_again=True,
    )  # fmt: skip


def tflops(of: Run, seconds: float) -> float:
    """Returns TFLOP/s per GPU as Megatron-LM counts them: all layers computed again, attention in full."""
    L, D, T, V = of.model.num_layers, of.model.embed_dim, of.seq_len, of.model.vocab_size
    return 96 * L * D**2 * (1 + T / 6 / D + V / 16 / L / D) * of.tokens_per_step / seconds / 1e12


def predicted(
    nodes: int,
    stages: Sequence[float],
    between: float,
    layers: Sequence[int] | None = None,
    model: Model = GPT_3_6B,
    rows: int = BATCH,
) -> float:
    """Returns the predicted TFLOP/s per GPU of a pipeline of two stages on half of the nodes each.

    Every stage takes the time of a run with its layers and its network everywhere, and the slower one sets the pace.
    Micro-batches travel while stages compute, except the first one forward and the last one backward.

    Args:
        nodes: nodes of both stages.
        stages: bytes per second, each way, of a node in each stage's network.
        between: the same between the stages.
        layers: layers of the stages; None: half of the model each.
        model: the model.
        rows: rows per step.
    """
    whole, slowest = run(nodes, between, model, rows), 0.0
    hop = 2 * whole.tokens * model.embed_dim / whole.machine().node_link
    for bandwidth, own in zip(stages, layers or [model.num_layers // 2] * 2, strict=True):
        stage = run(nodes, bandwidth, dataclasses.replace(model, num_layers=2 * own), rows)
        late = max(0.0, hop - sum(compute_seconds(stage, stage.machine())))
        slowest = max(slowest, step_seconds(stage, stage.machine()) + stage.grad_accum_steps * late)
    return tflops(whole, slowest + 2 * hop)


def fitted_bandwidths() -> dict[str, float]:
    """Returns the bytes per second, each way, of one node in every network that the runs on four nodes imply."""
    return {network: _fitted(published) for network, published in FOUR_NODES.items()}


def _fitted(published: float) -> float:
    low, high = 1e8, 1e12
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predicted(4, (middle, middle), middle) < published else (low, middle)
    return high


def table_rows() -> list[tuple[str, float | None, float, str]]:
    """Returns the rows of docs/plan_accuracy.md: run, published and predicted TFLOP/s per GPU, and a remark."""
    bandwidths = fitted_bandwidths()
    rows: list[tuple[str, float | None, float, str]] = []
    for nodes, published in ((4, FOUR_NODES), (8, EIGHT_NODES)):
        for network, speed in published.items():
            own = bandwidths[network]
            how = f"fitted: {own / 1e9:.1f} GB/s per node" if nodes == 4 else "predicted"
            rows.append((f"GPT 3.6B, {nodes} nodes of {network}", speed, predicted(nodes, (own, own), own), how))
    both, between = (bandwidths["InfiniBand"], bandwidths["RoCE"]), bandwidths["Ethernet"]
    for model, batch, known in ((GPT_3_6B, BATCH, None), (GPT_7_5B, 2 * BATCH, HYBRID_7_5B)):
        half = model.num_layers // 2
        for layers in ([half, half], partition(model.num_layers, (FOUR_NODES["InfiniBand"], FOUR_NODES["RoCE"]))):
            name = "GPT 3.6B" if model is GPT_3_6B else "GPT 7.5B"
            name += f", 4 nodes of InfiniBand with {layers[0]} layers, 4 of RoCE with {layers[1]}"
            own = known if layers[0] != half else None
            rows.append((name, own, predicted(8, both, between, layers, model, batch), "predicted"))
    return rows
