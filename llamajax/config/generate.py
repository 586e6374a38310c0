"""Settings of `python -m llamajax.generate`."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from llamajax import disk
from llamajax.config.hub import Weights, is_on_hub
from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.config.rules import AboveOne, Bound, NonNegativeFloat, PositiveInt, Section, Seed, Share
from llamajax.config.shipped import find_file

TopK = Annotated[int | None, Bound(lambda value: value > 0, "must be positive, or unset for all tokens")]
TopP = Annotated[float | None, Bound(lambda value: 0 < value <= 1, "must be above 0 and at most 1")]


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Section):
    """Generation of text: prompts, how tokens are chosen, and where the texts go."""

    model: Weights
    """Weights: a run's directory (its newest checkpoint), one of its checkpoints, a Hugging Face or PEFT directory, or
    hf://ORG/NAME[@REVISION] on the Hugging Face Hub, fetched once per machine."""
    prompt: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Text to continue."""
    prompts_file: str | None = None
    """File of prompts: a text file with one per line, or .jsonl with {"prompt": TEXT} or {"messages": [{"role": ...,
    "content": ...}, ...]} per line; beside `messages` optionally `system` and `tools`, as in training conversations."""
    parse_special: bool = False
    """Read special tokens written in prompts, such as <|eot_id|>, as tokens, as transformers does, and not as text."""
    chat: bool = False
    """Put every prompt into the model's chat template as a user message; without a prompt, chat with the model."""
    system: str | None = None
    """`chat`: system message; unset: none."""
    chat_template: str | None = None
    """Jinja file that renders messages as text, in the form of Hugging Face tokenizers; unset: the model's own template. A
    path such as configs/chat_templates/llama3.jinja that does not exist here names the file that comes with llamajax."""
    max_tokens: PositiveInt = 256
    """Maximum number of tokens in a continuation."""
    temperature: NonNegativeFloat = 0.8
    """Randomness of the draws; 0 always takes the likeliest token."""
    top_k: TopK = None
    """Number of likeliest tokens from which to draw; unset: all."""
    top_p: TopP = None
    """Probability mass of the likeliest tokens from which to draw: the fewest that reach it together; unset: all."""
    min_p: Share | None = None
    """Minimum probability of a token to draw, as a share of that of the likeliest one; unset: all tokens."""
    stop: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Text that ends a continuation and is not shown; a shell writes a line break as $'\\n'."""
    ignore_eos: bool = False
    """Continue after tokens that end a text, up to `max_tokens`, to measure speed."""
    seed: Seed = 0
    """Seed of the draws. The same seed gives the same texts on any mesh and in any batch."""
    num_samples: PositiveInt = 1
    """Continuations of every prompt."""
    batch_size: PositiveInt = 8
    """Continuations written at once, over all devices, rounded up to a multiple of the devices that share a batch."""
    max_seq_len: AboveOne | None = None
    """Longest prompt with its continuation, in tokens; unset: the longest that the model supports."""
    output: str | None = None
    """New file for the texts, instead of the screen: JSONL with `prompt` or `messages`, `sample`, `text`, `tokens`,
    `finish_reason` (stop or length) and `logprob` (of all tokens, in nats)."""
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which the weights are kept; `auto`: `compute_dtype`."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and matmuls; `auto`: the run's, or that of a Hugging Face model's weights."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Layout of the model over the devices. By default, over as many devices along `tensor` as its heads allow, and copied
    along `data` for the rest."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Several processes."""

    def broken_rules(self) -> Iterator[str]:
        if self.mesh.pipeline != 1:
            yield "mesh.pipeline: only training has stages; leave it out, and split the model over mesh.fsdp or mesh.tensor"
        if not self.model:
            yield "model: must not be empty; name a run, a checkpoint or a Hugging Face directory"
        if not self.chat and not self.prompt and self.prompts_file is None:
            yield "prompt: required, unless prompts_file names them, or chat is true to chat with the model"
        if self.prompt and self.prompts_file is not None:
            yield "prompts_file: cannot be given together with prompt; put all prompts into the file"
        if not self.chat and self.system is not None:
            yield "system: has no effect unless chat is true; set it, or remove this"
        if self.parse_special and self.chat:
            yield "parse_special: has no effect with chat, because the template writes special tokens; remove one"
        for name in ("top_k", "top_p", "min_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                yield f"{name}: has no effect with temperature=0; raise that, or remove this"
        if not all(self.stop):
            yield "stop: must not be empty text"
        if self.temperature == 0 and self.num_samples != 1:
            yield f"num_samples: {self.num_samples} would be identical with temperature=0; raise that, or remove this"
        if self.is_talk and self.num_samples != 1:
            yield "num_samples: has no effect in an interactive chat; remove it, or give a prompt"
        if self.is_talk and self.output is not None:
            yield "output: has no effect in an interactive chat; remove it, or give a prompt"
        if self.is_talk and self.distributed.enabled:
            yield "distributed.enabled: several processes cannot chat interactively; give a prompt"

    @property
    def is_talk(self) -> bool:
        """Whether prompts come from the terminal, one after the other."""
        return self.chat and not self.prompt and self.prompts_file is None

    def file_problems(self) -> list[str]:
        """Returns one `key: rule; remedy` line for every file that this machine lacks, or has already."""
        files = {"prompts_file": self.prompts_file, "chat_template": self.chat_template}
        problems = [
            f"{key}: no file {path}; correct the path"
            for key, path in files.items()
            if path is not None and disk.is_missing(find_file(path), stat.S_ISREG)
        ]
        if not is_on_hub(self.model) and disk.is_missing(os.path.expanduser(self.model), stat.S_ISDIR):
            problems.append(f"model: there is no directory {self.model}; give a run, a checkpoint or a Hugging Face model")
        if self.output is not None and not self.distributed.enabled and os.path.lexists(os.path.expanduser(self.output)):
            problems.append(f"output: {self.output} exists already; choose another file, or remove it")
        return problems
