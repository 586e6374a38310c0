"""Experts in compiled steps: all-to-alls, their bytes, and what is computed, against the formulas."""

import dataclasses
import functools

import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.experts import ExpertsConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.estimates.communication import expert_bytes
from llamajax.estimates.experts import Dispatch
from llamajax.planning.plan import Schedule, planned, replayed
from llamajax.planning.report.figures import schedule_figures
from tests.tiny import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("gpu_compiler")]
RATIO = 4
LAYERS = 2
FINE = tiny_config(
    model=ModelConfig(
        vocab_size=1024, embed_dim=512, mlp_dim=512, num_layers=LAYERS, num_heads=4, num_kv_heads=4, head_dim=128,
        max_seq_len=512, attend_across_documents=True, compute_dtype="bfloat16", remat="none",
        experts=ExpertsConfig(num_experts=32, top_k=4, mlp_dim=512 // RATIO, gated=False),
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=512),
    train=TrainConfig(num_steps=10, global_batch_size=64),
    mesh=MeshConfig(fsdp=1, expert=16),
    hardware=HardwareConfig(gpu="h100", nodes=2),
).changed({"parallel.stack": "scan", "parallel.expert_exchange": "blocks", "xla.latency_profile": None})  # fmt: skip
BIGMAC = FINE.changed({"model.experts.latent_dim": 512 // RATIO, "model.experts.mlp_dim": 512})


@functools.cache
def schedule(config: Config) -> Schedule:
    return planned(config)


KEPT = BIGMAC.changed({"model.remat": "save_attention_qkv_mlp"})
FORMS = {
    "fine": (FINE, "all-to-all"),
    "bigmac": (BIGMAC, "all-to-all"),
    "filled": (KEPT.changed({"parallel.expert_exchange": "ragged"}), "ragged-all-to-all"),
}


@pytest.mark.parametrize(("config", "kind"), FORMS.values(), ids=FORMS)
def test_tokens_travel_four_times_per_layer(config, kind):
    made = schedule(config)
    mesh = made.step.run.mesh
    way = Dispatch.of(config, mesh)
    sent = [use for use in made.timeline.collectives if use.collective.kind == kind]
    assert sum(use.count for use in sent) == 4 * LAYERS
    whole = 2 * way.rows * way.width
    filled = (way.header_rows + way.choices / way.peers) / way.block_rows if way.is_ragged else 1
    assert {use.collective.num_bytes for use in sent} == {round(filled * whole)}
    assert {(use.collective.axis, use.collective.link) for use in sent} == {("expert", "inter_node")}
    wire = sum(use.count * sum(use.collective.wire_bytes.values()) for use in sent)
    assert wire == pytest.approx(expert_bytes(config, mesh), rel=1e-6)
    told = schedule_figures(config, made)
    assert told["flops_factor"] == pytest.approx(1, abs=0.05)
    assert told["wire_bytes_factor"] == pytest.approx(1, abs=0.03)
    assert not told["not_understood"]
    assert told["argument_bytes"] < told["peak_bytes"]


def test_bigmac_sends_exactly_its_ratio():
    """Blocks without their headers, which have as many numbers whatever the width of a token."""
    ways = [Dispatch.of(config, schedule(config).step.run.mesh) for config in (FINE, BIGMAC)]
    tokens = []
    for config, way in zip((FINE, BIGMAC), ways, strict=True):
        uses = [use for use in schedule(config).timeline.collectives if use.collective.kind == "all-to-all"]
        whole = sum(use.count * use.collective.num_bytes for use in uses)
        tokens.append(whole * way.slots / way.block_rows)
    assert tokens[0] == RATIO * tokens[1]


def test_an_uneven_load_takes_time_and_rounds():
    step = schedule(FINE).step
    seconds, sent = {}, {}
    for imbalance in (1.0, 1.2, 2.0):
        config = dataclasses.replace(FINE, hardware=dataclasses.replace(FINE.hardware, expert_imbalance=imbalance))
        timeline = replayed(step, config).timeline
        seconds[imbalance] = timeline.compute_by_kind["experts"]
        sent[imbalance] = sum(use.count for use in timeline.collectives if use.collective.kind == "all-to-all")
        assert timeline.flops == pytest.approx(schedule(FINE).timeline.flops, rel=0.005)  # places of rounds are products
    assert seconds[1.0] < seconds[1.2] < 1.2 * seconds[1.0] < seconds[2.0]
    assert sent[1.0] == sent[1.2] == 4 * LAYERS < sent[2.0]
