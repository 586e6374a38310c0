"""Fifty steps of every preference objective have the losses of trl's trainers, with peft's adapters, on the same batches."""

import dataclasses
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llamajax.config.data import DataConfig, SourceConfig
from llamajax.config.hf_config import hf_config_of
from llamajax.config.model import ModelConfig
from llamajax.config.objective import ObjectiveConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.parallel.arrays import named_arrays
from llamajax.parallel.zero import trained_only
from llamajax.step.batch import IGNORE, OTHER, fields
from llamajax.step.state import TrainState, init_state, with_adapters
from llamajax.step.step import train_step
from llamajax.weights import names
from llamajax.weights.loading import load_adapters, load_model
from llamajax.weights.open_model import open_pretrained
from tests.adapters import torch, write_adapters, write_base
from tests.converters.models import tiny
from tests.tiny import resolved, single_device_mesh, tiny_config, to_device

pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NUM_STEPS, B, T, EOS = 50, 4, 32, 2
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, schedule="constant", grad_clip_norm=None)

CASES: dict[str, tuple[ObjectiveConfig, str, dict[str, Any]]] = {
    "dpo": (ObjectiveConfig(kind="dpo"), "trl.DPO", {}),
    "dpo-nll": (
        ObjectiveConfig(kind="dpo", beta=0.3, nll_weight=0.5), "trl.DPO",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.3},
    ),
    "ipo": (ObjectiveConfig(kind="ipo"), "trl.DPO", {"loss_type": ["ipo"]}),
    "kto": (
        ObjectiveConfig(kind="kto", desirable_weight=1.5), "trl.KTO", {"desirable_weight": 1.5, "undesirable_weight": 1.0},
    ),
    "orpo": (ObjectiveConfig(kind="orpo"), "trl.experimental.orpo.ORPO", {}),
    "simpo": (
        ObjectiveConfig(kind="simpo", beta=2.0, margin=1.0), "trl.experimental.cpo.CPO",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0, "beta": 2.0},
    ),
    "cpo": (ObjectiveConfig(kind="cpo", label_smoothing=0.1), "trl.experimental.cpo.CPO", {"label_smoothing": 0.1}),
}  # fmt: skip


LONG = pytest.mark.long


IN_CI = ("dpo", "ipo", "orpo")


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in IN_CI else LONG) for case in CASES])
def test_losses_are_those_of_trl(case, tmp_path, monkeypatch):
    objective, trainer, settings = CASES[case]
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_base(tmp_path / "base", tiny(num_layers=2, num_kv_heads=2))
    theirs = write_adapters(tmp_path / "base", tmp_path / "peft", seed=None)
    batches, expected = _trained(theirs, trainer, {"beta": 0.1} | settings, tmp_path)
    assert len(batches) == len(expected) == NUM_STEPS
    with jax.set_mesh(single_device_mesh()):
        ours, changed = _ours(tmp_path / "peft", objective, batches)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 0.05
    assert all(is_changed == names.is_adapter(name) for name, is_changed in changed.items())


@pytest.mark.parametrize("center_weight", [pytest.param(0.0, marks=LONG), 0.1])
def test_losses_of_a_reward_model_are_those_of_trl(center_weight, tmp_path):
    theirs = _write_reward_model(tmp_path / "base", tiny(num_layers=2, num_kv_heads=2, head="score"))
    settings = {"center_rewards_coefficient": center_weight or None, "learning_rate": 1e-3}
    batches, expected = _trained(theirs, "trl.Reward", settings, tmp_path)
    assert len(batches) == len(expected) == NUM_STEPS
    with jax.set_mesh(single_device_mesh()):
        found = open_pretrained(tmp_path / "base")
        config = _config(found.config, ObjectiveConfig(kind="reward", center_weight=center_weight))
        config = config.changed({"optimizer.learning_rate": 1e-3})
        _, ours = _history(config, init_state(config, load_model(found, config.model)), batches)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)
    assert np.ptp(expected) > 0.05


def _write_reward_model(directory: Path, config: ModelConfig) -> Any:
    """Writes a model of random weights with a score head, as transformers does; returns it."""
    import transformers

    special = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    known = transformers.AutoConfig.for_model(**hf_config_of(config, special, "float32"))
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(known)
    model.save_pretrained(directory)
    return model


def _ours(
    peft: Path, objective: ObjectiveConfig, batches: list[dict[str, np.ndarray]]
) -> tuple[list[float], dict[str, bool]]:
    """Losses of training on the batches, and which arrays changed, by name."""
    found = open_pretrained(peft)
    assert found.adapters is not None
    assert found.base is not None
    config = _config(found.config, objective, adapters=dataclasses.replace(found.adapters, base="float32"))
    state = init_state(config, load_model(found.base, config.model))
    state = with_adapters(state, load_adapters(found, trained_only(state.model)))
    before = {name: np.asarray(array) for name, array in named_arrays(state.model).items()}
    state, losses = _history(config, state, batches)
    after = named_arrays(state.model)
    return losses, {name: not np.array_equal(array, np.asarray(after[name])) for name, array in before.items()}


def _config(model: ModelConfig, objective: ObjectiveConfig, **sections: Any) -> Config:
    return tiny_config(
        model=dataclasses.replace(model, compute_dtype="float32", remat="none"),
        objective=objective,
        init_from="unused",
        data=DataConfig(sources=(SourceConfig(kind="preference", paths=("unused",)),), seq_len=T),
        optimizer=OPTIMIZER,
        train=TrainConfig(num_steps=NUM_STEPS, global_batch_size=B),
        mesh=MeshConfig(),
        **sections,
    )


def _history(config: Config, state: TrainState, batches: list[dict[str, np.ndarray]]) -> tuple[TrainState, list[float]]:
    """The state after training on the batches, and their losses."""
    step, losses = jax.jit(partial(train_step, resolved(config))), []
    for batch in batches:
        state, metrics = step(state, to_device(config, {name: batch[name] for name in fields(config)}))
        losses.append(float(metrics["loss"]))
    return state, losses


def _trained(
    model: Any, trainer: str, settings: dict[str, Any], directory: Path
) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """Batches and losses of trl's trainer."""
    module, _, name = trainer.rpartition(".")
    found = importlib.import_module(module)
    config = getattr(found, f"{name}Config")(
        output_dir=str(directory / "trl"), max_steps=NUM_STEPS, per_device_train_batch_size=B, logging_steps=1,
        lr_scheduler_type="constant", weight_decay=OPTIMIZER.weight_decay,
        adam_beta1=OPTIMIZER.b1, adam_beta2=OPTIMIZER.b2, adam_epsilon=OPTIMIZER.eps, max_grad_norm=0.0, use_cpu=True,
        bf16=False, activation_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True, max_length=T // 2,
        **({"learning_rate": OPTIMIZER.learning_rate} | settings),
    )  # fmt: skip
    trains = getattr(found, f"{name}Trainer")(
        model=model, args=config, processing_class=_tokenizer(), train_dataset=_answers(is_single=name == "KTO")
    )
    collate, batches = trains.data_collator, []

    def record(examples: list[Any]) -> Any:
        batch = collate(examples)
        batches.append(_rows({name: value.numpy() for name, value in batch.items() if torch.is_tensor(value)}))
        return batch

    trains.data_collator = record
    trains.train()
    return batches[:NUM_STEPS], [entry["loss"] for entry in trains.state.log_history if "loss" in entry]


def _tokenizer() -> Any:
    """A tokenizer with one word for each id of the tiny model."""
    import tokenizers
    import transformers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": EOS, "<unk>": 3} | {f"w{index}": index for index in range(4, 96)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def _answers(*, is_single: bool) -> Any:
    """Prompts with a preferred and a rejected answer of other lengths, or with one answer and its label."""
    import datasets

    rng = np.random.default_rng(0)

    def text(longest: int) -> str:
        return " ".join(f"w{token}" for token in rng.integers(4, 96, rng.integers(2, longest)))

    if is_single:
        records = [{"prompt": text(6), "completion": " " + text(8), "label": bool(index % 3)} for index in range(4 * B)]
    else:
        records = [{"prompt": text(6), "chosen": " " + text(8), "rejected": " " + text(8)} for index in range(4 * B)]
    return datasets.Dataset.from_list(records)


def _rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows of a batch of trl: pair j in row j, or answer j with the segment of its label."""
    if "chosen_input_ids" in batch:
        sides = [
            (batch[f"{side}_input_ids"], batch[f"{side}_labels"] != -100, batch[f"{side}_attention_mask"], number)
            for number, side in ((1, "chosen"), (2, "rejected"))
        ]
    elif "label" in batch:
        ids = np.where(batch["label"], 1, 2)
        own, other = (
            _row([[batch[f"{kl}input_ids"], batch[f"{kl}completion_mask"], batch[f"{kl}attention_mask"], ids]])
            for kl in ("", "KL_")
        )
        return own | {OTHER + name: values for name, values in other.items()}
    else:
        # A reward model reads whole texts.
        is_learnt = batch.get("completion_mask", batch["attention_mask"])
        of_batch = (batch["input_ids"], is_learnt, batch["attention_mask"])
        sides = [(*(array[half] for array in of_batch), number) for number, half in ((1, slice(B)), (2, slice(B, None)))]
    return _row(sides)


def _row(sides: Any) -> dict[str, np.ndarray]:
    """Rows of the sequences of each side, one behind the other: ids, which are learned, which are there, and segment."""
    names = ("tokens", "targets", "segment_ids", "positions", "whole_targets")
    row = {name: np.zeros((B, T), np.int32) for name in names}
    row["targets"].fill(IGNORE)
    row["whole_targets"].fill(IGNORE)
    for index in range(B):
        at = 0
        for ids, learnt, there, number in sides:
            kept = there[index].astype(bool)
            own, is_learnt = ids[index][kept], learnt[index][kept].astype(bool)
            end = at + len(own)
            row["tokens"][index, at:end] = own
            row["whole_targets"][index, at : end - 1] = own[1:]
            row["targets"][index, at : end - 1] = np.where(is_learnt[1:], own[1:], IGNORE)
            row["segment_ids"][index, at:end] = number if isinstance(number, int) else number[index]
            row["positions"][index, at:end] = np.arange(len(own))
            at = end
    return row
