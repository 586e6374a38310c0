"""Latency profiles, and a run that is told one."""

import re
import struct

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.machine import HardwareConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig

CONFIG = Config(
    run_dir="run",
    model=ModelConfig(
        vocab_size=4096, embed_dim=2048, mlp_dim=8192, num_layers=6, num_heads=16, num_kv_heads=4, head_dim=128, remat="full"
    ),
    data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=2048),
    mesh=MeshConfig(fsdp=16),
    train=TrainConfig(num_steps=100, global_batch_size=32, grad_accum_steps=2),
    optimizer=OptimizerConfig(learning_rate=1e-3),
    hardware=HardwareConfig(gpu="h100", nodes=2, node_bandwidth=200e9),
)

LINE = re.compile(r'costs \{ name: "([\w.\-]+)" cost_us: ([\d.]+) \}')

COSTS = {"all-gather-start": 7.0, "fusion.1.remat": 0.25}
TEXT = 'costs { name: "all-gather-start" cost_us: 7.000 }\ncosts { name: "fusion.1.remat" cost_us: 0.250 }\n'


def costs(text: str) -> dict[str, float]:
    found = [LINE.fullmatch(line) for line in text.splitlines()]
    assert None not in found
    return {match[1]: float(match[2]) for match in found if match}


def binary(costs: dict[str, float]) -> bytes:
    """A `ProfiledInstructionsProto` on the wire."""
    entries = [b"\x0a" + bytes([len(n)]) + n.encode() + b"\x11" + struct.pack("<d", us) for n, us in costs.items()]
    return b"".join(b"\x0a" + bytes([len(entry)]) + entry for entry in entries)
