"""FLOPs of a step; the golden plans contain them too."""

import jax
import pytest

from llamajax.config.data import SourceConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.estimates.formulas import mesh_sizes
from llamajax.estimates.machine import planned_machine
from llamajax.kernels import choice
from llamajax.planning.cost.attention import scores_of_calls
from llamajax.planning.cost.flops import planned_flops
from llamajax.planning.cost.replay import replay
from llamajax.planning.xla.compile import compile_for
from llamajax.planning.xla.parse import parse
from llamajax.step import loss
from llamajax.step.resolve import resolve_planned
from llamajax.step.state import abstract_state
from llamajax.step.step import train_step
from llamajax.verification.rows import make_rows
from tests.planning.plans import CONFIG
from tests.tiny import resolved, single_device_mesh, tiny_config


def test_a_ring_computes_hardly_more_than_half_of_the_scores():
    run = CONFIG.changed({"mesh": MeshConfig(fsdp=-1, sequence=4), "model.attention_kernel": "plain"})
    whole, in_ring = (
        planned_flops(resolve_planned(run.changed({"parallel.sequence": form}))).attention for form in ("gather", "ring")
    )
    assert in_ring == whole * (4 * 4 - (4 * 3) // 2 - 1) / (4 * 4)


@pytest.mark.parametrize("kernel", ["cudnn", "pallas", "tokamax"])
def test_only_full_attends_again(monkeypatch, kernel):
    """A forward pass is two products, of 7 of cuDNN's and 9 of llamajax's own and of tokamax's."""
    monkeypatch.setattr(choice, "_missing", lambda: None)
    run = CONFIG.changed({"model.attend_across_documents": True, "model.attention_kernel": kernel, "mesh": MeshConfig()})
    none, kept, full = (
        planned_flops(resolve_planned(run.changed({"model.remat": policy}))).attention
        for policy in ("none", "save_attention", "full")
    )
    assert kept == none
    assert full == pytest.approx(none * {"cudnn": 9 / 7, "pallas": 11 / 9, "tokamax": 11 / 9}[kernel], rel=0.01)


def test_idle_stages_compute_what_nobody_counts():
    """Four stages of two layers, eight micro-batches: 11 ticks forward and 13 backward, 9 of the head; it on all stages."""
    base = CONFIG.changed({"mesh": MeshConfig(pipeline=4, fsdp=-1), "parallel.zero": 1, "model.num_layers": 8})
    base = base.changed({"model.remat": "none", "train.grad_accum_steps": 8, "parallel.pipeline": "1f1b"})
    model, tokens = base.model, 32 * 1024
    head = 6 * model.vocab_size * model.embed_dim * tokens
    run = resolve_planned(base.changed({"parallel.pipeline_head": "last"}))
    flops = planned_flops(run)
    layers = flops.weights - head
    attention = flops.attention * (2 / 7 * 11 + 5 / 7 * 13) / 8
    executed = layers * (1 / 3 * 11 + 2 / 3 * 13) / 8 + attention
    assert flops.idle == pytest.approx(executed - layers - flops.attention + (4 * 9 / 8 - 1) * head)
    shared = planned_flops(resolve_planned(base.changed({"parallel.pipeline_head": "shared"})))
    assert shared.idle == pytest.approx(flops.idle - 3 * 9 / 8 * head)
    assert shared.total == flops.total
    uneven = planned_flops(resolve_planned(base.changed({"parallel.pipeline_head": "shared", "model.num_layers": 7})))
    assert uneven.idle > shared.idle
    assert planned_flops(resolve_planned(CONFIG)).idle == 0


def of_answers(config: Config, kind: str) -> Config:
    """A run of the objective on one device."""
    one = {"mesh": MeshConfig(), "hardware": HardwareConfig(gpu="h100", gpus_per_node=1)}
    data = {"data.sources": (SourceConfig(kind="preference", paths=("x.jsonl",)),)}
    return config.changed(one | data | {"init_from": "model", "objective.kind": kind})


@pytest.mark.slow
def test_a_loss_over_answers_computes_the_logits_again():
    tiny = {
        "model.vocab_size": 1024, "model.embed_dim": 256, "model.mlp_dim": 512, "model.head_dim": 16, "data.seq_len": 32,
        "model.remat": "none", "model.attention_kernel": "plain", "parallel.stack": "unrolled", "train.global_batch_size": 4,
        "mesh.num_cpu_devices": 1,
    }  # fmt: skip
    config = of_answers(tiny_config(), "orpo").changed(tiny)
    jax.set_mesh(single_device_mesh())
    counted = train_step.lower(resolved(config), abstract_state(config), make_rows(config, 0)).compile().cost_analysis()
    assert counted is not None
    assert counted["flops"] == pytest.approx(planned_flops(resolve_planned(config)).total, rel=0.01)


@pytest.mark.usefixtures("gpu_compiler")
@pytest.mark.long
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_a_reference_below_adapters_is_computed_forward(monkeypatch, kind):
    """DPO has one such pass. KTO has three: with other answers, and the reference of both. XLA would share the logits of a
    single chunk between the forward and the backward pass."""
    monkeypatch.setattr(loss, "MAX_CHUNK_LOGITS", 512 * CONFIG.model.vocab_size)
    config = of_answers(CONFIG, kind).changed(
        {"adapters.kind": "lora", "parallel.stack": "scan", "train.global_batch_size": 2}
    )
    run = resolve_planned(config)
    compiled = replay(parse(compile_for(run).hlo), planned_machine(config), mesh_sizes(config), scores_of_calls(run))
    assert compiled.flops == pytest.approx(planned_flops(run).total, rel=0.01)
