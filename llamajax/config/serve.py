"""Settings of `python -m llamajax.serve`."""

import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from llamajax import disk
from llamajax.config.hub import FORM, is_on_hub, is_well_formed
from llamajax.config.parallel import MeshConfig
from llamajax.config.rules import AboveOne, Bound, NonNegativeInt, PositiveFloat, PositiveInt, PositiveIntOrUnset, Section
from llamajax.config.shipped import find_file

TOKEN_VARIABLE = "LLAMAJAX_API_KEY"
"""Environment variable of the bearer token."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
Port = Annotated[int, Bound(lambda value: 0 <= value < 2**16, "must be a port: 0 for any free one, or below 65536")]


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Section):
    """A server of models: which ones, how many sequences at once, who may ask, and what a request may take."""

    model: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Weights, alone or as NAME=WEIGHTS: a run's directory (its newest checkpoint), one of its checkpoints, a Hugging Face
    directory, or hf://ORG/NAME[@REVISION] on the Hugging Face Hub, fetched once per machine. Requests choose among several
    by NAME, which is the directory's own unless given; the first one answers requests that name none."""
    adapter: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Adapters that add to the first `model`, alone or as NAME=ADAPTERS: a run with `adapters`, one of its checkpoints, or a
    PEFT directory. Requests choose them by NAME as they choose models. The weights of the model are in memory once."""
    host: str = "127.0.0.1"
    """Address to listen at. Others than those of this machine alone need a token in the environment variable
    LLAMAJAX_API_KEY, which every request must then have as `Authorization: Bearer TOKEN`."""
    port: Port = 8000
    """Port to listen at; 0: any free one."""
    chat_template: str | None = None
    """Jinja file that renders messages as text, in the form of Hugging Face tokenizers; unset: each model's own template. A
    path such as configs/chat_templates/llama3.jinja that does not exist here names the file that comes with llamajax."""
    parse_special: bool = False
    """Read special tokens written in prompts of /v1/completions, such as <|eot_id|>, as tokens, and not as text. A chat
    template writes tokens in any case."""
    slots: PositiveIntOrUnset = None
    """Sequences of a model that are written at once, rounded up to a multiple of the devices that share a batch; unset: as
    many as the memory of the devices has room for, at most 64; 8 on CPUs."""
    max_seq_len: AboveOne | None = None
    """Longest prompt with its continuation, in tokens, for which every slot has room; unset: the longest that the model
    supports, but at most 8192."""
    tokens_per_step: PositiveInt = 512
    """Tokens of prompts that are read between two tokens of the other sequences, per device that has slots of its own. Fewer
    tokens delay others less; more read prompts faster."""
    share_prefixes: bool = True
    """Copy what a prompt has in common with an earlier one instead of reading it again."""
    max_body_bytes: PositiveInt = 2**22
    """Largest body of a request, in bytes."""
    max_tokens: PositiveIntOrUnset = None
    """Most new tokens of a continuation; unset: as many as `max_seq_len` has room for."""
    max_queue: NonNegativeInt = 256
    """Continuations of a model that may wait for a slot; further requests get status 429."""
    max_time_s: PositiveFloat = 600.0
    """Longest time from a request to its last token, in seconds; then it gets status 504."""
    drain_s: PositiveFloat = 60.0
    """Time that unfinished answers have after SIGTERM or Ctrl-C, in seconds. A second signal ends the server at once."""
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which the weights are kept; `auto`: `compute_dtype`."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations and matmuls; `auto`: the run's, or that of a Hugging Face model's weights."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Layout of the models over the devices. By default, over as many devices along `tensor` as the heads of the first model
    allow, and copied along `data` for the rest."""

    def broken_rules(self) -> Iterator[str]:
        if not self.model:
            yield "model: required; name a run, a checkpoint or a Hugging Face directory"
        names = set[str]()
        for key, name, path in self._all_named:
            if not (name and path):
                yield f"{key}: must not be empty; write DIRECTORY or NAME=DIRECTORY"
            elif name in names:
                yield f"{key}: several models have the name {name}; write NAME=DIRECTORY for them"
            elif not is_well_formed(path):
                yield f"{key}: {path} {FORM}"
            names.add(name)
        if self.mesh.pipeline != 1:
            yield "mesh.pipeline: only training has stages; leave it out, and split the model over mesh.fsdp or mesh.tensor"

    @property
    def models(self) -> dict[str, str]:
        """Directory of each model, by name."""
        return dict(map(_named, self.model))

    @property
    def adapters(self) -> dict[str, str]:
        """Directory of each adapter of the first model, by name."""
        return dict(map(_named, self.adapter))

    @property
    def _all_named(self) -> list[tuple[str, str, str]]:
        """Key, name and directory of all models and adapters."""
        texts = {"model": self.model, "adapter": self.adapter}
        return [(key, *_named(text)) for key, some in texts.items() for text in some]

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.host in LOOPBACK or self.host.startswith("127.")

    def problems_here(self) -> list[str]:
        """Returns one `key: rule; remedy` line for everything that this machine lacks."""
        problems = []
        if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
            problems.append(f"serve: {' and '.join(missing)} are not installed; run pip install 'llamajax[serve]'")
        if not self.is_local and not os.environ.get(TOKEN_VARIABLE):
            problems.append(
                f"host: {self.host} is reached from other machines, so a token is needed; set {TOKEN_VARIABLE} in the"
                " environment, or leave host out"
            )
        if self.chat_template is not None and disk.is_missing(find_file(self.chat_template), stat.S_ISREG):
            problems.append(f"chat_template: no file {self.chat_template}; correct the path")
        kinds = {"model": "Hugging Face model", "adapter": "PEFT directory"}
        for key, _, path in self._all_named:
            if not is_on_hub(path) and disk.is_missing(os.path.expanduser(path), stat.S_ISDIR):
                problems.append(f"{key}: there is no directory {path}; give a run, a checkpoint or a {kinds[key]}")
        return problems


def _named(text: str) -> tuple[str, str]:
    """Returns the name and the directory in a text of `model`."""
    if found := re.fullmatch(r"([^=/]*)=(.*)", text):
        return found[1], found[2]
    if is_on_hub(text):
        return text.rpartition("/")[2].partition("@")[0], text
    path = os.path.normpath(os.path.expanduser(text)) if text else ""
    return os.path.basename(os.path.abspath(path)) if path else "", text
