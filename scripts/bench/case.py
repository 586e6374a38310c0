"""Measured case, identical in the process of every row: models, batches, optimizer, and a row's choices."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.file import load_config
from llamajax.config.machine import HardwareConfig, XlaConfig
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.estimates.device_memory import expected_bytes
from llamajax.estimates.formulas import flops_per_token, num_params

ROOT = Path(__file__).parents[2]
SEED = 0
IGNORE = -1
"""Target of a document's last token, if the document is closed to the next."""
WARMUP_STEPS, WINDOW_STEPS, NUM_WINDOWS = 5, 5, 4
"""Steps of a round before the clock runs, and windows of steps; the host waits for the device only after each window."""
LOSS_STEPS = 20
"""Number of first losses to compare."""
HEAD_CHUNK = 8192
"""Number of tokens for which `torch_ideal` holds logits at once."""
TOY = "toy"
_TOY = ModelConfig(
    vocab_size=512, embed_dim=64, mlp_dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_seq_len=128,
    init_std=0.1, tie_embeddings=True,
)  # fmt: skip
_8B = "llama3_1_8b_8xh200"
MODELS: dict[str, tuple[str, dict[str, Any], int, Any]] = {
    "1b": ("llama3_2_1b_8xh100", {}, 32_768, "float32"),
    "3b": ("llama3_2_3b_8xh100", {}, 32_768, "float32"),
    "8b16": (_8B, {"num_layers": 16}, 32_768, "float32"),
    # No card has room for gradient sums beside the state, so a step is one micro-batch.
    "8b": (_8B, {}, 8192, "bfloat16"),
    TOY: ("", {}, 512, "float32"),
}
"""Models by their names in `--models`: file in `configs/` with the model, changes to the model, tokens per step, and dtype
of AdamW's moments."""
REMATS = {
    "hf": ("none", "full"),
    "torch_ideal": ("none", "save_attention_qkv", "full"),
    "jax_naive": ("none", "full"),
    "llamajax": ("none", "save_attention_qkv_mlp", "save_attention_qkv", "save_attention", "full"),
}
"""Recomputation that each row supports in the backward pass, by its name in `model.remat`; least recomputation first."""
TORCH_ROWS = ("hf", "torch_ideal")
RECOMPUTED = {
    "none": (),
    "save_attention_qkv_mlp": (),
    "save_attention_qkv": ("gate and up",),
    "save_attention": ("gate and up", "qkv"),
    "full": ("gate and up", "qkv", "output"),
}
"""Products that each kind of recomputation repeats."""
FLOPS_PER_BYTE = 240
"""FLOPs that a GPU computes in the time of one byte from memory: 700 TFLOP/s of products, 3 TB/s."""
PASSES = ("forward", "input gradient", "weight gradient")
"""Three products of training with a weight, all with the same FLOPs."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Choices of a row."""

    micro_batch: int
    """Number of rows at a time."""
    remat: str

    def __str__(self) -> str:
        return f"{self.micro_batch} at a time, {self.remat}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on rows of one kind."""

    model: str
    """Name of the model in `MODELS`."""
    seq_len: int
    packed: bool
    """Whether rows hold several documents, closed to each other; otherwise each row is one document."""

    def __str__(self) -> str:
        return f"{self.model}, {self.seq_len:,} tokens{', packed' if self.packed else ''}"

    @property
    def is_toy(self) -> bool:
        """Whether this is the CPU's toy case."""
        return self.model == TOY

    @property
    def tokens(self) -> int:
        """Number of tokens per step."""
        return max(MODELS[self.model][2], self.seq_len)

    @property
    def rows(self) -> int:
        """Number of rows per step."""
        return self.tokens // self.seq_len

    @property
    def num_steps(self) -> int:
        """Number of steps in a round."""
        return WARMUP_STEPS + NUM_WINDOWS * WINDOW_STEPS

    @cached_property
    def network(self) -> ModelConfig:
        """Configuration of the model."""
        file, changes, *_ = MODELS[self.model]
        model = load_config(ROOT / "configs" / f"{file}.yaml").model if file else _TOY
        return dataclasses.replace(
            model, **changes, remat="none", attention_kernel="auto", attend_across_documents=not self.packed
        )

    def config(self, choice: Choice) -> Config:
        """Returns the run of `llamajax`; every row uses its optimizer."""
        remat: Any = choice.remat
        return Config(
            run_dir="unused",
            seed=SEED,
            model=dataclasses.replace(self.network, remat=remat),
            data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=self.seq_len),
            train=TrainConfig(
                num_steps=self.num_steps, global_batch_size=self.rows, grad_accum_steps=self.rows // choice.micro_batch
            ),
            optimizer=OptimizerConfig(
                learning_rate=3e-4, schedule="constant", warmup_steps=5, moment_dtype=MODELS[self.model][3]
            ),
            mesh=MeshConfig(num_cpu_devices=1 if self.is_toy else None),
            hardware=HardwareConfig(gpus_per_node=1),
            xla=XlaConfig(compilation_cache=None),
        )

    def candidates(self, row: str, memory_bytes: float) -> list[Choice]:
        """Returns the choices that a row tries in turn until one fits, by cost. Leaves out those that an estimate of memory,
        accurate to some 15%, rules out; if it rules out all, returns the one with the least memory."""
        sizes = [n for n in range(self.rows, 0, -1) if self.rows % n == 0]
        choices = [Choice(micro_batch=n, remat=remat) for remat in REMATS[row] for n in sizes]
        num_bytes = {choice: self._num_bytes(row, choice) for choice in choices}
        fitting = [choice for choice in choices if num_bytes[choice] <= 1.15 * memory_bytes]
        return sorted(fitting, key=self._cost) or [min(choices, key=num_bytes.__getitem__)]

    def _cost(self, choice: Choice) -> float:
        """Returns the FLOPs of recomputation, plus the time of summing gradients in fp32, expressed in FLOPs."""
        again = sum(
            2 * width * out * layers for width, out, layers in (self.gemms()[name] for name in RECOMPUTED[choice.remat])
        )
        num_sums = self.rows // choice.micro_batch
        return self.tokens * again + FLOPS_PER_BYTE * 12 * num_params(self.network) * (num_sums if num_sums > 1 else 0)

    def _num_bytes(self, row: str, choice: Choice) -> float:
        """Returns the expected memory of a row. All rows but `llamajax` and `torch_ideal` hold all logits at once. Without
        recomputation, torch keeps less than jax, and `jax_naive` keeps every layer's scores in bfloat16 and fp32."""
        keeps_all, of_torch = choice.remat == "none", row in TORCH_ROWS
        least = dataclasses.replace(choice, remat="save_attention_qkv_mlp") if keeps_all and of_torch else choice
        config, tokens = self.config(least), choice.micro_batch * self.seq_len
        logits = (min(tokens, HEAD_CHUNK) if row in ("torch_ideal", "llamajax") else tokens) * self.network.vocab_size
        scores = tokens * self.seq_len * self.network.num_heads if row == "jax_naive" else 0
        parts = expected_bytes(config, config.mesh.axis_sizes(1), max_chunk_scores=scores, max_chunk_logits=logits)
        return sum(parts.values()) + (6 * scores * self.network.num_layers if keeps_all else 0)

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions of a step's tokens in their documents, int32 [rows, T], the same in all steps. The lengths of packed
        documents have evenly distributed logarithms; the last document of a row is cut."""
        rng, found = np.random.default_rng(SEED), np.tile(np.arange(self.seq_len, dtype=np.int32), (self.rows, 1))
        for row in found if self.packed else ():
            at = 0
            while at < self.seq_len:
                row[at:] = np.arange(self.seq_len - at)
                at += int(np.exp(rng.uniform(np.log(self.seq_len / 64), np.log(self.seq_len))))
        return found

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """`tokens`, `targets`, `segment_ids` and `positions` of a step, int32 [rows, T]; random, by a fixed seed.

        Token ids follow Zipf's law, as in texts, so that the model can learn something.
        """
        vocab_size, positions = self.network.vocab_size, self.positions
        share = np.cumsum(1.0 / np.arange(1, vocab_size + 1))
        drawn = np.random.default_rng((SEED, step)).random((self.rows, self.seq_len + 1)) * share[-1]
        ids = np.random.default_rng(SEED).permutation(vocab_size)[np.searchsorted(share, drawn)].astype(np.int32)
        targets = ids[:, 1:].copy()
        targets[:, :-1][positions[:, 1:] == 0] = IGNORE
        segment_ids = np.cumsum(positions == 0, axis=1, dtype=np.int32)
        return {"tokens": ids[:, :-1].copy(), "targets": targets, "segment_ids": segment_ids, "positions": positions}

    def flops(self, *, full_attention: bool = False) -> float:
        """Returns the FLOPs of a step, forward and backward, without recomputation; attention counts what documents see, or
        whole rows."""
        keys = float(self.positions.mean()) + 0.5  # matches the formula: half the row if it is one document
        return self.tokens * flops_per_token(self.network, self.seq_len, full_attention=full_attention, keys=keys)

    def gemms(self) -> dict[str, tuple[int, int, int]]:
        """Returns each product with a weight: input width, output width, and number of layers that have it."""
        model = self.network
        heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        return {
            "qkv": (model.embed_dim, heads + 2 * kv_heads, model.num_layers),
            "output": (heads, model.embed_dim, model.num_layers),
            "gate and up": (model.embed_dim, 2 * model.mlp_dim, model.num_layers),
            "down": (model.mlp_dim, model.embed_dim, model.num_layers),
            "head": (model.embed_dim, model.vocab_size, 1),
        }

    @property
    def gemm_tokens(self) -> int:
        """Number of tokens in the products that are timed for the ceiling."""
        return min(8192, self.tokens)


def digest(tokens: np.ndarray) -> str:
    """Returns a digest of the tokens that a row has seen."""
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int32).tobytes()).hexdigest()[:16]


def norms_by_kind(squares: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns norms of tensors by Hugging Face name, from their sums of squares; the tensors of all layers form one kind,
    such as `self_attn.q_proj`."""
    found: dict[str, float] = {}
    for hf_name, square in squares:
        kind = re.sub(r"^model\.(layers\.(\d+|\{layer\})\.)?", "", hf_name).removesuffix(".weight")
        found[kind] = found.get(kind, 0.0) + square
    return {kind: math.sqrt(square) for kind, square in found.items()}
