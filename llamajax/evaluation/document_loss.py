"""Computes the loss of a model on documents, with the rows and the loss of training."""

import itertools
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32
from rich.table import Table

from llamajax.config.bases import read_file
from llamajax.config.batch_ramp import BatchRampConfig
from llamajax.config.evaluate import DocumentsConfig, EvaluateConfig
from llamajax.config.file import load_config, read_config
from llamajax.config.model import ModelConfig
from llamajax.config.parallel import num_parts
from llamajax.config.run import Config
from llamajax.config.training import OptimizerConfig, TrainConfig
from llamajax.config.yaml_text import Problems
from llamajax.data.rows.dataset import Dataset, prepare
from llamajax.data.rows.loader import Loader, held_out_batches
from llamajax.data.tokenizers.tokenizer import load_tokenizer
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError, DataError
from llamajax.model import Llama
from llamajax.step.batch import Batch
from llamajax.step.step import eval_step, one_behind
from llamajax.watch import console
from llamajax.watch.console import say
from llamajax.weights.loading import load_model
from llamajax.weights.pretrained import Pretrained

BATCH_SIZE = 8
"""Number of rows on each device if neither the settings nor a run set it."""


@dataclass(frozen=True)
class Losses:
    """Sums over rows of documents."""

    nats: float = 0.0
    """Cross-entropy of all targets, in nats."""
    tokens: int = 0
    """Number of targets."""
    text_bytes: int = 0
    """Bytes of text that the targets represent."""

    def __add__(self, other: "Losses") -> "Losses":
        return Losses(self.nats + other.nats, self.tokens + other.tokens, self.text_bytes + other.text_bytes)

    def figures(self) -> dict[str, Any]:
        """Returns the metrics by name; None where the divisor is 0."""
        loss = self.nats / self.tokens if self.tokens else None
        return {
            "tokens": self.tokens,
            "bytes": self.text_bytes,
            "loss": loss,
            "perplexity": None if loss is None else math.exp(min(loss, 700.0)),  # e**710 overflows a float
            "bits_per_byte": self.nats / math.log(2) / self.text_bytes if self.text_bytes else None,
        }


def evaluate_documents(
    config: EvaluateConfig, pretrained: Pretrained, model_config: ModelConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Prints and returns loss, perplexity and bits per byte; per source too if all held-out documents are evaluated.

    Args:
        config: what to evaluate.
        pretrained: the location of the model.
        model_config: configuration of the model, with the types to compute in.
        tokenizer: tokenizer of the model.

    Raises:
        ConfigError: no documents are named, or they do not fit this model.
        DataError: the documents cannot be read, or there are none.
    """
    path = find_run(config, pretrained)
    trained = read_run(path, model_config)
    run_config = adapt_run(trained, path, config, model_config, tokenizer)
    dataset = prepare(run_config, log=console.log, log_work=console.log_own, tokenizer=tokenizer)
    trained_on = pretrained.meta.get("data", {}).get("fingerprint")
    has_same_weights = run_config.data.sources == trained.data.sources  # true if the run starts with all of them
    if config.data is None and config.seq_len is None and has_same_weights and trained_on not in (None, dataset.fingerprint):
        say("warning    these are not the documents that the model was trained on: they have changed since")
    parts = {"all": Part(run_config, dataset)}
    if config.num_batches is None and len(run_config.data.sources) > 1:
        parts = {
            f"data.sources[{index}] {source.kind}": Part(run_config, dataset.of_source(index))
            for index, source in enumerate(run_config.data.sources)
        }
    total = sum(part.num_batches(config) for part in parts.values())
    if not total:
        raise DataError(
            f"data.held_out_fraction: {run_config.data.held_out_fraction} selects no documents; raise it, or set split"
            " to train"
        )
    size, seq_len = run_config.train.micro_batch_size, run_config.data.seq_len
    console.log(f"batches    {total:,} of {size} rows x {seq_len} tokens, {config.split.replace('_', ' ')}")
    if config.seq_len is None and len(lengths := {stage.seq_len for stage in trained.data.all_stages}) > 1:
        others = " or ".join(f"{length}" for length in sorted(lengths - {seq_len}))
        console.log(f"note       rows have the length of the run before its first stage; set seq_len for {others}")
    rows_in_training = trained.train.eval_batches * trained.train.micro_batch_size
    if config.num_batches is None and 0 < rows_in_training < len(dataset.held_out_rows):
        console.log(f"note       evaluations during training use only the first {rows_in_training:,} rows")
    model = load_model(pretrained, model_config)
    batches = ((name, batch) for name, part in parts.items() for batch in part.batches(config))
    token_bytes = np.pad(tokenizer.token_bytes, (0, model_config.vocab_size - tokenizer.vocab_size))
    found, seconds = add_up(model, console.track(batches, total, "evaluating"), token_bytes)
    losses = {name: found[name] for name in parts}
    losses["all"] = sum(losses.values(), Losses())
    figures = {name: of_part.figures() for name, of_part in losses.items()}
    speed = losses["all"].tokens / seconds
    print_losses(figures, speed)
    about = {"split": config.split, "seq_len": seq_len, "num_batches": total, "batch_size": size}
    return about | figures.pop("all") | {"tokens_per_sec": speed, "sources": figures}


@dataclass(frozen=True)
class Part:
    """Documents with a common sum of losses."""

    run_config: Config
    dataset: Dataset

    def num_batches(self, config: EvaluateConfig) -> int:
        """Returns the number of batches: all, or as many as configured."""
        if config.split == "train":
            assert config.num_batches is not None
            return config.num_batches
        held_out = -(-len(self.dataset.held_out_rows) // self.run_config.train.micro_batch_size)
        return held_out if config.num_batches is None else min(held_out, config.num_batches)

    def batches(self, config: EvaluateConfig) -> Iterator[Batch]:
        """Yields that number of batches."""
        num_batches = self.num_batches(config)
        if config.split == "held_out":
            yield from held_out_batches(self.dataset, self.run_config, num_batches * self.run_config.train.micro_batch_size)
            return
        with Loader(self.dataset, self.run_config, 0) as loader:
            yield from (batch for _, batch in itertools.islice(loader, num_batches))


def find_run(config: EvaluateConfig, pretrained: Pretrained) -> Path:
    """Returns the YAML file of the documents to evaluate.

    Raises:
        ConfigError: no file is named, and the model is not from a run.
    """
    if config.data is not None:
        return Path(os.path.expanduser(config.data))
    path = pretrained.source.parent.parent / "config.yaml"  # of RUN/checkpoints/STEP
    if pretrained.tensors is not None or not path.is_file():
        raise ConfigError(
            f"data: {pretrained.source} does not name its training data; name the YAML file of a run or of its data"
        )
    return path


def read_run(path: Path, model: ModelConfig) -> Config:
    """Reads the run in a YAML file; if the file has only the section `data`, creates a run of this model on it.

    Raises:
        ConfigError: the file has mistakes; one line for each.
    """
    if set(read_file(str(path), Problems()).content) != {"data"}:
        return load_config(path)
    documents = read_config(DocumentsConfig, str(path), (), Problems())
    rows = whole_batch(BATCH_SIZE * num_parts("batch", jax.sharding.get_mesh().shape))
    train = TrainConfig(num_steps=1, global_batch_size=rows, eval_batches=0)
    untrained = {"optimizer": OptimizerConfig(learning_rate=1.0), "run_dir": "none"}  # neither is used
    return Config(model=model, data=documents.data, train=train, **untrained)


def adapt_run(run_config: Config, path: Path, config: EvaluateConfig, model: ModelConfig, tokenizer: Tokenizer) -> Config:
    """Returns the run in `path` with this model and its tokenizer, and with batches for this mesh.

    Raises:
        ConfigError: the run has another tokenizer, preferences or prompts, or rows that do not fit the model or the mesh.
    """
    kinds = [source.kind for source in run_config.data.sources]
    for kind, what in (("preference", "preferences"), ("prompt", "prompts")):
        if kind in kinds:
            raise ConfigError(
                f"data: data.sources[{kinds.index(kind)}] in {path} has {what}, which have no loss of documents;"
                " name a file with other sources"
            )
    named = run_config.data.tokenizer.path if config.data is not None else None
    if named is not None and load_tokenizer(Path(named).expanduser()).sha256 != tokenizer.sha256:
        raise ConfigError(
            f"data: {path} names the tokenizer {named}, not the model's {tokenizer.source}; remove"
            " data.tokenizer.path there to use the model's"
        )
    seq_len = config.seq_len or run_config.data.seq_len
    if seq_len > model.max_seq_len:
        raise ConfigError(
            f"seq_len: rows of {seq_len} tokens in {path} exceed the model's max_seq_len={model.max_seq_len};"
            " set seq_len to that or less"
        )
    seq_shards = num_parts("seq", jax.sharding.get_mesh().shape)
    if seq_len % seq_shards:
        raise ConfigError(f"mesh.sequence: {seq_shards} must divide the {seq_len} tokens of a row; change it or seq_len")
    changes = {
        "model": model,
        "data": replace(run_config.data.without_stages(seq_len), tokenizer=replace(run_config.data.tokenizer, path=None)),
        "train.global_batch_size": whole_batch(config.batch_size or run_config.train.micro_batch_size),
        "train.grad_accum_steps": 1,
        "train.global_batch_ramp": BatchRampConfig(),
        "train.eval_every": None,
        "train.eval_batches": 0,  # `prepare` need not find any; `Part.batches` sets the number
        "mesh": config.mesh,
        "distributed": config.distributed,
        "hardware.gpu": "none",  # names the GPUs of the run, not of this machine
    }
    return run_config.changed(changes)


def whole_batch(size: int) -> int:
    """Rounds the size up to a multiple of the devices that share a batch."""
    shards = num_parts("batch", jax.sharding.get_mesh().shape)
    return -(-size // shards) * shards


def add_up(
    model: Llama, batches: Iterator[tuple[str, Batch]], token_bytes: Int32[np.ndarray, "V"]
) -> tuple[defaultdict[str, Losses], float]:
    """Returns the losses of named batches, at least one, by name, and the seconds that they took after compiling."""
    first = next(batches)
    compiled = eval_step.lower(model, first[1], token_bytes).compile()
    started = time.monotonic()
    results = ((name, compiled(model, batch, token_bytes)) for name, batch in itertools.chain([first], batches))
    losses: defaultdict[str, Losses] = defaultdict(Losses)
    for name, (sums, num_bytes) in one_behind(results):
        losses[name] += Losses(float(sums.cross_entropy), int(sums.num_counted), int(num_bytes))
    return losses, time.monotonic() - started


def print_losses(figures: dict[str, dict[str, Any]], tokens_per_sec: float) -> None:
    """Prints the table of all sources and their sum."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("documents", "tokens", "bytes", "loss", "perplexity", "bits per byte"):
        table.add_column(column, justify="left" if column == "documents" else "right")
    forms = {"tokens": ",", "bytes": ",", "loss": ".4f", "perplexity": ",.4g", "bits_per_byte": ".4f"}
    for name, found in figures.items():
        table.add_row(name, *("-" if found[key] is None else format(found[key], form) for key, form in forms.items()))
    console.print_table(table)
    console.log(f"speed      {tokens_per_sec:,.0f} tokens/s")
