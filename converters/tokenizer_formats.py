"""Grows both forms of a BPE tokenizer alike: SentencePiece's `tokenizer.model` and Hugging Face's `tokenizer.json`."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from google.protobuf.message import DecodeError
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (protobuf makes it at run time)
from tokenizers import Regex, pre_tokenizers

from converters.tokenizer_growth import Vocabulary, new_merges
from llamajax.config.json_file import parse_json
from llamajax.data.tokenizers.tokenizer_base import SPACE
from llamajax.data.tokenizers.tokenizer_files import JSON_FILE, MODEL_FILE
from llamajax.errors import ConfigError, show

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_MAX_PIECE_CHARS = 16
"""SentencePiece's default."""

_HAN = r"[\p{Han}\p{Hiragana}\p{Katakana}\u30FC]"
_WORDS = pre_tokenizers.Split(
    Regex(rf" ?{_HAN}+| ?(?:(?!{_HAN})[\p{{L}}\p{{M}}])+|\p{{N}}| ?[^ \p{{L}}\p{{M}}\p{{N}}]+| +(?= [^ \p{{N}}])| +"),
    "isolated",
)
"""Spans that a piece of Llama's SentencePiece may cover: a space before letters or signs, single digits, Chinese and
Japanese apart from other letters, and runs of spaces. SentencePiece cuts texts this way only during training."""


@dataclass(frozen=True)
class BpeTokenizer:
    """Tokenizer of a Hugging Face directory, in one form or both."""

    vocabulary: Vocabulary
    files: Mapping[str, bytes]
    """Contents of the tokenizer's file or files, by name."""
    added: Mapping[int, tuple[str, bool]]
    """Tokens matched in the text before BPE runs: id -> text, and whether it is special."""

    def grown(self, pieces: Sequence[str]) -> dict[str, bytes]:
        """Returns the files with new pieces, which get the ids after all others, in order."""
        grow = {JSON_FILE: self._grown_json, MODEL_FILE: self._grown_model}
        return {name: grow[name](content, pieces) for name, content in self.files.items()}

    def _grown_json(self, content: bytes, pieces: Sequence[str]) -> bytes:
        body = json.loads(content)
        vocab, merges = body["model"]["vocab"], body["model"]["merges"]
        # Unless added tokens are in the vocabulary, readers number them after it, whatever the file says.
        for token, (text, _) in self.added.items():
            vocab.setdefault(text, token)
        vocab |= {piece: token for token, piece in enumerate(pieces, self.vocabulary.first_new_id)}
        new = new_merges(self.vocabulary.ids, pieces)
        as_text = bool(merges) and isinstance(merges[0], str)
        merges += [" ".join(pair) if as_text else list(pair) for pair in new]
        return json.dumps(body, indent=2, ensure_ascii=False).encode()

    def _grown_model(self, content: bytes, pieces: Sequence[str]) -> bytes:
        model = ModelProto.FromString(content)
        kinds = ModelProto.SentencePiece
        lowest = min(piece.score for piece in model.pieces)
        for token in range(len(model.pieces), self.vocabulary.first_new_id):
            text, is_special = self.added[token]
            model.pieces.add(piece=text, score=0.0, type=kinds.CONTROL if is_special else kinds.USER_DEFINED)
        # The best score merges first, so new scores are below all old ones, in order.
        for place, piece in enumerate(pieces, 1):
            model.pieces.add(piece=piece, score=lowest - place, type=kinds.NORMAL)
        model.trainer_spec.vocab_size = len(model.pieces)
        model.DiscardUnknownFields()  # field 4: self-test samples with the old encodings, which readers would check
        return model.SerializeToString()


def read_tokenizer(directory: Path, files: Mapping[str, bytes]) -> BpeTokenizer:
    """Reads the tokenizer from a directory's small files.

    Args:
        directory: named in messages.
        files: contents by name; the tokenizer was loaded before, so it is not damaged.

    Raises:
        ConfigError: the tokenizer is missing or not BPE, or its files do not belong together.
    """
    added = _added_tokens(directory, files)
    model = None
    if MODEL_FILE in files:
        model = _parse_sentencepiece(files[MODEL_FILE])
    if JSON_FILE in files:
        vocabulary = _vocabulary_of_json(directory / JSON_FILE, files[JSON_FILE], added)
    elif model is not None:
        vocabulary = _vocabulary_of_model(directory / MODEL_FILE, model, added)
    else:
        raise ConfigError(f"{directory}: has no {JSON_FILE} or SentencePiece {MODEL_FILE}; add the model's tokenizer")
    if model is not None:
        _check_model(directory / MODEL_FILE, model, vocabulary, added)
    kept = [name for name in (JSON_FILE, MODEL_FILE) if name in files and (name == JSON_FILE or model is not None)]
    return BpeTokenizer(vocabulary, {name: files[name] for name in kept}, added)


def _added_tokens(directory: Path, files: Mapping[str, bytes]) -> dict[int, tuple[str, bool]]:
    """Returns every added token that any of the files names."""
    found: dict[int, tuple[str, bool]] = {}

    def parsed(name: str) -> dict[str, Any]:
        return parse_json(directory / name, files[name]) if name in files else {}

    try:
        decoder = parsed("tokenizer_config.json").get("added_tokens_decoder") or {}
        found |= {int(token): (entry["content"], bool(entry.get("special"))) for token, entry in decoder.items()}
        found |= {int(token): found.get(token, (text, False)) for text, token in parsed("added_tokens.json").items()}
        listed = json.loads(files[JSON_FILE]).get("added_tokens") or [] if JSON_FILE in files else []
        found |= {int(entry["id"]): (entry["content"], bool(entry["special"])) for entry in listed}
        texts = {text for text, _ in found.values()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{directory}: the added tokens of the tokenizer are damaged; download its files again") from error
    if not all(type(text) is str for text in texts) or len(texts) < len(found) or min(found, default=0) < 0:
        raise ConfigError(f"{directory}: an added token of the tokenizer has two ids; download its files again")
    return found


def _vocabulary_of_json(path: Path, content: bytes, added: Mapping[int, tuple[str, bool]]) -> Vocabulary:
    tokenizer = tokenizers.Tokenizer.from_str(content.decode())
    body = json.loads(content)
    model = body["model"]
    if not isinstance(tokenizer.model, tokenizers.models.BPE):
        kind = type(tokenizer.model).__name__
        raise ConfigError(f"{path}: model.type: {kind} cannot learn new pieces; choose a model with a BPE tokenizer")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ConfigError(f"{path}: model.{key}: {show(str(model[key]))} is not supported; it must be null")
    outside = {text for text, _ in added.values()} | {model.get("unk_token")}
    if model.get("byte_fallback"):
        outside |= {piece for piece in model["vocab"] if _BYTE_PIECE.fullmatch(piece)}
    normalizer, pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    is_byte_level = '"ByteLevel"' in json.dumps(body.get("pre_tokenizer"))

    def words(text: str) -> Iterable[str]:
        normal = text if normalizer is None else normalizer.normalize_str(text)
        parts = [normal] if pre_tokenizer is None else [part for part, _ in pre_tokenizer.pre_tokenize_str(normal)]
        return parts if is_byte_level else [word for part in parts for word in _sentencepiece_words(part)]

    bare = tokenizers.Tokenizer(tokenizer.model)
    return Vocabulary(
        ids={piece: token for piece, token in model["vocab"].items() if piece not in outside},
        taken=frozenset(model["vocab"]) | {text for text, _ in added.values()},
        first_new_id=max([*model["vocab"].values(), *added]) + 1,
        words=words,
        encode=lambda parts: [found.ids for found in bare.encode_batch_fast(list(parts), add_special_tokens=False)],
        max_piece_chars=sys.maxsize if is_byte_level else _MAX_PIECE_CHARS,
    )


def _parse_sentencepiece(content: bytes) -> Any | None:
    """Returns the model; None for another format. Llama 3 ships a different file under that name."""
    try:
        model = ModelProto.FromString(content)
        sentencepiece.SentencePieceProcessor(model_proto=content)
    except (DecodeError, RuntimeError):
        return None
    return model


def _vocabulary_of_model(path: Path, model: Any, added: Mapping[int, tuple[str, bool]]) -> Vocabulary:
    normal = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    plain = ModelProto.FromString(model.SerializeToString())
    plain.ClearField("normalizer_spec")
    plain.DiscardUnknownFields()
    plain.normalizer_spec.name = "identity"
    plain.normalizer_spec.add_dummy_prefix = plain.normalizer_spec.remove_extra_whitespaces = False
    bare = sentencepiece.SentencePieceProcessor(model_proto=plain.SerializeToString())
    return Vocabulary(
        ids=_normal_pieces(model),
        taken=frozenset(piece.piece for piece in model.pieces) | {text for text, _ in added.values()},
        first_new_id=max(len(model.pieces), *(token + 1 for token in added), 0),
        words=lambda text: _sentencepiece_words(normal.normalize(text)),
        encode=lambda parts: bare.encode(list(parts)),
        max_piece_chars=_MAX_PIECE_CHARS,
    )


def _check_model(path: Path, model: Any, vocabulary: Vocabulary, added: Mapping[int, tuple[str, bool]]) -> None:
    """Raises `ConfigError` if the SentencePiece model cannot get the same pieces at the same ids."""
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise ConfigError(f"{path}: is a SentencePiece unigram model, not BPE; choose a model with a BPE tokenizer")
    differing = [piece for piece, token in _normal_pieces(model).items() if vocabulary.ids.get(piece, token) != token]
    if differing or len(model.pieces) > vocabulary.first_new_id:
        raise ConfigError(
            f"{path}: its ids differ from those in {JSON_FILE}; remove the file that does not belong to the model"
        )
    for token in range(len(model.pieces), vocabulary.first_new_id):
        if token not in added:
            raise ConfigError(f"{path}: no file names token {token}; add it to added_tokens.json")


def _normal_pieces(model: Any) -> dict[str, int]:
    normal = ModelProto.SentencePiece.NORMAL
    return {piece.piece: token for token, piece in enumerate(model.pieces) if piece.type == normal}


def _sentencepiece_words(text: str) -> list[str]:
    return [word.replace(" ", SPACE) for word, _ in _WORDS.pre_tokenize_str(text.replace(SPACE, " "))]
