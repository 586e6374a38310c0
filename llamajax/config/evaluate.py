"""Settings of `python -m llamajax.evaluate`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from llamajax.config.data import DataConfig
from llamajax.config.hub import Weights
from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.config.rules import AboveOne, NonNegativeInt, PositiveFloat, PositiveInt, Section


@dataclass(frozen=True, kw_only=True)
class DocumentsConfig(Section):
    """Documents without a run: a file that has only the section `data`."""

    data: DataConfig
    """Documents, and how they become rows."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(Section):
    """Evaluation of a model: its loss on documents, or its results in the tasks of lm-evaluation-harness."""

    model: Weights
    """Weights: a run's directory (its newest checkpoint), one of its checkpoints, a Hugging Face or PEFT directory, or
    hf://ORG/NAME[@REVISION] on the Hugging Face Hub, fetched once per machine."""
    data: str | None = None
    """YAML file of a run, with the documents in its section `data`, or a file with that section alone; unset: the documents
    that the model was trained on."""
    split: Literal["held_out", "train"] = "held_out"
    """Part of the documents: the held-out ones, or the training ones in the order of training."""
    num_batches: PositiveInt | None = None
    """Maximum number of batches, the first ones of all sources mixed, as in evaluations during training. Unset: all held-out
    documents, and every source separately as well."""
    tasks: str | None = None
    """Tasks, groups or tags of lm-evaluation-harness (extra `eval`) to run instead of documents, separated by commas, such
    as hellaswag,arc_easy; * matches any letters."""
    include_path: str | None = None
    """`tasks`: directory with the YAML files of your own tasks."""
    num_fewshot: NonNegativeInt | None = None
    """`tasks`: solved examples before each question; unset: the number that each task sets."""
    limit: PositiveFloat | None = None
    """`tasks`: maximum number of questions per task; below 1, a share of them; unset: all."""
    apply_chat_template: bool = False
    """`tasks`: put every question into the model's chat template, with examples as turns before it."""
    system: str | None = None
    """`tasks`: system message before every question; unset: none."""
    log_samples: bool = False
    """`tasks`: also write every question and the model's answer to the file `json`."""
    json: str | None = None
    """File for the results, in JSON."""
    batch_size: PositiveInt | None = None
    """Rows per batch over all devices, rounded up to a multiple of the devices that share a batch. Unset: a micro-batch of
    the run that the data belong to; without a run, and for `tasks`, eight on each of those devices."""
    seq_len: AboveOne | None = None
    """Tokens per row, for `tasks` the maximum; unset: the length in the data's configuration, or the longest that the model
    supports."""
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which the weights are kept; `auto`: the type in which they are stored."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and matmuls; `auto`: the run's, or that of a Hugging Face model's weights."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Layout of model and rows over the devices."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Several processes."""

    def broken_rules(self) -> Iterator[str]:
        if self.mesh.pipeline != 1:
            yield "mesh.pipeline: only training has stages; leave it out, and split the model over mesh.fsdp or mesh.tensor"
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
            yield "split: train rows repeat without end; also set num_batches"
