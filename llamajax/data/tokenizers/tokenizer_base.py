"""Interface of all kinds of tokenizers."""

import abc
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from llamajax.data.tokenizers.fast_encoder import FastEncoder, NormalForm
from llamajax.data.tokenizers.tokenizer_files import MODEL_FILE, TokenizerFiles
from llamajax.errors import DataError

if TYPE_CHECKING:
    import gigatoken

_READING = b"2"
"""Version of how files are read. It changes when the same files begin to give other ids or document ends. A lone
SentencePiece model has always been read the same way."""
SPACE = "\u2581"
"""The character that SentencePiece writes for a space."""


class Tokenizer(abc.ABC):
    """Encodes text without adding tokens of its own.

    A document is framed by `bos_id` and `eos_id`, even if prompts begin with no token: its first token is trained on too and
    needs a predecessor. For models whose prompts begin with nothing, such as Qwen, that predecessor is the end of the
    previous document, as in their own training; text without one occurs in long documents, which continue at the start of
    later rows. A tokenizer that has only one of the two tokens uses it for both. A conversation is exactly what its template
    writes.
    """

    vocab_size: int
    """Exclusive upper limit of token ids."""
    bos_id: int
    """Token that begins a document."""
    eos_id: int
    """Token that ends a document."""
    prefix: tuple[int, ...]
    """Tokens at the start of a text when the model is used, as transformers' tokenizers add them: `bos_id` or nothing."""
    bos_token: str | None
    """Text of the token with which a chat template begins a text; None if the tokenizer has no token just for that."""
    eos_token: str | None
    """Text of the token with which a chat template ends a text or turn."""
    token_bytes: Int32[np.ndarray, "V"]
    """Number of UTF-8 bytes of text that each token stands for; 0 for tokens without text.

    Over the tokens of a text they add up to its length, unless the tokenizer adds or drops text (Llama 2's, for example,
    adds a space before it).
    """
    new_tokens: tuple[str, ...]
    """Tokens that only the files beside the vocabulary define; they have the last ids."""
    source: Path
    """The vocabulary file, for messages."""
    files: dict[str, bytes]
    """Content by name of all files that `load_tokenizer` needs, exactly as read, to be stored with a checkpoint."""
    read_from: TokenizerFiles
    """All files as read; another process builds the same tokenizer from them."""
    sha256: str
    """Hash of the files' content and of how they are read."""
    library: str
    """Package that encodes the texts."""
    special_texts: tuple[str, ...]
    """Tokens that are found in a text before the vocabulary is used, and tokens that no text is encoded to."""
    normal_form: NormalForm | None = None
    """Unicode normal form that the tokenizer applies to texts."""
    is_fast = False
    """Whether `encode_documents` uses gigatoken. Set once it is proven to give the same ids (`encoder_choice`)."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Builds the tokenizer from its files; reads no others.

        Raises:
            DataError: the tokenizer is damaged or cannot be reproduced exactly.
        """
        self.source, self.files, self.read_from = files.source, dict(files.contents), files
        hashes = (hashlib.sha256(content).digest() for content in self.files.values())
        reading = b"" if list(self.files) == [MODEL_FILE] else _READING
        self.sha256 = hashlib.sha256(b"".join((reading, *hashes))).hexdigest()

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """Returns the token ids of each text; special tokens written in a text are encoded as plain text."""

    @abc.abstractmethod
    def encode_following(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """Returns the ids as `encode_batch` does, for texts that each follow another text: no prefix is added."""

    def encode_documents(self, texts: Sequence[str], *, follow: bool = False) -> list[Int32[np.ndarray, "_"]]:
        """Returns the ids of `encode_batch` or `encode_following`, computed by gigatoken in one thread if `is_fast`."""
        if self.is_fast:
            return self.encode_fast(texts, follow=follow)
        return self.encode_following(texts) if follow else self.encode_batch(texts)

    def encode_fast(self, texts: Sequence[str], *, follow: bool = False) -> list[Int32[np.ndarray, "_"]]:
        """Returns what `encode_documents` does if `is_fast`; unless that is proven, the ids may differ.

        Raises:
            Exception: from gigatoken, if it does not support this tokenizer.
        """
        otherwise = self.encode_following if follow else self.encode_batch
        return self._fast_encoder.encode(texts, [self._is_next(text, follow) for text in texts], otherwise)

    @abc.abstractmethod
    def splits(self, text: str, place: int) -> bool:
        """Returns whether the text may be cut at this place, the end of a word.

        It may if no token crosses the place in any text with this stretch, and each side has the same ids as when encoded
        alone. The stretch must not contain `special_texts`.
        """

    @functools.cached_property
    def _fast_encoder(self) -> FastEncoder:
        return FastEncoder(self._load_fast, self.special_texts, self.normal_form)

    @abc.abstractmethod
    def _load_fast(self, without_prefix: bool) -> "gigatoken.Tokenizer":
        """Returns the tokenizer in gigatoken, with or without its prefix; raises whatever gigatoken does."""

    def _is_next(self, text: str, follows: bool) -> bool:
        """Returns whether a text gets no prefix because it `follows` another; False if none ever gets one."""
        return follows

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the token ids of a text to continue, after `prefix`; if empty, the token that begins a document."""
        return [*self.prefix, *self.encode_batch([text])[0].tolist()] or [self.bos_id]

    def encode_template(self, text: str) -> Int32[np.ndarray, "T"]:
        """Returns the token ids of a text from a chat template: special tokens written in it become those tokens."""
        return self.encode_template_parts([text])[0]

    @abc.abstractmethod
    def encode_template_parts(self, parts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """Encodes consecutive parts of one text as `encode_template` does; no token crosses from one part into the next.

        A tokenizer that adds a space before a text does so before the first part only.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids; special tokens have no text, and bytes that are not UTF-8 become U+FFFD."""

    @abc.abstractmethod
    def name(self, token: int) -> str:
        """Returns the name of a token, such as `<|im_end|>`."""

    def decode_all(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, with the names of tokens that have no text."""
        runs = itertools.groupby(ids, key=lambda token: bool(self.token_bytes[token]))
        return "".join(self.decode(run) if has_text else "".join(map(self.name, run)) for has_text, run in runs)

    def _named_end(self, key: str, ids: Callable[[str], int | None]) -> int | None:
        """Returns the token that the configuration names under `key`, or None if it names none."""
        name = self.read_from.ends.get(key)
        if name is not None and ids(name) is None:
            raise DataError(f"{self.source}: {key}: {name!r}, named by the files beside it, is not in it; correct them")
        return None if name is None else ids(name)

    def _set_ends(self, bos_id: int | None, eos_id: int | None, remedy: str) -> None:
        ends = [token for token in (bos_id, eos_id) if token is not None]
        if not ends:
            raise DataError(f"{self.source}: data.tokenizer.path: has no token to begin or end a document; {remedy}")
        self.bos_id, self.eos_id = ends[0], ends[-1]

    def _check_added(self, ids: Callable[[str], int | None]) -> None:
        """Refuses added tokens that the files list with other ids than they have here."""
        for token, added in self.read_from.added:
            if token not in (None, ids(added.content)):
                raise DataError(
                    f"{self.source}: the files beside it list the added token {added.content!r} with the id {token}, but it"
                    f" has {ids(added.content)} here; use files that belong together"
                )


def num_threads() -> int:
    """Returns how many threads a tokenizer may use: one if TOKENIZERS_PARALLELISM says so, as for Hugging Face's library."""
    return 1 if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("0", "false") else os.cpu_count() or 1


def neighbours(pieces: Iterable[str]) -> frozenset[str]:
    """Returns all pairs of characters that are adjacent in any of the pieces."""
    return frozenset("".join(pair) for piece in pieces for pair in itertools.pairwise(piece))


def text_bytes(piece: str) -> int:
    """Returns the number of UTF-8 bytes of the text that a SentencePiece piece stands for."""
    return len(piece.replace(SPACE, " ").encode())
