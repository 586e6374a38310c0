"""Grows a model's vocabulary; `python -m converters.tokenizer grow` calls it."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from converters.tokenizer_formats import BpeTokenizer, read_tokenizer
from converters.tokenizer_growth import MIN_SAVED, learn_pieces
from converters.tokenizer_weights import Growth, write_weights
from llamajax.config.data import SourceConfig
from llamajax.config.hf_config import CONFIG
from llamajax.config.json_file import read_bytes, read_json
from llamajax.data.documents.sources import Source
from llamajax.data.progress import seconds_told
from llamajax.data.tokenizers.tokenizer import load_tokenizer, sample_texts
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.disk import made_whole
from llamajax.errors import ConfigError, DataError, UserError, show
from llamajax.processes.exit import exit_code
from llamajax.weights.hf_files import open_model, read_travelling
from llamajax.weights.safetensors import Stored

HELD_OUT_EVERY = 10
"""One in this many parts of the corpus is held out for measuring and not learnt from."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_ODD_TEXTS = (
    "",
    " ",
    "  a\n\t\r\n\n b ",
    "\u00e9t\u00e9 e\u0301 \u6f22\u5b57 \u0627\u0644 \U0001f600\u200d \x07 \ufeff",
    "<s> </s> <0x0A> 12345",
)
_SHOWN_PIECES = 8
_TEXTS_AT_ONCE = 128


@dataclass(frozen=True)
class Model:
    """Hugging Face model with a vocabulary that can grow."""

    config: Mapping[str, Any]
    """Contents of config.json."""
    tensors: Mapping[str, Stored]
    """Tensors by name."""
    files: Mapping[str, bytes]
    """Contents of the tokenizer's and other small files, by name."""
    tokenizer: BpeTokenizer
    loaded: Tokenizer
    """The same tokenizer, as training would use it."""


@dataclass(frozen=True)
class Corpus:
    """Parts of texts, sampled evenly from the whole corpus."""

    learnt: Sequence[str]
    held_out: Sequence[str]


def grow(arguments: argparse.Namespace, progress: Progress) -> None:
    """Grows a model's vocabulary; the new directory appears complete and checked, or not at all.

    Raises:
        UserError: one of `llamajax.errors`.
        OSError: reading or writing failed.
    """
    source, out = Path(os.path.expanduser(arguments.model)), Path(os.path.expanduser(arguments.out))
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out}: exists already; choose another directory, or remove it")
    model = read_model(source)
    vocabulary = model.tokenizer.vocabulary
    _say(f"read       {source}: {vocabulary.first_new_id:,} tokens, from {', '.join(model.tokenizer.files)}")
    config = SourceConfig(kind=arguments.kind, paths=tuple(arguments.corpus), text_key=arguments.text_key)
    with _shown("reading    the corpus", progress):
        corpus = read_corpus(Source(config, "corpus"), arguments.train_max_bytes, progress)
    with _shown("learning   pieces", progress):
        pieces = _learn(model, corpus, arguments.num_pieces, progress)
    num_tokens = vocabulary.first_new_id + len(pieces)
    multiple = arguments.pad_vocab_multiple
    num_rows = -(-max(num_tokens, model.config["vocab_size"]) // multiple) * multiple
    with made_whole(out) as unfinished:
        for name, content in {**model.files, **model.tokenizer.grown(pieces)}.items():
            (unfinished / name).write_bytes(content)
        body = {key: value for key, value in model.config.items() if key != "auto_map"} | {"vocab_size": num_rows}
        (unfinished / "config.json").write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        grown = load_tokenizer(unfinished)
        with _shown("measuring  the new pieces", progress):
            _check(model.loaded, grown, [*_ODD_TEXTS, *corpus.held_out])
            for line in _worth(model.loaded, grown, corpus):
                _say(line)
        _say(
            f"vocabulary {model.config['vocab_size']:,} -> {num_rows:,} rows: {len(pieces):,} new tokens,"
            f" {num_rows - num_tokens:,} padding rows"
        )
        rows = Growth(vocabulary.first_new_id, vocabulary.encode(pieces), num_rows)
        started = time.monotonic()
        task = progress.add_task("writing", total=sum(stored.nbytes for stored in model.tensors.values()))
        tables = [name for name in (EMBEDDING, HEAD) if name in model.tensors]
        nbytes = write_weights(source, model.tensors, tables, rows, unfinished, lambda count: progress.advance(task, count))
        seconds = time.monotonic() - started
        _say(f"wrote      {nbytes / 1e6:,.0f} MB in {seconds:.1f} s, {nbytes / 1e6 / seconds:,.0f} MB/s")
    _say(f"done       {out}")


def _shown(doing: str, progress: Progress) -> AbstractContextManager[None]:
    """Prints the duration of the block if no terminal can show a progress bar."""
    return seconds_told(doing, _say) if progress.disable else nullcontext()


def _say(line: str) -> None:
    print(line, flush=True)  # the progress bar captures it and prints it above itself


def read_model(source: Path) -> Model:
    """Reads and checks everything in `source` except the values of the weights.

    Raises:
        ConfigError: it is not a Llama with a matching BPE tokenizer; the message says why in one line.
    """
    if (source / "checkpoints").is_dir() or (source.parent.name == "checkpoints" and (source / "meta.json").is_file()):
        raise ConfigError(
            f"{source}: is a run or checkpoint of llamajax; export it first, and grow the export:"
            f" python -m converters.hf export {source} HF_DIR"
        )
    config, files, tensors = read_json(source / CONFIG), read_travelling(source), open_model(source)
    for name, stored in tensors.items():
        if not name.startswith("model.layers.") and name not in (EMBEDDING, HEAD, "model.norm.weight"):
            raise ConfigError(f"{stored.file}: {show(name)} is not a tensor of a Llama; choose a Llama")
    for name in (EMBEDDING,) if config.get("tie_word_embeddings") else (EMBEDDING, HEAD):
        if name not in tensors:
            raise ConfigError(f"{source}: {name} is missing; download the whole model")
    num_rows = config.get("vocab_size")
    for name in (EMBEDDING, HEAD):
        shape = tensors[name].shape if name in tensors else (num_rows, 0)
        if type(num_rows) is not int or len(shape) != 2 or shape[0] != num_rows:
            raise ConfigError(
                f"{tensors[name].file}: {name} is {list(shape)}, but vocab_size in config.json is {show(str(num_rows))};"
                " the files belong to different models; download the model again"
            )
    card = source / "README.md"
    if card.is_file():
        files[card.name] = read_bytes(card)
    try:
        loaded = load_tokenizer(source)
        tokenizer = read_tokenizer(source, files)
    except UserError:
        raise
    except Exception as error:  # a damaged file makes the tokenizer libraries raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{source}: the tokenizer cannot be read: {reason}; download it again") from error
    if tokenizer.vocabulary.first_new_id > num_rows:
        raise ConfigError(
            f"{source}: the tokenizer has ids up to {tokenizer.vocabulary.first_new_id - 1}, but the model has only"
            f" {num_rows} rows; use the model's own tokenizer"
        )
    left_out = {"tokenizer.json", "tokenizer.model"} - tokenizer.files.keys()
    return Model(config, tensors, {name: files[name] for name in files.keys() - left_out}, tokenizer, loaded)


def read_corpus(source: Source, max_bytes: int, progress: Progress) -> Corpus:
    """Samples the corpus and reports the sizes of the samples.

    Raises:
        DataError: a file cannot be read, or the corpus has too little text.
    """
    files = source.files()
    num_bytes = sum(path.stat().st_size for path in files)
    task = progress.add_task("reading", total=num_bytes)

    def texts() -> Iterator[str]:
        for document in source.documents(files):
            progress.update(task, completed=document.bytes_read)
            yield document.text

    parts = sample_texts(texts(), max_bytes)
    if len(parts) < 2:
        raise DataError("corpus.paths: too little text to learn from one part and measure on another; add text")
    held_out = parts[::HELD_OUT_EVERY]
    learnt = [part for place, part in enumerate(parts) if place % HELD_OUT_EVERY]
    learnt_bytes, held_out_bytes = (sum(len(part.encode()) for part in some) for some in (learnt, held_out))
    _say(
        f"corpus     {num_bytes / 1e6:,.1f} MB in {len(files):,} file(s); {learnt_bytes / 1e6:,.1f} MB of it to learn from,"
        f" {held_out_bytes / 1e6:,.1f} MB to measure on"
    )
    return Corpus(learnt, held_out)


def _learn(model: Model, corpus: Corpus, num_pieces: int, progress: Progress) -> list[str]:
    """Returns the new pieces in order; at least one."""
    started = time.monotonic()
    vocabulary = model.tokenizer.vocabulary
    word_counts: Counter[str] = Counter()
    for part in progress.track(corpus.learnt, description="cutting"):
        word_counts.update(vocabulary.words(part))
    task = progress.add_task("learning", total=num_pieces)
    pieces = learn_pieces(vocabulary, word_counts, num_pieces, lambda: progress.advance(task))
    if not pieces:
        raise DataError(f"corpus.paths: no new piece would save {MIN_SAVED} tokens of this text; add text of another kind")
    few = "" if len(pieces) == num_pieces else f", not {num_pieces:,}: no further one would save {MIN_SAVED} tokens"
    _say(f"learnt     {len(pieces):,} pieces{few}; {len(word_counts):,} different words, {time.monotonic() - started:.1f} s")
    return pieces


def _check(old: Tokenizer, new: Tokenizer, texts: Sequence[str]) -> None:
    """Raises `ConfigError` unless the grown tokenizer keeps the old tokens and decodes to the same texts."""
    same = (old.bos_id, old.eos_id) == (new.bos_id, new.eos_id)
    same = same and all(old.decode([token]) == new.decode([token]) for token in range(old.vocab_size))
    for some in _batches(texts):
        encoded = zip(old.encode_batch(some), new.encode_batch(some), strict=True)
        same = same and all(old.decode(old_ids) == new.decode(new_ids) for old_ids, new_ids in encoded)
    if not same:
        raise ConfigError(
            f"{old.source}: the grown tokenizer does not decode all texts as before, and nothing was kept; please report"
            " this, with the file"
        )


def _worth(old: Tokenizer, new: Tokenizer, corpus: Corpus) -> Iterator[str]:
    """Reports the benefit of the new pieces, in a few lines."""

    def count(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
        found = np.zeros(tokenizer.vocab_size, np.int64)
        for some in _batches(texts):
            found += np.bincount(np.concatenate(tokenizer.encode_batch(some)), minlength=len(found))
        return found

    num_bytes = sum(len(text.encode()) for text in corpus.held_out)
    counts = count(new, corpus.held_out)
    before, after = int(np.sum(count(old, corpus.held_out))), int(np.sum(counts))
    yield (
        f"held out   {before:,} tokens -> {after:,} ({after / before - 1:+.1%}); {num_bytes / before:.3f} bytes per token"
        f" -> {num_bytes / after:.3f}"
    )
    counts = (counts + count(new, corpus.learnt))[old.vocab_size :]
    yield f"used       {np.count_nonzero(counts):,} of {len(counts):,} new pieces in this sample"
    for name, sizes in (("frequent", counts), ("longest", new.token_bytes[old.vocab_size :])):
        largest = np.argsort(-sizes, kind="stable")[:_SHOWN_PIECES]
        yield f"{name:<10} " + " ".join(_text_of(new, old.vocab_size + int(place)) for place in largest)


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yields small batches: texts encoded by the tokenizer library take a hundred times their own memory."""
    for at in range(0, len(texts), _TEXTS_AT_ONCE):
        yield texts[at : at + _TEXTS_AT_ONCE]


def _text_of(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token as written inside a text; at the start of a text it may lose a space."""
    return repr(tokenizer.decode([token, token])[len(tokenizer.decode([token])) :])


def main(arguments: argparse.Namespace) -> int:
    """Runs one command and returns the exit code."""

    def run() -> None:
        with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
            grow(arguments, progress)

    return exit_code(
        run,
        memory_remedy="a smaller --train_max_bytes",
        disk=arguments.out,
        disk_remedy="check the disk and try again",
    )
