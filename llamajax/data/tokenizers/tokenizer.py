"""Loads tokenizers and trains new ones."""

import heapq
import io
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import sentencepiece

from llamajax.data.tokenizers.hf_tokenizer import HuggingFaceTokenizer
from llamajax.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from llamajax.data.tokenizers.tokenizer_base import Tokenizer
from llamajax.data.tokenizers.tokenizer_files import JSON_FILE, TokenizerFiles, read_files
from llamajax.errors import ConfigError, DataError

TRAINING_CHUNK_CHARS = 2048
"""Length of the parts in which training text is sampled, in characters."""


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a SentencePiece model or a `tokenizer.json`, from the file or from a directory such as a checkpoint.

    The neighbouring files are read too, as transformers reads them.

    Raises:
        DataError: no tokenizer is found, or it is damaged or of another kind.
    """
    if (tokenizer := find_tokenizer(path)) is None:
        raise DataError(f"{path}: data.tokenizer.path: has no tokenizer.json or tokenizer.model; name the file")
    return tokenizer


def find_tokenizer(path: Path) -> Tokenizer | None:
    """Returns the tokenizer that `load_tokenizer` loads, or None if the path is a directory without one."""
    files = read_files(path)
    return None if files is None else tokenizer_of(files)


def tokenizer_of(files: TokenizerFiles) -> Tokenizer:
    """Builds a tokenizer from its files.

    Raises:
        DataError: it is damaged or of another kind.
    """
    return HuggingFaceTokenizer(files) if JSON_FILE in files.contents else SentencePieceTokenizer(files)


def sample_texts(texts: Iterable[str], max_bytes: int) -> list[str]:
    """Returns parts of the texts, in order, spread evenly over them: at most `max_bytes` of UTF-8, but at least one part.

    The texts are read once and few parts are held. Each part draws a pseudo-random number (always the same), and the parts
    with the smallest numbers are kept, as many as fit.
    """
    draw = random.Random(0).random
    parts = (text[at : at + TRAINING_CHUNK_CHARS] for text in texts for at in range(0, len(text), TRAINING_CHUNK_CHARS))
    kept: list[tuple[float, int, str]] = []  # a heap; the next part to drop is first
    size = 0
    for place, part in enumerate(parts):
        heapq.heappush(kept, (-draw(), place, part))
        size += len(part.encode())
        while size > max_bytes and len(kept) > 1:
            size -= len(heapq.heappop(kept)[2].encode())
    return [part for _, _, part in sorted(kept, key=lambda entry: entry[1])]


def train_sentencepiece(texts: Sequence[str], *, vocab_size: int) -> bytes:
    """Trains a SentencePiece BPE model that restores every text exactly, and returns its model file.

    Args:
        texts: training texts, as from `sample_texts`. A list, because SentencePiece takes an iterator's error for its end.
        vocab_size: number of pieces, including `<unk>`, `<s>`, `</s>` (ids 0, 1, 2) and one per byte; the model has fewer if
            the text is too short.

    Raises:
        ConfigError: `vocab_size` cannot hold the bytes and characters.
        DataError: the texts are empty or cannot be trained on.
    """
    if not texts:
        raise DataError("data.sources: there is no text to train a tokenizer on; add text or set data.tokenizer.path")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            split_digits=True,
            allow_whitespace_only_pieces=True,  # indentation
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=8 * TRAINING_CHUNK_CHARS,  # bytes; longer ones would be left out
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        too_small = re.search(r"(\d+) vs (\d+)", str(error))
        if too_small:
            raise ConfigError(
                f"model.vocab_size: {vocab_size} pieces cannot hold the bytes and common characters of this text;"
                f" raise it to {too_small[2]} or more"
            ) from error
        reason = " ".join(str(error).split())
        raise DataError(
            f"data.sources: SentencePiece cannot be trained on this text: {reason}; add text or set data.tokenizer.path"
        ) from error
    return model.getvalue()
