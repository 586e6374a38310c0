"""GRPO's loss and gradients are those of trl's trainer, on the same completions."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.objective import ObjectiveConfig, RolloutConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.data.rows.packing import fill_row
from llamajax.step.batch import IGNORE, fields
from llamajax.step.state import init_state
from llamajax.step.step import train_step
from llamajax.weights.loading import load_model
from llamajax.weights.open_model import open_pretrained
from tests.adapters import torch, write_base
from tests.converters.models import tiny
from tests.tiny import resolved, single_device_mesh, tiny_config, to_device

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
B, T, PROMPT = 8, 24, 5
CASES: dict[str, tuple[ObjectiveConfig, dict[str, Any]]] = {
    "dapo": (ObjectiveConfig(kind="grpo", clip_high=0.28), {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.04}),
    "grpo": (ObjectiveConfig(kind="grpo", length_normalized=True, kl_weight=0.3), {"loss_type": "grpo", "beta": 0.3}),
    "temperature": (
        ObjectiveConfig(kind="grpo", kl_weight=0.0, rollout=RolloutConfig(temperature=0.7, steps=2)),
        {"loss_type": "bnpo", "temperature": 0.7, "beta": 0.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_trl(case, tmp_path):
    objective, settings = CASES[case]
    write_base(tmp_path / "base", tiny(num_layers=2, num_kv_heads=2))
    found = open_pretrained(tmp_path / "base")
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, T - PROMPT + 1, B)
    ids = rng.integers(3, found.config.vocab_size, (B, T))
    advantages = rng.standard_normal(B).astype(np.float32)
    guessed = -np.log(found.config.vocab_size) + rng.normal(0, 0.3, (2, B, T - PROMPT)).astype(np.float32)
    theirs = _theirs(tmp_path, settings, ids, lengths, advantages, *guessed)

    rows: list[dict[str, np.ndarray]] = []
    for row, length, advantage, old, reference in zip(ids, lengths, advantages, *guessed, strict=True):
        own: dict[str, np.ndarray] = fill_row([row[: PROMPT + length]], T, [np.arange(1, PROMPT + length) >= PROMPT])
        own["advantages"] = np.where(own["targets"] != IGNORE, advantage, np.float32(0))
        for name, values in (("old", old), ("reference", reference)):
            own[name] = np.pad(values, (PROMPT - 1, 1))
        rows.append(own)
    with jax.set_mesh(single_device_mesh()):
        steps = RolloutConfig(temperature=objective.rollout.temperature, max_tokens=T - PROMPT, steps=2)
        config = tiny_config(
            model=found.config, mesh=MeshConfig(num_cpu_devices=1), init_from="base",
            objective=ObjectiveConfig(**{**vars(objective), "rollout": steps}),
            data=DataConfig(sources=(SourceConfig(kind="prompt", paths=("unused",)),), seq_len=T),
            train=TrainConfig(num_steps=1, global_batch_size=B), optimizer=OptimizerConfig(learning_rate=1e-3),
        )  # fmt: skip
        batch = {name: np.stack([row[name] for row in rows]) for name in fields(config)}
        state = init_state(config, load_model(found, config.model))
        _, ours = train_step(resolved(config), state, to_device(config, batch))
    np.testing.assert_allclose(float(ours["loss"]), theirs["loss"], rtol=1e-5)
    np.testing.assert_allclose(float(ours["grad_norm"]), theirs["grad_norm"], rtol=1e-4)
    assert float(ours["clipped"]) > 0.1


def _theirs(tmp_path, settings, ids, lengths, advantages, old, reference) -> dict[str, float]:
    import datasets
    import transformers

    trl: Any = importlib.import_module("trl")
    args = trl.GRPOConfig(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=B, num_generations=B, use_cpu=True, bf16=False,
        max_completion_length=T - PROMPT, report_to=[], **settings,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    prompts = datasets.Dataset.from_dict({"prompt": ["x"]})
    trainer = trl.GRPOTrainer(
        model, reward_funcs=lambda completions, **others: [0.0] * len(completions), args=args, train_dataset=prompts,
        processing_class=_tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    mask = np.arange(T - PROMPT) < lengths[:, None]
    inputs = {
        "prompt_ids": ids[:, :PROMPT], "prompt_mask": np.ones((B, PROMPT), int), "completion_ids": ids[:, PROMPT:],
        "completion_mask": mask.astype(int), "advantages": advantages, "old_per_token_logps": old,
        "ref_per_token_logps": reference, "num_items_in_batch": np.array(mask.sum()),
    }  # fmt: skip
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, {name: torch.tensor(value) for name, value in inputs.items()})
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters() if p.grad is not None])
    return {"loss": float(loss.detach()), "grad_norm": float(norm)}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "x": 3}
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="x")), **special)
