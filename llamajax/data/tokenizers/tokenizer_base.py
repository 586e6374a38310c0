"""What every kind of tokenizer can do."""

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
"""Another one whenever the same files give other ids, or other ends of documents; a lone SentencePiece model never did."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class Tokenizer(abc.ABC):
    """Encodes text without adding tokens of its own.

    A document is framed by `bos_id` and `eos_id`, whatever a prompt is begun with: its first token is learnt too, and needs
    something to follow. Where prompts begin with nothing, as Qwen's, that is what ends the document before, as it was when
    those models were trained; text without it is learnt from long documents, which go on at the beginning of other rows. A
    tokenizer that has only one of the two uses it for both. A conversation is what its template writes, and nothing else.
    """

    vocab_size: int
    """Token ids are below this."""
    bos_id: int
    """Begins a document."""
    eos_id: int
    """Ends a document."""
    prefix: tuple[int, ...]
    """What a text begins with when the model is used, as transformers' tokenizers begin it: `bos_id`, or nothing."""
    bos_token: str | None
    """How a chat template writes the token that begins a text; None if the tokenizer has none for that alone."""
    eos_token: str | None
    """How a chat template writes the token that ends a text or turn."""
    token_bytes: Int32[np.ndarray, "V"]
    """UTF-8 bytes of text that each token stands for; 0 for tokens that stand for none.

    Over the tokens of a text they add up to its length, unless the tokenizer itself adds or drops text (as Llama 2's,
    which puts a space before it).
    """
    new_tokens: tuple[str, ...]
    """Tokens that only the files beside the vocabulary have, of the last ids."""
    source: Path
    """The file it was read from, for messages."""
    files: dict[str, bytes]
    """Name and content of all that `load_tokenizer` needs, as it was read, to be kept with a checkpoint."""
    read_from: TokenizerFiles
    """All files, as they were read; another process makes the same tokenizer of them."""
    sha256: str
    """Hash of the files' content, and of how they are read."""
    library: str
    """The package that encodes its texts."""
    special_texts: tuple[str, ...]
    """Tokens that are looked for in a text before the vocabulary is used, and those that no text becomes."""
    normal_form: NormalForm | None = None
    """Of Unicode, into which it brings texts."""
    is_fast = False
    """Whether `encode_documents` uses gigatoken: set where that is proven to give the same ids (`encoder_choice`)."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Builds it from its files; reads no other.

        Raises:
            DataError: the tokenizer is damaged, or cannot be read exactly.
        """
        self.source, self.files, self.read_from = files.source, dict(files.contents), files
        hashes = (hashlib.sha256(content).digest() for content in self.files.values())
        reading = b"" if list(self.files) == [MODEL_FILE] else _READING
        self.sha256 = hashlib.sha256(b"".join((reading, *hashes))).hexdigest()

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """The token ids of each text; special tokens written in a text are read as plain text."""

    @abc.abstractmethod
    def encode_following(self, texts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """As `encode_batch`, of texts that each follow on another: nothing is put before them."""

    def encode_documents(self, texts: Sequence[str], *, follow: bool = False) -> list[Int32[np.ndarray, "_"]]:
        """The ids of `encode_batch`, or of `encode_following`, by gigatoken if `is_fast`, which computes in one thread."""
        if self.is_fast:
            return self.encode_fast(texts, follow=follow)
        return self.encode_following(texts) if follow else self.encode_batch(texts)

    def encode_fast(self, texts: Sequence[str], *, follow: bool = False) -> list[Int32[np.ndarray, "_"]]:
        """As `encode_documents` if `is_fast`; where that is not proven, the ids may be others.

        Raises:
            Exception: of gigatoken, which does not know such a tokenizer.
        """
        otherwise = self.encode_following if follow else self.encode_batch
        return self._fast_encoder.encode(texts, [self._is_next(text, follow) for text in texts], otherwise)

    @abc.abstractmethod
    def splits(self, text: str, place: int) -> bool:
        """Whether it is known that no token lies across this end of a word in any text that has this stretch, and that each
        side has the ids that it has by itself; of a stretch without `special_texts`."""

    @functools.cached_property
    def _fast_encoder(self) -> FastEncoder:
        return FastEncoder(self._load_fast, self.special_texts, self.normal_form)

    @abc.abstractmethod
    def _load_fast(self, without_prefix: bool) -> "gigatoken.Tokenizer":
        """The tokenizer in gigatoken, as it is or without what it puts before a text; raises whatever gigatoken does."""

    def _is_next(self, text: str, follows: bool) -> bool:
        """Whether nothing is put before a text that `follows` on another, or does not; False where nothing ever is."""
        return follows

    def encode_prompt(self, text: str) -> list[int]:
        """The token ids of a text to go on from, with `prefix`; if there are none, what begins a document."""
        return [*self.prefix, *self.encode_batch([text])[0].tolist()] or [self.bos_id]

    def encode_template(self, text: str) -> Int32[np.ndarray, "T"]:
        """The token ids of a text that a chat template wrote: special tokens written in it become those tokens."""
        return self.encode_template_parts([text])[0]

    @abc.abstractmethod
    def encode_template_parts(self, parts: Sequence[str]) -> list[Int32[np.ndarray, "_"]]:
        """As `encode_template`, of the consecutive parts of one text: no token lies across two of them.

        A tokenizer that puts a space before a text does so before the first part only.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special tokens have none, and bytes that are not UTF-8 become U+FFFD."""

    def _named_end(self, key: str, ids: Callable[[str], int | None]) -> int | None:
        """The token that the configuration names under `key`, if it does."""
        name = self.read_from.ends.get(key)
        if name is not None and ids(name) is None:
            raise DataError(f"{self.source}: {key}: {name!r}, as the files beside it say, is not in it; correct them")
        return None if name is None else ids(name)

    def _set_ends(self, bos_id: int | None, eos_id: int | None, remedy: str) -> None:
        ends = [token for token in (bos_id, eos_id) if token is not None]
        if not ends:
            raise DataError(f"{self.source}: data.tokenizer.path: has no token to begin or end a document; {remedy}")
        self.bos_id, self.eos_id = ends[0], ends[-1]

    def _check_added(self, ids: Callable[[str], int | None]) -> None:
        """Refuses added tokens that readers would give other ids than the files do."""
        for token, added in self.read_from.added:
            if token not in (None, ids(added.content)):
                raise DataError(
                    f"{self.source}: the files beside it give the added token {added.content!r} the id {token}, where it has"
                    f" {ids(added.content)}; use the files that belong together"
                )


def num_threads() -> int:
    """Threads that a tokenizer may use: one, if TOKENIZERS_PARALLELISM says so as to Hugging Face's library."""
    return 1 if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("0", "false") else os.cpu_count() or 1


def neighbours(pieces: Iterable[str]) -> frozenset[str]:
    """The pairs of characters that are beside each other in any of the pieces."""
    return frozenset("".join(pair) for piece in pieces for pair in itertools.pairwise(piece))


def text_bytes(piece: str) -> int:
    """The bytes in UTF-8 of the text that a piece of SentencePiece stands for."""
    return len(piece.replace(SPACE, " ").encode())
