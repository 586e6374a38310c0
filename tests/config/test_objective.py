"""Rules between the objective and the other settings of a run."""

import pytest

from llamajax.config.batch_ramp import BatchRampConfig
from llamajax.config.conversations import FieldNames, RoleNames
from llamajax.config.data import SourceConfig, StageConfig
from llamajax.config.objective import ObjectiveConfig, RolloutConfig
from llamajax.errors import ConfigError
from tests.tiny import tiny_config

PREFERENCES = (SourceConfig(kind="preference", paths=("x",)),)
DPO = tiny_config().changed({"init_from": "model", "objective.kind": "dpo", "data.sources": PREFERENCES})
REWARD = {"objective.kind": "reward", "model.head": "score"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"objective.kind": "next_token"}, "objective.kind: next_token has no use for sources of kind=preference"),
        ({"data.sources": (SourceConfig(kind="stdlib"),)}, "data.sources.0.kind: stdlib has no answers to compare"),
        ({"init_from": None}, "objective.kind: dpo needs init_from"),
        ({"objective.reference": "base"}, "objective.reference: base needs adapters"),
        ({"model.attend_across_documents": True}, "model.attend_across_documents: answers would see each other"),
        ({"train.z_loss_weight": 0.1}, "train.z_loss_weight: 0.1 has no effect with objective.kind=dpo"),
        ({"data.stages": (StageConfig(from_step=5, weights=(2.0,)),)}, "data.stages: are not possible with"),
        ({"mesh.pipeline": 2, "train.grad_accum_steps": 2, "parallel.zero": 1}, "mesh.pipeline: 2 is not possible"),
        ({"objective.kind": "reward"}, "model.head: vocabulary gives no scores for objective.kind=reward; set score"),
        ({"model.head": "score"}, "model.head: score predicts no tokens for objective.kind=dpo"),
        ({**REWARD, "adapters.kind": "lora"}, "adapters.kind: lora would leave the head of objective.kind=reward untrained"),
        ({**REWARD, "sample.prompt": "x"}, "sample.prompt: a model with objective.kind=reward writes no text"),
        ({**REWARD, "objective.beta": 0.2}, "objective.beta: 0.2 has no effect with kind=reward"),
        ({"objective.center_weight": 0.2}, "objective.center_weight: 0.2 has no effect with kind=dpo"),
        ({"offload.tiers.nvme_dir": "x", "offload.activations": ("input",)}, "offload.tiers.nvme_dir: is not possible"),
    ],
)
def test_what_does_not_go_together_is_one_line(changes, line):
    with pytest.raises(ConfigError) as refused:
        DPO.changed(changes)
    assert any(told.startswith(line) for told in str(refused.value).splitlines()), str(refused.value)


def test_the_reference_is_below_the_adapters_or_cached():
    adapted = DPO.changed({"adapters.kind": "lora"})
    assert (DPO.objective.reference_of(DPO.adapters), DPO.objective.reference_of(adapted.adapters)) == ("cached", "base")
    cached = adapted.changed({"objective.reference": "cached"})
    assert cached.objective.reference_of(cached.adapters) == "cached"
    assert DPO.changed({"objective.kind": "orpo", "init_from": None}).objective.reference_of(DPO.adapters) is None


def test_prompts_may_have_a_template_fields_and_roles():
    fields, roles = FieldNames(prompt="a", messages="b", instruction="c", content="d", tools="e"), RoleNames(user=("f",))
    source = SourceConfig(kind="prompt", paths=("x",), fields=fields, roles=roles, max_bad_records=3)
    changes = {"data.sources": (source,), "data.chat_template": "x", "init_from": "model", "objective.kind": "grpo"}
    config = tiny_config().changed(changes | {"objective.rollout.max_tokens": 4})
    assert config.objective.tokens_of_data(config.data.seq_len) == 12
    with pytest.raises(ConfigError, match="next_token has no use for sources of kind=prompt; set grpo"):
        tiny_config().changed({"data.sources": (source,)})


GRPO = tiny_config().changed({
    "init_from": "model", "objective.kind": "grpo", "data.sources": (SourceConfig(kind="prompt", paths=("x",)),),
    "objective.rollout.max_tokens": 8,
})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": ObjectiveConfig()}, "objective.kind: next_token has no use for sources of kind=prompt"),
        ({"data.sources": PREFERENCES}, "data.sources.0.kind: preference has no prompts for objective.kind=grpo"),
        ({"init_from": None}, "objective.kind: grpo needs init_from; name the model that writes the completions"),
        ({"objective.rollout.group_size": 5}, "objective.rollout.group_size: 5 must divide train.global_batch_size=32"),
        ({"objective.rollout.group_size": 1}, "objective.rollout.group_size: 1 leaves nothing to compare a completion with"),
        ({"objective.rollout.max_tokens": 16}, "objective.rollout.max_tokens: 16 leaves no room for prompts"),
        ({"objective.beta": 0.3}, "beta: 0.3 has no effect with kind=grpo"),
        ({"objective.reference": "base"}, "reference: base has no effect with kind=grpo"),
        ({"mesh.pipeline": 2, "parallel.zero": 1}, "mesh.pipeline: 2 is not possible with objective.kind=grpo"),
        ({"train.global_batch_ramp": BatchRampConfig(start=16, increment=16, sequences=64), "train.grad_accum_steps": 2},
         "train.global_batch_ramp: is not possible with objective.kind=grpo"),
    ],
)  # fmt: skip
def test_completions_need_what_the_model_can_write(changes, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as raised:
        GRPO.changed(changes)
    assert "\n" not in str(raised.value)


def test_completions_are_alone_in_their_rows():
    assert GRPO.changed({"model.attend_across_documents": True}).model.attend_across_documents


def test_rollouts_are_for_grpo_alone():
    with pytest.raises(ConfigError, match=r"rollout: has no effect with kind=dpo; remove it"):
        ObjectiveConfig(kind="dpo", rollout=RolloutConfig(group_size=4))


def test_a_step_reads_a_prompt_for_every_group():
    assert GRPO.objective.rows_of_data(32) == 4
    assert DPO.objective.rows_of_data(32) == 32


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        (ObjectiveConfig(kind="dpo", label_smoothing=0.1, nll_weight=0.2, length_normalized=True),
         "DPO, beta 0.1, label smoothing 0.1, per token, 0.2 x cross-entropy of chosen answers; the reference is the model"
         " at the start, computed once"),
        (ObjectiveConfig(kind="simpo", beta=2.0), "SimPO, beta 2, margin 0.5"),
        (ObjectiveConfig(kind="reward", center_weight=0.01, label_smoothing=0.1),
         "reward model, center weight 0.01, label smoothing 0.1"),
        (ObjectiveConfig(kind="grpo", clip_high=0.28, rollout=RolloutConfig(steps=2), scale_rewards=False),
         "GRPO, 8 completions of at most 256 tokens per prompt, ratios clipped to 0.8 to 1.28, 2 steps per rollout,"
         " advantages not scaled; 0.04 x divergence from the model at the start, held beside it"),
        (ObjectiveConfig(kind="orpo"), "ORPO, beta 0.1, 1 x cross-entropy of chosen answers"),
    ],
)  # fmt: skip
def test_it_is_told_in_a_few_words(objective, text):
    assert objective.described(DPO.adapters) == text


def test_passes_without_gradients_count():
    kto, base = ObjectiveConfig(kind="kto"), DPO.changed({"adapters.kind": "lora"}).adapters
    found = [ObjectiveConfig(kind="dpo").forward_passes(adapters) for adapters in (DPO.adapters, base)]
    assert found == [0, 1]
    assert [kto.forward_passes(adapters) for adapters in (DPO.adapters, base)] == [1, 3]
