"""Writes a tokenizer's files so that transformers and llama.cpp produce the ids of training."""

import json
import re
from collections.abc import Mapping
from typing import Any

from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (protobuf makes it at run time)
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HuggingFace

from llamajax.data.tokenizers.tokenizer_base import SPACE, Tokenizer
from llamajax.data.tokenizers.tokenizer_files import JSON_FILE, MODEL_FILE, TokenizerFiles, parse_files

_KINDS = ModelProto.SentencePiece


def tokenizer_files(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns files that replace or extend a tokenizer's, so that every reader produces the ids of training.

    transformers reads `tokenizer.json` the way `tokenizer_config.json` says; llama.cpp reads the scores in
    `tokenizer.model`, if it exists. A SentencePiece model without an equivalent `tokenizer.json` gets no new files.

    Args:
        files: contents by name, including `tokenizer.json` or `tokenizer.model`.
        tokenizer: the same tokenizer, as training used it.
    """
    known = json.loads(files.get("tokenizer_config.json", '{"clean_up_tokenization_spaces": false}'))
    config = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, **known}
    body = files.get(JSON_FILE)
    if body is None:
        beside = parse_files(tokenizer.source, files)
        bos_id = tokenizer.prefix[0] if tokenizer.prefix else None
        body = convert_sentencepiece(files[MODEL_FILE], bos_id, beside)
        if body is None:
            return {}
        config |= beside.values
        if beside.added:  # llama.cpp needs their ids spelled out
            config["added_tokens_decoder"] = {str(entry.pop("id")): entry for entry in json.loads(body)["added_tokens"]}
    model = json.loads(body)["model"]
    if model.get("unk_token") is not None:
        config.setdefault("unk_token", model["unk_token"])
    # With a Llama class, or no class, transformers 5 builds its own normalizer and pre-tokenizer.
    if JSON_FILE not in files or "Llama" in (config.get("tokenizer_class") or "Llama"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if model.get("byte_fallback") and not _puts_space_first(body):
        config.setdefault("add_prefix_space", False)  # llama.cpp would put a space before every prompt
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return {JSON_FILE: body} | ({} if config == known else {"tokenizer_config.json": text.encode()})


def convert_sentencepiece(model_file: bytes, bos_id: int | None, beside: TokenizerFiles | None = None) -> bytes | None:
    """Converts a SentencePiece model to a `tokenizer.json` with the same ids for every text.

    Args:
        model_file: contents of `tokenizer.model`.
        bos_id: token that starts each text; None: no such token.
        beside: settings from the accompanying files: added tokens, and whether a missing leading space is added only at
            the start of a text or also after special and added tokens.

    Returns:
        Contents of `tokenizer.json`. None if Hugging Face cannot express the model: it is not BPE, or puts the space
        after a word.
    """
    model = ModelProto.FromString(model_file)
    training, rules = model.trainer_spec, model.normalizer_spec
    if training.model_type != training.BPE or training.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        return None
    defined = [piece.piece for piece in model.pieces if piece.type == _KINDS.USER_DEFINED]
    tokenizer = HuggingFace(_bpe(model, whole_words=bool(defined)))
    prefixes_once = rules.add_dummy_prefix and beside is not None and beside.values.get("legacy") is False
    tokenizer.normalizer = normalizers.Sequence(_normalizers(rules, prefixes=rules.add_dummy_prefix and not prefixes_once))
    steps = []
    if prefixes_once:
        steps.append(pre_tokenizers.Metaspace(SPACE, "first", split=False))  # unless the text begins with one
    if defined:
        # SentencePiece matches these first, longest first, and puts its space only before a text, not after them.
        pattern = "|".join(re.escape(piece.replace(" ", SPACE)) for piece in sorted(defined, key=len, reverse=True))
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    if steps:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    special = [piece.piece for piece in model.pieces if piece.type in (_KINDS.UNKNOWN, _KINDS.CONTROL)]
    added = {text: AddedToken(text, special=True) for text in special} | {
        new.content: new for _, new in (beside.added if beside is not None else ())
    }
    for token in added.values():
        # A normalized token would match only with the prefix that the normalizer puts before a text.
        flags = {key: getattr(token, key) for key in ("lstrip", "rstrip", "single_word", "special")}
        token = AddedToken(token.content, **flags, normalized=False)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    if bos_id is not None:
        bos = tokenizer.id_to_token(bos_id)
        assert bos is not None
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer.to_str().encode()


def _bpe(model: Any, *, whole_words: bool) -> models.BPE:
    ids = {piece.piece: token for token, piece in enumerate(model.pieces)}
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == _KINDS.NORMAL}
    # SentencePiece merges the neighbours with the best-scoring union; ties go to the first in the text. So runs of spaces,
    # which have equal scores in Llama 2, grow from the left. Every way to split a piece becomes a merge.
    merges = sorted(
        ((text[:at], text[at:]) for text in scores for at in range(1, len(text)) if {text[:at], text[at:]} <= scores.keys()),
        key=lambda pair: (-scores[pair[0] + pair[1]], -len(pair[0])),
    )
    return models.BPE(
        ids,
        merges,
        unk_token=model.pieces[model.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
        ignore_merges=whole_words,
    )


def _normalizers(rules: Any, *, prefixes: bool) -> list[normalizers.Normalizer]:
    """Returns the normalizers that match SentencePiece's steps, in its order."""
    found: list[normalizers.Normalizer] = []
    if rules.precompiled_charsmap:
        found.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        found += [
            normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if prefixes:
        found.append(normalizers.Prepend(SPACE))
    return [*found, normalizers.Replace(" ", SPACE)]


def _puts_space_first(body: bytes) -> bool:
    first = HuggingFace.from_str(body.decode()).encode("a", add_special_tokens=False).tokens[0]
    return first.startswith(SPACE)
