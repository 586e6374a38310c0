"""The data of a run: sources of documents, tokenizer, rows."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from llamajax.config.cleaning import CleaningConfig
from llamajax.config.conversations import ChatForm, ChatFormat, FieldNames, RoleNames, TrainOn
from llamajax.config.rules import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloatOrUnset,
    PositiveInt,
    PositiveIntOrUnset,
    Section,
    ShareBelowOne,
)

DEFAULT_CACHE_DIR = "~/.cache/llamajax"


def is_remote(path: str) -> bool:
    """Whether a path is an address, such as s3://bucket/file, rather than the path of a local file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Section):
    """One collection of documents."""

    kind: Literal["text", "jsonl", "parquet", "arrow", "stdlib", "chat", "preference", "prompt", "tokenized", "megatron"]
    """Format of the documents. `text`: one document per file. `jsonl`: one per line, or per element of a file that is one
    JSON array. `parquet` and `arrow` (written by Hugging Face `datasets`): one per row. `stdlib`: the sources and help texts
    of the Python standard library that runs this program. `chat`: one conversation per record, rendered with
    `data.chat_template`; only what the assistant says is learned. `preference`: one pair of a chosen and a rejected answer
    per record, or one answer with a `label`, rendered likewise. `prompt`: one prompt per record, a text or messages, for the
    model to complete; reward functions read the record's other fields. docs/how-to/chat-data.md lists the forms.
    `tokenized`: one document per record, as `input_ids` and `labels` (-100: not learned), made with the run's tokenizer.
    Records of `chat`, `preference`, `prompt` and `tokenized` are lines or elements as in `jsonl`, or rows where a file's
    name ends in .parquet or .arrow.
    `megatron`: tokens in the `.bin` and `.idx` files of Megatron-LM, read in place, made with the tokenizer that
    `data.tokenizer.path` names. Files of `text` and of JSON may be compressed (gzip, zstd, bz2, xz), whatever their names,
    and may begin with a byte-order mark."""
    paths: tuple[str, ...] = ()
    """Files, directories or globs (`**` allowed), relative to the working directory; empty for `stdlib`. A directory means
    the files of this kind below it, by suffix: `text` all files, `jsonl` .jsonl, .ndjson and .json, also compressed,
    `parquet` .parquet, `chat`, `preference`, `prompt` and `tokenized` all of these and .arrow, `megatron` .idx. Hidden files
    are skipped, as are those in `_temporary` and `_delta_log`; the log counts the files with other suffixes. A glob does not
    read directories that it matches; the log says so.
    `arrow`, `chat`, `preference`, `prompt`, `tokenized`: a directory of `Dataset.save_to_disk`. Files that systems write
    beside data (`._*`, `.DS_Store`, `_SUCCESS`, `*.crc`, `_started_*`, `_committed_*`, `_metadata`, `_common_metadata`) are
    skipped and counted. A file with several names here, by links or overlapping globs, is read once; to read one more often,
    raise `weight`. `megatron`: the common prefix of a `.bin` and its `.idx`, or one of the two files. Addresses, and globs
    of them, are files that `fsspec` fetches into `data.cache_dir`: s3://, gs://, https://, hf://datasets/ORG/NAME/... and
    others, with the credentials that each store's own package finds."""
    text_key: str = "text"
    """`jsonl`, `parquet`, `arrow`: field or column with the text. `a.b`: the field b inside a, unless a field is called
    `a.b`."""
    chat_format: ChatFormat = "messages"
    """`chat`: form of a conversation. `messages`: a list of {role, content}. `sharegpt`: `conversations`, a list of {from,
    value}. `alpaca`: instruction, output, and optionally input and history. `prompt_completion`: prompt and completion, each
    a text or a list of messages. All may have `system` and `tools`."""
    fields: FieldNames = field(default_factory=FieldNames)
    """`chat`, `preference`, `prompt`, `tokenized`: names of fields where they differ, such as {messages: dialog, role:
    speaker, content: text}."""
    roles: RoleNames = field(default_factory=RoleNames)
    """`chat`, `preference`, `prompt`: further names of roles, such as {user: [customer], assistant: [agent]}."""
    train_on: TrainOn | None = None
    """`chat`: messages that are learned unless a mark says otherwise. `all`: every message of the assistant. `last`: its
    last one. `none-of-prompt`: those of the completion, for `prompt_completion`. Unset: `none-of-prompt` there, else
    `all`."""
    max_bad_records: NonNegativeInt = 0
    """`jsonl`, `parquet`, `arrow`, `chat`, `preference`, `prompt`, `tokenized`: number of malformed lines or rows (null
    text, broken JSON, a conversation that the template refuses) that are skipped and counted. One more stops the run at its
    start."""
    split: str | None = None
    """`megatron`: division of each file's documents, in order, such as 969,30,1: training, held out, and left for tests, as
    in Megatron-LM. Unset: the last `data.held_out_fraction` of them is held out."""
    weight: NonNegativeFloat = 1.0
    """Share of the training rows that comes from this source, relative to the weights of the other sources; 0: none until a
    stage of `data.stages` gives it weight."""
    max_epochs: PositiveFloatOrUnset = None
    """Maximum number of passes of the whole run, all stages together, over this source. A run that needs more is refused at
    its start. Unset: as many as the weights need."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Names and globs of files; for a pair of Megatron-LM's files, the name of the index."""
        if self.kind != "megatron":
            return self.paths
        return tuple(f"{path.removesuffix('.bin').removesuffix('.idx')}.idx" for path in self.paths)

    @property
    def form(self) -> ChatForm:
        """How the source writes conversations."""
        return ChatForm(chat_format=self.chat_format, fields=self.fields, roles=self.roles, train_on=self.train_on)

    @property
    def is_rendered(self) -> bool:
        """Whether a chat template writes the documents, or for prompts, those of them that are messages."""
        return self.kind in ("chat", "preference", "prompt")

    @property
    def needs_template(self) -> bool:
        """Whether all documents need a chat template; prompts that are texts need none."""
        return self.kind in ("chat", "preference")

    def broken_rules(self) -> Iterator[str]:
        if self.kind in ("text", "stdlib", "megatron") and self.max_bad_records > 0:
            yield f"max_bad_records: {self.max_bad_records} has no effect with kind={self.kind}; remove it"
        if self.kind != "stdlib" and not self.paths:
            yield f"paths: kind={self.kind} needs them; name the files or globs to read"
        if self.kind == "megatron" and any(map(is_remote, self.paths)):
            yield "paths: kind=megatron reads tokens in place, so the files must be on this machine; copy them"
        if self.kind == "stdlib" and self.paths:
            yield "paths: kind=stdlib finds its own files; remove paths"
        if not self.text_key:
            yield "text_key: must not be empty"
        if self.split is not None and self.kind != "megatron":
            yield f"split: {self.split} has no effect with kind={self.kind}; set data.held_out_fraction, or remove split"
        elif self.split is not None and not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}", self.split):
            yield f"split: {self.split!r} must be one to three numbers with commas between them; write 969,30,1"
        elif self.split is not None and not float(self.split.partition(",")[0]):
            yield f"split: {self.split} leaves nothing to train on; raise its first number"
        if self.kind in ("chat", "preference", "prompt", "tokenized") and self.text_key not in ("", "text"):
            yield f"text_key: {self.text_key} has no effect with kind={self.kind}; set fields, or remove text_key"
        yield from self.form.broken_rules(self.kind)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(Section):
    """Tokenizer, which turns text into token ids."""

    path: str | None = None
    """SentencePiece `tokenizer.model` or Hugging Face `tokenizer.json`, with the files beside it. Unset: train a
    SentencePiece BPE of `model.vocab_size` pieces on the training documents."""
    train_max_bytes: PositiveInt = 10_000_000
    """Bytes of text, spread over all training documents, on which a tokenizer is trained. Training takes 5 times as much
    memory, and up to 35 times where most words are different."""
    gigatoken: bool = True
    """Encode documents with gigatoken wherever it returns exactly the same ids, which is proven first; false: never."""


@dataclass(frozen=True, kw_only=True)
class StageConfig(Section):
    """Part of the run with other weights of the sources, or with longer or shorter rows."""

    from_step: PositiveInt
    """Number of finished steps after which the stage begins. It lasts until the next stage, or to the end of the run."""
    weights: tuple[float, ...] = ()
    """Weights that replace the sources' `weight`: one for each source, in the order of `data.sources`; 0 leaves a source
    out. Empty: those of the stage before."""
    seq_len: PositiveIntOrUnset = None
    """Tokens per row; unset: as in the stage before."""
    name: str = ""
    """Name for logs."""

    def broken_rules(self) -> Iterator[str]:
        if any(weight < 0 for weight in self.weights):
            yield f"weights: {min(self.weights)} must not be negative; 0 leaves a source out"
        elif self.weights and not any(self.weights):
            yield "weights: must not all be 0; give a source weight"
        if not self.weights and self.seq_len is None:
            yield "weights: a stage without weights and seq_len changes nothing; set one of them, or remove the stage"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Settings that apply from some step: those of the start of the run, or a `StageConfig` completed with those before
    it."""

    from_step: int
    """Number of finished steps after which it begins."""
    weights: tuple[float, ...]
    """Weights of the sources."""
    seq_len: int
    """Tokens per row."""
    name: str


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Documents, and how they become training rows."""

    sources: tuple[SourceConfig, ...]
    """Collections of documents, mixed by weight."""
    seq_len: PositiveInt
    """Tokens per row. Documents are packed into rows and see only themselves."""
    stages: tuple[StageConfig, ...] = ()
    """Changes from some step on: weights of the sources, length of rows, or both."""
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    """Filters that remove documents before they are tokenized."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer, which turns text into token ids."""
    mean_document_length: PositiveFloatOrUnset = None
    """Mean number of tokens per document, from which plans count attention where documents see only themselves. Unset: whole
    rows. Training counts the real documents."""
    chat_template: str | None = None
    """Jinja file that renders conversations of `chat`, `preference` and `prompt` sources as text, in the form of Hugging
    Face tokenizers; unset: the template beside the tokenizer. configs/chat_templates/llama3.jinja and others come with
    llamajax: a path that begins with configs/ and does not exist here names the shipped file."""
    held_out_fraction: ShareBelowOne = 0.01
    """Share of the documents that is held out for evaluation. A hash of the text, without the white space at its ends,
    chooses them, so copies of a text, and the pieces of a long one, are on the same side. `preference`, `prompt`: a hash of
    the prompt, so all answers to it, and all records with it, are on the same side."""
    cache_dir: str = DEFAULT_CACHE_DIR
    """Folder of tokenized documents, addressed by their content and shared between runs. It also keeps copies of remote
    files, in `remote`, which may be removed once the tokens are made."""
    prefetch_steps: PositiveInt = 2
    """Number of steps for which batches are prepared ahead of the device."""

    def broken_rules(self) -> Iterator[str]:
        if not self.sources:
            yield "sources: must not be empty; name at least one, for example [{kind: stdlib}]"
        never = [
            index
            for index, source in enumerate(self.sources)
            if not source.weight and not any(any(stage.weights[index : index + 1]) for stage in self.stages)
        ]
        for index in never:
            remedy = "remove the source to leave it out, or give it weight in data.stages"
            yield f"sources.{index}.weight: {self.sources[index].weight} must be positive; {remedy}"
        if self.sources and not never and not any(source.weight for source in self.sources):
            yield "sources: must not all have weight 0 before the first stage; give one of them weight"
        for index, stage in enumerate(self.stages):
            key = f"stages.{index}"
            if stage.weights and len(stage.weights) != len(self.sources):
                rule = f"{len(stage.weights)} for {len(self.sources)} sources"
                yield f"{key}.weights: {rule}; give one per source, in their order; 0 leaves a source out"
            if index and stage.from_step <= (before := self.stages[index - 1].from_step):
                yield f"{key}.from_step: {stage.from_step} must be above {before} of the stage before; put them in order"
        if self.chat_template is not None and not any(source.is_rendered for source in self.sources):
            yield "chat_template: has no effect without a source of kind=chat, preference or prompt; add one, or remove it"

    def problems_without_model(self) -> Iterator[str]:
        """Yields a `data.key: rule; remedy` line if the run has no tokenizer, unless a model brings one."""
        kinds = [source.kind for source in self.sources if source.kind in ("megatron", "tokenized")]
        if self.tokenizer.path is None and kinds:
            remedy = "name the tokenizer that made their tokens"
            yield f"data.tokenizer.path: is needed for sources of kind={kinds[0]}; {remedy}"

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Stages of the run, completed: first the settings of the start, then each of `stages`."""
        weights = tuple(source.weight for source in self.sources)
        found = [Stage(from_step=0, weights=weights, seq_len=self.seq_len, name="")]
        for stage in self.stages:
            weights, seq_len = stage.weights or found[-1].weights, stage.seq_len or found[-1].seq_len
            found.append(Stage(from_step=stage.from_step, weights=weights, seq_len=seq_len, name=stage.name))
        return tuple(found)

    def stage_at(self, step: int) -> int:
        """Returns the index in `all_stages` of the step after `step` finished steps."""
        return sum(stage.from_step <= step for stage in self.stages)

    @property
    def row_lengths(self) -> dict[str, int]:
        """Every length of rows, in tokens, by the key below `data` that sets it."""
        of_stages = {f"stages.{index}.seq_len": stage.seq_len for index, stage in enumerate(self.stages) if stage.seq_len}
        return {"seq_len": self.seq_len, **of_stages}

    @property
    def local_patterns(self) -> dict[str, str]:
        """Names and globs of files on this machine, by key; a directory, which means the files below it, is left out."""
        patterns = {
            f"sources.{i}.paths.{j}": path
            for i, source in enumerate(self.sources)
            for j, (named, path) in enumerate(zip(source.paths, source.patterns, strict=True))
            if not is_remote(path) and not os.path.isdir(os.path.expanduser(named))
        }
        held_out = self.cleaning.decontamination.paths
        return patterns | {
            f"cleaning.decontamination.paths.{j}": path for j, path in enumerate(held_out) if not is_remote(path)
        }

    def without_stages(self, seq_len: int | None = None) -> "DataConfig":
        """Returns the same sources without stages, each with its first weight above 0, in rows of `seq_len` tokens; None:
        those of the start."""
        stages = self.all_stages
        first = [next(filter(None, several)) for several in zip(*(stage.weights for stage in stages), strict=True)]
        sources = tuple(replace(source, weight=weight) for source, weight in zip(self.sources, first, strict=True))
        return replace(self, sources=sources, seq_len=seq_len or self.seq_len, stages=())
