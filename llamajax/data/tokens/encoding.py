"""Selects what documents are tokenized with: the tokenizer, given or trained on the documents, and the chat template."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamajax import disk
from llamajax.config.data import DataConfig
from llamajax.config.run import Config
from llamajax.config.shipped import find_file
from llamajax.data import cache
from llamajax.data.chat.chat_template import ChatTemplate, load_chat_template
from llamajax.data.documents.file_groups import ANNOUNCED_BYTES, HashedGroup
from llamajax.data.documents.formats import utf8_length
from llamajax.data.documents.split import is_held_out
from llamajax.data.free_memory import free_memory
from llamajax.data.progress import TokenizingProgress, seconds_told
from llamajax.data.tokenizers.tokenizer import load_tokenizer, sample_texts, train_sentencepiece
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError, DataError

_TOKENIZER_FORMAT = "tokenizer-3"
_TOLD_BYTES = 2**20
"""Number of bytes of text between progress reports."""
_MEMORY_PER_BYTE = 4
"""Minimum memory that SentencePiece needs per byte of its sample: 5 measured for repeated words, 35 if all words differ."""


@dataclass(frozen=True)
class Tokenizing:
    """Settings by which the documents of a run become tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """Chat template, needed for conversations."""
    cache_dir: Path
    held_out_fraction: float
    log: Callable[[str], None]
    """Receives a line about what this process is doing."""


def tokenizer_for(
    config: Config,
    models_tokenizer: Tokenizer | None,
    groups: Sequence[HashedGroup],
    cache_dir: Path,
    log: Callable[[str], None],
) -> Tokenizer:
    """Returns the model's own tokenizer, the one that the configuration names, or one trained on its training documents.

    Raises:
        ConfigError: see `given_tokenizer`; or `model.vocab_size` is too small for the text.
        DataError: a source cannot be read, there is no text, or the memory is too small for the sample.
        DiskError: the disk fails.
    """
    if (given := given_tokenizer(config, models_tokenizer)) is not None:
        return given
    vocab_size, max_bytes = config.model.vocab_size, config.data.tokenizer.train_max_bytes
    path = trained_path(config, groups, cache_dir)
    if not cache.is_whole(path):
        with disk.locked(path.parent):
            if not cache.is_whole(path):
                if path.exists():
                    log(f"damaged    {path}; rebuilding it")
                num_bytes = sum(group.num_bytes for group in groups)
                if num_bytes >= ANNOUNCED_BYTES:
                    log(f"sampling   {max_bytes / 1e6:,.1f} MB of text for the tokenizer from {num_bytes / 1e9:,.1f} GB")
                with TokenizingProgress(num_bytes, log, doing="sampling") as progress:
                    sample = sample_texts(_training_texts(config.data, groups, progress), max_bytes)
                size = sum(utf8_length(text) for text in sample)
                cut = f"of {progress.text_bytes / 1e6:,.1f} " if size < progress.text_bytes else ""
                training = f"tokenizer  training {vocab_size:,} pieces on {size / 1e6:,.1f} {cut}MB of text"
                log(training)
                with seconds_told(training, log):
                    model = train_sentencepiece(sample, vocab_size=vocab_size)
                cache.write_hashed(path, model)
    return load_tokenizer(path)


def given_tokenizer(config: Config, models_tokenizer: Tokenizer | None) -> Tokenizer | None:
    """Returns the model's own tokenizer or the one that the configuration names; None if one is to be trained.

    Raises:
        ConfigError: it does not fit the model or is not the model's own.
        DataError: it cannot be read.
    """
    data, vocab_size = config.data, config.model.vocab_size
    tokenizer = models_tokenizer
    if data.tokenizer.path is not None:
        tokenizer = load_tokenizer(Path(data.tokenizer.path).expanduser())
        if models_tokenizer is not None and tokenizer.sha256 != models_tokenizer.sha256:
            raise ConfigError(
                f"data.tokenizer.path: {data.tokenizer.path} is not the tokenizer that the model was trained with,"
                f" {models_tokenizer.source}; remove data.tokenizer.path to use that one"
            )
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        named = f"data.tokenizer.path={data.tokenizer.path}" if data.tokenizer.path else str(tokenizer.source)
        raise ConfigError(
            f"model.vocab_size: {vocab_size} is below the {tokenizer.vocab_size} tokens of {named};"
            f" raise it to {tokenizer.vocab_size} or more{_or_without(tokenizer, vocab_size)}"
        )
    return tokenizer


def trained_path(config: Config, groups: Iterable[HashedGroup], cache_dir: Path) -> Path:
    """Returns the path of the tokenizer trained on these groups, which may not exist."""
    data, contents = config.data, [group.content for group in groups]
    rest = data.held_out_fraction, config.model.vocab_size, data.tokenizer.train_max_bytes
    return cache_dir / "tokenizers" / cache.key_of(_TOKENIZER_FORMAT, contents, *rest) / "tokenizer.model"


def _or_without(tokenizer: Tokenizer, vocab_size: int) -> str:
    """Returns a further remedy if only added tokens exceed the vocabulary, as in some published fine-tunes."""
    if tokenizer.vocab_size - len(tokenizer.new_tokens) > vocab_size:
        return ""
    return f", or remove {', '.join(tokenizer.new_tokens)} from the files beside it if the model has no rows for them"


def _training_texts(data: DataConfig, groups: Iterable[HashedGroup], progress: TokenizingProgress) -> Iterator[str]:
    """Yields the texts that are not held out; raises `DataError` as soon as the sample exceeds the memory."""
    free = free_memory()
    for number, group in enumerate(groups):
        num_documents, text_bytes = 0, 0
        for document in group.documents():
            if not is_held_out(document.split_hash, data.held_out_fraction):
                num_documents += not document.goes_on
                text_bytes += utf8_length(document.text)
                yield document.text
            if text_bytes >= _TOLD_BYTES:
                progress.advance(num_documents, text_bytes, document.bytes_read, group=number)
                num_documents, text_bytes = 0, 0
                _check_memory(min(progress.text_bytes, data.tokenizer.train_max_bytes), free)
        progress.advance(num_documents, text_bytes, 0, group=number)
        progress.finish_group(group.num_bytes, number)


def _check_memory(sample_bytes: int, free: int | None) -> None:
    if free is not None and _MEMORY_PER_BYTE * sample_bytes > free:
        raise DataError(
            f"data.tokenizer.train_max_bytes: training a tokenizer on {sample_bytes / 1e6:,.1f} MB of text takes at least"
            f" {_MEMORY_PER_BYTE * sample_bytes / 1e9:,.1f} GB of memory, but only {free / 1e9:,.1f} GB are free; set it to"
            f" {free // _MEMORY_PER_BYTE // 2:,} or less, or use a machine with more"
        )


def chat_template_for(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the chat template for the run's conversations; None if there are none, or only prompts and no template.

    Raises:
        ConfigError: a template is needed but missing. Prompts may be texts, so each that is not reports it itself.
        DataError: the template is malformed or cannot be read.
    """
    if not any(source.is_rendered for source in data.sources):
        return None
    named = data.chat_template
    template = load_chat_template(Path(find_file(named)) if named else tokenizer.source.parent, tokenizer)
    if template is None and any(source.needs_template for source in data.sources):
        raise ConfigError(
            "data.chat_template: is required for sources of kind=chat or preference, because the tokenizer has none; name a"
            " Jinja file, for example one of configs/chat_templates/"
        )
    return template
