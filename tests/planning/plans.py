"""A plan that no compiler made: a small compiled module, kept as text, replayed for a cluster of 16, with made-up memory."""

import dataclasses
import pathlib

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import TrainConfig
from llamajax.estimates.formulas import mesh_sizes
from llamajax.estimates.gpu_memory_budget import Allowance
from llamajax.estimates.machine import planned_machine
from llamajax.planning.cost.replay import replay
from llamajax.planning.fitting import Candidate, Suggestion
from llamajax.planning.memory import MemoryPlan, PeakTensor
from llamajax.planning.plan import Plan, Schedule
from llamajax.planning.scopes import MEMORY_KINDS, MemoryKind
from llamajax.planning.xla.buffers import Buffer, BufferAssignment
from llamajax.planning.xla.compile import CompiledStep
from llamajax.planning.xla.hlo import Module
from llamajax.planning.xla.parse import parse
from llamajax.step.resolve import resolve_planned
from tests.tiny import tiny_config

HLO = (pathlib.Path(__file__).parent / "hlo" / "fsdp_jax_0.10.hlo").read_text()
GIB = 2**30
CONFIG = tiny_config(
    run_dir="runs/<tiny>",
    model=ModelConfig(
        vocab_size=1024, embed_dim=256, mlp_dim=512, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=32, remat="full",
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=1024),
    train=TrainConfig(num_steps=1000, global_batch_size=32),
    mesh=MeshConfig(data=2, fsdp=4, tensor=2),
    hardware=HardwareConfig(gpu="h100", nodes=4, gpus_per_node=4, price_per_gpu_hour=2.0, token_budget=1e9),
)  # fmt: skip


def step(config: Config = CONFIG, **changes) -> CompiledStep:
    """Returns a step as a compiler could return it for `config`."""
    made = CompiledStep(
        run=resolve_planned(config),
        hlo=HLO,
        buffers=BufferAssignment(arguments=(), other_bytes=0, arena_bytes=0, host_bytes=0, peak=()),
        peak_bytes=0,
        options={"xla_gpu_enable_latency_hiding_scheduler": True},
        compile_s=1.5,
        jax_version="0.10.2",
    )
    return dataclasses.replace(made, **changes)


def memory(peak_bytes: int = 60 * GIB) -> MemoryPlan:
    state: dict[MemoryKind, int] = {"parameters": 10 * GIB, "optimizer": 20 * GIB, "temporaries": peak_bytes - 30 * GIB}
    by_kind = dict.fromkeys(MEMORY_KINDS, 0) | state
    buffer = Buffer(instruction="param.1", opcode="parameter", op_name="", dtype="f32", shape=(4, 256), size=10 * GIB)
    tensor = PeakTensor(buffer, "parameters", "model.[bold]")
    return MemoryPlan(
        by_kind=by_kind,
        argument_bytes=30 * GIB,
        temp_bytes=peak_bytes - 30 * GIB,
        peak_bytes=peak_bytes,
        host_bytes=0,
        host_room_bytes=1e12,
        capacity_bytes=84_942_979_072,
        allowance=Allowance(num_communicators=7),
        training_fraction=0.92,
        tensors=(tensor,),
    )


def schedule(*, peak_bytes: int = 60 * GIB, seconds: float = 0.0, config: Config = CONFIG) -> Schedule:
    """A schedule whose step takes `seconds` longer than the module's, all of them waiting for communication."""
    module: Module = parse(HLO)
    timeline = replay(module, planned_machine(config), mesh_sizes(config))
    timeline = dataclasses.replace(
        timeline, step_time_s=timeline.step_time_s + seconds, exposed_comm_s=timeline.exposed_comm_s + seconds
    )
    return Schedule(step=step(config), module=module, memory=memory(peak_bytes), timeline=timeline)


def plan(*, config: Config = CONFIG, peak_bytes: int = 60 * GIB) -> Plan:
    """The profile saves a millisecond; without room for it, one change is suggested."""
    blind = schedule(peak_bytes=peak_bytes, seconds=1e-3, config=config)
    made = Plan(
        config=config,
        guessed=blind,
        informed=schedule(peak_bytes=peak_bytes, config=config),
    )
    if made.chosen.memory.fits:
        return made
    changes = {"train.grad_accum_steps": 4}
    suggestion = Suggestion(
        candidate=Candidate(changes=changes, config=config.changed(changes), flops_ratio=1.0),
        memory=memory(),
        step_time_s=2 * made.chosen.timeline.step_time_s,
    )
    return dataclasses.replace(made, suggestions=(suggestion,))
