"""Settings of `objective`: what the steps of a run minimize."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from llamajax.config.adapters import AdaptersConfig
from llamajax.config.data import DataConfig
from llamajax.config.model import ModelConfig
from llamajax.config.offload import OffloadConfig
from llamajax.config.parallel import MeshConfig
from llamajax.config.rules import (
    Bound,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFloatOrUnset,
    PositiveInt,
    PositiveIntOrUnset,
    Section,
)
from llamajax.config.training import SampleConfig, TrainConfig

ObjectiveKind = Literal["next_token", "dpo", "ipo", "orpo", "kto", "simpo", "cpo", "reward", "grpo"]
Smoothing = Annotated[float, Bound(lambda value: 0 <= value < 0.5, "must be at least 0 and below 0.5")]
TopP = Annotated[float | None, Bound(lambda value: 0 < value <= 1, "must be above 0 and at most 1")]
ClipRange = Annotated[float, Bound(lambda value: 0 < value < 1, "must be above 0 and below 1")]
OptionalWeight = Annotated[float | None, Bound(lambda value: value >= 0, "must not be negative; unset: the method's own")]

_WITH_REFERENCE = ("dpo", "ipo", "kto")
_READ_BY = {
    "label_smoothing": ("dpo", "cpo", "simpo", "reward"), "length_normalized": ("dpo", "grpo"), "margin": ("simpo",),
    "nll_weight": ("dpo", "ipo", "orpo", "simpo", "cpo"), "desirable_weight": ("kto",), "undesirable_weight": ("kto",),
    "reference": _WITH_REFERENCE, "center_weight": ("reward",),
    "beta": ("dpo", "ipo", "orpo", "kto", "simpo", "cpo"),
    "rollout": ("grpo",), "clip_low": ("grpo",), "clip_high": ("grpo",), "kl_weight": ("grpo",),
    "scale_rewards": ("grpo",),
}  # fmt: skip
"""Kinds that read a setting."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Section):
    """Completions that the model writes while it trains."""

    group_size: PositiveInt = 8
    """Completions of a prompt, which are compared with each other. A step trains on `train.global_batch_size` completions,
    so on `global_batch_size / group_size` prompts."""
    max_tokens: PositiveInt = 256
    """Longest completion, in tokens. A row holds a prompt and its completion, so longer prompts than `data.seq_len` less
    this are left out."""
    temperature: PositiveFloat = 1.0
    """Divisor of the logits before a token is drawn."""
    top_p: TopP = None
    """Total probability of the smallest set of likeliest tokens that are drawn from; unset: all tokens."""
    steps: PositiveInt = 1
    """Steps that train on the completions of one rollout, each on its own share. Above 1, the model changes between writing
    and training, which the clipped ratio of probabilities corrects."""
    batch_size: PositiveIntOrUnset = None
    """Completions written at once, over all devices; each takes a cache of keys and values. Unset: those of a
    micro-batch."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Section):
    """Loss that the run minimizes: of the next token, over preferred and rejected answers, or over the model's own
    completions."""

    kind: ObjectiveKind = "next_token"
    """`next_token`: cross-entropy of every learned token. The others need sources of kind `preference`: `dpo`
    (arXiv:2305.18290), `ipo` (arXiv:2310.12036), `kto`, which takes single answers with a label too (arXiv:2402.01306), and,
    without a reference model, `orpo` (arXiv:2403.07691), `simpo` (arXiv:2405.14734) and `cpo` (arXiv:2401.08417). `reward`
    trains a reward model, which gives each answer a score (arXiv:2203.02155). `grpo` needs sources of kind `prompt`: the
    model completes them, and functions of yours reward each completion (arXiv:2402.03300)."""
    beta: PositiveFloat = 0.1
    """Strength of the preference: `dpo`, `kto`, `simpo`, `cpo`: factor of the log-probabilities; `ipo`: its tau; `orpo`: its
    lambda. SimPO's authors use 2 and more."""
    label_smoothing: Smoothing = 0.0
    """`dpo` (then called cDPO), `cpo`, `simpo`, `reward`: assumed share of pairs whose answers are the wrong way round."""
    length_normalized: bool = False
    """`dpo`: use log-probabilities per token of an answer. `ipo`, `orpo` and `simpo` always do. `grpo`: every completion
    counts alike, as in its paper, rather than every token, as in DAPO (arXiv:2503.14476)."""
    margin: NonNegativeFloat = 0.5
    """`simpo`: its gamma, by which the reward of a preferred answer should exceed that of the rejected one."""
    nll_weight: OptionalWeight = None
    """Weight of the cross-entropy of preferred answers, per token, that is added to the loss; `orpo` counts the tokens of
    prompts too. Unset: 1 for `orpo` and `cpo`, 0 for the others. Llama 3 was trained with `dpo` and 0.2."""
    desirable_weight: NonNegativeFloat = 1.0
    """`kto`: weight of desirable answers."""
    undesirable_weight: NonNegativeFloat = 1.0
    """`kto`: weight of undesirable answers."""
    center_weight: NonNegativeFloat = 0.0
    """`reward`: weight of a pair's squared sum of scores, which keeps them near zero (arXiv:2312.09244); 0.01 is usual."""
    reference: Literal["auto", "base", "cached"] = "auto"
    """`dpo`, `ipo`, `kto`: where the reference's log-probabilities come from. `base`: every step computes them with the
    frozen weights below the adapters. `cached`: the weights that the run starts from compute them once, before the first
    step, into the run's directory. `auto`: `base` with adapters, `cached` without."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """`grpo`: completions that the model writes while it trains."""
    clip_low: ClipRange = 0.2
    """`grpo`: how far below 1 the ratio of a token's probabilities, now and when it was written, still counts."""
    clip_high: PositiveFloatOrUnset = None
    """`grpo`: how far above 1 it still counts; unset: `clip_low`. DAPO uses 0.28."""
    kl_weight: NonNegativeFloat = 0.04
    """`grpo`: weight of the divergence from the weights that the run starts from, which are held in
    `model.compute_dtype`; adapters have them below. 0: no such term, and nothing is held."""
    scale_rewards: bool = True
    """`grpo`: divide the advantages of a group by the standard deviation of its rewards, as its paper does; `false`: leave
    them as they are (arXiv:2503.20783)."""

    @property
    def is_preference(self) -> bool:
        """Whether it compares answers."""
        return self.kind not in ("next_token", "grpo")

    @property
    def is_on_policy(self) -> bool:
        """Whether the model trains on what it writes."""
        return self.kind == "grpo"

    def rows_of_data(self, rows: int) -> int:
        """Returns how many rows of the data the first `rows` rows of all batches take: each, or one prompt per group."""
        return rows // self.rollout.group_size if self.is_on_policy else rows

    def tokens_of_data(self, seq_len: int) -> int:
        """Returns how many tokens of the data a row of `seq_len` tokens has room for: all, or those beside a completion."""
        return seq_len - self.rollout.max_tokens if self.is_on_policy else seq_len

    @property
    def has_reference(self) -> bool:
        """Whether it compares the model with a reference."""
        return self.kind in _WITH_REFERENCE

    @property
    def own_nll_weight(self) -> float:
        """Weight of the cross-entropy of preferred answers."""
        return float(self.kind in ("orpo", "cpo")) if self.nll_weight is None else self.nll_weight

    def reference_of(self, adapters: AdaptersConfig) -> Literal["base", "cached"] | None:
        """Returns where the reference's log-probabilities come from; None: the objective has no reference."""
        if not self.has_reference:
            return None
        return ("base" if adapters.enabled else "cached") if self.reference == "auto" else self.reference

    def holds_reference(self, adapters: AdaptersConfig) -> bool:
        """Whether the run holds the weights that it starts from, to compare completions with them."""
        return self.is_on_policy and self.kl_weight > 0 and not adapters.enabled

    def forward_passes(self, adapters: AdaptersConfig) -> int:
        """Returns the number of passes without gradients that a step takes through every row: that of the reference, and for
        `kto` those through the prompts with other answers."""
        of_reference = int(self.reference_of(adapters) == "base")
        return of_reference + (1 + of_reference if self.kind == "kto" else 0)

    def described(self, adapters: AdaptersConfig) -> str:
        """Returns the objective in a few words."""
        parts = [f"{self.kind.upper() if self.kind != 'simpo' else 'SimPO'}, beta {self.beta:g}"]
        if self.kind == "grpo":
            return self._described_grpo(adapters)
        if self.kind == "reward":
            parts = ["reward model"] + ([f"center weight {self.center_weight:g}"] if self.center_weight else [])
        parts += [f"margin {self.margin:g}"] if self.kind == "simpo" else []
        parts += [f"label smoothing {self.label_smoothing:g}"] if self.label_smoothing else []
        parts += ["per token"] if self.length_normalized else []
        parts += [f"{self.own_nll_weight:g} x cross-entropy of chosen answers"] if self.own_nll_weight else []
        reference = {
            "base": "the reference is the model without its adapters",
            "cached": "the reference is the model at the start, computed once",
        }
        where = self.reference_of(adapters)
        return ", ".join(parts) + (f"; {reference[where]}" if where else "")

    def _described_grpo(self, adapters: AdaptersConfig) -> str:
        rollout, high = self.rollout, self.clip_low if self.clip_high is None else self.clip_high
        parts = [
            f"GRPO, {rollout.group_size} completions of at most {rollout.max_tokens:,} tokens per prompt",
            f"ratios clipped to {1 - self.clip_low:g} to {1 + high:g}",
        ]
        parts += [f"{rollout.steps} steps per rollout"] if rollout.steps > 1 else []
        parts += ["advantages not scaled"] if not self.scale_rewards else []
        parts += ["every completion counts alike"] if self.length_normalized else []
        base = "the model without its adapters" if adapters.enabled else "the model at the start, held beside it"
        return ", ".join(parts) + (f"; {self.kl_weight:g} x divergence from {base}" if self.kl_weight else "")

    def broken_rules(self) -> Iterator[str]:
        defaults = {name: field.default for name, field in ObjectiveConfig.__dataclass_fields__.items()}
        defaults["rollout"] = RolloutConfig()
        for name, kinds in _READ_BY.items():
            if self.kind not in kinds and (value := getattr(self, name)) != defaults[name]:
                told = "" if name == "rollout" else f"{value} "
                yield f"{name}: {told}has no effect with kind={self.kind}; remove it"


def objective_problems(
    objective: ObjectiveConfig,
    model: ModelConfig,
    adapters: AdaptersConfig,
    data: DataConfig,
    train: TrainConfig,
    mesh: MeshConfig,
    offload: OffloadConfig,
    sample: SampleConfig,
    *,
    has_model: bool,
) -> Iterator[str]:
    """Yields one `key: rule; remedy` line for every broken rule between the objective and other settings of a run;
    `has_model`: the run starts from a model."""
    kind, kinds = objective.kind, [source.kind for source in data.sources]
    if kind == "reward" and model.head != "score":
        yield f"model.head: {model.head} gives no scores for objective.kind=reward; set score"
    if kind == "reward" and adapters.enabled:
        yield f"adapters.kind: {adapters.kind} would leave the head of objective.kind=reward untrained; remove adapters"
    if kind == "reward" and sample.prompt is not None:
        yield "sample.prompt: a model with objective.kind=reward writes no text; remove it"
    if kind != "reward" and model.head == "score":
        yield f"model.head: score predicts no tokens for objective.kind={kind}; set reward there, or name other weights"
    if kind == "next_token":
        if "preference" in kinds:
            yield "objective.kind: next_token has no use for sources of kind=preference; set dpo or another, or kind: chat"
        if "prompt" in kinds:
            yield "objective.kind: next_token has no use for sources of kind=prompt; set grpo, or kind: chat"
        return
    if objective.is_on_policy:
        yield from _grpo_problems(objective, data, train, offload, has_model=has_model)
    wanted, lacks = ("prompt", "prompts") if objective.is_on_policy else ("preference", "answers to compare")
    for index, other in enumerate(kinds):
        if other != wanted:
            yield f"data.sources.{index}.kind: {other} has no {lacks} for objective.kind={kind}; use {wanted}"
    if objective.has_reference and not has_model:
        yield f"objective.kind: {kind} needs init_from; name the model that answers are compared with, or use orpo"
    if objective.reference == "base" and not adapters.enabled:
        yield "objective.reference: base needs adapters, below which the weights are frozen; set cached, or add adapters"
    if model.attend_across_documents and not objective.is_on_policy:  # a completion is alone in its row
        yield f"model.attend_across_documents: answers would see each other with objective.kind={kind}; remove it"
    if train.z_loss_weight:
        yield f"train.z_loss_weight: {train.z_loss_weight} has no effect with objective.kind={kind}; remove it"
    if any(stage.seq_len for stage in data.stages):
        yield f"data.stages: rows of several lengths are not possible with objective.kind={kind}; remove their seq_len"
    if data.stages and objective.reference_of(adapters) == "cached":
        yield "data.stages: are not possible with objective.reference=cached; remove them, or train adapters with base"
    if mesh.pipeline > 1:
        yield f"mesh.pipeline: {mesh.pipeline} is not possible with objective.kind={kind}; use fsdp and tensor"
    if offload.tiers.nvme_dir is not None:
        yield f"offload.tiers.nvme_dir: is not possible with objective.kind={kind}; remove it"


def _grpo_problems(
    objective: ObjectiveConfig, data: DataConfig, train: TrainConfig, offload: OffloadConfig, *, has_model: bool
) -> Iterator[str]:
    """Yields the problems of `objective_problems` that only completions have."""
    rollout = objective.rollout
    if not has_model:
        yield "objective.kind: grpo needs init_from; name the model that writes the completions"
    if train.global_batch_size % rollout.group_size:
        size = f"must divide train.global_batch_size={train.global_batch_size}, the completions of a step"
        yield f"objective.rollout.group_size: {rollout.group_size} {size}; choose a divisor"
    if rollout.group_size == 1:
        yield "objective.rollout.group_size: 1 leaves nothing to compare a completion with; set at least 2"
    if rollout.max_tokens >= data.seq_len:
        rule = f"leaves no room for prompts in data.seq_len={data.seq_len}"
        yield f"objective.rollout.max_tokens: {rollout.max_tokens} {rule}; lower it, or raise data.seq_len"
    if train.global_batch_ramp.start is not None:
        yield "train.global_batch_ramp: is not possible with objective.kind=grpo; remove it"
    if offload.parameters != "none":
        yield f"offload.parameters: {offload.parameters} is not possible with objective.kind=grpo; remove it"
