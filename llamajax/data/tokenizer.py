"""Text to token ids and back: SentencePiece models, Hugging Face `tokenizer.json`, and SentencePiece trained here."""

import abc
import functools
import hashlib
import heapq
import io
import json
import os
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue]

from llamajax.errors import ConfigError, DataError

KNOWN_BOS = ("<s>", "<|begin_of_text|>", "<|endoftext|>")
KNOWN_EOS = ("</s>", "<|end_of_text|>", "<|endoftext|>")
"""Names that begin and end a text in tokenizers whose configuration does not say."""
TRAINING_CHUNK_CHARS = 2048
"""Training text is sampled in parts of this length."""

_SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer(abc.ABC):
    """Encodes text without adding tokens of its own; documents are framed by `bos_id` and `eos_id` elsewhere.

    A tokenizer that has only one of the two uses it for both.
    """

    vocab_size: int
    """Token ids are below this."""
    bos_id: int
    """Begins a document."""
    eos_id: int
    """Ends a document."""
    bos_token: str | None
    """How a chat template writes the token that begins a text; None if the tokenizer has none for that alone."""
    eos_token: str | None
    """How a chat template writes the token that ends a text or turn."""
    token_bytes: np.ndarray
    """int32 [vocab_size]: UTF-8 bytes of text that each token stands for; 0 for tokens that stand for none.

    Over the tokens of a text they add up to its length, unless the tokenizer itself adds or drops text (as Llama 2's,
    which puts a space before it).
    """
    source: Path
    """The file it was read from, for messages."""
    files: dict[str, bytes]
    """Name and content of all that `load_tokenizer` needs, as it was read, to be kept with a checkpoint."""
    sha256: str
    """Hash of the files' content."""

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The token ids of each text, int32; special tokens written in a text are read as plain text."""

    def encode_template(self, text: str) -> np.ndarray:
        """The token ids of a text that a chat template wrote, int32: special tokens written in it become those tokens."""
        return self.encode_template_parts([text])[0]

    @abc.abstractmethod
    def encode_template_parts(self, parts: Sequence[str]) -> list[np.ndarray]:
        """As `encode_template`, of the consecutive parts of one text: no token lies across two of them.

        A tokenizer that puts a space before a text does so before the first part only.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special tokens have none, and bytes that are not UTF-8 become U+FFFD."""

    def _set_files(self, *paths: Path) -> None:
        self.source = paths[0]
        self.files = {path.name: path.read_bytes() for path in paths}
        hashes = b"".join(hashlib.sha256(content).digest() for content in self.files.values())
        self.sha256 = hashlib.sha256(hashes).hexdigest()

    def _set_ends(self, bos_id: int | None, eos_id: int | None, remedy: str) -> None:
        ends = [token for token in (bos_id, eos_id) if token is not None]
        if not ends:
            raise DataError(f"{self.source}: data.tokenizer.path: has no token to begin or end a document; {remedy}")
        self.bos_id, self.eos_id = ends[0], ends[-1]


def load_tokenizer(path: Path) -> Tokenizer:
    """Loads a SentencePiece model, a `tokenizer.json`, or the one or other from a directory such as a checkpoint's.

    Raises:
        DataError: there is no tokenizer, or it is damaged, or not of these kinds.
    """
    try:
        file = _tokenizer_file(path) if path.is_dir() else path
        return HuggingFaceTokenizer(file) if file.suffix == ".json" else SentencePieceTokenizer(file)
    except OSError as error:
        where = error.filename or path
        raise DataError(f"{where}: data.tokenizer.path: {error.strerror}; correct the path") from error


def _tokenizer_file(folder: Path) -> Path:
    found = [file for file in folder.iterdir() if file.suffix == ".model" or file.name == "tokenizer.json"]
    named = [file for file in found if file.stem == "tokenizer"]
    if not named and len(found) != 1:
        raise DataError(f"{folder}: data.tokenizer.path: has no tokenizer.json or tokenizer.model; name the file")
    return min(named or found)  # tokenizer.json before tokenizer.model: the latter may be Llama 3's tiktoken file


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    The character U+2581, which it writes for a space, is read as one, as transformers and llama.cpp read it.
    """

    def __init__(self, path: Path) -> None:
        self._set_files(path)
        try:
            self._processor = sentencepiece.SentencePieceProcessor()
            self._processor.LoadFromSerializedProto(self.files[path.name])
            model = ModelProto.FromString(self._processor.serialized_model_proto())
        except RuntimeError as error:
            raise DataError(
                f"{path}: data.tokenizer.path: is not a SentencePiece model; if it came with Llama 3 or later,"
                " use the tokenizer.json of the Hugging Face release"
            ) from error
        self.vocab_size = self._processor.get_piece_size()
        bos_id, eos_id = self._processor.bos_id(), self._processor.eos_id()
        bos_id, eos_id = (token if token >= 0 else None for token in (bos_id, eos_id))
        self._set_ends(bos_id, eos_id, "use a model with a bos or eos piece")
        self.bos_token = None if bos_id is None else self._processor.id_to_piece(bos_id)
        self.eos_token = None if eos_id is None else self._processor.id_to_piece(eos_id)
        kinds = ModelProto.SentencePiece
        byte_counts = {kinds.BYTE: lambda _: 1, kinds.NORMAL: _text_bytes, kinds.USER_DEFINED: _text_bytes}
        self.token_bytes = np.array(
            [byte_counts[piece.type](piece.piece) if piece.type in byte_counts else 0 for piece in model.pieces], np.int32
        )
        control = [re.escape(piece.piece) for piece in model.pieces if piece.type == kinds.CONTROL]
        self._control = re.compile(f"({'|'.join(sorted(control, key=len, reverse=True)) or '(?!)'})")
        self._strips_text = model.normalizer_spec.remove_extra_whitespaces
        model.normalizer_spec.add_dummy_prefix = False
        self._without_prefix = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return list(self._processor.encode(list(texts), return_type="numpy", num_threads=os.cpu_count() or 1))

    def encode_template_parts(self, parts: Sequence[str]) -> list[np.ndarray]:
        """Control pieces such as `</s>` become their tokens, as user-defined ones do in any text."""
        after_text = False
        encoded = []
        for part in parts:
            ids = [np.zeros(0, np.int32)]
            for index, section in enumerate(self._control.split(part)):  # every second one is a control piece
                if index % 2:
                    ids.append(np.array([self._processor.piece_to_id(section)], np.int32))
                    after_text = False
                elif section:
                    # What takes the space off the front of a text, and puts it there again, shall do so here as well.
                    goes_on = after_text and not (self._strips_text and section.startswith(" "))
                    processor = self._without_prefix if goes_on else self._processor
                    ids.append(processor.encode(section, return_type="numpy"))
                    after_text = True
            encoded.append(np.concatenate(ids))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(token) for token in ids])


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, with the `tokenizer_config.json` beside it if there is one."""

    def __init__(self, path: Path) -> None:
        config_path = path.with_name("tokenizer_config.json")
        self._set_files(path, *([config_path] if config_path.exists() else []))
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self.files[path.name].decode())
            model = json.loads(self._tokenizer.to_str())
            config = json.loads(self.files.get(config_path.name, b"{}").decode())
        except Exception as error:  # the library raises nothing narrower
            reason = str(error).splitlines()[0]
            raise DataError(f"{path}: data.tokenizer.path: is not a tokenizer.json: {reason}; replace the file") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.token_bytes = self._count_bytes(vocabulary, model)
        bos_id = self._special_token(config.get("bos_token"), KNOWN_BOS, "bos_token")
        eos_id = self._special_token(config.get("eos_token"), KNOWN_EOS, "eos_token")
        self._set_ends(bos_id, eos_id, "put a tokenizer_config.json with bos_token and eos_token beside it")
        # A configuration that says null (Qwen's) means it, although documents are then begun with another token.
        self.bos_token, self.eos_token = (
            None if token is None or config.get(key, token) is None else self._tokenizer.id_to_token(token)
            for key, token in (("bos_token", bos_id), ("eos_token", eos_id))
        )

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_template_parts(self, parts: Sequence[str]) -> list[np.ndarray]:
        tokenizer, without_prefix, prefixes_sections = self._for_templates
        added = tokenizer.get_added_tokens_decoder()
        after_text = False
        encoded = []
        for part in parts:
            encoding = (without_prefix if after_text else tokenizer).encode(part, add_special_tokens=False)
            ids = encoding.ids
            first_added = next((index for index, token in enumerate(ids) if token in added), None)
            if after_text and prefixes_sections and first_added is not None:
                rest = part[encoding.offsets[first_added][0] :]
                ids = ids[:first_added] + tokenizer.encode(rest, add_special_tokens=False).ids
            if ids:
                after_text = not prefixes_sections or ids[-1] not in added
            encoded.append(np.array(ids, np.int32))
        return encoded

    @functools.cached_property
    def _for_templates(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer, bool]:
        """Reads special tokens in a text; another that puts nothing before a text; whether the first one does so before
        the text after every special token."""
        text = self._tokenizer.to_str()
        model = json.loads(text)
        normalizers = _steps(model["normalizer"], "normalizers")
        pre_tokenizers = _steps(model["pre_tokenizer"], "pretokenizers")
        is_first_only = any(step.get("prepend_scheme") == "first" for step in pre_tokenizers)
        for step in normalizers:
            if step["type"] == "Prepend":
                step["prepend"] = ""
        for step in pre_tokenizers:
            if "prepend_scheme" in step:
                step["prepend_scheme"] = "never"
            if "add_prefix_space" in step:
                step["add_prefix_space"] = False
        both = tokenizers.Tokenizer.from_str(text), tokenizers.Tokenizer.from_str(json.dumps(model))
        return *both, not is_first_only

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids])

    def _special_token(self, configured: str | dict | None, known: Sequence[str], key: str) -> int | None:
        if configured is not None:
            name = configured["content"] if isinstance(configured, dict) else configured
            token = self._tokenizer.token_to_id(name)
            if token is None:
                where = self.source.with_name("tokenizer_config.json")
                raise DataError(f"{where}: {key}: {name!r} is not in {self.source.name}; correct it")
            return token
        return next((token for name in known if (token := self._tokenizer.token_to_id(name)) is not None), None)

    def _count_bytes(self, vocabulary: dict[str, int], model: dict) -> np.ndarray:
        decoder = json.dumps(model["decoder"])
        if '"ByteLevel"' in decoder:  # every character of a token's name stands for a byte
            count = len
        elif any(f'"{kind}"' in decoder for kind in ("ByteFallback", "Metaspace", "Replace")):
            count = _text_bytes
        else:
            raise DataError(
                f"{self.source}: data.tokenizer.path: its decoder does not keep text as it is;"
                " use byte-level BPE or a SentencePiece kind of tokenizer"
            )
        counts = np.zeros(self.vocab_size, np.int32)
        for name, token in vocabulary.items():
            is_byte = model["model"].get("byte_fallback") and _BYTE_PIECE.fullmatch(name)
            counts[token] = 1 if is_byte else count(name)
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            counts[token] = 0 if added.special else len(added.content.encode())
        unknown = vocabulary.get(model["model"].get("unk_token"))
        if unknown is not None:
            counts[unknown] = 0
        return counts


def _steps(step: dict | None, list_key: str) -> list[dict]:
    """A normalizer or pre-tokenizer of a `tokenizer.json`, or those of a sequence."""
    if step is None:
        return []
    return step[list_key] if step["type"] == "Sequence" else [step]


def _text_bytes(piece: str) -> int:
    return len(piece.replace(_SPACE, " ").encode())


def sample_texts(texts: Iterable[str], max_bytes: int) -> list[str]:
    """Parts of the texts, in order, spread evenly over all of them: at most `max_bytes` in UTF-8, but at least one part.

    All texts are gone through once and few are kept: every part draws a number, always the same, and those with the
    smallest numbers stay, as many as fit.
    """
    draw = random.Random(0).random
    parts = (text[at : at + TRAINING_CHUNK_CHARS] for text in texts for at in range(0, len(text), TRAINING_CHUNK_CHARS))
    kept: list[tuple[float, int, str]] = []  # a heap: first the part that goes next
    size = 0
    for place, part in enumerate(parts):
        heapq.heappush(kept, (-draw(), place, part))
        size += len(part.encode())
        while size > max_bytes and len(kept) > 1:
            size -= len(heapq.heappop(kept)[2].encode())
    return [part for _, _, part in sorted(kept, key=lambda entry: entry[1])]


def train_sentencepiece(texts: Sequence[str], *, vocab_size: int) -> bytes:
    """Trains a SentencePiece BPE that gives back every text exactly, and returns its model file.

    Args:
        texts: what to train on, as of `sample_texts`: SentencePiece takes an error raised by an iterator for its end.
        vocab_size: pieces, among them `<unk>`, `<s>`, `</s>` (ids 0, 1, 2) and one per byte; fewer if the text is too
            short for so many.

    Raises:
        ConfigError: `vocab_size` cannot hold the bytes and characters.
        DataError: there is no text, or none to train on.
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
