"""Settings of `python -m llamajax.evaluate`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from llamajax.config.data import DataConfig
from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.config.rules import AboveOne, NonNegativeInt, PositiveFloat, PositiveInt, Section


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig(Section):
    """Documents without a run: a file that has the section `data` alone."""

    data: DataConfig
    """The documents, and how they become rows."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """How good a model is: its loss on documents, or its results in the tasks of lm-evaluation-harness."""

    model: str
    """The weights: a run's directory (its newest checkpoint), one of its checkpoints, or a Hugging Face directory."""
    data: str | None = None
    """The YAML file of a run, of which the section `data` names the documents, or one with that section alone; unset: what
    the model was trained on."""
    split: Literal["held_out", "train"] = "held_out"
    """Which of the documents: those that training leaves out, or the others, in the order they are trained on."""
    num_batches: PositiveInt | None = None
    """Batches at most, the first ones of all sources mixed, as evaluations while training take them; unset: all that is
    held out, every source also by itself."""
    tasks: str | None = None
    """Instead of documents: names of tasks, groups or tags of lm-evaluation-harness (extra `eval`), with commas between
    them, such as hellaswag,arc_easy; * stands for any letters."""
    include_path: str | None = None
    """`tasks`: a directory with the YAML files of your own tasks."""
    num_fewshot: NonNegativeInt | None = None
    """`tasks`: solved examples before each question; unset: what each task says."""
    limit: PositiveFloat | None = None
    """`tasks`: questions of each task at most; below 1, a share of them; unset: all."""
    apply_chat_template: bool = False
    """`tasks`: put every question into the model's chat template, examples as turns before it."""
    system: str | None = None
    """`tasks`: a system message before every question; unset: there is none."""
    log_samples: bool = False
    """`tasks`: also write every question, with what the model made of it, into the file `json`."""
    json: str | None = None
    """A file for the results, in JSON."""
    batch_size: PositiveInt | None = None
    """Rows at once, over all devices; rounded up to a multiple of the devices that share a batch. Unset: a micro-batch
    of the run whose data it is; without a run, and for `tasks`, eight on each of those devices."""
    seq_len: AboveOne | None = None
    """Tokens per row, for `tasks` at most; unset: what the data's configuration says, or what the model is meant for."""
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type the weights are kept in; `auto`: the one they are stored in."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and matmuls; `auto`: the run's, or the one that a Hugging Face model's weights have."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How model and rows are laid over the devices."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Several processes."""

    def broken_rules(self) -> Iterator[str]:
        if not self.model:
            yield "model: must not be empty; name a run, a checkpoint or a Hugging Face directory"
        if self.tasks is not None and not self.tasks.strip(", "):
            yield "tasks: must not be empty; name some, or remove it"
        for name in ("include_path", "num_fewshot", "limit", "apply_chat_template", "system", "log_samples"):
            if self.tasks is None and getattr(self, name):
                yield f"{name}: has no effect without tasks; remove it"
        for name in ("data", "num_batches"):
            if self.tasks is not None and getattr(self, name) is not None:
                yield f"{name}: has no effect with tasks; remove one"
        if self.tasks is not None and self.split != "held_out":
            yield "split: has no effect with tasks; remove one"
        if self.log_samples and self.json is None:
            yield "log_samples: needs a file; name it with json"
        if self.split != "held_out" and self.num_batches is None:
            yield "split: train has no end; also set num_batches"
