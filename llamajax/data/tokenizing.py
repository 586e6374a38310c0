"""By what the documents of a run become tokens: its tokenizer, given or trained on them, and its chat template."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamajax import disk
from llamajax.config.run import Config
from llamajax.data import cache
from llamajax.data.chat import ChatTemplate, load_chat_template
from llamajax.data.groups import ANNOUNCED_BYTES, FileGroup
from llamajax.data.split import is_held_out
from llamajax.data.tokenizer import load_tokenizer, sample_texts, train_sentencepiece
from llamajax.data.tokenizer_base import Tokenizer
from llamajax.errors import ConfigError

_TOKENIZER_FORMAT = "tokenizer-3"


@dataclass(frozen=True)
class Tokenizing:
    """How the documents of a run become tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    """Needed for conversations."""
    cache_dir: Path
    held_out_fraction: float
    log: Callable[[str], None]
    """Takes a line about what this process is doing."""


def tokenizer_for(
    config: Config,
    models_tokenizer: Tokenizer | None,
    groups: Sequence[FileGroup],
    cache_dir: Path,
    log: Callable[[str], None],
) -> Tokenizer:
    """The model's own tokenizer, or the one that the configuration names, or one trained on its training documents.

    Raises:
        ConfigError: as of `given_tokenizer`, or `model.vocab_size` is too small for the text.
        DataError: a source cannot be read, or there is no text.
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
                    log(f"damaged    {path}; making it again")
                num_bytes = sum(group.num_bytes for group in groups)
                if num_bytes >= ANNOUNCED_BYTES:
                    log(f"sampling   {max_bytes / 1e6:,.1f} MB of text for the tokenizer from {num_bytes / 1e9:,.1f} GB")
                sample = sample_texts(_training_texts(groups, config.data.held_out_fraction), max_bytes)
                size = sum(len(text.encode()) for text in sample)
                log(f"tokenizer  training {vocab_size:,} pieces on {size / 1e6:.1f} MB of text")
                model = train_sentencepiece(sample, vocab_size=vocab_size)
                cache.write_hashed(path, model)
    return load_tokenizer(path)


def given_tokenizer(config: Config, models_tokenizer: Tokenizer | None) -> Tokenizer | None:
    """The model's own tokenizer, or the one that the configuration names; None if one is to be trained.

    Raises:
        ConfigError: it does not fit the model, or is not the model's own.
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


def trained_path(config: Config, groups: Iterable[FileGroup], cache_dir: Path) -> Path:
    """Where the tokenizer is that is trained on these groups, or would be."""
    data, contents = config.data, [group.content for group in groups]
    rest = data.held_out_fraction, config.model.vocab_size, data.tokenizer.train_max_bytes
    return cache_dir / "tokenizers" / cache.key_of(_TOKENIZER_FORMAT, contents, *rest) / "tokenizer.model"


def _or_without(tokenizer: Tokenizer, vocab_size: int) -> str:
    """What else can be done where only added tokens have no row, as in some published fine-tunes."""
    if tokenizer.vocab_size - len(tokenizer.new_tokens) > vocab_size:
        return ""
    return f", or take {', '.join(tokenizer.new_tokens)} out of the files beside it if the model has no rows for them"


def _training_texts(groups: Iterable[FileGroup], held_out_fraction: float) -> Iterator[str]:
    for group in groups:
        for document in group.documents():
            if not is_held_out(document.split_hash, held_out_fraction):
                yield document.text


def chat_template_for(config: Config, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of the run's conversations; None if there are none.

    Raises:
        ConfigError: it is needed, and there is none.
        DataError: it is malformed, or cannot be read.
    """
    if not any(source.kind == "chat" for source in config.data.sources):
        return None
    named = config.data.chat_template
    template = load_chat_template(Path(named).expanduser() if named else tokenizer.source.parent, tokenizer)
    if template is None:
        raise ConfigError(
            "data.chat_template: is needed for sources of kind=chat, since the tokenizer has none; name a Jinja file, for"
            " example one of configs/chat_templates/"
        )
    return template
