"""Settings of the entry points that work with a model that is there; written like those of `llamajax.config.run`.

Only the standard library is imported here.
"""

import os
from dataclasses import dataclass, field
from typing import Literal

from llamajax.config.parallel import DistributedConfig, MeshConfig
from llamajax.config.rules import require


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Text from a model: what it goes on from, how tokens are chosen, and where they go."""

    model: str
    """The weights: a run's directory (its newest checkpoint), one of its checkpoints, or a Hugging Face directory."""
    prompt: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Text to go on from."""
    prompts_file: str | None = None
    """More prompts than fit a command line: a text file with one per line, or .jsonl with {"prompt": TEXT} or {"messages":
    [{"role": ..., "content": ...}, ...]} per line."""
    chat: bool = False
    """Put every prompt into the model's chat template, as a user's message; without a prompt, talk with the model."""
    system: str | None = None
    """`chat`: what the system's message says; unset: there is none."""
    chat_template: str | None = None
    """A Jinja file that turns messages into text, as Hugging Face tokenizers have it; unset: the model's own."""
    max_tokens: int = 256
    """Longest continuation, tokens."""
    temperature: float = 0.8
    """Randomness; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens; unset: from all."""
    top_p: float | None = None
    """Draw from the fewest of the likeliest tokens that have this probability together; unset: from all."""
    min_p: float | None = None
    """Draw from tokens that are at least this share as likely as the likeliest; unset: from all."""
    stop: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Text that ends a continuation and is not shown; a shell writes a line break as $'\\n'."""
    ignore_eos: bool = False
    """Go on behind tokens that end a text, up to `max_tokens`; to measure speed."""
    seed: int = 0
    """Seed of the draws: the same one gives the same texts on any mesh and in any batch."""
    num_samples: int = 1
    """Continuations of every prompt."""
    batch_size: int = 8
    """Continuations written at once, over all devices; rounded up to a multiple of the devices that share a batch."""
    max_seq_len: int | None = None
    """Longest prompt with its continuation, tokens; unset: what the model is meant for."""
    output: str | None = None
    """A new file for the texts, instead of the screen: JSONL with `prompt` or `messages`, `sample`, `text`, `tokens`,
    `finish_reason` (stop or length) and `logprob` (of all tokens, in nats)."""
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type the weights are kept in; `auto`: `compute_dtype`."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and matmuls; `auto`: the run's, or the one that a Hugging Face model's weights have."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Where the model lies. Left alone: over as many devices along `tensor` as its heads allow, copied along `data` for
    the rest."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Several processes."""

    def __post_init__(self) -> None:
        filters = ("top_k", "top_p", "min_p")
        require(
            (bool(self.model), "model: must not be empty; name a run, a checkpoint or a Hugging Face directory"),
            (
                self.chat or bool(self.prompt) or self.prompts_file is not None,
                "prompt: required, unless prompts_file names them, or chat is true to talk with the model",
            ),
            (
                not self.prompt or self.prompts_file is None,
                "prompts_file: cannot be given together with prompt; put all prompts into the file",
            ),
            (self.chat or self.system is None, "system: has no effect unless chat is true; set it, or remove this"),
            (self.max_tokens > 0, f"max_tokens: {self.max_tokens} must be positive"),
            (self.temperature >= 0, f"temperature: {self.temperature} must not be negative"),
            (self.top_k is None or self.top_k > 0, f"top_k: {self.top_k} must be positive, or unset for all tokens"),
            (self.top_p is None or 0 < self.top_p <= 1, f"top_p: {self.top_p} must be above 0 and at most 1"),
            (self.min_p is None or 0 <= self.min_p <= 1, f"min_p: {self.min_p} must be between 0 and 1"),
            *(
                (
                    self.temperature != 0 or getattr(self, name) is None,
                    f"{name}: has no effect with temperature=0; raise that, or remove this",
                )
                for name in filters
            ),
            (all(self.stop), "stop: must not be empty text"),
            (0 <= self.seed < 2**32, f"seed: {self.seed} must be at least 0 and below 2**32"),
            (self.num_samples > 0, f"num_samples: {self.num_samples} must be positive"),
            (
                self.temperature != 0 or self.num_samples == 1,
                f"num_samples: {self.num_samples} would be equal with temperature=0; raise that, or remove this",
            ),
            (self.batch_size > 0, f"batch_size: {self.batch_size} must be positive"),
            (self.max_seq_len is None or self.max_seq_len > 1, f"max_seq_len: {self.max_seq_len} must be above 1"),
            (not self.is_talk or self.num_samples == 1, "num_samples: has no effect in a talk; remove it, or give a prompt"),
            (not self.is_talk or self.output is None, "output: has no effect in a talk; remove it, or give a prompt"),
            (
                not self.is_talk or not self.distributed.enabled,
                "distributed.enabled: several processes cannot talk; give a prompt",
            ),
        )

    @property
    def is_talk(self) -> bool:
        """Whether prompts come from the terminal, one after the other."""
        return self.chat and not self.prompt and self.prompts_file is None

    def problems(self) -> list[str]:
        """What is wrong between sections: nothing can be."""
        return []

    def file_problems(self) -> list[str]:
        """What this machine lacks or has already: one `key: rule; remedy` line each."""
        files = {"prompts_file": self.prompts_file, "chat_template": self.chat_template}
        problems = [
            f"{key}: there is no file {path}; correct the path"
            for key, path in files.items()
            if path is not None and not os.path.isfile(os.path.expanduser(path))
        ]
        if not os.path.isdir(os.path.expanduser(self.model)):
            problems.append(f"model: there is no directory {self.model}; give a run, a checkpoint or a Hugging Face model")
        if self.output is not None and not self.distributed.enabled and os.path.lexists(os.path.expanduser(self.output)):
            problems.append(f"output: {self.output} exists already; choose another file, or remove it")
        return problems
