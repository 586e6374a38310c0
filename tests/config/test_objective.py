"""Rules between the objective and the other settings of a run."""

import pytest

from llamajax.config.conversations import FieldNames, RoleNames
from llamajax.config.data import SourceConfig, StageConfig
from llamajax.config.objective import ObjectiveConfig
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


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        (ObjectiveConfig(kind="dpo", label_smoothing=0.1, nll_weight=0.2, length_normalized=True),
         "DPO, beta 0.1, label smoothing 0.1, per token, 0.2 x cross-entropy of chosen answers; the reference is the model"
         " at the start, computed once"),
        (ObjectiveConfig(kind="simpo", beta=2.0), "SimPO, beta 2, margin 0.5"),
        (ObjectiveConfig(kind="reward", center_weight=0.01, label_smoothing=0.1),
         "reward model, center weight 0.01, label smoothing 0.1"),
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
